"""Activations of a unit between forward and backward: recomputed, or moved to the host.

``fully_shard(module, activations=...)`` takes one of these:

    "recompute"          keep the inputs of the unit, and run its forward again in backward
    "offload"            move what autograd saves to pinned memory of the host, and back
    "recompute+offload"  recompute, and move the inputs that are kept to the host
    a policy             recompute what it does not keep: a function, or a list of operators, of
                         ``torch.utils.checkpoint.create_selective_checkpoint_contexts``

Recomputation is torch's own (``torch.distributed._composable.checkpoint``). Offload, for units A, B
in order of forward, on an accelerator::

    forward A   autograd's tensors are collected
    forward B   ... while those of A are copied to the host; at its end A's memory is freed
    backward B  its copy has just begun: the tensors are still there. Those of A are copied back
    backward A  waits for that copy

So the device holds the activations of two units. Copies run on streams of their own. On the CPU
nothing is moved: it is the host.

Autograd refuses a backward through a tensor that was changed in place after it was saved. It cannot
see that for tensors that a hook has taken. So `_Part` compares versions at the end of the forward.
In the first step it also compares checksums, because the version of an operator's own output is
hidden from hooks.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from vescale_fsdp import compat, devices, transfers
from vescale_fsdp.engine.arguments import Activations
from vescale_fsdp.engine.unit import Unit

WORDS = ("recompute", "offload", "recompute+offload")
MIN_BYTES = 16 << 10  # a copy of less takes longer to start than to run


def check_activations(modules: Sequence[nn.Module], activations: object) -> None:
    """Raise for what is no policy, and for modules that are recomputed already.

    Raises:
        ValueError: as above.
    """
    is_list = isinstance(activations, list | tuple) and all(map(callable, activations))
    if not (activations is None or activations in WORDS or callable(activations) or is_list):
        raise ValueError(
            f"fully_shard: activations must be one of {', '.join(map(repr, WORDS))}, a policy "
            "function or a list of operators as for torch.utils.checkpoint."
            f"create_selective_checkpoint_contexts, or None; got {activations!r}"
        )
    if activations in (None, "offload"):
        return
    for module in modules:
        if compat.recompute.state(module) is not None:
            raise ValueError(
                f"fully_shard(activations={activations!r}): torch's composable checkpoint has "
                f"already been applied to this module; leave one of them out:\n{module}"
            )


def apply_activations(modules: Sequence[nn.Module], activations: Activations | None) -> bool:
    """Let the modules recompute their activations, if asked to. Returns whether to offload.

    Call it before the hooks of the unit are registered. They run outside of those of this.
    """
    if activations is not None and activations != "offload":
        context: dict[str, Any] = {}
        if not isinstance(activations, str):
            context["context_fn"] = partial(create_selective_checkpoint_contexts, activations)
        for module in modules:
            compat.recompute(module, **context)
    return activations in ("offload", "recompute+offload")


class Offload:
    """Moves the activations of the units of one engine to the host, and back."""

    def __init__(self) -> None:
        self._last: weakref.ref[Kept] | None = None  # of the forwards so far
        self._pass_number = -1
        self.is_active = False  # on the CPU nothing is moved
        self._stays: set[int] = set()  # storages that the engine, or the model, frees itself
        self._is_checked: set[str] = set()  # units whose checksums were right in one step
        self.copies: Any = transfers.Copies  # a simulation has others

    def begin(self, unit: Unit, units: Sequence[Unit], pass_number: int) -> Kept | None:
        """Start to collect what autograd saves, in a forward of ``unit``. None on the CPU.

        Args:
            units: of the engine. Their parameters, sharded or not, and buffers are not moved.
        """
        if pass_number != self._pass_number:
            self._pass_number, self._last, self._stays = pass_number, None, set()
            for each in units:
                for group in each.groups:
                    self._stays |= group.gathered_storages()
            for module in units[0].modules():
                for tensor in (*module.parameters(), *module.buffers()):
                    if not compat.is_wrapper(local := compat.local_tensor(tensor)):
                        self._stays.add(local.untyped_storage()._cdata)
        device = next((group.pool.device for each in units for group in each.groups), None)
        self.is_active = device is not None and devices.has_streams(device)
        if device is None or not self.is_active:
            return None
        checks = unit.fqn not in self._is_checked
        return Kept(self, device, unit.fqn, self._stays, checks=checks)

    def add(self, kept: Kept) -> Kept | None:
        """Append what the forward of a unit has kept. Returns what the unit before it has kept."""
        before = None if self._last is None else self._last()
        self._last = weakref.ref(kept)
        return before

    def aside(self, module: nn.Module) -> AbstractContextManager[Any]:
        """A context for a forward that a checkpoint around the unit runs again.

        As in the first run, the checkpoint does not see what the unit saves. Of the module's own
        checkpoint it is to see that.
        """
        state = compat.recompute.state(module)
        if not self.is_active or (state is not None and not state.enable_hook):
            return nullcontext()

        def pack(tensor: torch.Tensor) -> Any:
            return _Saved(_Part(None, tensor, False), tensor) if _is_plain(tensor) else tensor

        return torch.autograd.graph.saved_tensors_hooks(pack, _unpack)

    def skip_checksums(self, name: str) -> None:
        """Make no checksums any more for this unit, because those of one step were right."""
        self._is_checked.add(name)


class _Part:
    """One storage that autograd has saved: on the device, on the host, or on both.

    Without ``kept`` it stays on the device, and so does one of a few bytes.
    """

    def __init__(self, kept: Kept | None, tensor: torch.Tensor, checks: bool) -> None:
        self.kept, self.device = kept, tensor.device
        self.moves = kept is not None and tensor.untyped_storage().nbytes() >= MIN_BYTES
        storage = tensor.untyped_storage()
        flat = torch.empty(0, dtype=torch.uint8, device=tensor.device)
        self.here: torch.Tensor | None = flat.set_(storage, 0, (storage.nbytes(),), (1,))
        self.there: torch.Tensor | None = None  # pinned
        self.dtype = tensor.dtype
        # It shares the version of the variable, and holds it, and so the graph, which holds this.
        self._source: torch.Tensor | None = tensor
        self._version = tensor._version
        self._sum = _checksum(self.here) if checks else None
        self._others: list[torch.Tensor] = []  # later checksums
        self._has_changed = False

    def look(self) -> None:
        """Find out whether other code has written to the storage, which is still there."""
        if self._source is not None:
            self._has_changed |= self._source._version != self._version
            self._source = None
        if self._sum is not None and self.here is not None:
            self._others.append(_checksum(self.here))

    def free(self) -> None:
        """Drop the memory on the device, if it is a copy of what is on the host."""
        if self.moves:
            self.here = None

    def check(self, name: str) -> None:
        """Raise if it was changed after it was saved. The first backward waits for the device."""
        if self._sum is not None:
            self._has_changed |= any(bool(other != self._sum) for other in self._others)
            self._sum, self._others = None, []
        if self._has_changed:
            raise _changed(self.dtype, name)


def _changed(dtype: torch.dtype, name: str) -> RuntimeError:
    return RuntimeError(
        f"a tensor of dtype {dtype} that the backward of unit {name!r} needs was changed by an "
        "in-place operation after autograd had saved it; use the operation that is not in place. "
        'Without activations="offload", torch\'s own error says which tensor it is'
    )


class _Saved:
    """What the graph of autograd holds instead of a tensor: a view of a `_Part`."""

    __slots__ = ("_dtype", "_is_conj", "_is_neg", "_offset", "_part", "_size", "_stride")

    def __init__(self, part: _Part, tensor: torch.Tensor) -> None:
        self._part, self._dtype = part, tensor.dtype
        self._offset, self._size = tensor.storage_offset(), tensor.size()
        self._stride = tensor.stride()
        self._is_conj, self._is_neg = tensor.is_conj(), tensor.is_neg()

    def restore(self) -> torch.Tensor:
        part = self._part
        whole = part.here if part.kept is None else part.kept.bring(part)
        assert whole is not None, "parts of nobody stay"
        view = torch.empty(0, dtype=self._dtype, device=part.device)
        view.set_(whole.untyped_storage(), self._offset, self._size, self._stride)
        view = view.conj() if self._is_conj else view
        return compat.neg_view(view) if self._is_neg else view


class _Unmoved:
    """A parameter or buffer. It is checked as autograd checks what no hook has taken."""

    def __init__(self, tensor: torch.Tensor, name: str) -> None:
        self._tensor, self._version, self._name = tensor, tensor._version, name

    def restore(self) -> torch.Tensor:
        if self._tensor._version != self._version:
            raise _changed(self._tensor.dtype, self._name)
        return self._tensor


class _Wrapped:
    """A wrapper subclass (DTensor), as its inner tensors."""

    def __init__(self, kept: Kept, tensor: Any) -> None:
        names, self._context = tensor.__tensor_flatten__()
        self._type, self._size, self._stride = type(tensor), tensor.size(), tensor.stride()
        self._inner = {name: kept.pack(getattr(tensor, name)) for name in names}

    def restore(self) -> torch.Tensor:
        inner = {name: _unpack(each) for name, each in self._inner.items()}
        made: torch.Tensor = self._type.__tensor_unflatten__(
            inner, self._context, self._size, self._stride
        )
        return made


class Kept:
    """What the forward of one unit has kept for its backward, in one pass.

    The graph of autograd owns its parts, so that each is freed with the node that needs it.
    """

    def __init__(
        self,
        offload: Offload,
        device: torch.device,
        name: str,
        stays: set[int],
        *,
        checks: bool,
    ) -> None:
        self.device, self._offload, self._name = device, offload, name
        self._stays, self._checks = stays, checks
        self._parts: weakref.WeakValueDictionary[tuple[int, int], _Part] = (
            weakref.WeakValueDictionary()
        )
        self._hooks: Any = torch.autograd.graph.saved_tensors_hooks(self.pack, _unpack)
        self._before: weakref.ref[Kept] | None = None
        self._leaving: transfers.Copies | None = None  # to the host
        self._coming: transfers.Copies | None = None  # back
        self._hooks.__enter__()

    # Forward

    def leave(self) -> None:
        """Collect no more. An interrupted forward needs no other end."""
        hooks, self._hooks = self._hooks, None  # they refer to this object
        if hooks is not None:
            hooks.__exit__(None, None, None)

    def pack(self, tensor: torch.Tensor) -> Any:
        """Take a tensor that autograd saves. Returns what it is to hold instead."""
        if self._hooks is None:  # after a KeyboardInterrupt
            return tensor
        if compat.is_wrapper(tensor):
            return _Wrapped(self, tensor)
        if tensor.device != self.device or not _is_plain(tensor):
            return tensor
        storage = tensor.untyped_storage()
        if storage._cdata in self._stays:
            return _Unmoved(tensor, self._name)
        key = storage._cdata, tensor._version
        part = self._parts.get(key)
        if part is None:
            part = self._parts[key] = _Part(self, tensor, self._checks)
        return _Saved(part, tensor)

    def end(self) -> None:
        """The forward has ended: copy to the host, and free what the unit before it has copied."""
        self.leave()
        before = self._offload.add(self)
        if before is not None:
            before._free()
            self._before = weakref.ref(before)
        for part in list(self._parts.values()):
            part.look()
        parts = [part for part in list(self._parts.values()) if part.moves]
        if parts:
            sources = [part.here for part in parts if part.here is not None]
            self._leaving = self._offload.copies.to_host(sources)
            for part, copied in zip(parts, self._leaving.given_up(), strict=True):
                part.there = copied

    def _free(self) -> None:
        if self._leaving is None or self._coming is not None:
            return
        self._leaving.wait()
        self._leaving = None
        for part in list(self._parts.values()):
            part.look()
            part.free()

    # Backward

    def prefetch(self) -> None:
        """The backward of the unit begins: bring back what it needs, and the unit before it."""
        if self._leaving is not None:  # nothing has been freed yet
            for part in list(self._parts.values()):
                part.look()
        self._fetch()
        before = None if self._before is None else self._before()
        if before is not None:
            before._fetch()

    def _fetch(self) -> None:
        parts = [part for part in list(self._parts.values()) if part.here is None]
        hosts = [part.there for part in parts if part.there is not None]
        if hosts:
            self._coming = self._offload.copies.to_device(hosts, self.device)
            for part, made in zip(parts, self._coming.given_up(), strict=True):
                part.here = made

    def bring(self, part: _Part) -> torch.Tensor:
        """Return a part on the device, for the current stream.

        Raises:
            RuntimeError: it was changed after it was saved.
        """
        if part.here is None:
            self._fetch()
        if self._coming is not None:
            self._coming.wait()
        part.check(self._name)
        self._offload.skip_checksums(self._name)
        assert part.here is not None, "it has been fetched"
        return part.here

    def finish(self) -> None:
        """The backward of the unit has ended. Another one (``retain_graph``) fetches again."""
        if self._leaving is not None:
            self._free()
        if self._coming is not None:
            self._coming.wait()
            self._coming = None
        for part in list(self._parts.values()):
            part.free()


def _is_plain(tensor: torch.Tensor) -> bool:
    return type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided


def _unpack(saved: Any) -> torch.Tensor:
    held = isinstance(saved, _Saved | _Wrapped | _Unmoved)
    whole: torch.Tensor = saved.restore() if held else saved
    return whole


def _checksum(flat: torch.Tensor) -> torch.Tensor:
    """A number that a change of the bytes changes, as far as one step can tell. Read once."""
    whole = len(flat) // 4 * 4
    return flat[:whole].view(torch.int32).sum(dtype=torch.int64)

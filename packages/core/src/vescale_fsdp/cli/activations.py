"""Runs a step of a model on the meta device, and follows the memory of its activations.

Tensors on the meta device have shapes and autograd, but no values and no memory. A dispatch mode
sees the storage of each tensor that an operator makes, and a finalizer its end. The units have the
engine's own boundary (`vescale_fsdp.engine`), so the moments of the trace are those at which the
engine unshards and reduces::

    forward 1   forward 2   backward of root   backward 2, its gradients   backward 1, its gradients

`timeline` adds the buffers of the engine to this, moment by moment. What autograd makes for a
parameter counts as an activation until its gradient is complete; then the engine has it.

Recomputation and offload are as in ``fully_shard(activations=...)``, of all units but the root.
A condition on values is an error, except ``tensor.all()``, which is true: transformers asks whether
all tokens belong to one sequence.

Attention by ``scaled_dot_product_attention`` is fused, as on the devices; on the meta device torch
would count a matrix of all pairs of tokens.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from vescale_fsdp import compat, repeated_blocks
from vescale_fsdp.cli.modules import call, owners, reason
from vescale_fsdp.cli.settings import Settings
from vescale_fsdp.cli.text import InputError
from vescale_fsdp.costs import Activations, Event, Model, Moment, Trace
from vescale_fsdp.engine import (
    MIN_OFFLOADED_BYTES,
    BoundaryCall,
    enter_boundary,
    leave_boundary,
    map_tensors,
)


def trace_of(model: Model, settings: Settings, activations: Activations) -> Trace:
    """Run a step of the model's module, and return its events and activations.

    Args:
        model: its module is on the meta device. Parameters get the compute dtype.
        settings: of the plan: inputs, compute dtype and backend.
        activations: what is kept between forward and backward.

    Raises:
        InputError: the inputs are wrong, or the model cannot run without values.
    """
    module: nn.Module = model.module
    args, kwargs = _inputs(model, settings)
    dtype: torch.dtype = getattr(torch, settings.compute_dtype.name)
    for param in module.parameters():
        if param.is_floating_point():
            param.data = param.data.to(dtype)
    recorder = _Recorder((args, kwargs), module)
    has_host = settings.backend == "nccl"  # on CPUs nothing is moved
    offload = _Offload(recorder) if "offload" in activations and has_host else None
    try:
        with (
            redirect_stdout(sys.stderr),
            _hooked(model, dtype, recorder, offload, recomputes="recompute" in activations),
            _fused_attention(is_accelerator=has_host),
            recorder,
        ):
            loss = _loss(module(*args, **kwargs))
            if loss.requires_grad:
                torch.autograd.backward([loss])  # as a method it would suspend function modes
            recorder.note(Event.END)
    except InputError:
        raise
    except Exception as error:  # it is the user's code, or that of transformers
        raise InputError(
            f"{model.name} cannot run on the meta device, where tensors have shapes but no values: "
            f"{reason(error)}; plan without --batch and --inputs, or a function that builds the "
            "model with operators that only need shapes"
        ) from error
    return Trace(tuple(recorder.moments), 0 if offload is None else offload.highest_bytes)


def _inputs(model: Model, settings: Settings) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of forward, on the meta device."""
    if settings.inputs is not None:
        return _from_function(settings.inputs)
    assert settings.batch is not None, "there is a batch or a function"
    known = inspect.signature(model.module.forward).parameters
    if "input_ids" not in known:
        raise InputError(
            f"--batch is for models whose forward takes input_ids; that of {model.name} takes "
            f"{', '.join(known) or 'nothing'}: use --inputs module:function"
        )
    tokens = torch.zeros(settings.batch, dtype=torch.long, device="meta")
    given = {"input_ids": tokens, "labels": tokens, "use_cache": False}
    return (), {name: value for name, value in given.items() if name in known}


def _from_function(name: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    module_name, colon, function_name = name.partition(":")
    if not (colon and module_name and function_name):
        raise InputError(f"--inputs is {name!r}, expected module:function")
    found = map_tensors(lambda tensor: tensor.to("meta"), call(module_name, function_name))
    if isinstance(found, torch.Tensor):
        return (found,), {}
    if isinstance(found, dict):
        return (), found
    if isinstance(found, list | tuple):
        if len(found) == 2 and isinstance(found[0], list | tuple) and isinstance(found[1], dict):
            return tuple(found[0]), found[1]
        return tuple(found), {}
    raise InputError(
        f"--inputs {name} returned a {type(found).__name__}, expected the arguments of forward: a "
        "tensor, a tuple, a dict of keyword arguments, or a tuple and a dict"
    )


def _loss(output: Any) -> torch.Tensor:
    """Return ``.loss`` of an output, else the sum of its first tensor."""
    loss = output.get("loss") if isinstance(output, dict) else getattr(output, "loss", None)
    if not isinstance(loss, torch.Tensor):
        found: list[torch.Tensor] = []
        map_tensors(lambda tensor: found.append(tensor) or tensor, output)  # type: ignore[func-returns-value]
        if not found:
            raise InputError(f"forward returned a {type(output).__name__} without tensors")
        loss = found[0]
    return loss.sum() if loss.dim() else loss


class _Recorder(compat.TorchDispatchMode):
    """Counts the bytes of storages that operators make, and notes the moments of a step.

    Args:
        inputs: of the step. They are counted as long as they exist.
        module: its parameters and buffers are not counted.
    """

    def __init__(self, inputs: Any, module: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moments: list[Moment] = []
        self.stays = {
            tensor.untyped_storage()._cdata for tensor in (*module.parameters(), *module.buffers())
        }
        self._sizes: dict[int, int] = {}  # bytes of each storage
        # Of the results of ``tensor.all()``, which count as True: no padding, nothing packed.
        self._all: set[int] = set()
        self._live = self._highest = 0
        map_tensors(self._see, inputs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_read = func is torch.ops.aten._local_scalar_dense.default
        if is_read and args[0].untyped_storage()._cdata in self._all:
            return True
        result = func(*args, **(kwargs or {}))
        for leaf in compat.pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                self._see(leaf)
        if func is torch.ops.aten.all.default:
            self._all.add(result.untyped_storage()._cdata)
        return result

    def _see(self, tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key not in self._sizes and key not in self.stays:
            self._sizes[key] = storage.nbytes()
            self._live += storage.nbytes()
            self._highest = max(self._highest, self._live)
            weakref.finalize(storage, self._end, key).atexit = False
        return tensor

    def _end(self, key: int) -> None:
        self._live -= self._sizes.pop(key)
        self._all.discard(key)

    def hand_over(self, gradient: torch.Tensor) -> None:
        """Do not count a gradient any more: it is complete, and the engine's."""
        key = gradient.untyped_storage()._cdata
        taken = min(gradient.nbytes, self._sizes.get(key, 0))
        if taken:
            self._sizes[key] -= taken
            self._live -= taken

    def note(self, event: Event, unit: int = 0, call: int = 0, **more: Any) -> None:
        """Add a moment."""
        self.moments.append(Moment(event, self._highest, self._live, unit, call, **more))
        self._highest = self._live


class _Call(BoundaryCall):
    """One forward of a unit."""

    def __init__(self, recorder: _Recorder, unit: int, number: int, kept: _Kept | None) -> None:
        super().__init__(f"unit {unit}")
        self._recorder, self.unit, self.number, self.kept = recorder, unit, number, kept

    def note(self, event: Event, **more: Any) -> None:
        self._recorder.note(event, self.unit, self.number, **more)

    def pre_backward(self) -> None:
        self.note(Event.BACKWARD)
        if self.kept is not None:
            self.kept.prefetch()

    def post_backward(self) -> None:
        if self.kept is not None:
            self.kept.finish()
        self.note(Event.END_OF_BACKWARD)


@contextmanager
def _hooked(
    model: Model,
    dtype: torch.dtype,
    recorder: _Recorder,
    offload: _Offload | None,
    *,
    recomputes: bool,
) -> Iterator[None]:
    """Give the module's units the hooks of a trace."""
    module: nn.Module = model.module
    blocks = repeated_blocks(module)
    handles: list[Any] = _gradient_hooks(model, [module, *blocks], recorder)
    numbers = iter(range(1 << 62))
    for index, unit in enumerate([module, *blocks]):
        is_block = index > 0
        hooks = _UnitHooks(index, dtype, recorder, offload if is_block else None, numbers)
        handles.append(unit.register_forward_pre_hook(hooks.before, prepend=True, with_kwargs=True))
        handles.append(unit.register_forward_hook(hooks.after))
        if is_block and recomputes:
            # Generators have no state on the meta device.
            unit.forward = partial(
                checkpoint, unit.forward, use_reentrant=False, preserve_rng_state=False
            )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for block in blocks if recomputes else ():
            del block.forward


class _UnitHooks:
    """The hooks around the forward of one unit."""

    def __init__(
        self,
        index: int,
        dtype: torch.dtype,
        recorder: _Recorder,
        offload: _Offload | None,
        numbers: Iterator[int],
    ) -> None:
        self._index, self._dtype, self._recorder = index, dtype, recorder
        self._offload, self._numbers = offload, numbers
        self._depth = 0
        self._call: _Call | None = None

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        self._depth += 1
        is_outer = self._depth == 1 and compat.current_backward() == -1  # else it is recomputed
        if is_outer:
            self._recorder.note(Event.FORWARD, self._index, number := next(self._numbers))
        args, kwargs = map_tensors(self._cast, (args, kwargs))
        if is_outer:
            kept = None if self._offload is None else self._offload.begin()
            self._call = _Call(self._recorder, self._index, number, kept)
            args, kwargs = enter_boundary(self._call, (args, kwargs))
            if kept is not None:
                kept.begin()
        return args, kwargs

    def after(self, module: nn.Module, args: Any, output: Any) -> Any:
        self._depth -= 1
        if self._depth or self._call is None:
            return output
        call, self._call = self._call, None
        if call.kept is not None:
            call.kept.end()
        output, is_reachable = leave_boundary(call, output)
        call.note(
            Event.END_OF_FORWARD, takes_gradients=call.takes_gradients, is_reachable=is_reachable
        )
        return output

    def _cast(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._dtype) if tensor.is_floating_point() else tensor


def _gradient_hooks(model: Model, units: list[nn.Module], recorder: _Recorder) -> list[Any]:
    """Take each parameter's gradient when it is complete, as the engine does."""
    owner = owners(model.module, units[1:])
    handles = []
    for index, unit in enumerate(units):
        groups = model.units[model.order[index]].groups
        places = {tensor.name: i for i, group in enumerate(groups) for tensor in group.tensors}
        for name, param in unit.named_parameters():
            if param.requires_grad and owner[id(param)] == index - 1:

                def take(param: torch.Tensor, unit: int = index, place: int = places[name]) -> None:
                    gradient, param.grad = param.grad, None
                    assert gradient is not None, "it has been accumulated"
                    recorder.hand_over(gradient)
                    recorder.note(Event.GRADIENT, unit, group=place, num_elements=gradient.numel())

                handles.append(param.register_post_accumulate_grad_hook(take))
    return handles


class _Part:
    """One storage that autograd has saved: on the device, on the host, or on both."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.here: torch.Tensor | None = _of_storage(storage, torch.uint8, 0, (storage.nbytes(),))
        self.num_bytes = storage.nbytes()


class _Saved:
    """What the graph of autograd holds instead of a tensor: a view of a `_Part`."""

    def __init__(self, part: _Part, kept: _Kept, tensor: torch.Tensor) -> None:
        self._part, self._kept, self._dtype = part, kept, tensor.dtype
        self._offset = int(tensor.storage_offset())
        self._shape = tensor.size(), tensor.stride()

    def restore(self) -> torch.Tensor:
        if self._part.here is None:
            self._kept.fetch()
        assert self._part.here is not None, "it has been fetched"
        return _of_storage(
            self._part.here.untyped_storage(), self._dtype, self._offset, *self._shape
        )


def _of_storage(storage: Any, dtype: torch.dtype, offset: int, *shape: Any) -> torch.Tensor:
    empty = torch.empty(0, dtype=dtype, device="meta")
    return empty.set_(storage, offset, *shape)


class _Offload:
    """Offloads the activations of units. A unit's leave the device when the next one has ended."""

    def __init__(self, recorder: _Recorder) -> None:
        self.recorder = recorder
        self.last: _Kept | None = None  # of the forwards so far
        self.highest_bytes = self._bytes = 0  # on the host

    def begin(self) -> _Kept:
        return _Kept(self)

    def copy(self, part: _Part) -> None:
        """Copy a part to the host, where it stays as long as it exists."""
        self._bytes += part.num_bytes
        self.highest_bytes = max(self.highest_bytes, self._bytes)
        weakref.finalize(part, self._drop, part.num_bytes).atexit = False

    def _drop(self, num_bytes: int) -> None:
        self._bytes -= num_bytes


class _Kept:
    """What the forward of one unit has kept for its backward. The graph owns the parts."""

    def __init__(self, offload: _Offload) -> None:
        self._offload = offload
        self._before: _Kept | None = None
        self._parts: weakref.WeakValueDictionary[tuple[int, int], _Part] = (
            weakref.WeakValueDictionary()
        )
        self._hooks: Any = saved_tensors_hooks(self._pack, _unpack)

    def begin(self) -> None:
        self._hooks.__enter__()

    def _pack(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        is_small = storage.nbytes() < MIN_OFFLOADED_BYTES
        if is_small or storage._cdata in self._offload.recorder.stays:
            return tensor
        key = storage._cdata, tensor._version
        part = self._parts.get(key)
        if part is None:
            part = self._parts[key] = _Part(tensor)
        return _Saved(part, self, tensor)

    def end(self) -> None:
        """The forward has ended: the parts are copied, and those of the unit before are free."""
        self._hooks.__exit__(None, None, None)
        self._before, self._offload.last = self._offload.last, self
        for part in self._parts.values():
            self._offload.copy(part)
        if self._before is not None:
            self._before.finish()

    def prefetch(self) -> None:
        """The backward of the unit begins: bring back what it needs, and the unit before it."""
        self.fetch()
        if self._before is not None:
            self._before.fetch()

    def fetch(self) -> None:
        for part in self._parts.values():
            if part.here is None:
                part.here = torch.empty(part.num_bytes, dtype=torch.uint8, device="meta")

    def finish(self) -> None:
        """Free the memory on the device."""
        for part in self._parts.values():
            part.here = None


def _unpack(saved: Any) -> torch.Tensor:
    whole: torch.Tensor = saved.restore() if isinstance(saved, _Saved) else saved
    return whole


@contextmanager
def _fused_attention(*, is_accelerator: bool) -> Iterator[None]:
    """Let ``scaled_dot_product_attention`` save what its fused kernels save.

    Args:
        is_accelerator: whose kernels also have dropout, and values of another width. On CPUs torch
            computes these from the matrix of all pairs.
    """
    original = F.scaled_dot_product_attention

    def attend(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **more: Any,
    ) -> Any:
        is_fused = query.dim() == 4 and not (attn_mask is not None and attn_mask.requires_grad)
        if not is_accelerator:
            is_fused &= dropout_p == 0 and query.shape[-1] == value.shape[-1]
        if not is_fused:
            return original(query, key, value, attn_mask, dropout_p, is_causal, **more)
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = attn_mask.to(query.dtype)
        return _Attention.apply(query, key, value, attn_mask)  # type: ignore[no-untyped-call]

    class ByName(TorchFunctionMode):  # for modules that have imported the function by name
        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            return (attend if func is original else func)(*args, **(kwargs or {}))

    # A mode is suspended within torch's functions of Python, such as multi_head_attention_forward.
    with mock.patch.object(F, "scaled_dot_product_attention", attend), ByName():
        yield


class _Attention(torch.autograd.Function):
    """Shapes of fused attention: it saves its inputs, its output, and one number for each row."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,  # [batch, heads, tokens, width]
        key: torch.Tensor,
        value: torch.Tensor,  # [batch, heads, tokens, width of the output]
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        batch, heads, length, _ = query.shape
        output = query.new_empty(batch, length, heads, value.shape[-1]).transpose(1, 2)
        sums = query.new_empty(batch, heads, length, dtype=torch.float32)
        ctx.save_for_backward(query, key, value, mask, output, sums)
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, *_ = ctx.saved_tensors
        return (*(torch.empty_like(each) for each in (query, key, value)), None)

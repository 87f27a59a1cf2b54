"""Follows the memory of activations in a step, and notes its moments.

A dispatch mode sees the storage of each tensor that an operator makes, and a finalizer its end. On
meta, other tensors that a model makes or has (``torch.arange(n)``, targets of a loss) become shapes
where they meet its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from vescale_fsdp.spi import TorchDispatchMode, current_backward, map_tensors, pytree
from vescale_fsdp_tune.budget.shapes import Shapes, tensors_in
from vescale_fsdp_tune.budget.twins import tensors_of
from vescale_fsdp_tune.costs.model import Event, Moment


class Recorder(TorchDispatchMode):
    """Counts the bytes of storages that operators make, and notes the moments of a step.

    Args:
        inputs: of the step. They are counted as long as they exist.
        module: its tensors are not counted.
        homes: for each parameter of a unit, but of the root: its storage and the unit.

    Attributes:
        running: units whose forward is under way.
        read_outside: units with a parameter that an operator has read in no forward of theirs.
    """

    def __init__(self, inputs: Any, module: nn.Module, homes: Mapping[int, int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.moments: list[Moment] = []
        self.running: list[int] = []
        self.read_outside: set[int] = set()
        self._homes = homes
        self.stays = {tensor.untyped_storage()._cdata for tensor in tensors_of(module)}
        self._sizes: dict[int, int] = {}  # bytes of each storage
        # Of the results of ``mask.all()``, which count as True: no padding, nothing packed. And
        # the sums of masks, with their sizes, because ``mask.sum() == mask.numel()`` asks the same.
        self._all: set[int] = set()
        self._sums: dict[int, int] = {}
        self._live = self._highest = 0
        self._shapes = Shapes()
        map_tensors(self._see, inputs)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_read = func is torch.ops.aten._local_scalar_dense.default
        if is_read and args[0].untyped_storage()._cdata in self._all:
            return True
        kwargs = kwargs or {}
        self._note_reads((args, *kwargs.values()))
        args, kwargs = _on_one_device(args, kwargs)
        result = self._shapes.run(func, args, kwargs)
        for tensor in tensors_in(result):
            self._see(tensor)
        self._note_questions(func, args, result)
        return result

    def _note_questions(self, func: Any, args: Any, result: Any) -> None:
        """Remember results that say whether all elements of a mask are true."""
        if func is torch.ops.aten.all.default:
            self._all.add(result.untyped_storage()._cdata)
        elif func is torch.ops.aten.sum.default and args[0].dtype == torch.bool:
            self._sums[result.untyped_storage()._cdata] = args[0].numel()
        elif func is torch.ops.aten.eq.Scalar:
            size = self._sums.get(args[0].untyped_storage()._cdata)
            if size is not None and args[1] == size:
                self._all.add(result.untyped_storage()._cdata)

    def _note_reads(self, arguments: Any) -> None:
        if current_backward() != -1:
            return
        for tensor in tensors_in(arguments):
            home = self._homes.get(tensor.untyped_storage()._cdata)
            if home is not None and home not in self.running:
                self.read_outside.add(home)

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
        self._sums.pop(key, None)

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


def _on_one_device(args: Any, kwargs: Any) -> Any:
    """Return the arguments of an operator, on meta if some are and others are not."""
    if len({tensor.is_meta for tensor in tensors_in((args, *kwargs.values()))}) < 2:
        return args, kwargs

    def place(leaf: Any) -> Any:
        is_other = isinstance(leaf, torch.Tensor) and not leaf.is_meta
        return torch.empty_like(leaf, device="meta") if is_other else leaf

    return pytree.tree_map(place, (args, kwargs))

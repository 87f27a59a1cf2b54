"""Activations that are offloaded in a trace: which are on the device, and which on the host.

As in `vescale_fsdp.engine.activations`, but nothing is copied: there are only bytes.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from vescale_fsdp.spi import MIN_BYTES


class _Part:
    """One storage that autograd has saved: on the device, on the host, or on both."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self.here: torch.Tensor | None = _of_storage(storage, torch.uint8, 0, (storage.nbytes(),))
        self.num_bytes = storage.nbytes()


class _Saved:
    """What the graph of autograd holds instead of a tensor: a view of a `_Part`."""

    def __init__(self, part: _Part, kept: Kept, tensor: torch.Tensor) -> None:
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


class Offload:
    """Offloads the activations of units. A unit's leave the device when the next one has ended."""

    def __init__(self, stays: Collection[int]) -> None:
        self.stays = stays
        self.last: Kept | None = None  # of the forwards so far
        self.highest_bytes = self._bytes = 0  # on the host

    def begin(self) -> Kept:
        return Kept(self)

    def copy(self, part: _Part) -> None:
        """Copy a part to the host, where it stays as long as it exists."""
        self._bytes += part.num_bytes
        self.highest_bytes = max(self.highest_bytes, self._bytes)
        weakref.finalize(part, self._drop, part.num_bytes).atexit = False

    def _drop(self, num_bytes: int) -> None:
        self._bytes -= num_bytes


class Kept:
    """What the forward of one unit has kept for its backward. The graph owns the parts."""

    def __init__(self, offload: Offload) -> None:
        self._offload = offload
        self._before: Kept | None = None
        self._parts: weakref.WeakValueDictionary[tuple[int, int], _Part] = (
            weakref.WeakValueDictionary()
        )
        self._hooks: Any = saved_tensors_hooks(self._pack, _unpack)

    def begin(self) -> None:
        self._hooks.__enter__()

    def _pack(self, tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        is_small = storage.nbytes() < MIN_BYTES
        if is_small or storage._cdata in self._offload.stays:
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

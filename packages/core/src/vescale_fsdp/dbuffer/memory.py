"""Memory that comes and goes under addresses that stay.

The full buffers of a group exist for a moment in every step. A `Region` is one Storage object
for life, with memory under it only while it is needed, so that views of it can be made once and
saved by autograd.

* On an accelerator its size goes to 0 and back; the caching allocator makes that cheap.
* On Linux CPUs it is a private mapping whose pages go to the next region that needs some
  (`mapped`). Through malloc the same buffers would fragment the heap without bound: glibc serves
  them from the heap as soon as one of them was freed, and the aligned requests of torch do not
  fit the holes that they leave.
  What is smaller than 16 KiB keeps its pages: to move them costs more than to copy it.
* Elsewhere the size goes to 0 and back through malloc.
* With ``VESCALE_FSDP_CHECK_MEMORY=1`` nothing is freed: what is released is filled with NaN (bytes
  of ones), so that whoever reads it shows.

A `SlabPool` lends scratch memory that nobody has saved views of, such as gradients on their way.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from typing import Protocol

import torch

from vescale_fsdp import devices
from vescale_fsdp.dbuffer.mapped import CAN_MAP, Mapped

_SMALLEST_FREED = 1 << 14  # bytes of a mapped region
_STEPS_PER_HEAP_TRIM = 16  # costs the next step a few ms of page faults


class Region(Protocol):
    """Memory under one Storage object, there or not."""

    storage: torch.UntypedStorage
    num_bytes: int
    is_materialized: bool

    def materialize(self) -> None:
        """Put memory under the storage, uninitialised. Does nothing if it is there."""

    def release(self) -> None:
        """Take the memory away. Does nothing if it is gone."""


def _is_mapped(device: torch.device) -> bool:
    return CAN_MAP and device.type == "cpu" and not devices.has_streams(device)


def make_region(num_bytes: int, device: torch.device) -> Region:
    """A region on ``device``, without memory at first."""
    if is_checked():
        return _Poisoned(num_bytes, device)
    if _is_mapped(device) and num_bytes:
        return Mapped(num_bytes) if num_bytes >= _SMALLEST_FREED else _Kept(num_bytes)
    return _Resized(num_bytes, device)


class _Kept(Mapped):
    """So small that it keeps its pages."""

    def materialize(self) -> None:
        self.is_materialized = True

    def release(self) -> None:
        self.is_materialized = False


class _Resized:
    """The storage's size goes to 0 and back."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self.storage = torch.empty(num_bytes, dtype=torch.uint8, device=device).untyped_storage()
        self.is_materialized = True
        self.release()

    def materialize(self) -> None:
        if not self.is_materialized:
            self.storage.resize_(self.num_bytes)
            self.is_materialized = True

    def release(self) -> None:
        if self.is_materialized:
            self.storage.resize_(0)
            self.is_materialized = False


class _Poisoned:
    """Keeps its memory, and holds NaN where another region would have none."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self._bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.storage = self._bytes.untyped_storage()
        self.is_materialized = True
        self.release()

    def materialize(self) -> None:
        self.is_materialized = True

    def release(self) -> None:
        if self.is_materialized:
            self._bytes.fill_(0xFF)
            self.is_materialized = False


def is_checked() -> bool:
    """Whether memory that is released or not yet written to holds NaN."""
    return os.environ.get("VESCALE_FSDP_CHECK_MEMORY", "0") == "1"


def mapped_empty(num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A flat, uninitialised tensor whose memory goes back to the system when it dies.

    For what is written at once: its memory is there when this returns.
    """
    num_bytes = num_elements * dtype.itemsize
    if not _is_mapped(device) or not num_bytes or is_checked():
        return torch.empty(num_elements, dtype=dtype, device=device)
    tensor = torch.empty(0, dtype=dtype)
    mapped = Mapped(num_bytes)
    mapped.touch()
    return tensor.set_(mapped.storage, 0, (num_elements,), (1,))


class SlabPool:
    """Scratch memory on one device that is lent, given back, and lent again.

    It holds as many slabs as were out at the same time; those that are in have no memory. On an
    accelerator it leaves all to the caching allocator.

    Attributes:
        lane: the stream on which what it lends is allocated, written to and freed.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lane = devices.Lane(device)
        self._idle: list[Region] = []
        self._lent: dict[int, Region] = {}
        self._num_trims = 0

    def take(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """A flat, uninitialised tensor. Give it back with `give`."""
        num_bytes = num_elements * dtype.itemsize
        if devices.has_streams(self.device) or num_bytes == 0:
            return torch.empty(num_elements, dtype=dtype, device=self.device)
        fitting = [region for region in self._idle if region.num_bytes >= num_bytes]
        if fitting:
            region = min(fitting, key=lambda each: each.num_bytes)
            self._idle.remove(region)
        else:
            if self._idle:  # too small: replace one, so that sizes do not pile up
                self._idle.remove(min(self._idle, key=lambda each: each.num_bytes))
            region = make_region(num_bytes, self.device)
        region.materialize()
        self._lent[region.storage._cdata] = region
        slab = torch.empty(0, dtype=dtype, device=self.device)
        return slab.set_(region.storage, 0, (num_elements,), (1,))

    def give(self, slab: torch.Tensor) -> None:
        """Take back what `take` has lent. Nobody may use it any more."""
        region = self._lent.pop(slab.untyped_storage()._cdata, None)
        if region is not None:
            region.release()
            self._idle.append(region)

    def trim(self) -> None:
        """Hand free memory of the heap back to the system, every so often. Once per step."""
        self._num_trims += 1
        if self.device.type == "cpu" and self._num_trims % _STEPS_PER_HEAP_TRIM == 0:
            _trim_heap()


def _trim_heap() -> None:
    """Have glibc give back free pages inside of its heap (elsewhere: nothing).

    Torch asks for aligned memory, and glibc 2.36 caches the slivers that it cuts off for that; a
    cached sliver keeps the free memory around it apart. What a step frees then does not fit the
    next one, and the heap's resident part grew by some MB in every step.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


_POOLS: weakref.WeakValueDictionary[torch.device, SlabPool] = weakref.WeakValueDictionary()


def pool_for(device: torch.device) -> SlabPool:
    """The pool of a device, shared by all groups that hold it."""
    pool = _POOLS.get(device)
    if pool is None:
        pool = _POOLS[device] = SlabPool(device)
    return pool

"""Buffers whose memory is allocated and freed while their Storage object stays the same.

The full buffers of a group are needed only for a short part of every step. A `Region` is one
Storage object that has memory only during that part. So its views are made once, and autograd can
save them.

* On an accelerator the storage is resized to 0 and back; the caching allocator makes that cheap.
* On Linux CPUs it is a private mapping (`Mapped`). With malloc the same buffers would fragment the
  heap without limit: glibc allocates them on the heap once one of them was freed, and torch's
  aligned requests do not fit the freed blocks. Regions below 16 KiB keep their pages, because
  moving pages costs more than copying so little.
* On other systems the storage is resized to 0 and back with malloc.
* With ``VESCALE_FSDP_CHECK_MEMORY=1`` nothing is freed. A released region is filled with NaN
  (bytes of ones), so that an error is visible if code reads it.

The blocks of a model have full buffers of the same size, and only a few exist at a time. The kernel
clears new pages and maps each at a page fault, which took a quarter of the processor time of a step
(docs/design/performance.md). So a released mapped region keeps its pages until another region of
its size needs memory. Then ``mremap`` moves them to the address of the other region::

    block 0   | pages |  --released-->  | pages |  --moved-->  |       |
    block 2   |       |                 |       |              | pages |  with their old contents

Spare pages are freed when a region needs memory and none of them fit, so that there are never more
pages than were needed at once; and by `hand_back`.

A `SlabPool` has temporary memory without saved views, for example for gradients during a reduction.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any, ParamSpec, Protocol, TypeVar

import torch

from vescale_fsdp import compat, devices

P = ParamSpec("P")
R = TypeVar("R")

CAN_MAP = hasattr(mmap, "MADV_HUGEPAGE")  # Linux
_HUGE_PAGE = 2 << 20

_MADV_POPULATE_WRITE = 23  # not in Python's mmap
_MOVE_PAGES_ONLY = 1 | 2 | 4  # MREMAP_MAYMOVE | MREMAP_FIXED | MREMAP_DONTUNMAP (Linux 5.7)
# Regions that are released and still have their pages, by address; oldest first.
_spare: dict[int, weakref.ref[Mapped]] = {}
_lock = threading.Lock()


class Mapped:
    """A private mapping under one Storage object, with pages only while it is materialized.

    Args:
        num_bytes: its size, at least 1.
    """

    def __init__(self, num_bytes: int) -> None:
        large = num_bytes >= _HUGE_PAGE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._mapping = mmap.mmap(-1, num_bytes + (_HUGE_PAGE if large else 0), flags=flags)
        offset = whole = 0
        if large:
            address = torch.frombuffer(self._mapping, dtype=torch.uint8).data_ptr()
            offset = -address % _HUGE_PAGE
            # Whole huge pages only: the rest would take one for a few bytes.
            whole = num_bytes // _HUGE_PAGE * _HUGE_PAGE
            self._mapping.madvise(mmap.MADV_HUGEPAGE, offset, whole)
        tensor = torch.frombuffer(self._mapping, dtype=torch.uint8, count=num_bytes, offset=offset)
        self.storage = tensor.untyped_storage()
        self.is_materialized = self._has_kept = False
        self._address, self.num_bytes = tensor.data_ptr(), num_bytes
        rest = -(-(num_bytes - whole) // mmap.PAGESIZE) * mmap.PAGESIZE
        # The kernel moves no range with both kinds of pages.
        self._ranges = [each for each in ((0, whole), (whole, rest)) if each[1]]

    def materialize(self) -> None:
        """Allocate memory, uninitialised. Does nothing if there is memory."""
        if self.is_materialized:
            return
        self.is_materialized = True
        if self._has_kept:
            return
        with _lock:
            own = _spare.pop(self._address, None)
            if own is not None and own() is self:
                return
            for address, ref in reversed(_spare.items()):
                other = ref()
                if other is not None and other.num_bytes == self.num_bytes:
                    del _spare[address]
                    other._give_pages(self)
                    return
            _hand_back()

    def release(self, *, keeps: bool = False) -> None:
        """Free the memory, unless it ``keeps`` it for itself. Does nothing if there is none."""
        if self.is_materialized:
            self.is_materialized, self._has_kept = False, keeps
            if keeps:
                return
            with _lock:
                _spare[self._address] = weakref.ref(self)

    def touch(self) -> None:
        """Map all small pages in one call, which costs less than one page fault for each."""
        if self.num_bytes < _HUGE_PAGE:
            with contextlib.suppress(OSError):  # Linux 5.14
                self._mapping.madvise(_MADV_POPULATE_WRITE)

    def _give_pages(self, other: Mapped) -> None:
        for start, length in self._ranges:
            source, target = self._address + start, other._address + start
            if _mremap(source, length, length, _MOVE_PAGES_ONLY, target) != target:
                self._drop_pages()  # an old kernel: the other one takes fresh pages
                return

    def _drop_pages(self) -> None:
        self._mapping.madvise(mmap.MADV_DONTNEED)


def hand_back() -> None:
    """Free the spare pages of all regions."""
    with _lock:
        _hand_back()


def _hand_back() -> None:
    while _spare:
        region = _spare.popitem()[1]()
        if region is not None:
            region._drop_pages()


_libc = ctypes.CDLL(None, use_errno=True)
if CAN_MAP:
    _mremap = _libc.mremap
    _mremap.restype = ctypes.c_void_p
    _mremap.argtypes = [ctypes.c_void_p, *[ctypes.c_size_t] * 2, ctypes.c_int, ctypes.c_void_p]

_SMALLEST_FREED = 1 << 14  # bytes of a mapped region
SMALLEST_LASTING = 1 << 14  # bytes of a sum of gradients; smaller ones may share a message
_LARGEST_MAPPED = (32 << 20) - (64 << 10)  # bytes of a block, with room for glibc's own
_MOST_TIMES, _MOST_IDLE = 1.25, 8  # of a slab for what it is taken for; of unused slabs
_STEPS_PER_HEAP_TRIM = 16  # costs the next step a few ms of page faults


class Region(Protocol):
    """One Storage object, with or without memory."""

    storage: torch.UntypedStorage
    num_bytes: int
    is_materialized: bool

    def materialize(self) -> None:
        """Allocate memory, uninitialised. Does nothing if there is memory."""

    def release(self, *, keeps: bool = False) -> None:
        """Free the memory. Does nothing if there is none.

        Args:
            keeps: do not free it, but count as freed: the next `materialize` finds it where it was.
        """


def _is_mapped(device: torch.device) -> bool:
    return CAN_MAP and device.type == "cpu" and not devices.has_streams(device)


def make_region(num_bytes: int, device: torch.device, *, keeps: bool = False) -> Region:
    """Make a region on ``device``. It has no memory yet.

    Args:
        keeps: on the CPU, a released region keeps its pages for the next time.
    """
    if is_checked():
        return _Poisoned(num_bytes, device)
    if _is_mapped(device) and num_bytes:
        frees = num_bytes >= _SMALLEST_FREED and not keeps
        return Mapped(num_bytes) if frees else _Kept(num_bytes)
    return _Resized(num_bytes, device)


class _Kept(Mapped):
    """A region that keeps its pages: a small one, or one that is used again soon."""

    def materialize(self) -> None:
        self.is_materialized = True

    def release(self, *, keeps: bool = False) -> None:
        self.is_materialized = False


class Borrowed:
    """A region of memory that something else owns. It is always there."""

    def __init__(self, owner: torch.Tensor) -> None:
        self.storage = owner.untyped_storage()
        self.num_bytes, self.is_materialized = self.storage.nbytes(), True

    def materialize(self) -> None:
        pass

    def release(self, *, keeps: bool = False) -> None:
        pass


class _Resized:
    """A region whose storage is resized to 0 and back."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self.storage = torch.empty(num_bytes, dtype=torch.uint8, device=device).untyped_storage()
        self.is_materialized = True
        self.release()

    def materialize(self) -> None:
        if not self.is_materialized:
            if self.storage.nbytes() != self.num_bytes:  # else it was kept
                self.storage.resize_(self.num_bytes)
            self.is_materialized = True

    def release(self, *, keeps: bool = False) -> None:
        if self.is_materialized:
            if not keeps:
                self.storage.resize_(0)
            self.is_materialized = False


class _Poisoned:
    """A region that keeps its memory, filled with NaN when another region would have none."""

    def __init__(self, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self._bytes = torch.empty(num_bytes, dtype=torch.uint8, device=device)
        self.storage = self._bytes.untyped_storage()
        self.is_materialized = True
        self.release()

    def materialize(self) -> None:
        self.is_materialized = True

    def release(self, *, keeps: bool = False) -> None:
        if self.is_materialized:
            self._bytes.fill_(0xFF)
            self.is_materialized = False


def is_checked() -> bool:
    """Whether memory that is released or not yet written to holds NaN."""
    return os.environ.get("VESCALE_FSDP_CHECK_MEMORY", "0") == "1"


def mapped_empty(num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a flat, uninitialised tensor whose memory returns to the system when it is deleted.

    Its pages are mapped here, for data that is written at once.
    """
    num_bytes = num_elements * dtype.itemsize
    if not _is_mapped(device) or not num_bytes or is_checked():
        return torch.empty(num_elements, dtype=dtype, device=device)
    tensor = torch.empty(0, dtype=dtype)
    mapped = Mapped(num_bytes)
    mapped.touch()
    return tensor.set_(mapped.storage, 0, (num_elements,), (1,))


class Lasting:
    """Memory of one flat tensor that is given out again once nobody else holds its storage.

    For results that users may keep: gradients. New memory would have to be mapped and cleared by
    the kernel in each step. While somebody holds it, others get memory that does not last. So it is
    never more than one tensor, also if gradients of several backwards are added up.
    """

    def __init__(self) -> None:
        self._flat: torch.Tensor | None = None
        self._kind: object = None
        self._num_holders = 0  # of the storage, if nobody else holds it

    def take(self, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a flat, uninitialised tensor. The caller need not return it."""
        kind = (num_elements, dtype, device)
        if self._flat is None or self._kind != kind:
            self._flat, self._kind = mapped_empty(*kind), kind
            self._num_holders = compat.num_holders(self._flat)
        elif self._is_held(self._flat):
            return mapped_empty(*kind)
        return self._flat.detach()

    def _is_held(self, flat: torch.Tensor) -> bool:
        return compat.num_holders(flat) > self._num_holders


class SlabPool:
    """A pool of temporary tensors (slabs) on one device.

    A slab is at most a quarter larger than what it is taken for. Unused slabs have no memory, and
    are few. On an accelerator it uses the caching allocator instead.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._idle: list[Region] = []
        self._lent: dict[int, Region] = {}
        self._num_trims = 0

    def take(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a flat, uninitialised tensor. Return it to the pool with `give`."""
        num_bytes = num_elements * dtype.itemsize
        if devices.has_streams(self.device) or num_bytes == 0:
            return torch.empty(num_elements, dtype=dtype, device=self.device)
        fits = [r for r in self._idle if num_bytes <= r.num_bytes <= num_bytes * _MOST_TIMES]
        if fits:
            region = min(fits, key=lambda each: each.num_bytes)
            self._idle.remove(region)
        else:
            if len(self._idle) >= _MOST_IDLE:  # so that sizes do not pile up
                del self._idle[0]
            region = make_region(num_bytes, self.device)
        region.materialize()
        self._lent[region.storage._cdata] = region
        slab = torch.empty(0, dtype=dtype, device=self.device)
        return slab.set_(region.storage, 0, (num_elements,), (1,))

    def give(self, slab: torch.Tensor) -> None:
        """Return a slab to the pool. It must not be used any more."""
        region = self._lent.pop(slab.untyped_storage()._cdata, None)
        if region is not None:
            region.release()
            self._idle.append(region)

    def trim(self) -> None:
        """Free unused heap memory at every 16th call. Call it once per step."""
        self._num_trims += 1
        if self.device.type == "cpu" and self._num_trims % _STEPS_PER_HEAP_TRIM == 0:
            _trim_heap()


def on_lane(method: Callable[P, R]) -> Callable[P, R]:
    """Make a method of an object with a ``lane`` run on that stream, which owns the memory."""

    @functools.wraps(method)
    def queued(*args: P.args, **kwargs: P.kwargs) -> R:
        owner: Any = args[0]
        lane = owner.lane
        if lane.is_current:
            return method(*args, **kwargs)
        with lane.entered():
            return method(*args, **kwargs)

    return queued


def _trim_heap() -> None:
    """Make glibc return free pages of its heap to the system. Does nothing with other libraries.

    For torch's aligned requests glibc 2.36 splits off small blocks and caches them. A cached block
    keeps the free memory around it from being joined. Then the memory that a step frees does not
    fit the next step, and the heap's resident size grew by some MB in every step.
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
        if _is_mapped(device):
            _keep_heap()
    return pool


def _keep_heap() -> None:
    """Make glibc keep up to 64 MiB at the end of its heap, which the next step uses again.

    It returns the end of the heap to the system above twice the size of the largest block that it
    has mapped and freed, of 32 MiB at most. So where all large blocks are `Mapped`, the kernel
    would map and clear the memory of activations in each step, for a tenth of its time. One block
    that is not written to costs nothing.
    """
    torch.empty(_LARGEST_MAPPED, dtype=torch.uint8)  # freed at once

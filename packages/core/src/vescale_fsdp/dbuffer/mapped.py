"""Mapped: memory on Linux CPUs, at addresses that stay, whose pages go from one region to the next.

A model's blocks have full buffers of one size, of which a few are there at a time. Fresh pages are
cleared by the kernel and mapped one fault at a time, which took a quarter of the processor time of
a step (docs/design/performance.md). So a region that is released keeps its pages until another
one of its size needs some, and gives them to it: ``mremap`` moves them under the other's address::

    block 0   | pages |  --released-->  | pages |  --moved-->  |       |
    block 2   |       |                 |       |              | pages |  with what they held

They go back to the system when a region needs memory and no spare pages fit it, so that there are
never more pages than were needed at once, and at `hand_back`.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import threading
import weakref

import torch

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
        self.is_materialized = False
        self._address, self.num_bytes = tensor.data_ptr(), num_bytes
        rest = -(-(num_bytes - whole) // mmap.PAGESIZE) * mmap.PAGESIZE
        # The kernel moves no range with both kinds of pages.
        self._ranges = [each for each in ((0, whole), (whole, rest)) if each[1]]

    def materialize(self) -> None:
        """Put memory under the storage, uninitialised. Does nothing if it is there."""
        if self.is_materialized:
            return
        self.is_materialized = True
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

    def release(self) -> None:
        """Let the memory go. Does nothing if it is gone."""
        if self.is_materialized:
            self.is_materialized = False
            with _lock:
                _spare[self._address] = weakref.ref(self)

    def touch(self) -> None:
        """Map its pages, all in one call, if they are small: cheaper than one fault for each."""
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
    """Give the spare pages of all regions back to the system."""
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

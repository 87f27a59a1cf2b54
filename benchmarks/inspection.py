"""Counts memory and copies of one step on this rank, with torch's profiler.

Memory is the peak of the CPU allocator during the step, minus its value before the model was made.
It contains parameters, optimizer states, unsharded buffers, gradients, activations, and copies in
collectives. Our mapped regions are disabled and use the allocator for the same bytes, so this runs
separately from timed steps.

Copies are the bytes written by operators that only move data: ``copy_`` (casts and copies between
buffers), ``cat`` and similar ones, called from Python, C++ or the threads of gloo. Copies between
gloo's own buffers are not counted. The model also copies, for example transposed activations.
Callers subtract the same count for ``compute``.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from packages.core.tests.allocations import Block, peak_of, through_the_allocator, traced
from torch.profiler import ProfilerActivity, profile

if TYPE_CHECKING:
    from benchmarks.engines import Engine

__all__ = ["Inspection", "copied_bytes", "inspect", "peak_after"]

# The argument that is the result. None: the result is as large as all arguments together.
COPIES = {"aten::copy_": 0, "aten::cat": None, "aten::_cat": None}
_MARK_BYTES = 8_388_593  # of a tensor that marks a time: a prime, which no other tensor has


@dataclass(frozen=True)
class Inspection:
    """The counts of a rank in one step.

    Attributes:
        peak_bytes: peak of tensors.
        resting_bytes: the part of it that is also allocated between steps.
        copied_bytes: written by copies, also the model's.
    """

    peak_bytes: int
    resting_bytes: int
    copied_bytes: int


def inspect(make: Callable[[], Engine]) -> tuple[Engine, Inspection]:
    """Make an engine, and count one step's memory and another one's copies."""
    engines: list[Engine] = []

    def life() -> None:
        engines.append(make())
        time.sleep(0.1)  # until gloo's threads have released the last engine
        torch.empty(_MARK_BYTES, dtype=torch.uint8)
        engines[0].step()
        time.sleep(0.1)

    with through_the_allocator(), _silent():
        peak, resting = peak_after(traced(life), _MARK_BYTES)
        return engines[0], Inspection(peak, resting, copied_bytes(engines[0].step))


def peak_after(blocks: list[Block], mark_bytes: int) -> tuple[int, int]:
    """Return the peak of bytes in use after the block of that size, and the bytes at its time."""
    mark = next(block for block in blocks if block.num_bytes == mark_bytes)
    later = [
        replace(block, start=max(block.start, mark.start))
        for block in blocks
        if (block.end is None or block.end > mark.start) and block is not mark
    ]
    resting = sum(block.num_bytes for block in later if block.start == mark.start)
    return peak_of(later)[0], resting


def copied_bytes(run: Callable[[], object]) -> int:
    """Bytes that copies wrote in a call."""
    with _silent(), profile(activities=[ProfilerActivity.CPU], record_shapes=True) as prof:
        run()
    results = prof.profiler.kineto_results
    assert results is not None, "the profiler has stopped"
    return sum(_copies_in(results.experimental_event_tree()))


@contextmanager
def _silent() -> Iterator[None]:
    """A context without output to stderr, where the profiler's C++ code prints start and stop."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def _copies_in(events: list[Any]) -> Iterator[int]:
    """Bytes of the innermost copies: ``cat`` may call ``copy_``."""
    pending = list(events)
    while pending:
        event = pending.pop()
        inner = list(_copies_in(event.children))
        if not inner and event.name in COPIES:
            yield _num_bytes(event.extra_fields.inputs, COPIES[event.name])
        yield from inner


def _num_bytes(inputs: list[Any], which: int | None) -> int:
    given = inputs[0] if which is None else [inputs[which]]
    return sum(math.prod(each.sizes) * each.dtype.itemsize for each in given)

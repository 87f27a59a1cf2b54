"""Memory and copies of one step, counted by torch's profiler on the rank that makes it.

Memory is what the CPU allocator has handed out at most during the step, since before the model was
made: parameters, states, gathered buffers, gradients, activations, copies inside of collectives.
Our mapped regions are switched off meanwhile and ask the allocator for the same bytes, so this runs
apart from what is timed.

Copies are the bytes that operators write which move data and compute nothing: ``copy_`` (casts and
copies between buffers), ``cat`` and their relatives, wherever they are called from: Python, C++,
the threads of gloo. What gloo's own code moves between its buffers is not seen. The model copies
too (transposed activations, say): the same count for ``compute`` is to be taken off.
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
from torch.profiler import ProfilerActivity, profile

from vescale_fsdp.testing.helpers import Block, peak_of, through_the_allocator, traced

if TYPE_CHECKING:
    from benchmarks.engines import Engine

__all__ = ["Inspection", "copied_bytes", "inspect", "peak_after"]

# Where the result is, among the arguments; None: the result is as large as all arguments together.
COPIES = {"aten::copy_": 0, "aten::cat": None, "aten::_cat": None}
_MARK_BYTES = 8_388_593  # of a tensor that marks a time: a prime, which no other tensor has


@dataclass(frozen=True)
class Inspection:
    """What a rank counted in one step.

    Attributes:
        peak_bytes: at most in use, of tensors.
        resting_bytes: in use before and after, of these.
        copied_bytes: written by copies, the model's included.
    """

    peak_bytes: int
    resting_bytes: int
    copied_bytes: int


def inspect(make: Callable[[], Engine]) -> tuple[Engine, Inspection]:
    """Make an engine, and count one step's memory and another one's copies."""
    engines: list[Engine] = []

    def life() -> None:
        engines.append(make())
        time.sleep(0.1)  # until the threads of gloo have let go of the last one
        torch.empty(_MARK_BYTES, dtype=torch.uint8)
        engines[0].step()
        time.sleep(0.1)

    with through_the_allocator(), _silent():
        peak, resting = peak_after(traced(life), _MARK_BYTES)
        return engines[0], Inspection(peak, resting, copied_bytes(engines[0].step))


def peak_after(blocks: list[Block], mark_bytes: int) -> tuple[int, int]:
    """The most bytes in use since the block of that size was there, and those in use then."""
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
    """Nothing is written to stderr: the profiler's C++ says when it starts and stops."""
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

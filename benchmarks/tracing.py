"""Records the collectives of a rank in a step, from issue to end, and its waits for them.

Times are seconds of the system's monotonic clock, the same for all processes of a machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.utils._pytree import tree_leaves

__all__ = ["Event", "Trace", "traced"]

NAMES = {
    "all_gather_single": "gather",
    "all_gather_into_tensor": "gather",
    "reduce_scatter_single": "reduce",
    "reduce_scatter_tensor": "reduce",
    "all_to_all_single": "reduce",
    "all_reduce": "sum",
    "isend": "send",
    "irecv": "receive",
}


@dataclass
class Event:
    """One collective, as one rank sees it.

    Attributes:
        kind: gather, reduce or sum; send or receive, between two ranks.
        num_bytes: of the whole buffer.
        issued, ended: of the collective. ``ended`` is when a thread of gloo said so; of messages
            between two ranks, which say nothing, when the wait for it was over.
        waited_from, waited_to: of the thread that computes.
        phase: in which it was waited for: forward, backward or optimizer.
    """

    kind: str
    num_bytes: int
    issued: float
    ended: float = 0.0
    waited_from: float = 0.0
    waited_to: float = 0.0
    phase: str = ""

    @property
    def waited_s(self) -> float:
        """Seconds that the computing thread waited for it."""
        return self.waited_to - self.waited_from


class Trace:
    """The events of some steps, and when the parts of each step began."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.marks: list[tuple[str, float]] = []

    def mark(self, name: str) -> None:
        """Record that a part of the step begins."""
        self.marks.append((name, time.perf_counter()))


class _TracedWork(dist.Work):
    def __init__(self, work: Any, event: Event, trace: Trace) -> None:
        super().__init__()
        self._work, self._event, self._trace = work, event, trace

    def wait(self, *args: Any) -> bool:
        event = self._event
        event.phase = self._trace.marks[-1][0] if self._trace.marks else ""
        event.waited_from = time.perf_counter()
        result: bool = self._work.wait(*args)
        event.waited_to = time.perf_counter()
        event.ended = event.ended or event.waited_to
        return result

    def get_future(self) -> Any:
        return self._work.get_future()


@contextmanager
def traced() -> Iterator[Trace]:
    """Trace the collectives that are called as attributes of ``torch.distributed``."""
    trace, originals = Trace(), {}
    for name, kind in NAMES.items():
        original = getattr(dist, name, None)
        if original is not None:
            originals[name] = original
            setattr(dist, name, _watch(original, kind, trace))
    try:
        yield trace
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def _watch(collective: Callable[..., Any], kind: str, trace: Trace) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        largest = max(tensor.numel() * tensor.itemsize for tensor in tensors)
        event = Event(kind, largest, time.perf_counter())
        trace.events.append(event)
        work = collective(*args, **kwargs)
        if work is None:  # it was synchronous
            event.waited_from, event.ended = event.issued, time.perf_counter()
            event.waited_to, event.phase = event.ended, trace.marks[-1][0] if trace.marks else ""
            return None

        def end(_: Any) -> None:
            event.ended = time.perf_counter()

        if kind not in ("send", "receive"):
            work.get_future().add_done_callback(end)
        return _TracedWork(work, event, trace)

    return watched

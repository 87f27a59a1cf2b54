"""The two ledgers of a simulated rank: bytes that are allocated, and seconds that pass."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

GATHERED = "unsharded parameters"
INNER = "inner shards"
LOCAL = "gradients on their way"
REDUCING = "reductions"
REDUCED = "reduced gradients"
KEPT = "messages for backward"
MADE = "gradients"
SCRATCH = "temporary memory of the optimizer"
ACTIVATIONS = "activations"
KINDS = (ACTIVATIONS, GATHERED, INNER, KEPT, MADE, LOCAL, REDUCING, REDUCED, SCRATCH)

COMPUTE, RECOMPUTATION, ENGINE = "compute", "recomputation", "engine"
COPIES, OPTIMIZER, WAITING = "copies", "optimizer", "waiting"


class Peak(NamedTuple):
    """The highest memory of buffers that are allocated and freed within a step."""

    num_bytes: int
    when: str  # such as "the backward of model.layers.0-31"
    parts: dict[str, int]  # bytes by kind; they sum to num_bytes


class Account:
    """The allocated bytes by kind, and the peak."""

    def __init__(self) -> None:
        self._live: Counter[str] = Counter()
        self._total = 0
        self.peak = Peak(0, "the start", {})
        self.when = "the start"

    def add(self, kind: str, num_bytes: int) -> None:
        """Allocate."""
        self._live[kind] += num_bytes
        self._total += num_bytes
        if self._total > self.peak.num_bytes:
            self.peak = Peak(self._total, self.when, {k: n for k, n in self._live.items() if n})

    def drop(self, kind: str, num_bytes: int) -> None:
        """Free."""
        self._live[kind] -= num_bytes
        self._total -= num_bytes

    def set_activations(self, highest: int, now: int) -> None:
        """Note the most activations since the last call, and those that are there now."""
        self.add(ACTIVATIONS, highest - self._live[ACTIVATIONS])
        self.drop(ACTIVATIONS, highest - now)


class Clock:
    """Time of the processor, or of the device, and of the networks beside it.

    Each network runs one collective at a time, in the order of issue.

    Attributes:
        now: seconds since the start of the step.
        seconds: of what took them, by kind; they sum to ``now``.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self.seconds: dict[str, float] = {}
        self._free: dict[str, float] = {}  # from when on each network is

    def spend(self, kind: str, seconds: float) -> None:
        """Work."""
        if seconds:
            self.now += seconds
            self.seconds[kind] = self.seconds.get(kind, 0.0) + seconds

    def issue(self, network: str, seconds: float, after: float = 0.0) -> float:
        """Start a collective, not before ``after``. Returns when it ends."""
        start = max(self.now, self._free.get(network, 0.0), after)
        self._free[network] = start + seconds
        return start + seconds

    def wait(self, until: float) -> None:
        """Wait for the end of a collective."""
        self.spend(WAITING, max(until - self.now, 0.0))

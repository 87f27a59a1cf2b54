"""The parts of a step, each as a separate engine for `benchmarks.team`.

``vescale``, ``fsdp2``, ``compute`` and ``wire`` are those of `benchmarks.engines`. ``wire-fsdp2``
are the collectives of FSDP2's step, one after the other, because FSDP2 waits for each on CPU.
``ping`` is an all-gather of four bytes from each rank, to measure the latency.
"""

from __future__ import annotations

import time
import warnings
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from benchmarks import engines
from benchmarks.engines import ENGINES, NUM_WARM, Engine, Training
from benchmarks.models import Batches, Preset
from benchmarks.wire import Collective, Recorder

__all__ = ["NUM_PINGS", "Shares", "make_engine", "shares_of"]

NUM_PINGS = 50


class OneByOne:
    """Issues recorded collectives again and waits for each."""

    def __init__(self, collectives: list[Collective], expected_bytes: float) -> None:
        self._calls, self.expected_bytes = [each.call for each in collectives], expected_bytes

    def step(self) -> float:
        """All of them once."""
        for func, args, kwargs in self._calls:
            result = func(*args, **kwargs)
            dist.Work.unbox(result[-1] if isinstance(result, tuple) else result).wait()
        return 0.0


class Pings:
    """Tiny all-gathers. A step has ``NUM_PINGS`` of them."""

    expected_bytes = 0.0

    def __init__(self, num_ranks: int) -> None:
        self._mine, self._all = torch.zeros(1), torch.zeros(num_ranks)

    def step(self) -> float:
        """All of them once."""
        for _ in range(NUM_PINGS):
            dist.all_gather_into_tensor(self._all, self._mine)
        return 0.0


def make_engine(name: str, preset: Preset, precision: str, rank: int, num_ranks: int) -> Engine:
    """Make one of the engines above."""
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed")
    if name == "ping":
        return Pings(num_ranks)
    if name != "wire-fsdp2":
        return engines.make_engine(name, preset, precision, rank, num_ranks)
    model, optimized = ENGINES["fsdp2"](preset.make(), precision, num_ranks)
    training = Training(model, optimized, Batches(preset, rank))
    for _ in range(NUM_WARM - 1):
        training.step()
    recorder = Recorder(keeps_calls=True)
    with recorder:
        training.step()
    sent = sum(each.sent_bytes(num_ranks) for each in recorder.collectives)
    return OneByOne(recorder.collectives, sent)


class Shares:
    """The division of a step of compute: fractions of its time that sum to 1.

    Attributes:
        blocks: forward and backward of each.
        root: forward and backward of everything else.
        optimizer: on this rank's share.
    """

    def __init__(self, blocks: list[list[float]], parts: dict[str, float]) -> None:
        total = sum(parts.values())
        self.blocks = [(forward / total, backward / total) for forward, backward in blocks]
        rest = [
            max(parts[name] / total - sum(block[i] for block in self.blocks), 0.0)
            for i, name in enumerate(("forward", "backward"))
        ]
        self.root = rest[0], rest[1]
        self.optimizer = parts["optimizer"] / total


def shares_of(preset: Preset, precision: str, num_ranks: int, steps: int = 6) -> Shares:
    """By CPU time of this process, with one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, optimized = ENGINES["compute"](preset.make(), precision, num_ranks)
    dtype = torch.bfloat16 if precision == "bf16" else None
    training = Training(model, optimized, Batches(preset, 0), input_dtype=dtype)
    for _ in range(2):
        training.step()
    modules: Any = model.blocks
    blocks = [[0.0, 0.0] for _ in modules]
    for block, times in zip(modules, blocks, strict=True):
        _time_hooks(block, times)
    marks: list[tuple[str, float]] = []
    training.mark = lambda name: marks.append((name, time.process_time()))
    for _ in range(steps):
        training.step()
    parts = dict.fromkeys(("forward", "backward", "optimizer"), 0.0)
    for (name, start), (_, stop) in pairwise(marks):
        if name in parts:
            parts[name] += stop - start
    return Shares(blocks, parts)


def _time_hooks(block: torch.nn.Module, times: list[float]) -> None:
    started = [0.0, 0.0]

    def start(which: int) -> None:
        started[which] = time.process_time()

    def stop(which: int) -> None:
        times[which] += time.process_time() - started[which]

    block.register_forward_pre_hook(lambda *_: start(0))
    block.register_forward_hook(lambda *_: stop(0))
    block.register_full_backward_pre_hook(lambda *_: start(1))
    block.register_full_backward_hook(lambda *_: stop(1))

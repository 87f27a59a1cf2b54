"""The same training step under each engine, and the two parts that no engine can do without.

vescale, fsdp2, ddp    the whole step: forward, backward, AdamW
vescale-int8, -e4m3    ours, with weights that are gathered in 8 bits; with -int8-grads gradients
                       travel in 8 bits too
compute                a local model in the compute dtype; AdamW on this rank's share of it
wire                   the collectives of our step, with nothing between them
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
from benchmarks.models import GPT, Batches, Preset, loss_of
from benchmarks.wire import Recorder, Replay, bytes_by_layout
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from vescale_fsdp import QuantizedGather, QuantizedReduce, fully_shard

__all__ = ["ENGINES", "Engine", "make_engine"]

POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


class Engine(Protocol):
    """A step that can be timed.

    Attributes:
        expected_bytes: that one rank sends in a step, without headers.
    """

    expected_bytes: float

    def step(self) -> float:
        """One step; returns the loss."""


class Training:
    """Forward, backward and optimizer of one model, sharded or not.

    Attributes:
        mark: is told the name of each part of a step when it begins.
    """

    expected_bytes = 0.0

    def __init__(
        self, model: nn.Module, optimized: list[nn.Parameter], batches: Batches, autocasts: bool
    ) -> None:
        self.model, self._batches, self._autocasts = model, batches, autocasts
        self.optimizer = AdamW(optimized, lr=1e-4, fused=True)
        self.mark: Callable[[str], object] = lambda name: None

    def step(self) -> float:
        tokens, targets = self._batches.next()
        self.mark("forward")
        with torch.autocast("cpu", torch.bfloat16, enabled=self._autocasts):
            loss: Tensor = loss_of(self.model(tokens), targets)
        self.mark("backward")
        loss.backward()
        self.mark("optimizer")
        self.optimizer.step()
        self.model.zero_grad()
        self.mark("end")
        return loss.item()


class Wire:
    """What our engine sends in a step."""

    def __init__(self, collectives: list[Any], expected_bytes: float) -> None:
        self._replay, self.expected_bytes = Replay(collectives), expected_bytes

    def step(self) -> float:
        self._replay.step()
        return 0.0


def _sharded(
    shard: Callable[..., Any], model: GPT, precision: str, num_ranks: int
) -> tuple[nn.Module, list[nn.Parameter]]:
    for block in model.blocks:
        shard(block, mp_policy=POLICIES[precision])
    shard(model, mp_policy=POLICIES[precision])
    return model, list(model.parameters())


def _vescale(model: GPT, precision: str, n: int) -> tuple[nn.Module, list[nn.Parameter]]:
    return _sharded(fully_shard, model, precision, n)


def _int8(model: GPT, precision: str, n: int) -> tuple[nn.Module, list[nn.Parameter]]:
    return _sharded(partial(fully_shard, gather=QuantizedGather("int8")), model, precision, n)


def _e4m3(model: GPT, precision: str, n: int) -> tuple[nn.Module, list[nn.Parameter]]:
    return _sharded(partial(fully_shard, gather=QuantizedGather("e4m3")), model, precision, n)


def _int8_grads(model: GPT, precision: str, n: int) -> tuple[nn.Module, list[nn.Parameter]]:
    shard = partial(fully_shard, gather=QuantizedGather("int8"), reduce=QuantizedReduce())
    return _sharded(shard, model, precision, n)


def _fsdp2(model: GPT, precision: str, n: int) -> tuple[nn.Module, list[nn.Parameter]]:
    return _sharded(torch_fully_shard, model, precision, n)


def _ddp(model: GPT, precision: str, n: int) -> tuple[nn.Module, list[nn.Parameter]]:
    replicated = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if precision == "bf16":
        replicated.register_comm_hook(None, bf16_compress_hook)
    return replicated, list(model.parameters())


def _compute(model: GPT, precision: str, n: int) -> tuple[nn.Module, list[nn.Parameter]]:
    shares = []
    for param in model.parameters():
        share = nn.Parameter(torch.zeros(-(-param.numel() // n)))
        share.grad = torch.zeros_like(share)
        shares.append(share)
    dtype = POLICIES[precision].param_dtype
    return (model if dtype is None else model.to(dtype)), shares


ENGINES = {
    "vescale": _vescale,
    "vescale-int8": _int8,
    "vescale-e4m3": _e4m3,
    "vescale-int8-grads": _int8_grads,
    "fsdp2": _fsdp2,
    "ddp": _ddp,
    "compute": _compute,
    "wire": _vescale,
}


def make_engine(name: str, preset: Preset, precision: str, rank: int, num_ranks: int) -> Engine:
    """One of `ENGINES`, after its first steps: nothing is allocated, recorded or agreed later."""
    torch.manual_seed(0)
    model, optimized = ENGINES[name](preset.make(), precision, num_ranks)
    autocasts = name == "ddp" and precision == "bf16"
    training = Training(model, optimized, Batches(preset, rank), autocasts)
    for _ in range(3):
        training.step()
    recorder = Recorder(keeps_calls=name == "wire")
    with recorder:
        training.step()
    sent = sum(each.sent_bytes(num_ranks) for each in recorder.collectives)
    if name.startswith("vescale") or name == "wire":
        planned = bytes_by_layout(model, num_ranks)
        assert sent == planned, f"the step sends {sent} bytes by its calls, {planned} by the plan"
    if name == "wire":
        return Wire(recorder.collectives, sent)
    training.expected_bytes = sent
    return training

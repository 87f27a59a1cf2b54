"""The same training step with each engine, and its two parts: computation and communication.

vescale, fsdp2, ddp    the whole step: forward, backward, AdamW; sharded with the defaults: a unit
                       for each block, and the root
vescale-tuned,         the last four blocks, and norm and head as a unit, are not resharded between
fsdp2-tuned            forward and backward; ours with in_flight=5, the same number of unsharded
                       blocks as in ZeRO-3
vescale-ddp, -zero1, -zero2
                       ours, with these rows of the table of ZeRO's stages
deepspeed, deepspeed-* the same with ZeRO-3, if DeepSpeed is installed (`zero`); with -1 and -2
                       its stages 1 and 2
vescale-lean           ours with in_flight=1, for the lowest memory
vescale-int8, -e4m3    ours, with all-gathers in 8 bits; with -int8-grads also reduce-scatters
compute                a local model in the compute dtype; AdamW on this rank's shard of it
wire                   only the collectives of vescale-tuned's step
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any, Protocol

import torch
import torch.distributed as dist
from benchmarks.models import Batches, Preset, loss_of
from benchmarks.wire import Recorder, Replay, bytes_by_layout, gap_bytes
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from vescale_fsdp import QuantizedGather, QuantizedReduce, fully_shard

__all__ = ["ENGINES", "Engine", "Training", "make_engine", "missing"]

LEARNING_RATE = 1e-3
NUM_WARM = 3  # steps in which engines record orders, and allocators fill
POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


class Engine(Protocol):
    """A step that can be timed.

    Attributes:
        expected_bytes: the bytes that one rank sends in a step, without headers.
    """

    expected_bytes: float

    def step(self) -> float:
        """Run one step. Returns the loss."""


class Training:
    """Forward, backward and optimizer of one model, sharded or not.

    Attributes:
        mark: called with the name of each part of a step when it begins.
    """

    expected_bytes = 0.0

    def __init__(
        self,
        model: nn.Module,
        optimized: list[nn.Parameter],
        batches: Batches,
        *,
        autocasts: bool = False,
        input_dtype: torch.dtype | None = None,
    ) -> None:
        self.model, self._batches = model, batches
        self._autocasts, self._input_dtype = autocasts, input_dtype
        self.optimizer = AdamW(optimized, lr=LEARNING_RATE, fused=True)
        self.mark: Callable[[str], object] = lambda name: None

    def step(self) -> float:
        inputs, targets = self._batches.next()
        if self._input_dtype is not None and inputs.is_floating_point():
            inputs = inputs.to(self._input_dtype)
        self.mark("forward")
        with torch.autocast("cpu", torch.bfloat16, enabled=self._autocasts):
            loss = loss_of(self.model(inputs), targets)
        self.mark("backward")
        self.backward(loss)
        self.mark("optimizer")
        self.update()
        self.mark("end")
        return loss.item()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        self.optimizer.step()
        self.model.zero_grad()


class Wire:
    """The collectives of our engine in a step."""

    def __init__(self, collectives: list[Any], expected_bytes: float) -> None:
        self._replay, self.expected_bytes = Replay(collectives), expected_bytes

    def step(self) -> float:
        self._replay.step()
        return 0.0


def _sharded(
    shard: Callable[..., Any], *, num_kept: int = 0, **options: Any
) -> Callable[[nn.Module, str, int], tuple[nn.Module, list[nn.Parameter]]]:
    """Return a function that shards a model: its blocks are units, and the rest is the root.

    Args:
        num_kept: if above 0, norm and head are a unit, and this unit and as many of the last blocks
            are not resharded between forward and backward.
    """

    def wrap(model: nn.Module, precision: str, n: int) -> tuple[nn.Module, list[nn.Parameter]]:
        kinds = {"mp_policy": POLICIES[precision], **options}
        blocks = list(model.blocks)  # type: ignore[arg-type]
        for number, block in enumerate(blocks, start=1):
            stays = number > len(blocks) - num_kept
            shard(block, **kinds | ({"reshard_after_forward": False} if stays else {}))
        if num_kept and hasattr(model, "head"):
            shard([model.norm, model.head], **kinds, reshard_after_forward=False)
        shard(model, **kinds)
        return model, list(model.parameters())

    return wrap


def _ddp(model: nn.Module, precision: str, n: int) -> tuple[nn.Module, list[nn.Parameter]]:
    replicated = DistributedDataParallel(model, gradient_as_bucket_view=True)
    if precision == "bf16":
        replicated.register_comm_hook(None, _reduce_in_bf16)
    return replicated, list(model.parameters())


def _reduce_in_bf16(_, bucket):  # type: ignore[no-untyped-def]  # DDP refuses these as strings
    """Return the mean of a bucket, sent in bf16. (torch's own hook for this requires CUDA.)"""
    whole = bucket.buffer()
    sent = whole.to(torch.bfloat16).div_(dist.get_world_size())
    work = dist.all_reduce(sent, async_op=True)
    return work.get_future().then(lambda future: whole.copy_(future.value()[0]))


def _compute(model: nn.Module, precision: str, n: int) -> tuple[nn.Module, list[nn.Parameter]]:
    shares = []
    for param in model.parameters():
        share = nn.Parameter(torch.zeros(-(-param.numel() // n)))
        share.grad = torch.zeros_like(share)
        shares.append(share)
    dtype = POLICIES[precision].param_dtype
    return (model if dtype is None else model.to(dtype)), shares


TUNED = {"num_kept": 1, "in_flight": 5}  # which keeps three blocks more
ENGINES = {
    "vescale": _sharded(fully_shard),
    "vescale-tuned": _sharded(fully_shard, **TUNED),
    "vescale-lean": _sharded(fully_shard, in_flight=1),
    "vescale-ddp": _sharded(fully_shard, sharding="ddp"),
    "vescale-zero1": _sharded(fully_shard, sharding="zero1"),
    "vescale-zero2": _sharded(fully_shard, sharding="zero2"),
    "vescale-int8": _sharded(fully_shard, gather_codec=QuantizedGather("int8")),
    "vescale-e4m3": _sharded(fully_shard, gather_codec=QuantizedGather("e4m3")),
    "vescale-int8-grads": _sharded(
        fully_shard, gather_codec=QuantizedGather("int8"), reduce_codec=QuantizedReduce()
    ),
    "fsdp2": _sharded(torch_fully_shard),
    "fsdp2-tuned": _sharded(torch_fully_shard, num_kept=4),
    "ddp": _ddp,
    "compute": _compute,
    "wire": _sharded(fully_shard, **TUNED),
}


def missing(name: str) -> str | None:
    """Return why an engine cannot run on this machine. None: it can."""
    if name.startswith("deepspeed") and importlib.util.find_spec("deepspeed") is None:
        return "DeepSpeed is not installed (benchmarks/README.md says how)"
    return None


def make_engine(name: str, preset: Preset, precision: str, rank: int, num_ranks: int) -> Engine:
    """Make one of `ENGINES` or of `zero.VARIANTS`, and run its first steps.

    After these steps, engines have allocated, recorded and agreed on everything.
    """
    torch.manual_seed(0)
    training = _training(name, preset, precision, Batches(preset, rank), num_ranks)
    for _ in range(NUM_WARM - 1):
        training.step()
    recorder = Recorder(keeps_calls=name == "wire")
    with recorder:
        training.step()
    sent = sum(each.sent_bytes(num_ranks) for each in recorder.collectives)
    if name.startswith("vescale") or name == "wire":
        flags = sum(param.requires_grad for param in training.model.parameters())
        sent -= flags * (num_ranks - 1)  # a byte a parameter: that it was used
        planned, gaps = bytes_by_layout(training.model, num_ranks), gap_bytes(training.model)
        message = f"the step sends {sent} bytes by its calls, {planned} by the plan, gaps of {gaps}"
        assert planned <= sent <= planned + gaps, message
    if name == "wire":
        return Wire(recorder.collectives, sent)
    training.expected_bytes = sent
    return training


def _training(
    name: str, preset: Preset, precision: str, batches: Batches, num_ranks: int
) -> Training:
    if name.startswith("deepspeed"):
        from benchmarks.zero import ZeroTraining

        return ZeroTraining(name, preset.make(), precision, batches)
    model, optimized = ENGINES[name](preset.make(), precision, num_ranks)
    return Training(
        model,
        optimized,
        batches,
        autocasts=name == "ddp" and precision == "bf16",
        input_dtype=POLICIES[precision].param_dtype if name == "compute" else None,
    )

"""Only the step of Muon, on constant gradients, with each engine.

vescale    our `fully_shard` and Muon: one owner per matrix, packed messages, with overlap
literal    the same with ``overlap=False``: one matrix after another (Algorithm 2 of the paper)
fsdp2      torch's ``fully_shard`` and ``torch.optim.Muon``: DTensor gathers in each product
ddp        ``torch.optim.Muon`` on whole parameters, on every rank; communicates in backward only
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from benchmarks.models import Batches, Preset, loss_of
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.nn.parallel import DistributedDataParallel

from vescale_fsdp import fully_shard
from vescale_fsdp.optim import Muon, split_named_params

__all__ = ["ENGINES", "MuonStep", "make_engine"]


class MuonStep:
    """The engine for `team.Team`. A step is one of the optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer, expected_bytes: float) -> None:
        self.optimizer, self.expected_bytes = optimizer, expected_bytes

    def step(self) -> float:
        """Step; there is no loss."""
        self.optimizer.step()
        return 0.0


def _sharded(shard: Callable[..., Any]) -> Callable[[nn.Module], nn.Module]:
    def wrap(model: nn.Module) -> nn.Module:
        for block in model.blocks:  # type: ignore[union-attr]
            shard(block)
        shard(model)
        return model

    return wrap


ENGINES: dict[str, tuple[Callable[[nn.Module], nn.Module], Callable[..., Any]]] = {
    "vescale": (_sharded(fully_shard), Muon),
    "literal": (_sharded(fully_shard), lambda params, lr: Muon(params, lr=lr, overlap=False)),
    "fsdp2": (_sharded(torch_fully_shard), torch.optim.Muon),
    "ddp": (DistributedDataParallel, torch.optim.Muon),
}


def make_engine(name: str, preset: Preset, precision: str, rank: int, num_ranks: int) -> MuonStep:
    """Make one of `ENGINES` with gradients, and run its first steps.

    Expected bytes are known only for ours: the mean over ranks of `Muon.communication_plan`. They
    are compared here with the messages that are sent.
    """
    assert precision == "fp32", "torch.optim.Muon rounds parameters of 16 bits twice"
    wrap, make = ENGINES[name]
    torch.manual_seed(0)
    model = preset.make()
    wrapped = wrap(model)
    tokens, targets = Batches(preset, rank).next()
    loss_of(wrapped(tokens), targets).backward()
    hidden, _ = split_named_params(model)
    optimizer = make(hidden, lr=1e-3)
    for _ in range(2):
        optimizer.step()
    if name != "vescale":
        return MuonStep(optimizer, 0.0)
    plan = optimizer.communication_plan()
    with counted() as sent:
        optimizer.step()
    assert sent[0] == plan.sent_bytes(rank), f"sent {sent[0]}, planned {plan.sent_bytes(rank)}"
    return MuonStep(optimizer, plan.total_bytes / num_ranks)


@contextmanager
def counted() -> Iterator[list[int]]:
    """A context that counts the bytes that this rank sends. Yields a list with this number."""
    sent, all_to_all, isend = [0], dist.all_to_all_single, dist.isend

    def counted_all_to_all(output: Tensor, given: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent[0] += given.nbytes  # nothing is for the rank itself
        return all_to_all(output, given, *args, **kwargs)

    def counted_isend(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        sent[0] += tensor.nbytes
        return isend(tensor, *args, **kwargs)

    with (
        mock.patch.object(dist, "all_to_all_single", counted_all_to_all),
        mock.patch.object(dist, "isend", counted_isend),
    ):
        yield sent

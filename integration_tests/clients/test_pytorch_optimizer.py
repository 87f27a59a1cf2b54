"""All optimizers of pytorch-optimizer, unchanged: as in one process, or with DDP."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from vescale_fsdp import fully_shard
from vescale_fsdp.testing import run_ranks

pytest.importorskip("pytorch_optimizer", reason="installed for this test")

NEED_MORE = {  # than parameters and a learning rate, or than gradients
    *("adahessian", "alig", "bsam", "demo", "lbfgs", "ranger21", "sophiah"),
    *("adalomo", "adammini", "lomo"),  # they want the module
    *("adago", "adamuon", "distributedmuon", "lorarite", "muon", "muonclip", "normuon"),
    "spectralsphere",  # these two lines: matrices only
}
CHAOTIC = {"kate"}  # its loss rises from 3 to 39: the last bit of a gradient decides
# They keep plain tensors as large as rows, columns or squares of a parameter, which could differ
# between ranks, or change shapes in place. The error says so. Replicated parameters take them all.
REFUSED_IF_SHARDED = {
    *("adafactor", "adanorm", "alice", "came", "dash", "emofact", "kron", "racs"),
    *("shampoo", "sm3", "soap", "spam", "splus"),
}


class Model(nn.Module):
    """Matrices, vectors and a number, of sizes that two ranks cannot halve."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Tanh(), nn.Linear(8, 6))
            for _ in range(2)
        )
        self.head = nn.Linear(6, 11)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, length] -> [batch, length, 11]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x) * self.scale


def names() -> list[str]:
    from pytorch_optimizer.optimizer import OPTIMIZERS

    return [name for name in sorted(OPTIMIZERS) if name not in NEED_MORE]


def make(name: str, params: list[nn.Parameter]) -> torch.optim.Optimizer:
    from pytorch_optimizer.optimizer import OPTIMIZERS

    kind: Callable[..., torch.optim.Optimizer] = OPTIMIZERS[name]
    try:
        return kind(params, lr=1e-2)
    except TypeError:  # some find their own
        return kind(params)


def batches(rank: int, num_ranks: int) -> list[tuple[Tensor, Tensor]]:
    found = []
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        tokens, targets = (torch.randint(0, 11, (4, 5), generator=generator) for _ in range(2))
        size = 4 // num_ranks
        own = slice(rank * size, (rank + 1) * size)
        found.append((tokens[own], targets[own]))
    return found


def train(name: str, sharding: str | None, rank: int, num_ranks: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = Model()
    run: nn.Module = model
    if sharding == "DDP":
        run = DistributedDataParallel(model)
    elif sharding is not None:
        for block in model.blocks:
            fully_shard(block, sharding=sharding)
        fully_shard(model, sharding=sharding)
    optimizer: Any = make(name, list(model.parameters()))
    if hasattr(optimizer, "train"):  # those without schedules
        optimizer.train()
    for step, (tokens, targets) in enumerate(batches(rank, num_ranks)):
        optimizer.zero_grad()
        F.cross_entropy(run(tokens).flatten(0, 1), targets.flatten()).backward()
        torch.manual_seed(step)
        optimizer.step()
    if hasattr(optimizer, "eval"):
        optimizer.eval()
    values = model.state_dict().items()
    return {key: v.full_tensor() if isinstance(v, DTensor) else v.clone() for key, v in values}


def compare(sharding: str) -> dict[str, str]:
    """Return what is wrong, by optimizer."""
    is_sharded = sharding == "zero3"
    refused = REFUSED_IF_SHARDED if is_sharded else set()
    here = dist.get_rank(), dist.get_world_size()
    wrong = {}
    for name in names():
        if is_sharded and name in CHAOTIC:
            continue
        expected = train(name, None, 0, 1) if is_sharded else train(name, "DDP", *here)
        try:
            found = train(name, sharding, *here)
        except (NotImplementedError, RuntimeError, ValueError) as error:  # ours, and DTensor's
            if name not in refused:
                wrong[name] = f"{type(error).__name__}: {error}"
            continue
        if name in refused:
            wrong[name] = "runs now: tell the documentation"
        for key, value in expected.items():
            # To the largest element: where a gradient is nearly zero, its sign is not the same.
            error = (found[key] - value).abs().max() / value.abs().max().clamp(min=1e-2)
            if not error < 2e-4:
                wrong[name] = f"{key} differs by {error:.1e} of its largest element"
    return wrong


@pytest.mark.timeout(400)
@pytest.mark.parametrize("sharding", ["zero3", pytest.param("ddp", marks=pytest.mark.nightly)])
def test_all_optimizers(sharding: str) -> None:
    for wrong in run_ranks(compare, 2, sharding, timeout_s=300):
        assert wrong == {}

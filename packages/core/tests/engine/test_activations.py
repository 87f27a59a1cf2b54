"""``fully_shard(activations=...)``: what is kept of a forward for its backward."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.utils.checkpoint import CheckpointPolicy

from vescale_fsdp import fully_shard
from vescale_fsdp.testing import run_ranks

WIDTH, NUM_BLOCKS, NUM_ROWS = 32, 6, 64


class Block(nn.Module):
    """A residual block with a norm, dropout and two tensors in its outputs' container."""

    num_forwards = 0

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor, *, scale: float = 1.0) -> dict[str, Tensor]:
        Block.num_forwards += 1
        hidden = torch.tanh(self.up(self.norm(x)))
        return {"x": x + scale * self.drop(self.down(hidden))}


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, scale=0.5)["x"]
        return self.head(x)  # type: ignore[no-any-return]


def keeps_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = op is torch.ops.aten.addmm.default
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


POLICIES: list[Any] = [
    None,
    "recompute",
    "offload",
    "recompute+offload",
    keeps_products,
    [torch.ops.aten.addmm.default],
]


def sharded(wanted: Any, *, on_root: bool = False) -> nn.Module:
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        fully_shard(block, activations=None if on_root else wanted)
    return fully_shard(model, activations=wanted if on_root else None)


def train(model: nn.Module, num_steps: int = 2) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    torch.manual_seed(dist.get_rank())
    losses = []
    for step in range(num_steps):
        for _ in range(2):  # accumulates
            x = torch.randn(NUM_ROWS, WIDTH)
            loss = model(x).square().mean()
            loss.backward()
            losses.append(loss.item())
        model.eval()
        with torch.no_grad():
            losses.append(model(x).sum().item())
        model.train()
        optimizer.step()
        optimizer.zero_grad(set_to_none=step > 0)
    return losses


def check_each_gives_the_same_bits() -> dict[str, Any]:
    found, counts = {}, {}
    for index, wanted in enumerate(POLICIES):
        Block.num_forwards = 0
        found[index] = train(sharded(wanted))
        counts[index] = Block.num_forwards
        found[-1 - index] = train(copy.deepcopy(sharded(wanted)))
    found[100] = train(sharded("recompute", on_root=True))
    return {"losses": found, "counts": counts}


def test_each_gives_the_bits_of_a_training_that_keeps_all() -> None:
    """With dropout, accumulation, evaluation in between, keyword arguments, and in a copy."""
    for found in run_ranks(check_each_gives_the_same_bits, 2):
        assert all(losses == found["losses"][0] for losses in found["losses"].values())
        forwards, once = 2 * 3 * NUM_BLOCKS, 2 * 2 * NUM_BLOCKS  # those in training, once more
        expected = [0, once, 0, once, once, once]
        assert [n - forwards for n in found["counts"].values()] == expected


def check_refusals() -> list[str]:
    said = []
    for wanted in ("offloaded", 3, [3], {"a": 1}, True):
        with pytest.raises(ValueError, match="activations must be one of 'recompute'") as error:
            fully_shard(nn.Linear(4, 4), activations=wanted)  # type: ignore[call-overload]
        said.append(str(error.value))
    with pytest.raises(ValueError, match="composable checkpoint has already been applied"):
        fully_shard(checkpoint(nn.Linear(4, 4)), activations="recompute")
    fully_shard(checkpoint(nn.Linear(4, 4)), activations="offload")
    return said


def test_what_is_no_policy_is_refused() -> None:
    for said in run_ranks(check_refusals, 2):
        assert "'offloaded'" in said[0]

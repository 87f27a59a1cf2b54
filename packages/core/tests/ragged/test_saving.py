"""torch.save, torch.load with weights_only, and pickling between processes."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from vescale_fsdp import RaggedShard, RaggedTensor
from vescale_fsdp.ragged import ReplicatedTensor, redistribute
from vescale_fsdp.testing import run_ranks

from .helpers import random
from .layouts import grid, layouts_of, same


def save_and_load(path: Path) -> None:
    file = path / f"{dist.get_rank()}.pt"
    for x in layouts_of(random((4, 3))):
        state = {
            "weight": nn.Parameter(x.clone()),
            "half": x.bfloat16(),
            "part": x[1:3],
            "sum": x.sum(),
            "step": torch.tensor(3),
            "norm": x.norm(),
        }
        torch.save(state, file)
        loaded = torch.load(file, weights_only=True)
        for name, tensor in state.items():
            found = loaded[name]
            kind = DTensor if isinstance(tensor, ReplicatedTensor) else type(tensor)
            assert type(found) is kind, name
            if isinstance(tensor, DTensor):
                assert found.placements == tensor.placements
                assert torch.equal(found._local_tensor, tensor._local_tensor)
                same(found.detach(), tensor.detach().full_tensor())
        assert isinstance(loaded["weight"], nn.Parameter)
        assert loaded["weight"].requires_grad


def test_a_state_dict_comes_back_with_weights_only(tmp_path: Path) -> None:
    run_ranks(save_and_load, 2, tmp_path)


def save_optimizer(path: Path) -> None:
    file = path / f"{dist.get_rank()}.pt"
    x, *_ = layouts_of(random((4, 3)))
    parameter = nn.Parameter(x)
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.grad = x.clone()
    optimizer.step()
    torch.save({"model": {"w": parameter}, "optimizer": optimizer.state_dict()}, file)
    loaded = torch.load(file, weights_only=True)
    fresh = torch.optim.AdamW([parameter], lr=0.5)
    fresh.load_state_dict(loaded["optimizer"])
    assert fresh.param_groups[0]["lr"] == 0.1
    assert torch.equal(fresh.state[parameter]["exp_avg"], optimizer.state[parameter]["exp_avg"])


def test_an_optimizer_comes_back_with_weights_only(tmp_path: Path) -> None:
    run_ranks(save_optimizer, 2, tmp_path)


def save_on_grid(path: Path) -> None:
    file = path / f"{dist.get_rank()}.pt"
    strided = [RaggedShard((0,), (1, 1), split_factor=2), Shard(0)]
    local = torch.full((12,), float(dist.get_rank() // 2))
    partial = [Partial("avg"), RaggedShard((0,), (1, 1))]
    tensors = [
        RaggedTensor.distribute(random((4, 6)), grid(), strided),
        RaggedTensor.from_local(local, grid(), partial, shape=(4, 6)),
    ]
    torch.save(tensors, file)
    for found, tensor in zip(torch.load(file, weights_only=True), tensors, strict=True):
        assert found.placements == tensor.placements
        whole = redistribute(found, placements=[Replicate(), Replicate()])
        same(whole, tensor.full_tensor())


def test_other_placements_come_back(tmp_path: Path) -> None:
    run_ranks(save_on_grid, 4, tmp_path)


# --- between processes ----------------------------------------------------------------------------


def placements() -> list[RaggedShard]:
    """Placements go from process to process; this one has no mesh."""
    x, *_ = layouts_of(random((4, 3)))
    return [x.ragged_placement, x.ragged_placement.with_split_factor(2)]


def test_placements_are_returned_from_ranks() -> None:
    first, second = run_ranks(placements, 2)
    assert first == second == [RaggedShard.owner(0, 2), RaggedShard((), (1, 0), split_factor=2)]


def send_to_the_other() -> None:
    """Pickled on one rank and unpickled on another, which then holds that part."""
    x, *_ = reversed(list(layouts_of(random((4, 3)))))
    for tensor in (x, copy.deepcopy(x)):
        received = [None, None]
        dist.all_gather_object(received, pickle.dumps(tensor.to_local()))
        dist.all_gather_object(parts := [None, None], (tensor.placements, tensor.local_range))
        locals_ = [pickle.loads(data) for data in received]
        assert torch.equal(torch.cat(locals_), random((4, 3)).flatten())
        assert parts[0][0] == parts[1][0] == x.placements
    gathered: list[object] = [None, None]
    dist.all_gather_object(gathered, x)
    mine = gathered[dist.get_rank()]
    assert type(mine) is RaggedTensor
    assert torch.equal(mine, x)


def test_tensors_are_sent_between_ranks() -> None:
    run_ranks(send_to_the_other, 2)

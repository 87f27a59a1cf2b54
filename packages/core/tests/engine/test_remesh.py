"""A sharded model moves to another number of ranks, in processes that go on."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale_fsdp import (
    CPUOffloadPolicy,
    Granularity,
    MixedPrecisionPolicy,
    PlanError,
    QuantizedGather,
    QuantizedReduce,
    RankMismatchError,
    checkpoint,
    fully_shard,
)
from vescale_fsdp.engine import check_remesh, remesh
from vescale_fsdp.optim import SOAP, AdamW8bit, Muon, OptimizerGroup, Shampoo, flatten_, offload_
from vescale_fsdp.ranks import waits
from vescale_fsdp.testing import run_ranks

WIDTH = 12
Make = Callable[[nn.Module], torch.optim.Optimizer]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.05)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return Muon(model.parameters(), lr=0.05)


def eight_bits(model: nn.Module) -> torch.optim.Optimizer:
    return AdamW8bit(model.parameters(), lr=0.05, block_size=16, min_8bit_size=1)


def built(make: Make, **options: Any) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    sizes = [(WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH, 4)]
    first, second, last = (nn.Linear(*size, bias=False) for size in sizes)
    model = nn.Sequential(first, nn.Tanh(), second, nn.Tanh(), last)
    if make is eight_bits:
        options["granularity"] = AdamW8bit.granularity(16, min_8bit_size=1)
    for layer in (model[0], model[2]):
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model, make(model)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> float:
    """One step on 12 samples, divided among the ranks."""
    x = torch.randn(12, WIDTH, generator=torch.Generator().manual_seed(number))
    own = x.chunk(dist.get_world_size())[dist.get_rank()]
    loss = model(own).square().mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total) / dist.get_world_size()


def new_world(root: Path, name: str, size: int) -> bool:
    """Leave the world, and join one of the first ``size`` ranks, if this is one of them."""
    rank = dist.get_rank()
    dist.destroy_process_group()
    if rank >= size:
        return False
    store = dist.FileStore(str(root / name), size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    return True


def moved(root: Path, make: Make, options: dict[str, Any]) -> list[float]:
    """Two steps on 4 ranks, two on 3, two on 1, two on 3."""
    model, optimizer = built(make, **options)
    check_remesh(model)
    params = list(model.parameters())
    losses = [step(model, optimizer, number) for number in range(2)]
    checkpoint.save(root / "4", model, optimizer)
    number = 2
    for former, name, size in (("4", "3", 3), ("3", "1", 1)):
        if not new_world(root, f"world-{name}", size):
            return losses
        remesh(model)
        optimizer.state.clear()
        checkpoint.load(root / former, model, optimizer)
        assert all(a is b for a, b in zip(params, model.parameters(), strict=True))
        assert all(param.grad is None for param in params)
        losses += [step(model, optimizer, number + i) for i in range(2)]
        number += 2
        checkpoint.save(root / name, model, optimizer)
    return losses


def undisturbed(make: Make, options: dict[str, Any]) -> list[float]:
    model, optimizer = built(make, **options)
    return [step(model, optimizer, number) for number in range(6)]


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (adamw, {}),
        (adamw, {"sharding": "zero1"}),
        (adamw, {"sharding": "ddp"}),
        (muon, {}),
        (eight_bits, {}),
    ],
    ids=["zero3", "zero1", "ddp", "muon", "adamw8bit"],
)
@pytest.mark.sampled(1)
def test_losses_are_those_of_one_world(tmp_path: Path, make: Make, options: dict[str, Any]) -> None:
    found = run_ranks(moved, 4, tmp_path, make, options)[0]
    expected = run_ranks(undisturbed, 4, make, options)[0]
    assert len(found) == 6
    assert found == pytest.approx(expected, abs=1e-6)


def flat(model: nn.Module) -> torch.optim.Optimizer:
    return flatten_(adamw(model))


def in_parts(model: nn.Module) -> torch.optim.Optimizer:
    return offload_(adamw(model), part_bytes=300)


def shampoo(model: nn.Module) -> torch.optim.Optimizer:
    return Shampoo(model.parameters(), lr=0.05)


def grouped(model: nn.Module) -> torch.optim.Optimizer:
    first, *others = model.parameters()
    return OptimizerGroup(muon=Muon([first], lr=0.05), soap=SOAP(others, lr=0.05))


CODECS: dict[str, Any] = {
    "gather_codec": QuantizedGather(block=16),
    "reduce_codec": QuantizedReduce(block=16, error_feedback=True),
}
HALF = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def beside_a_new_one(root: Path, make: Make, options: dict[str, Any]) -> list[list[float]]:
    """On 4 ranks, then 3: losses of a model that has moved, and of a new one with its state."""
    model, optimizer = built(make, **options)
    for number in range(2):
        step(model, optimizer, number)
    checkpoint.save(root / "saved", model, optimizer)
    if not new_world(root, "world", 3):
        return []
    remesh(model)
    optimizer.state.clear()
    found = []
    for each in ((model, optimizer), built(make, **options)):
        checkpoint.load(root / "saved", *each)
        losses = [step(*each, number) for number in range(3)]
        weights = [param.full_tensor().detach() for param in each[0].parameters()]
        found.append(losses + [float(weight.sum()) for weight in weights])
    return found


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (flat, {}),
        (in_parts, {}),
        (shampoo, {"granularity": Granularity.whole()}),
        (grouped, {"granularity": Granularity.rows(1)}),
        (adamw, CODECS),
        (flat, {"sharding": "zero2", "mp_policy": HALF, "activations": "recompute"}),
        (adamw, {"offload_policy": CPUOffloadPolicy(pin_memory=False), "in_flight": 1}),
    ],
    ids=["flatten", "offload", "shampoo", "group", "codecs", "zero2", "cpu-offload"],
)
@pytest.mark.sampled(2)
def test_a_model_that_has_moved_equals_a_new_one(
    tmp_path: Path, make: Make, options: dict[str, Any]
) -> None:
    for result in run_ranks(beside_a_new_one, 4, tmp_path, make, options)[:3]:
        moved, new = result
        assert moved == new


def eight_bits_in_blocks(model: nn.Module) -> torch.optim.Optimizer:
    return AdamW8bit(model.parameters(), block_size=64, min_8bit_size=1)


def shampoo_in_blocks(model: nn.Module) -> torch.optim.Optimizer:
    return Shampoo(model.parameters(), lr=0.05, block_size=4)


def refused_by_its_optimizer(root: Path, make: Make) -> None:
    """256 elements are whole blocks of 64, or 4 rows, on each of 4 ranks, but not on each of 3."""
    model = fully_shard(nn.Linear(16, 16, bias=False))
    optimizer = make(model)
    checkpoint.save(root / "saved", model, optimizer)
    if new_world(root, "world", 3):
        remesh(model)
        optimizer.state.clear()
        with pytest.raises(PlanError, match="inside a block"):
            checkpoint.load(root / "saved", model, optimizer)


@pytest.mark.parametrize("make", [eight_bits_in_blocks, shampoo_in_blocks])
def test_an_optimizer_checks_the_new_shards(tmp_path: Path, make: Make) -> None:
    run_ranks(refused_by_its_optimizer, 4, tmp_path, make)


def broken_off(root: Path, where: str) -> tuple[str, list[float]]:
    """Rank 3 leaves in a step; the others find out in their forward or backward, and go on."""
    model, optimizer = built(adamw)
    losses = [step(model, optimizer, number) for number in range(2)]
    checkpoint.save(root / "saved", model, optimizer)
    if dist.get_rank() == 3:
        loss = None if where == "forward" else model(torch.ones(3, WIDTH)).sum()
        waits.abort("it leaves")
        del loss
        new_world(root, "unused", 0)
        return "", losses
    with pytest.raises(RankMismatchError) as caught:
        step(model, optimizer, 2)
    error = str(caught.value)
    del caught
    new_world(root, "world", 3)
    remesh(model)
    optimizer.state.clear()
    checkpoint.load(root / "saved", model, optimizer)
    return error, losses + [step(model, optimizer, number) for number in range(2, 6)]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_step_that_was_broken_off_is_forgotten(tmp_path: Path, where: str) -> None:
    results = run_ranks(broken_off, 4, tmp_path, where)
    expected = run_ranks(undisturbed, 4, adamw, {})[0]
    for error, losses in results[:3]:
        assert error
        assert losses == pytest.approx(expected, abs=1e-6)


def marked() -> tuple[list[Any], list[Any]]:
    """What users have put on parameters, after a move."""
    model = fully_shard(nn.Linear(WIDTH, WIDTH))
    called: list[torch.Size] = []
    held = [weakref.ref(param) for param in model.parameters()]
    penalty = sum(param.square().sum() for param in model.parameters())  # a graph that is alive
    for param in model.parameters():
        param.mark = param.shape  # type: ignore[attr-defined]
        param.register_post_accumulate_grad_hook(lambda param: called.append(param.shape))
    remesh(model)
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    model(torch.ones(2, WIDTH)).sum().backward()
    assert all(ref() is param for ref, param in zip(held, model.parameters(), strict=True))
    del penalty
    return [param.mark for param in model.parameters()], called  # type: ignore[attr-defined]


def test_attributes_and_hooks_of_parameters_remain() -> None:
    for marks, called in run_ranks(marked, 2):
        assert marks == called == [(WIDTH, WIDTH), (WIDTH,)]


def refused() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=mesh)
    with pytest.raises(NotImplementedError, match=r"the root is sharded over the axes \('outer'"):
        check_remesh(model)
    part = fully_shard(nn.Linear(WIDTH, WIDTH), mesh=mesh["inner"])
    with pytest.raises(NotImplementedError, match="is on 2 of 4 ranks"):
        check_remesh(part)


def test_what_cannot_move() -> None:
    run_ranks(refused, 4)


def compiled(root: Path) -> tuple[list[float], int, int]:
    """Losses on 4, then 2 ranks, and how often a block was compiled before and after."""
    model, optimizer = built(adamw)
    compiles = [0]

    def backend(graph: Any, inputs: Any) -> Any:
        compiles[0] += 1
        return graph.forward

    for layer in model:
        layer.compile(backend=backend)
    losses = [step(model, optimizer, number) for number in range(3)]
    before = compiles[0]
    checkpoint.save(root / "4", model, optimizer)
    if new_world(root, "world", 2):
        remesh(model)
        optimizer.state.clear()
        checkpoint.load(root / "4", model, optimizer)
        losses += [step(model, optimizer, number) for number in range(3, 6)]
    return losses, before, compiles[0]


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # by Dynamo
def test_compiled_code_is_kept(tmp_path: Path) -> None:
    found, before, after = run_ranks(compiled, 4, tmp_path)[0]
    assert found == pytest.approx(run_ranks(undisturbed, 4, adamw, {})[0], abs=1e-6)
    assert before > 0
    # Blocks of another batch are compiled once more, for any size: each, or since torch 2.15 one.
    assert after - before <= before

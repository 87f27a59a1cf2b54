"""Muon on shards: the bits of one process, however the parameters lie."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp import RaggedShard, checkpoint, fully_shard
from vescale_fsdp.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
)
from vescale_fsdp.optim import Muon, muon
from vescale_fsdp.optim.muon import Plan
from vescale_fsdp.program import ZERO_TABLE
from vescale_fsdp.testing import run_ranks

from .preconditioning import Twins, assert_same, randn, random_cut, sharded

# Tall, wide and square matrices, with sizes that fill no vector register, and stacks of them.
SHAPES = [(16, 24), (40, 8), (7, 5), (1, 9), (6, 4, 10), (2, 3, 8, 4), (12, 12), (4, 0)]
SMALL_BUCKETS: dict[str, Any] = {"lr": 0.1, "bucket_bytes": 128}
LITERAL: dict[str, Any] = {"lr": 0.1, "overlap": False}

Cut = Callable[[Sequence[int]], Sequence[Placement]]


def muon_with(**options: Any) -> Callable[[Any], Muon]:
    return lambda params: Muon(params, **options)


def assert_like_one_process(
    mesh: DeviceMesh,
    cut: Callable[[int], Cut],
    shapes: Sequence[Sequence[int]] = SHAPES,
    dtype: torch.dtype = torch.float32,
    *,
    with_literal: bool = True,
    **options: Any,
) -> list[Twins]:
    """The packed exchange, Algorithm 2 and a plain optimizer make the same parameters and states.

    Args:
        cut: gives from a seed what cuts a shape.
        with_literal: run Algorithm 2 too.
    """
    both = [
        Twins(muon_with(**(given | options)), shapes, mesh, cut(0), dtype)
        for given in (SMALL_BUCKETS, LITERAL)[: 1 + with_literal]
    ]
    for step in range(2):
        for twins in both:
            twins.step(step)
    for twins, name in zip(both, ("packed", "Algorithm 2"), strict=False):
        twins.check(f"{name} {options}")
    return both


def ragged(seed: int) -> Cut:
    cut = random_cut(random.Random(seed))
    return lambda shape: [cut(shape)]


def random_cuts() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for seed in range(2):
        assert_like_one_process(mesh, lambda _, seed=seed: ragged(seed), with_literal=not seed)
    options = {"nesterov": False, "adjust_lr_fn": "match_rms_adamw", "lr": torch.tensor(0.05)}
    assert_like_one_process(mesh, ragged, with_literal=False, **options)
    assert_like_one_process(mesh, ragged, dtype=torch.bfloat16)
    assert_like_one_process(mesh, ragged, dtype=torch.bfloat16, with_literal=False, nesterov=False)
    shapes = [(12, 5), (2, 12, 7)]
    assert_like_one_process(mesh, ragged, shapes, split_rows=[6, 1, 5])
    assert_like_one_process(mesh, ragged, shapes, split_rows=4)


def plain_shards() -> None:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    assert_like_one_process(mesh, lambda _: lambda shape: [Shard(0)])
    matrices = [shape for shape in SHAPES if len(shape) == 2]
    assert_like_one_process(mesh, lambda _: lambda shape: [Shard(1)], matrices, with_literal=False)
    assert_like_one_process(mesh, lambda _: lambda shape: [Replicate()], with_literal=False)


def gradients_that_come_and_go() -> None:
    """Parameters without a gradient are skipped; plans are made once for each set."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    made = mock.Mock(side_effect=Plan)
    with mock.patch.object(muon, "Plan", made):
        twins = Twins(muon_with(**SMALL_BUCKETS), SHAPES, mesh, ragged(5))
        for step, skip in enumerate([(), (1, 4), (), (1, 4), range(len(SHAPES)), (0,)]):
            twins.step(step, skip)
            twins.check(f"step {step}")
    # None are skipped, two, and one; all are no set.
    assert made.call_count == 3


def parameters_that_change_place() -> None:
    """The same object is cut anew."""
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    twins = Twins(muon_with(**SMALL_BUCKETS), [(6, 8)], mesh, ragged(0))
    twins.step(0)
    (param,) = twins.params
    state = twins.optimizer.state.pop(param)
    moved = [RaggedShard((0,), (*[0] * (size - 1), 1))]
    anew = nn.Parameter(param.detach().redistribute(placements=moved))
    param.grad = None
    torch.utils.swap_tensors(param, anew)
    state["momentum_buffer"] = state["momentum_buffer"].redistribute(placements=moved)
    twins.optimizer.state[param] = state
    assert param.placements == tuple(moved)
    twins.step(1)
    twins.check()


def counted_bytes(run: Callable[[], None]) -> int:
    """What this rank gives to all-to-alls, without what it keeps."""
    sent, all_to_all = [0], dist.all_to_all_single

    def counted(output: Tensor, input: Tensor, **rest: Any) -> Any:
        assert rest["input_split_sizes"][dist.get_rank()] == 0, "a rank sends to itself"
        sent[0] += input.nbytes
        return all_to_all(output, input, **rest)

    with mock.patch.object(dist, "all_to_all_single", counted):
        run()
    return sent[0]


def bytes_are_those_of_the_plan() -> None:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    twins = Twins(muon_with(**SMALL_BUCKETS), SHAPES, mesh, ragged(2))
    assert isinstance(twins.optimizer, Muon)
    plan = twins.optimizer.communication_plan()
    twins.gradients(0)
    assert counted_bytes(twins.optimizer.step) == plan.sent_bytes(dist.get_rank())
    assert (plan.total_bytes > 0) == (size > 1)
    assert plan.balance >= 1.0


def what_is_whole_on_one_rank_is_not_sent() -> None:
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    owners = iter(range(size))
    twins = Twins(
        muon_with(lr=0.1), [(8, 8)] * size, mesh, lambda _: [RaggedShard.owner(next(owners), size)]
    )
    twins.gradients(0)
    assert counted_bytes(twins.optimizer.step) == 0


def parts_are_refused_and_would_be_wrong() -> None:
    """A matrix optimizer that takes a shard for the matrix computes something else, silently."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    rows = [RaggedShard((0,), [2] * dist.get_world_size())]
    whole = randn(0, (2 * dist.get_world_size(), 6))
    param = nn.Parameter(sharded(whole, mesh, rows))
    with pytest.raises(ValueError, match="'weight' is a plain tensor of shape"):
        Muon([("weight", nn.Parameter(param.to_local().detach().view(2, 6)))])
    part = nn.Parameter(param.to_local().detach().clone().view(2, 6))
    optimizer, of_part = Muon([param], lr=0.1), torch.optim.Muon([part], lr=0.1)
    param.grad = sharded(randn(1, whole.shape), mesh, rows)
    part.grad = param.grad.to_local().view(2, 6)
    optimizer.step()
    of_part.step()
    assert not torch.allclose(param.to_local().view(2, 6), part, atol=1e-3)


def everything_on_one_axis() -> None:
    random_cuts()
    plain_shards()
    gradients_that_come_and_go()
    parameters_that_change_place()
    bytes_are_those_of_the_plan()
    what_is_whole_on_one_rank_is_not_sent()
    if dist.get_world_size() > 1:
        parts_are_refused_and_would_be_wrong()


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_the_bits_of_one_process(world_size: int) -> None:
    run_ranks(everything_on_one_axis, world_size)


# Several axes


def replicas() -> None:
    """The work is divided over the replicas, and the bytes are those of the plan."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))

    def cuts(seed: int) -> Cut:
        cut = random_cut(random.Random(seed), 2)
        return lambda shape: [Replicate(), cut(shape)]

    for twins in assert_like_one_process(mesh, cuts):
        plan = twins.optimizer.communication_plan()  # type: ignore[attr-defined]
        twins.gradients(9)
        if twins.optimizer.overlap:  # type: ignore[attr-defined]
            assert counted_bytes(twins.optimizer.step) == plan.sent_bytes(dist.get_rank())
    equal = Twins(muon_with(lr=0.1), [(8, 8)] * 4, mesh, cuts(1))
    plan = equal.optimizer.communication_plan()  # type: ignore[attr-defined]
    assert len(set(plan.loads.values())) == 1


def rows_and_columns_of_tensor_parallelism() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    generator = random.Random(3)

    def by_rows(shape: Sequence[int]) -> Sequence[Placement]:
        units = generator.choice([(0, 1), (1, 0), (1, 1), (1, 3)])
        return [RaggedShard((0,), units, split_factor=2), Shard(0)]

    def by_columns(shape: Sequence[int]) -> Sequence[Placement]:
        units = generator.choice([(0, 1), (1, 0), (5, shape[0] * shape[1] // 2 - 5)])
        return [RaggedShard((0, 1), units, split_factor=2), Shard(1)]

    assert_like_one_process(mesh, lambda _: by_rows, [(16, 6), (8, 24), (8, 8, 3)])
    assert_like_one_process(mesh, lambda _: by_columns, [(6, 16), (24, 8), (5, 4)])
    assert_like_one_process(
        mesh, lambda _: lambda shape: [RaggedShard.owner(1, 2), Shard(2)], [(3, 5, 4)]
    )
    assert_like_one_process(
        mesh, lambda _: lambda shape: [RaggedShard((0,), (1, 3)), Replicate()], [(8, 5), (4, 3, 5)]
    )


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 12, bias=False)
        self.down = nn.Linear(12, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu())


def models_with_tensor_parallelism(shard: Any, overlap: bool) -> None:
    """Tensor parallelism first, then ours or FSDP2, whose placement is a strided shard."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    torch.manual_seed(0)
    model, plain = TwoLayers(), TwoLayers()
    plain.load_state_dict(model.state_dict())
    plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    shard(model, mesh=mesh["data"])
    optimizer = Muon(model.named_parameters(), lr=0.1, overlap=overlap)
    reference = torch.optim.Muon(plain.parameters(), lr=0.1)
    for step in range(3):
        model(randn(step, (4, 8))).square().sum().backward()
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            expected.grad = param.grad.full_tensor()
        optimizer.step()
        optimizer.zero_grad()
        reference.step()
    for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
        assert_same(param, expected, str(param.placements))


def models_of_each_row_of_the_zero_table() -> None:
    """Stages that keep whole parameters have a matrix on many ranks; one of them computes it."""
    line = init_device_mesh("cpu", (4,))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for sharding, row in ZERO_TABLE.items():
        torch.manual_seed(0)
        model, plain = TwoLayers(), TwoLayers()
        plain.load_state_dict(model.state_dict())
        fully_shard(model, mesh=line if row.num_axes == 1 else grid, sharding=sharding)
        optimizer, reference = Muon(model.parameters(), lr=0.1), Muon(plain.parameters(), lr=0.1)
        for step in range(2):
            model(randn(step, (4, 8))).square().sum().backward()
            for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
                expected.grad = param.grad.full_tensor()
            optimizer.step()
            optimizer.zero_grad()
            reference.step()
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            assert_same(param, expected, f"{sharding}: {param.placements}")


def everything_on_two_axes() -> None:
    replicas()
    models_of_each_row_of_the_zero_table()
    rows_and_columns_of_tensor_parallelism()
    for overlap in (True, False):
        models_with_tensor_parallelism(fully_shard, overlap)
        models_with_tensor_parallelism(torch_fully_shard, overlap)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # it returns a view
def test_the_bits_of_one_process_on_two_axes() -> None:
    run_ranks(everything_on_two_axes, 4)


# Models


class Experts(nn.Module):
    """Attention-like projections, a stack of experts, norms and an embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.qkv = nn.Linear(8, 24, bias=False)
        self.experts = nn.Parameter(torch.randn(3, 8, 8) * 0.3)
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 11)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch] -> [batch, 11]
        x = self.embedding(tokens)
        q, k, v = self.qkv(x).chunk(3, -1)
        x = x + torch.tanh(q * k) * v
        x = x + torch.einsum("bi,eij->bj", x, self.experts)
        return self.head(self.norm(x))


Optimizers = list[torch.optim.Optimizer]


def make(seed: int = 0) -> Experts:
    torch.manual_seed(seed)
    return Experts()


def optimizers_of(model: nn.Module, lr: float = 0.05) -> Optimizers:
    """Muon for the matrices of the middle, AdamW for the rest."""
    named = dict(model.named_parameters())
    groups = [
        {"params": [("qkv.weight", named.pop("qkv.weight"))], "split_rows": 8},
        {"params": [("experts", named.pop("experts"))]},
    ]
    return [Muon(groups, lr=lr), torch.optim.AdamW(named.values(), lr=lr, weight_decay=0.1)]


def step_on(model: nn.Module, optimizers: Optimizers, step: int, rank: int) -> float:
    tokens = torch.randint(0, 11, (6,), generator=torch.Generator().manual_seed(2 * step + rank))
    loss = nn.functional.cross_entropy(model(tokens), tokens.roll(1))
    loss.backward()
    return loss.item()


def finish(optimizers: Optimizers) -> None:
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()


def twenty_steps_of_a_model() -> None:
    """On two ranks, where sums have one order: losses and parameters are those of DDP."""
    model, plain = make(), make()
    fully_shard(model)
    ddp = nn.parallel.DistributedDataParallel(plain)
    ours, reference = optimizers_of(model), optimizers_of(plain)
    for step in range(20):
        losses = [
            step_on(net, of_net, step, dist.get_rank())
            for net, of_net in ((model, ours), (ddp, reference))
        ]
        assert losses[0] == losses[1], step
        finish(ours)
        finish(reference)
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert_same(param, expected, name)
    # As one state dict for all ranks, and into the optimizer of one process.
    options = StateDictOptions(full_state_dict=True)
    found = get_optimizer_state_dict(model, ours[0], options=options)
    if dist.get_rank() == 0:
        fresh = optimizers_of(make())[0]
        wanted = {"qkv.weight": plain.qkv.weight, "experts": plain.experts}
        for name, param in wanted.items():
            expected = reference[0].state[param]["momentum_buffer"]
            assert torch.equal(found["state"][name]["momentum_buffer"], expected), name
        assert len(found["state"]) == len(fresh.state)
    whole = copy.deepcopy(reference[0].state_dict())
    ours[0].load_state_dict(whole)
    momentum = ours[0].state[model.experts]["momentum_buffer"]
    assert_same(momentum, reference[0].state[plain.experts]["momentum_buffer"], "experts")


def test_a_model_trains_as_with_ddp() -> None:
    run_ranks(twenty_steps_of_a_model, 2)


def train_sharded(
    path: Path, save_at: int | None, steps: range, **options: Any
) -> dict[str, Tensor]:
    """The same batch on all ranks, so that the number of ranks does not matter."""
    model = fully_shard(make(seed=0 if save_at else 1), **options)
    optimizer = Muon(
        [{"params": [model.qkv.weight], "split_rows": 8}, {"params": [model.experts]}], lr=0.05
    )
    if save_at is None:
        checkpoint.load(path, model, optimizer)
    for step in steps:
        if step == save_at:
            checkpoint.save(path, model, optimizer).wait()
        step_on(model, [optimizer], step, 0)
        finish([optimizer])
        model.zero_grad()
    found = {name: param.full_tensor().detach() for name, param in model.named_parameters()}
    for name in ("qkv.weight", "experts"):
        state = optimizer.state[model.get_parameter(name)]
        found[f"momentum of {name}"] = state["momentum_buffer"].full_tensor()
    return found


@pytest.mark.parametrize(("world_size", "whole_experts"), [(4, False), (1, True)])
def test_training_goes_on_on_any_number_of_ranks(
    tmp_path: Path, world_size: int, whole_experts: bool
) -> None:
    """Of two, so that the mean of equal gradients is exact on all."""
    path = tmp_path / "step-2"
    expected = run_ranks(train_sharded, 2, path, 2, range(4))[0]
    resumed = run_ranks(resume, world_size, path, whole_experts)[0]
    assert resumed.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(resumed[name], value), name


def resume(path: Path, whole_experts: bool) -> dict[str, Tensor]:
    granularity = Muon.granularity(whole_experts=whole_experts)
    return train_sharded(path, None, range(2, 4), granularity=granularity)

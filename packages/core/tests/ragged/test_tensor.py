"""RaggedTensor: made from parts and wholes, gathered, copied, and used as a parameter."""

from __future__ import annotations

import copy
import io
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp import RaggedShard, RaggedTensor
from vescale_fsdp.testing import run_ranks

from .helpers import assert_holds, cuts, distributed, make_mesh, random

WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 3])

# --- from_local and distribute --------------------------------------------------------------------


def check_from_local() -> None:
    mesh, whole = make_mesh(), random()
    for cut in cuts():
        start, stop = cut.local_range(whole.shape, dist.get_rank())
        local = whole.reshape(-1)[start:stop].clone()
        with CommDebugMode() as traffic:
            x = RaggedTensor.from_local(local, mesh, [cut], shape=whole.shape)
        assert traffic.get_total_counts() == 0
        assert x._local_tensor.data_ptr() == local.data_ptr()  # no copy
        assert x.shape == (6, 16)
        assert x.stride() == (16, 1)
        assert x.numel() == 96
        assert x.is_contiguous()
        assert x.local_range == (start, stop)
        assert x.ragged_placement == cut
        assert x.ragged_axis == 0
        assert not x.requires_grad
        assert_holds(x, whole, like=x)
        assert RaggedTensor.from_local(
            local.requires_grad_(), mesh, [cut], shape=whole.shape
        ).requires_grad


@WORLD_SIZES
def test_from_local_wraps_the_flat_part_without_a_copy(world_size: int) -> None:
    run_ranks(check_from_local, world_size)


def check_wrong_local() -> None:
    mesh, rows = make_mesh(), RaggedShard((0,), (1, 2))
    expected = 4 * (1 + dist.get_rank())  # shape (3, 4)
    message = rf"gives this rank {expected} elements of a tensor of shape \(3, 4\)"
    for wrong in [
        torch.zeros(expected + 1),
        torch.zeros(expected - 1),
        torch.zeros(0),
        torch.zeros(expected // 4, 4),  # the right number, but not flat
    ]:
        with pytest.raises(ValueError, match=message) as caught:
            RaggedTensor.from_local(wrong, mesh, [rows], shape=(3, 4))
        assert str(tuple(wrong.shape)) in str(caught.value)


def test_from_local_refuses_a_part_of_another_shape() -> None:
    run_ranks(check_wrong_local, 2)


def check_wrong_placements() -> None:
    mesh, rows = make_mesh(), RaggedShard((0,), (1, 1))
    wrong: list[tuple[list[Placement], str]] = [
        ([], "one RaggedShard"),
        ([Shard(0)], "one RaggedShard"),
        ([Replicate()], "one RaggedShard"),
        ([rows, rows], "one placement per axis"),
        ([rows, Replicate()], "a mesh of 1 axes"),
        ([RaggedShard((0,), (1, 1, 1))], "for 3 ranks, but axis 0 of the mesh has 2"),
        ([RaggedShard((0,), (1, 2))], "does not fit a tensor of shape"),
        ([RaggedShard((0, 1, 2), (1, 1))], "does not fit a tensor of shape"),
    ]
    for placements, message in wrong:
        with pytest.raises(ValueError, match=message):
            RaggedTensor.distribute(torch.zeros(4, 2), mesh, placements)
        with pytest.raises(ValueError, match=message):
            RaggedTensor.from_local(torch.zeros(4), mesh, placements, shape=(4, 2))
    grid = init_device_mesh("cpu", (1, 2), mesh_dim_names=("outer", "inner"))
    with pytest.raises(ValueError, match="one RaggedShard and otherwise Replicate"):
        RaggedTensor.distribute(torch.zeros(4, 2), grid, [RaggedShard((0,), (1,)), rows])


def test_placements_are_one_ragged_shard_that_fits_mesh_and_shape() -> None:
    run_ranks(check_wrong_placements, 2)


def check_distribute() -> None:
    whole = random()
    for cut in cuts():
        with CommDebugMode() as traffic:
            x = RaggedTensor.distribute(whole, make_mesh(), [cut])
        assert traffic.get_total_counts() == 0
        assert_holds(x, whole, like=x)
        x.zero_()
        assert whole.abs().min() > 0  # it was a copy
        transposed = whole.t()  # not contiguous
        y = RaggedTensor.distribute(
            transposed.reshape(16, 6).t().contiguous().t(),
            x.device_mesh,
            [RaggedShard((0, 1), cut.local_units)],
        )
        assert torch.equal(y.full_tensor(), transposed)
        assert y.stride() == (6, 1)


@WORLD_SIZES
def test_distribute_copies_this_ranks_part(world_size: int) -> None:
    run_ranks(check_distribute, world_size)


def check_local_views() -> None:
    for (x,) in distributed(random()):
        assert x.to_local().dim() == 1
        assert x.to_local().data_ptr() == x._local_tensor.data_ptr()
        text = repr(x)
        assert text.startswith("RaggedTensor(shape=(6, 16), dtype=torch.float32, placements=")
        assert f"local=[{x.local_range[0]}, {x.local_range[1]})" in text


def test_to_local_is_flat_and_repr_says_the_range() -> None:
    run_ranks(check_local_views, 2)


# --- full_tensor and redistribute -----------------------------------------------------------------

SHAPES: list[tuple[int, ...]] = [(), (1,), (5,), (3, 7), (2, 3, 5), (2, 3, 1, 4), (0,), (2, 0, 3)]


def check_full_tensor() -> None:
    mesh, num_shards = make_mesh(), dist.get_world_size()
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            whole = (random(shape) * 8).to(dtype)
            for start in range(3):
                size = -(-(start + whole.numel()) // num_shards) or 1
                cut = RaggedShard.from_interval(start, size, num_shards, shape)
                x = RaggedTensor.distribute(whole, mesh, [cut])
                full = x.full_tensor()
                assert type(full) is Tensor
                assert full.dtype == dtype
                assert full.shape == shape
                assert full.is_contiguous()
                assert torch.equal(full, whole), (shape, dtype, cut)


@WORLD_SIZES
def test_full_tensor_is_what_was_distributed(world_size: int) -> None:
    run_ranks(check_full_tensor, world_size)


def check_full_tensor_is_a_copy() -> None:
    for (x,) in distributed(random()):
        x.full_tensor().zero_()
        assert torch.equal(x.full_tensor(), random())


@WORLD_SIZES
def test_full_tensor_is_a_copy(world_size: int) -> None:
    run_ranks(check_full_tensor_is_a_copy, world_size)


def check_cost_of_full_tensor() -> None:
    mesh = make_mesh()
    for units, expected in [((3, 3), 1), ((1, 5), 2), ((0, 6), 1)]:
        x = RaggedTensor.distribute(random(), mesh, [RaggedShard((0,), units)])
        with CommDebugMode() as traffic:
            x.full_tensor()
        assert traffic.get_total_counts() == expected


def test_full_tensor_is_one_gather_of_equal_parts_or_a_broadcast_per_holder() -> None:
    run_ranks(check_cost_of_full_tensor, 2)


def check_autograd() -> None:
    weight, whole = random(seed=1), random()
    for (x,) in distributed(whole):
        x.requires_grad_()
        for gather in (
            lambda x: x.full_tensor(),
            lambda x: x.redistribute(placements=[Replicate()]).to_local(),
        ):
            x.grad = None
            full = gather(x * x)
            (full * weight).sum().backward()
            expected = 2 * whole * weight  # every rank's loss is the same; nothing is summed
            assert type(x.grad) is RaggedTensor
            torch.testing.assert_close(x.grad.full_tensor(), expected, rtol=1e-6, atol=0)
            assert_holds(x.grad, x.grad.full_tensor(), like=x)
        x.grad = None
        local = x.to_local()
        (local * local).sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), 2 * whole, rtol=1e-6, atol=0)
        with torch.no_grad():
            assert not x.full_tensor().requires_grad
            assert not x.to_local().requires_grad


@WORLD_SIZES
def test_gathering_is_differentiable(world_size: int) -> None:
    run_ranks(check_autograd, world_size)


def check_redistribute() -> None:
    whole = random()
    for (x,) in distributed(whole):
        replicated = x.redistribute(placements=[Replicate()])
        assert type(replicated) is DTensor
        assert replicated.placements == (Replicate(),)
        assert replicated.shape == (6, 16)
        assert torch.equal(replicated.to_local(), whole)
        assert x.redistribute(placements=list(x.placements)) is x
        assert x.redistribute(x.device_mesh, x.placements) is x


@WORLD_SIZES
def test_redistribute_to_replicate_gathers(world_size: int) -> None:
    run_ranks(check_redistribute, world_size)


def check_redistribute_errors() -> None:
    for (x,) in distributed(random()):
        with pytest.raises(RuntimeError, match="needs placements"):
            x.redistribute()
        with pytest.raises(RuntimeError, match="only operators make a Partial"):
            x.redistribute(placements=[Partial()])
        with pytest.raises(ValueError, match="is for 3 ranks"):
            x.redistribute(placements=[RaggedShard((0,), (1, 2, 3))])
        other = init_device_mesh("cpu", (1, 2))
        with pytest.raises(NotImplementedError, match="another mesh"):
            x.redistribute(other, [Replicate(), Replicate()])


def test_a_target_that_cannot_be_raises() -> None:
    run_ranks(check_redistribute_errors, 2)


def check_two_axes() -> None:
    """Ragged along the inner axis, the same along the outer one."""
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    cut, whole = RaggedShard((0,), (1, 5)), random()
    x = RaggedTensor.distribute(whole, grid, [Replicate(), cut])
    assert x.ragged_axis == 1
    assert x.local_range == ((0, 16) if dist.get_rank() % 2 == 0 else (16, 96))
    assert torch.equal(x.full_tensor(), whole)
    norm = torch.linalg.vector_norm(x).full_tensor()
    torch.testing.assert_close(norm, whole.norm())  # replicas count once
    y = RaggedTensor.distribute(whole, grid, [cut, Replicate()])
    assert y.ragged_axis == 0
    assert y.local_range == ((0, 16) if dist.get_rank() < 2 else (16, 96))
    assert torch.equal(y.full_tensor(), whole)


def test_a_mesh_of_two_axes_replicates_along_the_other() -> None:
    run_ranks(check_two_axes, 4)


# --- copies and parameters ------------------------------------------------------------------------


def check_deepcopy() -> None:
    whole = random()
    for (x,) in distributed(whole):
        parameter = nn.Parameter(x)
        parameter.grad = x.clone()
        copied = copy.deepcopy(parameter)
        assert type(copied) is RaggedTensor
        assert isinstance(copied, nn.Parameter)
        assert copied.requires_grad
        assert copied.is_leaf
        assert_holds(copied, whole, like=parameter)
        assert_holds(copied.grad, whole, like=parameter)
        with torch.no_grad():
            copied.zero_()
            copied.grad.zero_()
        assert_holds(parameter, whole, like=parameter)
        assert_holds(parameter.grad, whole, like=parameter)
        frozen = copy.deepcopy(nn.Parameter(x, requires_grad=False))
        assert isinstance(frozen, nn.Parameter)
        assert not frozen.requires_grad
        assert not isinstance(copy.deepcopy(x), nn.Parameter)


def test_deepcopy_of_a_parameter_is_a_parameter_of_its_own() -> None:
    run_ranks(check_deepcopy, 2)


def check_deepcopy_of_ties() -> None:
    (x,) = next(distributed(random()))
    parameter = nn.Parameter(x)
    first, second = copy.deepcopy([parameter, parameter])
    assert first is second
    module = nn.Linear(16, 6, bias=False)
    module.weight = parameter
    copied = copy.deepcopy(module)
    assert copied.weight is not parameter
    assert isinstance(copied.weight, nn.Parameter)
    assert list(dict(copied.named_parameters())) == ["weight"]


def test_deepcopy_keeps_ties_and_registration() -> None:
    run_ranks(check_deepcopy_of_ties, 2)


def check_parameter() -> None:
    for (x,) in distributed(random()):
        parameter = nn.Parameter(x)
        assert type(parameter) is RaggedTensor
        assert isinstance(parameter, nn.Parameter)
        assert isinstance(parameter, DTensor)
        assert not isinstance(x, nn.Parameter)
        assert parameter.requires_grad
        assert parameter._local_tensor.data_ptr() == x._local_tensor.data_ptr()
        assert parameter.placements == x.placements
        module = nn.Module()
        module.weight = parameter
        assert module.weight is parameter
        assert next(module.parameters()) is parameter
        for view in (parameter.detach(), parameter.data):
            assert type(view) is RaggedTensor
            assert not view.requires_grad
            assert view._local_tensor.data_ptr() == x._local_tensor.data_ptr()
        assert type(module.state_dict()["weight"]) is RaggedTensor


def test_parameter_shares_memory_and_keeps_its_identity() -> None:
    run_ranks(check_parameter, 2)


def check_in_place_on_data() -> None:
    """What initialisers and EMA do: write under no_grad, seen through every alias."""
    for (x,) in distributed(random()):
        parameter = nn.Parameter(x)
        with torch.no_grad():
            parameter.mul_(2)
        assert_holds(x, random() * 2, like=x)
        parameter.data.fill_(1.0)
        assert_holds(x, torch.ones(6, 16), like=x)


def test_writes_to_a_parameter_reach_the_local_part() -> None:
    run_ranks(check_in_place_on_data, 2)


def check_pickle() -> None:
    whole = random()
    for (x,) in distributed(whole):
        file = io.BytesIO()
        torch.save({"x": x}, file)
        file.seek(0)
        for loaded in (
            pickle.loads(pickle.dumps(x)),
            torch.load(file, weights_only=False)["x"],
        ):
            assert_holds(loaded, whole, like=x)
            assert torch.equal(loaded.full_tensor(), whole)


def test_pickle_keeps_part_and_placement() -> None:
    run_ranks(check_pickle, 2)


def saved_and_loaded(path: Path) -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(12.0).view(3, 4)
    rank = dist.get_rank()
    buffer = torch.zeros(100)
    buffer[:8] = whole.flatten()[:4].repeat(2) if rank == 0 else whole.flatten()[4:]
    local = buffer[:4] if rank == 0 else buffer[:8]
    placements = [RaggedShard((0,), (1, 2))]
    tensor = RaggedTensor.from_local(local, mesh, placements, shape=(3, 4))
    torch.save({"weight": nn.Parameter(tensor)}, path / f"{rank}.pt")
    assert (path / f"{rank}.pt").stat().st_size < 8000
    loaded = torch.load(path / f"{rank}.pt", weights_only=False)["weight"]
    assert isinstance(loaded, nn.Parameter)
    assert loaded.requires_grad
    assert torch.equal(loaded.full_tensor(), whole)


def test_torch_save_and_load_keep_the_part_of_each_rank(tmp_path: Path) -> None:
    run_ranks(saved_and_loaded, 2, tmp_path)

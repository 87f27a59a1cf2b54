"""torch.distributed.checkpoint reads and writes ragged tensors: any cut, any number of ranks.

The values are those of `expected`, so that nothing need be passed from the ranks that save to
the ranks that load.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode

from vescale_fsdp import RaggedShard, RaggedTensor
from vescale_fsdp.testing import run_ranks

from .helpers import make_mesh

SHAPES: dict[str, tuple[int, ...]] = {
    "scalar": (),
    "one": (1,),
    "vector": (11,),
    "matrix": (5, 7),
    "cube": (3, 4, 5),
    "stack": (2, 3, 2, 5),
    "thin": (1, 9, 1),
    "nothing": (0,),
    "no rows": (0, 3),
    "no columns": (3, 0, 2),
}

State = dict[str, Tensor]


def expected(name: str) -> Tensor:
    """Different numbers in each of the tensors, from 1."""
    shape, number = SHAPES[name], list(SHAPES).index(name)
    return torch.arange(1.0, 1 + math.prod(shape)).view(shape) + 1000 * number


# How a state is laid out: (whole tensor, its number) -> tensor. All ranks call it.
Layout = Callable[[Tensor, int], Tensor]


def ragged(whole: Tensor, number: int, gap: int = 0) -> Tensor:
    """Cut as in a buffer where the tensor begins at ``gap`` + ``number``: anywhere in a row."""
    num_shards, start = dist.get_world_size(), (gap + number) % 4
    shard_size = max(1, -(-(start + whole.numel()) // num_shards))
    cut = RaggedShard.from_interval(start, shard_size, num_shards, whole.shape)
    return RaggedTensor.distribute(whole, make_mesh(), [cut])


def ragged_elsewhere(whole: Tensor, number: int) -> Tensor:
    return ragged(whole, number, gap=2)


def ragged_rows(whole: Tensor, number: int) -> Tensor:
    """All rows on the last ranks: the first holds nothing. What has no rows has an owner."""
    num_shards = dist.get_world_size()
    last = num_shards - 1
    if whole.dim() < 2 or whole.shape[0] < 2 or not whole.numel():
        return owned(whole, last)
    units = [0] * (num_shards - 2) + [1, whole.shape[0] - 1]
    return RaggedTensor.distribute(whole, make_mesh(), [RaggedShard((0,), units)])


def owned(whole: Tensor, number: int) -> Tensor:
    num_shards = dist.get_world_size()
    owner = RaggedShard.owner(number % num_shards, num_shards)
    if not whole.numel():
        owner = RaggedShard((), [0] * num_shards)
    return RaggedTensor.distribute(whole, make_mesh(), [owner])


def plain(whole: Tensor, number: int) -> Tensor:
    return whole.clone()


def sharded(whole: Tensor, number: int) -> Tensor:
    """As FSDP2 does: rows, as even as they go; the last ranks may hold nothing."""
    placement = Shard(0) if whole.dim() else Replicate()
    return distribute_tensor(whole, make_mesh(), [placement], src_data_rank=None)


def replicated_and_ragged(whole: Tensor, number: int) -> Tensor:
    """Every rank is a replica that holds all: the ragged axis has one rank."""
    grid = init_device_mesh("cpu", (dist.get_world_size(), 1))
    cut = RaggedShard((), (1 if whole.numel() else 0,))
    return RaggedTensor.distribute(whole, grid, [Replicate(), cut])


def lay_out(layout: Layout, value: Callable[[Tensor], Tensor] = torch.clone) -> State:
    return {name: layout(value(expected(name)), number) for number, name in enumerate(SHAPES)}


def save(path: Path, layout: Layout) -> None:
    dcp.save(lay_out(layout), checkpoint_id=path)


def load(path: Path, layout: Layout) -> None:
    state = lay_out(layout, value=lambda whole: torch.full_like(whole, -1.0))
    given = dict(state)
    dcp.load(state, checkpoint_id=path)
    for name, tensor in state.items():
        assert tensor is given[name]  # loaded in place
        full = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        assert torch.equal(full, expected(name)), name


@pytest.mark.parametrize("load_as", [ragged_elsewhere, owned])
@pytest.mark.parametrize("save_as", [ragged, ragged_rows])
def test_another_cut_on_another_number_of_ranks(
    tmp_path: Path, save_as: Layout, load_as: Layout
) -> None:
    run_ranks(save, 3, tmp_path, save_as)
    run_ranks(load, 2, tmp_path, load_as)


def test_more_ranks_than_saved(tmp_path: Path) -> None:
    run_ranks(save, 2, tmp_path, ragged)
    run_ranks(load, 3, tmp_path, ragged_elsewhere)


def test_the_same_cut_again(tmp_path: Path) -> None:
    run_ranks(save, 2, tmp_path, ragged)
    run_ranks(load, 2, tmp_path, ragged)


@pytest.mark.parametrize("other", [plain, sharded, replicated_and_ragged])
def test_to_other_kinds_of_tensors(tmp_path: Path, other: Layout) -> None:
    run_ranks(save, 3, tmp_path, ragged)
    run_ranks(load, 2, tmp_path, other)


@pytest.mark.parametrize("other", [plain, sharded, replicated_and_ragged])
def test_from_other_kinds_of_tensors(tmp_path: Path, other: Layout) -> None:
    run_ranks(save, 3, tmp_path, other)
    run_ranks(load, 2, tmp_path, ragged)


def save_training(path: Path) -> None:
    parameter = nn.Parameter(ragged(expected("cube"), 0))
    optimizer = torch.optim.AdamW([parameter], lr=0.1)
    parameter.grad = ragged(expected("cube"), 0)
    optimizer.step()
    dcp.save({"model": {"w": parameter}, "optim": optimizer.state_dict()}, checkpoint_id=path)


def load_training(path: Path) -> None:
    dense = nn.Parameter(expected("cube"))
    dense_optimizer = torch.optim.AdamW([dense], lr=0.1)
    dense.grad = expected("cube")
    dense_optimizer.step()

    parameter = nn.Parameter(ragged_elsewhere(torch.zeros(3, 4, 5), 1))
    optimizer = torch.optim.AdamW([parameter], lr=0.5)
    parameter.grad = torch.zeros_like(parameter)
    optimizer.step()  # makes the states that are loaded into
    state = {"model": {"w": parameter}, "optim": optimizer.state_dict()}
    dcp.load(state, checkpoint_id=path)
    optimizer.load_state_dict(state["optim"])
    torch.testing.assert_close(parameter.full_tensor(), dense)
    assert optimizer.param_groups[0]["lr"] == 0.1
    for key in ("exp_avg", "exp_avg_sq"):
        found = optimizer.state[parameter][key].full_tensor()
        torch.testing.assert_close(found, dense_optimizer.state[dense][key])


def test_parameters_and_states_of_an_optimizer(tmp_path: Path) -> None:
    run_ranks(save_training, 3, tmp_path)
    run_ranks(load_training, 2, tmp_path)


# --- the three methods ----------------------------------------------------------------------------


def chunks_of_ranks() -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Offsets and sizes of this rank's chunks: shape (4, 5) cut at element 7."""
    cut = RaggedShard((0, 1), (7, 13))
    x = RaggedTensor.distribute(torch.arange(20.0).view(4, 5), make_mesh(), [cut])
    with CommDebugMode() as traffic:
        chunks = x.__create_chunk_list__()
        items = x.__create_write_items__("w", x)
        shards = [x.__get_tensor_shard__(item.index) for item in items]
    assert traffic.get_total_counts() == 0
    for chunk, item, shard in zip(chunks, items, shards, strict=True):
        assert item.index == MetadataIndex("w", chunk.offsets)
        assert item.tensor_data.chunk == chunk
        assert item.tensor_data.size == (4, 5)
        assert item.tensor_data.properties.dtype == torch.float32
        assert shard.shape == chunk.sizes
        part = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
        assert torch.equal(shard, torch.arange(20.0).view(4, 5)[part])
        base, size = x._local_tensor.data_ptr(), x._local_tensor.nbytes
        assert base <= shard.data_ptr() < base + size  # a view: loading writes into the part
    return [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]


def test_chunks_are_the_boxes_of_the_range_and_views_of_it() -> None:
    assert run_ranks(chunks_of_ranks, 2) == [
        [((0, 0), (1, 5)), ((1, 0), (1, 2))],
        [((1, 2), (1, 3)), ((2, 0), (2, 5))],
    ]


def count_chunks() -> tuple[int, int, int]:
    """Chunks of a tensor that rank 1 owns, of one without elements, and of a scalar on rank 1."""
    mesh, owner = make_mesh(), RaggedShard.owner(1, 2)
    tensors = [
        RaggedTensor.distribute(torch.zeros(4, 5), mesh, [owner]),
        RaggedTensor.distribute(torch.zeros(0, 5), mesh, [RaggedShard((), (0, 0))]),
        RaggedTensor.distribute(torch.zeros(()), mesh, [owner]),
    ]
    first, second, third = (len(tensor.__create_chunk_list__()) for tensor in tensors)
    return first, second, third


def test_empty_parts_have_no_chunk_and_empty_tensors_one_in_all() -> None:
    assert run_ranks(count_chunks, 2) == [(0, 1, 0), (1, 0, 1)]


def ask_for_another_chunk() -> None:
    x = ragged(expected("matrix"), 0)
    with pytest.raises(ValueError, match=r"'w' has a chunk at .*\[4, 6\].* this rank holds"):
        x.__get_tensor_shard__(MetadataIndex("w", torch.Size((4, 6))))


def test_a_chunk_of_another_rank_is_refused() -> None:
    run_ranks(ask_for_another_chunk, 2)


def load_another_shape(path: Path) -> None:
    state = {"matrix": ragged(torch.zeros(7, 5), 0)}
    with pytest.raises(CheckpointException, match=r"Size mismatch .* for matrix"):
        dcp.load(state, checkpoint_id=path)


def test_a_checkpoint_of_another_shape_is_refused(tmp_path: Path) -> None:
    run_ranks(save, 2, tmp_path, ragged)
    run_ranks(load_another_shape, 2, tmp_path)

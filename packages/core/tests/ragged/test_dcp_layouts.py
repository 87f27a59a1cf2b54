"""torch.distributed.checkpoint: saved in one layout, loaded in any other, on 1 to 4 ranks.

A checkpoint has each tensor once for each layout and number of a target layout, so that one save
and one load try every pair of layouts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp import RaggedShard, RaggedTensor
from vescale_fsdp.testing import run_ranks

from .helpers import make_mesh
from .redistribution import (
    Layout,
    Shape,
    Traffic,
    assert_laid_out,
    held,
    lay_out,
    same_bits,
    unit_vectors,
)

SHAPES: dict[str, Shape] = {
    "scalar": (),
    "matrix": (4, 6),
    "uneven": (5, 3),
    "nothing": (0, 3),
}

# Layouts on one axis of n ranks, then those on two axes of two.
ONE_AXIS = ["rows", "elements", "owner", "fsdp2", "replicate"]
TWO_AXES = ["hsdp", "hsdp outside", "strided", "columns", "tensor first", "plain"]
MOST_LAYOUTS = len(ONE_AXIS) + len(TWO_AXES)


def value_of(shape: Shape) -> Tensor:
    return torch.arange(1.0, 1 + math.prod(shape)).view(shape) + 100 * len(shape)


def spread(total: int, num_ranks: int) -> list[int]:
    """Units of no pattern; where there are three ranks or more, one of them has none."""
    units = [0] * num_ranks
    for unit in range(total):
        units[(unit * unit + unit // 2) % num_ranks] += 1
    if num_ranks > 2:
        units[0], units[1] = units[0] + units[1], 0
    return units


def on_one_axis(name: str, shape: Shape) -> Layout:
    size = dist.get_world_size()
    if not math.prod(shape):
        cut = RaggedShard((0,), [0] * size)
    elif name == "owner" or not shape:
        cut = RaggedShard.owner((len(shape) + len(name)) % size, size)
    else:
        dims = 1 if name == "rows" else len(shape)
        cut = RaggedShard(range(dims), spread(math.prod(shape[:dims]), size))
    sharded = Shard(0) if shape else Replicate()
    return {"fsdp2": (sharded,), "replicate": (Replicate(),)}.get(name, (cut,))


def on_two_axes(name: str, shape: Shape) -> Layout:
    numel = math.prod(shape)
    elements = RaggedShard(range(len(shape)), (numel // 3, numel - numel // 3))
    owner = RaggedShard.owner(1, 2)
    sharded = Shard(0) if shape else Replicate()
    splits = numel and shape
    left = (-(-shape[0] // 2), *shape[1:]) if splits else ()
    within = math.prod(left[:2])
    units = (within // 3, within - within // 3)
    # Of chunks of an uneven dimension, the units are those of the larger one.
    unit = 1 if splits and shape[0] % 2 else None
    inner = RaggedShard((0, 1), units, elements_per_unit=unit) if splits else owner
    strided = inner.with_split_factor(2) if splits else owner
    layouts: dict[str, tuple[Placement, Placement]] = {
        "hsdp": (Replicate(), elements),
        "hsdp outside": (elements, Replicate()),
        "strided": (strided, sharded),
        "columns": (RaggedShard((0,), (1, shape[0] - 1)), Shard(1))
        if numel and len(shape) > 1
        else (owner, sharded),
        "tensor first": (sharded, inner),
        "plain": (sharded, Replicate()) if len(shape) < 2 else (Shard(1), Shard(0)),
    }
    return layouts[name]


def layouts_here() -> list[str]:
    return [*ONE_AXIS, *TWO_AXES] if dist.get_world_size() == 4 else ONE_AXIS


def tensor_in(name: str, value: Tensor, mesh: DeviceMesh, grid: DeviceMesh | None) -> Tensor:
    shape = tuple(value.shape)
    if name in TWO_AXES:
        assert grid is not None
        return lay_out(value, grid, on_two_axes(name, shape))
    return lay_out(value, mesh, on_one_axis(name, shape))


def make_meshes() -> tuple[DeviceMesh, DeviceMesh | None]:
    return make_mesh(), init_device_mesh("cpu", (2, 2)) if dist.get_world_size() == 4 else None


def save(path: Path) -> None:
    mesh, grid = make_meshes()
    state = {
        f"{source}.{number}.{shape}": tensor_in(source, value_of(SHAPES[shape]), mesh, grid)
        for source in layouts_here()
        for number in range(MOST_LAYOUTS)
        for shape in SHAPES
    }
    dcp.save(state, checkpoint_id=path)


def load(path: Path, sources: list[str]) -> None:
    mesh, grid = make_meshes()
    targets = layouts_here()
    state = {
        f"{source}.{number}.{shape}": tensor_in(target, torch.full(SHAPES[shape], -1.0), mesh, grid)
        for source in sources
        for number, target in enumerate(targets)
        for shape in SHAPES
    }
    dcp.load(state, checkpoint_id=path)
    for key, found in state.items():
        _, number, shape = key.split(".")
        expected = tensor_in(targets[int(number)], value_of(SHAPES[shape]), mesh, grid)
        assert same_bits(found.to_local(), expected.to_local()), (key, targets[int(number)])


@pytest.mark.sampled(2)
@pytest.mark.parametrize("saved_by", [1, 2, 3, 4])
def test_any_layout_on_any_number_of_ranks(tmp_path: Path, saved_by: int) -> None:
    sources = [*ONE_AXIS, *TWO_AXES] if saved_by == 4 else ONE_AXIS
    run_ranks(save, saved_by, tmp_path)
    for loaded_by in (1, 2, 3, 4):
        run_ranks(load, loaded_by, tmp_path, sources)


# --- the chunks of a rank -------------------------------------------------------------------------


def chunks_of(x: RaggedTensor) -> Iterator[tuple[tuple[slice, ...], Tensor]]:
    """The boxes that a rank writes, with their data."""
    items = x.__create_write_items__("w", x)
    chunks = x.__create_chunk_list__()
    assert [item.tensor_data.chunk for item in items] == chunks
    for chunk in chunks:
        box = tuple(slice(o, o + s) for o, s in zip(chunk.offsets, chunk.sizes, strict=True))
        yield box, x.__get_tensor_shard__(MetadataIndex("w", chunk.offsets))


def assert_chunks_cover(x: RaggedTensor, whole: Tensor) -> None:
    """The chunks are this rank's elements, each once, with their values, and as views."""
    sizes, at = tuple(x.device_mesh.shape), x.device_mesh.get_coordinate()
    mine = held(tuple(whole.shape), x.placements, sizes, at).reshape(-1)
    times = torch.zeros(whole.shape, dtype=torch.int64)
    local = x.to_local()
    for box, data in chunks_of(x):
        times[box] += 1
        assert same_bits(data, whole[box])
        if data.numel():
            assert data.untyped_storage().data_ptr() == local.untyped_storage().data_ptr()
    expected = torch.zeros(whole.numel(), dtype=torch.int64)
    expected[mine] = 1
    assert torch.equal(times.view(-1), expected), (x.placements, whole.shape)


def check_all_cuts() -> None:
    mesh = make_mesh()
    with Traffic() as traffic:
        for shape in [(5,), (2, 3), (2, 2, 2), (), (0, 3), (2, 1, 3)]:
            whole = value_of(shape)
            for cut in unit_vectors(shape, dist.get_world_size()):
                assert_chunks_cover(lay_out(whole, mesh, (cut,)), whole)
    assert traffic.calls == []


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_chunks_of_every_cut(world_size: int) -> None:
    run_ranks(check_all_cuts, world_size)


def check_all_compositions() -> None:
    grid = init_device_mesh("cpu", (2, 2))
    for shape in [(4, 2), (2, 3), (4, 2, 2), (6,)]:
        whole = value_of(shape)
        others: list[Placement] = [Replicate(), *[Shard(dim) for dim in range(len(shape))]]
        for other, cut in product(others, unit_vectors(shape, 2)):
            dims = len(cut.dims)
            crosses = isinstance(other, Shard) and other.dim < dims
            parts = [held(shape, (other,), (2,), (k,)).shape for k in range(2)]
            if any(math.prod(p[:dims]) % cut.total_units for p in parts if math.prod(p)):
                continue
            strided = RaggedShard(cut.dims, cut.local_units, split_factor=2 if crosses else 1)
            for layout in [(other, cut), (strided, other)]:
                x = lay_out(whole, grid, layout)
                assert_laid_out(x, whole, grid, layout)
                assert_chunks_cover(x, whole)


def test_chunks_of_every_composition() -> None:
    run_ranks(check_all_compositions, 4)

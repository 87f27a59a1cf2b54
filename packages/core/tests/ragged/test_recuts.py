"""Layouts after a change of shape: every cut of small shapes, against lists of elements."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp import RaggedShard
from vescale_fsdp.compat import DTensorSpec
from vescale_fsdp.ragged.holdings import check_placements, holding_of
from vescale_fsdp.ragged.recuts import ragged_in, rescaled, reshaped, same_layout, sliced
from vescale_fsdp.ragged.tensor import make_spec
from vescale_fsdp.testing import run_ranks

from .helpers import make_mesh
from .layouts import COMPOSED, grid


def held(spec: DTensorSpec, there: tuple[int, ...]) -> list[int]:
    """The global flat indices that a coordinate holds, in the order of its local tensor."""
    numbers = torch.arange(math.prod(spec.shape)).view(spec.shape)
    boxes = holding_of(spec.shape, spec.placements, spec.mesh.shape, there).boxes
    return [number for box in boxes for number in box.of(numbers).flatten().tolist()]


def coordinates(spec: DTensorSpec) -> Iterator[tuple[int, ...]]:
    return product(*(range(size) for size in spec.mesh.shape))


def every_cut(shape: tuple[int, ...]) -> Iterator[DTensorSpec]:
    """All ways to cut a shape over three ranks: the elements of the first two, in any numbers."""
    mesh, numel = make_mesh(), math.prod(shape)
    if dist.get_rank():
        return  # one rank looks at what all hold
    for first in range(numel + 1):
        for second in range(numel - first + 1):
            runs = [(1, first), (1, second), (1, numel - first - second)]
            cut = RaggedShard.from_runs_of_elements(runs, shape)
            yield make_spec(mesh, [cut], shape, torch.float32)


def composed_specs() -> Iterator[DTensorSpec]:
    mesh = grid()
    if dist.get_rank():
        return
    for placements in COMPOSED:
        yield make_spec(mesh, placements, (4, 6, 2), torch.float32)


def check_valid(spec: DTensorSpec) -> None:
    check_placements(spec.shape, spec.placements, spec.mesh.shape)
    if len(spec.placements) == 1:  # with the fewest dims
        _, cut = ragged_in(spec)
        unit = cut.unit_numel(spec.shape)
        runs = [(count, units * unit) for count, units in cut.runs]
        assert cut == RaggedShard.from_runs_of_elements(runs, spec.shape)


# --- other shapes ---------------------------------------------------------------------------------


def check_reshaped(specs: list[DTensorSpec], shapes: list[tuple[int, ...]]) -> int:
    possible = 0
    for spec, shape in product(specs, shapes):
        result = reshaped(spec, shape)
        if result is None:
            assert len(spec.placements) > 1
            continue
        check_valid(result)
        assert all(held(spec, there) == held(result, there) for there in coordinates(spec))
        back = reshaped(result, spec.shape)
        assert back is not None
        assert same_layout(back, spec)
        possible += 1
    return possible


def reshape_all() -> int:
    shapes = [(12,), (3, 4), (4, 1, 3), (1, 12), (2, 2, 3), (2, 3, 2)]
    return check_reshaped(list(every_cut((2, 3, 2))), shapes)


def reshape_composed() -> int:
    shapes = [(48,), (24, 2), (4, 12), (4, 1, 6, 2), (2, 2, 6, 2), (4, 6, 2, 1), (4, 3, 2, 2)]
    return check_reshaped(list(composed_specs()), shapes)


def reshape_parts() -> list[int]:
    """Tensor parallelism over two ranks leaves 2 and 1 of three; the larger part has 16."""
    mesh = grid()
    if dist.get_rank():
        return []
    fixed = RaggedShard((0, 1, 2), (5, 11), split_factor=2, elements_per_unit=1)
    rows = make_spec(mesh, [fixed, Shard(0)], (3, 4, 2), torch.float32)
    columns = make_spec(mesh, [fixed, Shard(1)], (4, 3, 2), torch.float32)
    return [
        check_reshaped([rows], [(3, 8), (3, 1, 4, 2), (1, 3, 4, 2), (3, 2, 2, 2), (24,)]),
        check_reshaped([columns], [(4, 6), (4, 3, 2, 1), (4, 1, 3, 2), (2, 2, 3, 2), (24,)]),
        sliced(columns, 0, 2) is None,  # 5 elements are in rows 1 and 2 of the parts
    ]


def test_reshaping_leaves_every_element_where_it_is() -> None:
    assert run_ranks(reshape_all, 3)[0] == 91 * 6  # 13 * 14 / 2 cuts
    # Without a Shard all 7. Shard(0): not the first two and not (2, 2, 6, 2); Shard(1): not the
    # first three and not (4, 3, 2, 2); Shard(2): not the first and not (4, 12).
    assert run_ranks(reshape_composed, 4)[0] == 2 * 7 + 3 * 4 + 3 * 3 + 2 * 5
    assert run_ranks(reshape_parts, 4)[0] == [4, 3, True]


# --- slices ---------------------------------------------------------------------------------------


def check_sliced(spec: DTensorSpec) -> int:
    rows = spec.shape[0]
    row = math.prod(spec.shape[1:])
    possible = 0
    for start, stop in product(range(rows + 1), repeat=2):
        if start > stop:
            continue
        result = sliced(spec, start, stop)
        if result is None:
            continue
        possible += 1
        check_valid(result)
        assert tuple(result.shape) == (stop - start, *spec.shape[1:])
        for there in coordinates(spec):
            kept = [i - start * row for i in held(spec, there) if start * row <= i < stop * row]
            assert held(result, there) == kept
        if stop == start + 1:
            dropped = reshaped(result, spec.shape[1:])
            assert dropped is not None
            check_valid(dropped)
            assert tuple(dropped.shape) == tuple(spec.shape[1:])
            for there in coordinates(spec):
                assert held(dropped, there) == held(result, there)
    return possible


def slice_all() -> int:
    return sum(check_sliced(spec) for spec in every_cut((4, 1, 2)))


def slice_composed() -> list[int]:
    return [check_sliced(spec) for spec in composed_specs()]


def test_slices_keep_the_elements_that_lie_in_them() -> None:
    assert run_ranks(slice_all, 3)[0] == 45 * 15  # 9 * 10 / 2 cuts, 15 slices of 4 rows
    # Shard(0) is in the third, the sixth and the last.
    assert run_ranks(slice_composed, 4)[0] == [15, 15, 0, 15, 15, 0, 15, 15, 15, 0]


# --- slices that change their size ----------------------------------------------------------------


def check_rescaled(spec: DTensorSpec, placements: list[Placement]) -> int:
    possible = 0
    for kept in range(len(spec.shape) + 1):
        trailing = math.prod(spec.shape[kept:])
        for new in [(), (1,), (5,), (2, 3)]:
            shape = (*spec.shape[:kept], *new)
            result = rescaled(spec, kept, shape, placements)
            slices = [sorted({i // trailing for i in held(spec, t)}) for t in coordinates(spec)]
            if result is None:
                cut_through = sum(map(len, slices)) > math.prod(spec.shape[:kept])
                assert cut_through or len(spec.placements) > 1
                continue
            possible += 1
            check_valid(result)
            for there, expected in zip(coordinates(spec), slices, strict=True):
                size = math.prod(new)
                whole = [i * size + j for i in expected for j in range(size)]
                assert held(result, there) == whole
    return possible


def rescale_all() -> int:
    return sum(check_rescaled(spec, list(spec.placements)) for spec in every_cut((2, 2, 3)))


def test_slices_that_nobody_cuts_may_change_their_size() -> None:
    possible = run_ranks(rescale_all, 3)[0]
    # 4 new sizes for each cut that lies between slices: of all 91 none goes through an element;
    # 15 lie between the 4 slices of 3, 6 between the 2 of 6, and 3 leave the whole to one rank.
    assert possible == 4 * (91 + 15 + 6 + 3)

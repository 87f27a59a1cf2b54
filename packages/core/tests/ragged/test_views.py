"""Views of ragged tensors share memory, cost no communication, and have the right numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard

from vescale_fsdp import RaggedShard, RaggedTensor
from vescale_fsdp.testing import run_ranks

from .helpers import make_mesh, random
from .layouts import Results, composed, counted_collectives, grid, layouts_of, same, whole_of

# Of a tensor of shape (4, 1, 6).
SHAPED: dict[str, Callable[[Tensor], Tensor]] = {
    "view": lambda x: x.view(2, 12),
    "view with a free size": lambda x: x.view(-1, 3, 2),
    "reshape": lambda x: x.reshape(8, 3),
    "flatten": lambda x: x.flatten(),
    "flatten some": lambda x: x.flatten(1),
    "unflatten": lambda x: x.unflatten(2, (2, 3)),
    "squeeze": lambda x: x.squeeze(),
    "squeeze one": lambda x: x.squeeze(-2),
    "squeeze what is larger": lambda x: x.squeeze(0),
    "squeeze some": lambda x: x.squeeze((0, 1)),
    "unsqueeze": lambda x: x.unsqueeze(0),
    "unsqueeze at the end": lambda x: x.unsqueeze(-1),
    "none": lambda x: x[None, :, None],
    "view_as": lambda x: x.view_as(torch.empty(4, 6)),
    "the same": lambda x: x.view(4, 1, 6),
    "expand to the same": lambda x: x.expand(4, -1, 6),
    "transpose past a 1": lambda x: x.transpose(0, 1),
    "permute past a 1": lambda x: x.permute(1, 0, 2),
    "transpose of nothing": lambda x: x.transpose(1, 1),
    "all of it": lambda x: x[:, 0:1, :6],
}

PARTS: dict[str, Callable[[Tensor], Tensor]] = {
    "slice": lambda x: x[1:3],
    "first": lambda x: x[:1],
    "last": lambda x: x[-2:],
    "beyond": lambda x: x[3:99],
    "empty": lambda x: x[2:2],
    "narrow": lambda x: x.narrow(0, 1, 2),
    "index": lambda x: x[2],
    "index from the end": lambda x: x[-1],
    "index twice": lambda x: x[1][0],
    "slice of a slice": lambda x: x[1:][1:2],
    "split": lambda x: x.split(3)[1],
    "split with sizes": lambda x: x.split([1, 0, 3])[2],
    "chunk": lambda x: x.chunk(2)[1],
    "unbind": lambda x: x.unbind()[1],
    "tensor_split": lambda x: x.tensor_split(3)[1],
    "slice and reshape": lambda x: x[1:].reshape(3, 3, 2),
}

EVERY = {**SHAPED, **PARTS}


def address_and_end(tensor: Tensor) -> tuple[int, int]:
    local = tensor._local_tensor
    return local.data_ptr(), local.data_ptr() + local.nbytes


def check_views() -> None:
    whole, results = random((4, 1, 6)), Results()
    for x in layouts_of(whole):
        begin, end = address_and_end(x)
        with counted_collectives() as collectives:
            views = {name: view(x) for name, view in EVERY.items()}
        assert collectives == []
        for name, result in views.items():
            assert type(result) is RaggedTensor, name
            results.add(result, EVERY[name](whole), (name, x.placements))
            first, last = address_and_end(result)
            assert not result._local_tensor.numel() or begin <= first < last <= end, name
            total, units = result.numel(), result.ragged_placement.total_units
            assert units == 0 if not total else total % units == 0, name
    results.check()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_views_have_the_numbers_of_dense_ones_and_share_memory(world_size: int) -> None:
    run_ranks(check_views, world_size)


def check_writes() -> None:
    for x in layouts_of(random((4, 1, 6))):
        x.view(24).zero_()
        x[1:3].fill_(5.0)
        x[3].view(6).add_(7.0)
        expected = torch.tensor([0.0, 5.0, 5.0, 7.0]).repeat_interleave(6).view(4, 1, 6)
        same(x, expected)


def test_writes_to_views_reach_the_tensor() -> None:
    run_ranks(check_writes, 3)


def placements_of_views() -> list[RaggedShard]:
    mesh = make_mesh()
    rows = RaggedTensor.distribute(random((6, 4)), mesh, [RaggedShard((0,), (1, 2, 3))])
    cells = RaggedTensor.distribute(random((6, 4)), mesh, [RaggedShard((0, 1), (5, 0, 19))])
    views = [
        rows.view(3, 8),
        rows.view(2, 3, 4),
        rows.flatten(),
        rows[1:5],
        rows[4],
        cells[1:],
        cells.view(24, 1),
        cells.squeeze(),
    ]
    return [view.ragged_placement for view in views]


def test_units_follow_with_the_fewest_dims() -> None:
    assert run_ranks(placements_of_views, 3)[0] == [
        RaggedShard((0, 1), (1, 2, 3)),  # units of 4 of rows of 8
        RaggedShard((0, 1), (1, 2, 3)),
        RaggedShard((0,), (1, 2, 3)),
        RaggedShard((0,), (0, 2, 2)),
        RaggedShard.owner(2, 3),
        RaggedShard((0, 1), (1, 0, 19)),  # element 4 is the first of row 1
        RaggedShard((0,), (5, 0, 19)),
        RaggedShard((0, 1), (5, 0, 19)),
    ]


def check_composed() -> None:
    """Views that other axes allow are right; those that they do not allow say so."""
    whole = random((4, 6, 2))
    # With the first dimension whose Shard is in the way, and the last.
    views: list[tuple[Callable[[Tensor], Tensor], int, int]] = [
        (lambda x: x.view(24, 2), 0, 1),
        (lambda x: x.view(4, 12), 1, 2),
        (lambda x: x.view(4, 6, 2, 1), 3, 2),
        (lambda x: x.unsqueeze(-1).squeeze(3), 3, 2),
        (lambda x: x.unsqueeze(0), 3, 2),
        (lambda x: x.view(2, 2, 6, 2), 0, 0),
        (lambda x: x.view(4, 3, 2, 2), 1, 1),
        (lambda x: x[1:3], 0, 0),
        (lambda x: x[3], 0, 0),
    ]
    for x in composed(whole):
        sharded = [p.dim for p in x.placements if type(p) is Shard]
        for view, first, last in views:
            if any(first <= dim <= last for dim in sharded):
                with pytest.raises(NotImplementedError, match="shards"):
                    view(x)
            else:
                same(view(x), view(whole), x.placements)


def test_beside_other_placements() -> None:
    run_ranks(check_composed, 4)


def check_split_factor() -> None:
    """Units that reach past a Shard to the right are labelled so."""
    whole = random((4, 6, 2))
    x = RaggedTensor.distribute(whole, grid(), [RaggedShard((0,), (1, 3)), Shard(1)])
    flat = x.view(4, 6, 2, 1)
    assert flat.placements == x.placements
    part = x[1:4]
    assert part.placements == (RaggedShard.owner(1, 2), Shard(1))
    y = RaggedTensor.distribute(
        whole, grid(), [RaggedShard((0, 1), (5, 7), split_factor=2), Shard(1)]
    )
    assert y[1:].placements == (RaggedShard((0, 1), (2, 7), split_factor=2), Shard(1))
    assert y[2].placements == (RaggedShard.owner(1, 2), Shard(0))
    same(y[1:], whole[1:])


def test_split_factors_follow() -> None:
    run_ranks(check_split_factor, 4)


# --- expand ---------------------------------------------------------------------------------------


# Some are a range of the storage by chance, or all elements, but along another dimension.
OF_ANY_SHAPE: dict[str, Callable[[Tensor], Tensor | tuple[Tensor, ...]]] = {
    "first column": lambda x: x[:, 0],
    "last of the last": lambda x: x.select(-1, -1),
    "first row": lambda x: x[0],
    "first rows": lambda x: x[:1],
    "all rows": lambda x: x[:],
    "all columns": lambda x: x[:, :],
    "every sixth row": lambda x: x[::6],
    "every second row": lambda x: x[1::2],
    "no columns": lambda x: x[:, :0],
    "no rows": lambda x: x[1:0],
    "rows, from its end": lambda x: x[-1:],
    "columns": lambda x: x.unbind(1),
    "rows": lambda x: x.unbind(),
    "halves": lambda x: x.chunk(2),
    "all in one part": lambda x: x.split(99),
    "all columns in one part": lambda x: x.split(99, 1),
    "of what was computed": lambda x: (x * 2)[0],
    "rows of what was computed": lambda x: (x * 2).unbind(),
    "of a view": lambda x: x.view(1, -1)[:, 0],
    "transposed": lambda x: x.t()[0],
}


def check_any_shape() -> None:
    for shape in ((6, 1), (1, 4), (4, 3), (1, 1), (2, 2)):
        whole = random(shape)
        for x in layouts_of(whole):
            for name, view in OF_ANY_SHAPE.items():
                leaf, dense = (y.detach().clone().requires_grad_() for y in (x, whole))
                found, expected = view(leaf), view(dense)
                if isinstance(found, Tensor):
                    found, expected = (found,), (expected,)
                for one, other in zip(found, expected, strict=True):
                    same(one, other, (name, shape, x.placements))
                for parts in (found, expected):
                    loss = sum(part.pow(2).sum() * (i + 1) for i, part in enumerate(parts))
                    whole_of(loss).backward()
                assert type(leaf.grad) is RaggedTensor, (name, shape, x.placements)
                same(leaf.grad, dense.grad, (name, shape, x.placements))


@pytest.mark.parametrize("world_size", [1, 2])
def test_views_of_any_shape_have_the_values_and_gradients_of_dense_ones(world_size: int) -> None:
    run_ranks(check_any_shape, world_size)


def check_along_a_sharded_dimension() -> None:
    mesh = init_device_mesh("cpu", (2, 1))
    for shape, outer in (((6, 1), Shard(1)), ((6, 4), Shard(0)), ((4, 6), Shard(1))):
        whole = random(shape)
        x = RaggedTensor.distribute(whole, mesh, [outer, RaggedShard((0,), (1,))])
        for view in (lambda x: x[:, 0], lambda x: x[:, :0], lambda x: x[::6]):
            same(view(x), view(whole), shape)


def test_parts_along_a_dimension_that_another_axis_shards_are_gathered() -> None:
    run_ranks(check_along_a_sharded_dimension, 2)


def check_inference() -> None:
    for x in layouts_of(random((4, 3))):
        version, total = x._local_tensor._version, x.sum(0)
        with torch.inference_mode():
            x.view(-1).mul_(2)
            x.detach()[1:].mul_(2)
            total.detach().mul_(2)
        assert x._local_tensor._version > version
        same(total, 2 * random((4, 3)).sum(0))
        same(x[1:], 4 * random((4, 3))[1:])


def test_views_in_inference_mode_count_writes() -> None:
    run_ranks(check_inference, 2)


def check_expand() -> None:
    mesh = make_mesh()
    rows = RaggedTensor.distribute(random((6, 1)), mesh, [RaggedShard((0,), (1, 5))])
    result = rows.expand(6, 3)
    assert result.placements == rows.placements
    same(result, random((6, 1)).expand(6, 3))
    for shape in ((2, 6, 1), (2, 6, 3)):  # gathered
        same(rows.expand(shape) * 2, random((6, 1)).expand(shape) * 2)
    owned = RaggedTensor.distribute(random((6, 1)), mesh, [RaggedShard.owner(1, 2)])
    same(owned.expand(2, 6, 3), random((6, 1)).expand(2, 6, 3))


def test_expand_repeats_behind_the_cuts() -> None:
    run_ranks(check_expand, 2)


# --- errors ---------------------------------------------------------------------------------------


def check_errors() -> None:
    for x in layouts_of(random((4, 6))):
        with pytest.raises(RuntimeError, match=r"shape \[5, 5\] is invalid.*24 elements"):
            x.view(5, 5)
        with pytest.raises(IndexError, match=r"index 4 is out of \w+ for dimension 0"):
            x[4]
        with pytest.raises((IndexError, RuntimeError), match="dimension"):
            x.squeeze(2)
    assert dist.get_world_size() == 2


def test_shapes_and_indices_that_do_not_fit_are_refused_on_every_rank() -> None:
    run_ranks(check_errors, 2)


def check_nothing() -> None:
    for shape in [(0,), (0, 3), (3, 0)]:
        for x in layouts_of(torch.zeros(shape)):
            same(x.view(-1), torch.zeros(0))
            same(x.unsqueeze(0), torch.zeros(1, *shape))
            same(x[0:1], torch.zeros(shape)[0:1])
    scalar = RaggedTensor.distribute(torch.tensor(3.0), make_mesh(), [RaggedShard.owner(1, 2)])
    same(scalar.view(1, 1), torch.full((1, 1), 3.0))
    same(scalar.unsqueeze(0).squeeze(), torch.tensor(3.0))
    same(scalar.t(), torch.tensor(3.0))


def test_of_numbers_and_of_no_elements() -> None:
    run_ranks(check_nothing, 2)


def check_replicate_axis() -> None:
    whole = random((4, 6))
    x = RaggedTensor.distribute(whole, grid(), [Replicate(), RaggedShard((0,), (1, 3))])
    same(x.view(24)[0:6], whole.view(24)[0:6])
    assert x[0].placements == (Replicate(), RaggedShard.owner(0, 2))


def test_replicas_have_the_same_views() -> None:
    run_ranks(check_replicate_axis, 4)

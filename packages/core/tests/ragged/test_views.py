"""Views of ragged tensors share memory, cost no communication, and have the right numbers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import Replicate, Shard

from vescale_fsdp import RaggedShard, RaggedTensor
from vescale_fsdp.testing import run_ranks

from .helpers import make_mesh, random
from .layouts import Results, composed, counted_collectives, grid, layouts_of, same

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
        with pytest.raises(RuntimeError, match=r"\(4, 6\): shape '\[5, 5\]' is invalid"):
            x.view(5, 5)
        with pytest.raises(IndexError, match=r"index 4 is out of \w+ for dimension 0"):
            x[4]
        with pytest.raises((IndexError, RuntimeError), match=r"[Dd]imension"):
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

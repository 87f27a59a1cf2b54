"""Replicated DTensors, numbers and ragged tensors of smaller shapes beside ragged tensors."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from vescale_fsdp import RaggedShard, RaggedTensor
from vescale_fsdp.ragged.tensor import local_part
from vescale_fsdp.testing import run_ranks

from .helpers import make_mesh, random
from .layouts import Results, composed, counted_collectives, grid, layouts_of, same

OPERATORS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul": lambda x, y: x * y,
    "the other way round": lambda x, y: y - x,
    "compare": lambda x, y: y > x,
    "where": lambda x, y: torch.where(y > 0, x, y),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, 3.0),
    "masked_fill_": lambda x, y: x.clone().masked_fill_(y > 0, torch.tensor(3.0)),
    "add_": lambda x, y: x.clone().add_(y, alpha=2),
    "copy_": lambda x, y: torch.zeros_like(x).copy_(y),
    "addcmul": lambda x, y: torch.addcmul(x, y, x, value=0.5),
    "lerp": lambda x, y: torch.lerp(x, y, 0.3),
    "clamp": lambda x, y: torch.clamp(x, min=y),
    "foreach": lambda x, y: torch._foreach_mul([x, x], [y, x])[0],
    "foreach in place": lambda x, y: first_after(
        torch._foreach_add_, [x.clone(), x.clone()], [y, x]
    ),
    "promotion": lambda x, y: x.bfloat16() * y,
}


def first_after(func: Callable[..., object], *lists: list[Tensor]) -> Tensor:
    func(*lists)
    return lists[0][0]


def replicated(whole: Tensor, mesh: object) -> Tensor:
    placements = [Replicate()] * mesh.ndim
    return DTensor.from_local(whole, mesh, placements, run_check=False)


def check_broadcast() -> None:
    mesh, whole, results = make_mesh(), random((4, 3, 2)), Results()
    shapes = [(4, 3, 2), (3, 2), (2,), (4, 1, 1), (1, 3, 1), (1,), ()]
    for x in layouts_of(whole):
        with counted_collectives() as collectives:
            for shape, (name, operator) in product(shapes, OPERATORS.items()):
                if name.startswith("foreach") and shape == ():
                    continue  # a number in a list of tensors: as torch has it
                other = random(shape, seed=4)
                result = operator(x, replicated(other, mesh))
                assert type(result) is RaggedTensor, name
                assert result.placements == x.placements, name
                results.add(result, operator(whole, other), (name, shape, x.placements))
        assert collectives == []
    results.check()


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_replicated_tensors_are_cut_locally(world_size: int) -> None:
    run_ranks(check_broadcast, world_size)


def check_composed() -> None:
    whole = random((4, 6, 2))
    for x in composed(whole):
        for shape in [(4, 6, 2), (6, 1), (4, 1, 1), ()]:
            other = random(shape, seed=4)
            same(x * replicated(other, x.device_mesh), whole * other, (x.placements, shape))
        same(x / x.norm(), whole / whole.norm())


def test_beside_other_placements() -> None:
    run_ranks(check_composed, 4)


def check_memory() -> None:
    """Only this rank's elements are made of a tensor that is expanded, and none of a run."""
    x = RaggedTensor.distribute(random((4, 3)), make_mesh(), [RaggedShard((0, 1), (5, 7))])
    local = local_part(random((3,)), x._spec)
    assert local.untyped_storage().nbytes() == 4 * x._local_tensor.numel()
    whole = random((4, 3))
    rows = RaggedTensor.distribute(whole, make_mesh(), [RaggedShard((0,), (1, 3))])
    assert local_part(whole, rows._spec).untyped_storage().data_ptr() == whole.data_ptr()


def test_no_more_than_the_local_elements_are_made() -> None:
    run_ranks(check_memory, 2)


def check_partial() -> None:
    """Results of reductions are reduced first, as DTensor does; one small all-reduce."""
    whole = random((4, 3))
    for x in layouts_of(whole):
        with counted_collectives() as collectives:
            result = x - x.mean()
        assert collectives == ["all_reduce"]
        same(result, whole - whole.mean())
        same(x / x.sum(0), whole / whole.sum(0), rtol=1e-5)
    full = DTensor.from_local(whole, x.device_mesh, [Partial()], run_check=False)
    with pytest.raises(ValueError, match=r"Partial.*ragged\.redistribute\(x, placements=ragged"):
        x + full  # as large as the ragged one: somebody should see that this communicates


def test_small_partial_tensors_are_reduced_first() -> None:
    run_ranks(check_partial, 2)


def check_smaller_ragged() -> None:
    mesh, whole = make_mesh(), random((4, 3))
    x = RaggedTensor.distribute(whole, mesh, [RaggedShard((0,), (1, 3))])
    with counted_collectives() as collectives:
        results = [x / x.sum(1, keepdim=True), x.amax(1, keepdim=True) - x]
        assert all(result.placements == x.placements for result in results)
    assert collectives == []
    same(results[0], whole / whole.sum(1, keepdim=True))
    same(results[1], whole.amax(1, keepdim=True) - whole)
    same(x + x.sum(1)[0:3], whole + whole.sum(1)[0:3])
    with pytest.raises(ValueError, match="sharded differently"):
        x.sum(1)[0:3].add_(x)
    with pytest.raises(ValueError, match=r"would write a RaggedTensor of shape \(4, 3\) into"):
        x.sum(1, keepdim=True).add_(x)


def test_a_ragged_result_of_a_reduction_broadcasts_back() -> None:
    run_ranks(check_smaller_ragged, 2)


def check_same_cut_in_other_words() -> None:
    mesh, whole = make_mesh(), random((4, 3))
    rows = RaggedTensor.distribute(whole, mesh, [RaggedShard((0,), (1, 3))])
    cells = RaggedTensor.distribute(whole, mesh, [RaggedShard((0, 1), (1, 3))])
    assert rows.placements != cells.placements
    assert (rows + cells).placements == rows.placements
    assert (cells + rows).placements == cells.placements
    same(cells + rows, 2 * whole)
    same(torch._foreach_add([rows], [cells])[0], 2 * whole)
    assert torch.equal(rows, cells)


def test_the_same_cut_with_other_dims_is_the_same_layout() -> None:
    run_ranks(check_same_cut_in_other_words, 2)


# --- lists ----------------------------------------------------------------------------------------


def check_lists() -> None:
    """Positions without a ragged tensor are DTensor's or torch's own."""
    mesh, whole, plain = make_mesh(), random((4, 3)), random((5,), seed=1)
    for x in layouts_of(whole):
        gate = replicated(plain, mesh)
        results = torch._foreach_mul([x, gate, plain], [2.0, 3.0, 4.0])
        assert [type(result) for result in results] == [RaggedTensor, DTensor, Tensor]
        for result, expected in zip(results, (whole * 2, plain * 3, plain * 4), strict=True):
            same(result, expected)
        both = [x.clone(), replicated(plain.clone(), mesh)]
        torch._foreach_addcmul_(both, [x, gate], [x, gate], [0.5, 2.0])
        same(both[0], whole + 0.5 * whole * whole)
        same(both[1], plain + 2 * plain * plain)
        norms = torch._foreach_norm([x, gate, plain])
        for norm, expected in zip(norms, (whole, plain, plain), strict=True):
            same(norm, expected.norm())


def test_lists_of_ragged_replicated_and_plain_tensors() -> None:
    run_ranks(check_lists, 2)


def check_optimizer() -> None:
    mesh, wholes = make_mesh(), [random((4, 3)), random((5,), seed=1), random((2, 2), seed=2)]
    for how in ({"foreach": True}, {"foreach": False}, {"fused": True}):
        dense = [torch.nn.Parameter(whole.clone()) for whole in wholes]
        cut = RaggedShard((0, 1), (5, 7))
        mixed = [
            torch.nn.Parameter(RaggedTensor.distribute(wholes[0], mesh, [cut])),
            torch.nn.Parameter(replicated(wholes[1].clone(), mesh)),
            torch.nn.Parameter(replicated(wholes[2].clone(), mesh)),
        ]
        for parameters in (dense, mixed):
            optimizer = torch.optim.AdamW(parameters, lr=0.1, **how)
            for _ in range(2):
                for parameter in parameters:
                    parameter.grad = parameter.detach() * 0.5
                optimizer.step()
        for parameter, expected in zip(mixed, dense, strict=True):
            same(parameter.detach(), expected.detach(), how)


def test_optimizers_step_ragged_and_replicated_parameters_together() -> None:
    run_ranks(check_optimizer, 2)


# --- errors ---------------------------------------------------------------------------------------


def check_refused() -> None:
    mesh, whole = make_mesh(), random((4, 3))
    x = RaggedTensor.distribute(whole, mesh, [RaggedShard((0, 1), (5, 7))])
    sharded = DTensor.from_local(random((2, 3)), mesh, [Shard(0)], run_check=False)
    other_mesh = replicated(whole, init_device_mesh("cpu", (1, 2)))
    refused: list[tuple[str, Callable[[], object]]] = [
        ("a plain tensor of shape .4, 3.", lambda: x + whole),
        ("Shard", lambda: x + sharded),
        ("another mesh", lambda: x + other_mesh),
        ("would add a dimension", lambda: x + torch.ones(1, 1, 1)),
        ("would write", lambda: whole.clone().mul_(x)),
        ("would write", lambda: whole.clone().copy_(x.clone().requires_grad_())),
        ("one number for all", lambda: torch._foreach_mul([x], x.view(12)[0])),
    ]
    for message, attempt in refused:
        with pytest.raises(ValueError, match=message) as caught:
            attempt()
        assert "full_tensor()" in str(caught.value)
    same(x, whole)  # nothing was written


def test_what_does_not_mix_names_the_ways_out() -> None:
    run_ranks(check_refused, 2)


def check_read_out() -> None:
    whole = random((4, 3))
    x = RaggedTensor.distribute(whole, make_mesh(), [RaggedShard((0, 1), (5, 7))])
    plain = torch.zeros(2, 4, 3, dtype=torch.float64)
    assert plain.copy_(x, non_blocking=True) is plain
    assert torch.equal(plain, whole.double().expand(2, 4, 3))


def test_a_plain_tensor_takes_a_copy_of_the_whole() -> None:
    run_ranks(check_read_out, 2)


def check_grid() -> None:
    whole = random((4, 6))
    x = RaggedTensor.distribute(whole, grid(), [Replicate(), RaggedShard((0,), (1, 3))])
    half = DTensor.from_local(whole, grid(), [Replicate(), Shard(0)], run_check=False)
    with pytest.raises(ValueError, match="Shard"):
        x * half
    same(x * replicated(whole, x.device_mesh), whole * whole)


def test_replicated_means_on_every_axis() -> None:
    run_ranks(check_grid, 4)

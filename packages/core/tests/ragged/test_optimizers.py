"""torch's optimizers on ragged parameters: the bits of the same optimizer on dense ones.

Every part is a whole number of vector registers (16 elements) or the same single element, so
that torch's kernels go the same way for the part as for the whole.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import _foreach_supported_types

from vescale_fsdp import RaggedShard, RaggedTensor
from vescale_fsdp.testing import run_ranks

from .helpers import assert_holds, make_mesh, random

SHAPES: list[tuple[int, ...]] = [(6, 16), (3, 2, 16), (32,), (), (0, 4)]

# By world size, one for each of the shapes; every rank holds nothing of some of them.
CUTS = {
    2: [
        RaggedShard((0,), (1, 5)),
        RaggedShard((0,), (2, 1)),
        RaggedShard.owner(0, 2),
        RaggedShard.owner(1, 2),
        RaggedShard((), (0, 0)),
    ],
    3: [
        RaggedShard((0,), (2, 1, 3)),
        RaggedShard((0,), (0, 1, 2)),
        RaggedShard.owner(0, 3),
        RaggedShard.owner(1, 3),
        RaggedShard((), (0, 0, 0)),
    ],
}

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": lambda params, **how: torch.optim.AdamW(params, lr=0.1, weight_decay=0.1, **how),
    "adamw, amsgrad": lambda params, **how: torch.optim.AdamW(params, amsgrad=True, **how),
    "adam, maximize": lambda params, **how: torch.optim.Adam(params, maximize=True, **how),
    "sgd": lambda params, **how: torch.optim.SGD(params, lr=0.1, **how),
    "sgd, nesterov": lambda params, **how: torch.optim.SGD(
        params, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True, **how
    ),
}

HOW = {
    "single": {"foreach": False, "fused": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}


def distribute_all(wholes: list[Tensor]) -> list[RaggedTensor]:
    mesh, placements = make_mesh(), CUTS[dist.get_world_size()]
    return [
        RaggedTensor.distribute(whole, mesh, [placement])
        for whole, placement in zip(wholes, placements, strict=True)
    ]


def check_optimizers(name: str) -> None:
    for how in HOW.values():
        check_optimizer(name, how)


def check_optimizer(name: str, how: dict[str, Any]) -> None:
    wholes = [random(shape, seed=seed) for seed, shape in enumerate(SHAPES)]
    dense = [nn.Parameter(whole.clone()) for whole in wholes]
    ragged = [nn.Parameter(tensor) for tensor in distribute_all(wholes)]
    addresses = [parameter._local_tensor.data_ptr() for parameter in ragged]
    dense_optimizer, optimizer = OPTIMIZERS[name](dense, **how), OPTIMIZERS[name](ragged, **how)
    for step in range(5):
        grads = [random(shape, seed=100 * step + k) for k, shape in enumerate(SHAPES)]
        for parameter, grad in zip(dense, grads, strict=True):
            parameter.grad = grad
        for parameter, grad in zip(ragged, distribute_all(grads), strict=True):
            parameter.grad = grad
        dense_optimizer.step()
        optimizer.step()
    assert [parameter._local_tensor.data_ptr() for parameter in ragged] == addresses
    for expected, whole, parameter in zip(dense, wholes, ragged, strict=True):
        assert_holds(parameter, expected, like=parameter.grad)
        if whole.numel():
            assert not torch.equal(expected, whole)  # it has moved
        state = optimizer.state[parameter]
        assert set(state) == set(dense_optimizer.state[expected])
        for key, value in dense_optimizer.state[expected].items():
            if key == "step":
                assert type(state["step"]) is Tensor
                assert state["step"].item() == 5
            elif value is not None:
                assert_holds(state[key], value, like=parameter.grad)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_single_foreach_and_fused_are_bit_equal_to_dense(world_size: int, name: str) -> None:
    run_ranks(check_optimizers, world_size, name)


WITH_MORE: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=0.1),
    "adafactor, foreach": lambda p: torch.optim.Adafactor(p, lr=0.1, foreach=True),
    "adagrad, fused": lambda p: torch.optim.Adagrad(p, lr=0.1, fused=True),
    "rprop": lambda p: torch.optim.Rprop(p, foreach=False),
    "rprop, foreach": lambda p: torch.optim.Rprop(p, foreach=True),
}


def check_others() -> None:
    """Means of rows, masks, directions that depend on all parameters: to rounding."""
    shapes = SHAPES[:4]
    for name, make in WITH_MORE.items():
        wholes = [random(shape, seed=seed) for seed, shape in enumerate(shapes)]
        dense = [nn.Parameter(whole.clone()) for whole in wholes]
        ragged = [nn.Parameter(tensor) for tensor in distribute_some(wholes)]
        optimizers = make(dense), make(ragged)
        for step in range(4):
            grads = [random(shape, seed=100 * step + k) for k, shape in enumerate(shapes)]
            for params, values in ((dense, grads), (ragged, distribute_some(grads))):
                for parameter, grad in zip(params, values, strict=True):
                    parameter.grad = grad
            for optimizer in optimizers:
                optimizer.step()
        for expected, found in zip(dense, ragged, strict=True):
            torch.testing.assert_close(
                found.full_tensor(), expected, msg=lambda m, n=name: f"{n}: {m}"
            )


def distribute_some(wholes: list[Tensor]) -> list[RaggedTensor]:
    mesh, placements = make_mesh(), CUTS[dist.get_world_size()]
    pairs = zip(wholes, placements, strict=False)
    return [RaggedTensor.distribute(whole, mesh, [placement]) for whole, placement in pairs]


@pytest.mark.parametrize("world_size", [2, 3])
def test_adafactor_adagrad_and_rprop(world_size: int) -> None:
    run_ranks(check_others, world_size)


def check_lbfgs(search: str | None) -> None:
    target = random((4, 3))
    found = []
    for is_sharded in (False, True):
        whole = random((4, 3), seed=1)
        rows = (1, *[0] * (dist.get_world_size() - 2), 3)
        tensor = RaggedTensor.distribute(whole, make_mesh(), [RaggedShard((0,), rows)])
        param: Any = nn.Parameter(tensor if is_sharded else whole)
        optimizer = torch.optim.LBFGS([param], lr=0.3, max_iter=5, line_search_fn=search)

        def closure(param: Any = param, is_sharded: bool = is_sharded) -> Tensor:
            leaf = (param.full_tensor() if is_sharded else param).detach().requires_grad_()
            loss = ((leaf - target) ** 4).sum() + leaf.square().sum()
            (grad,) = torch.autograd.grad(loss, leaf)
            if is_sharded:
                grad = RaggedTensor.distribute(grad, make_mesh(), param.placements)
            param.grad = grad
            return loss

        for _ in range(4):
            optimizer.step(closure)
        found.append(param.full_tensor() if is_sharded else param)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("search", [None, "strong_wolfe"])
def test_lbfgs(search: str | None) -> None:
    run_ranks(check_lbfgs, 2, search)


def check_empty_ranks() -> list[bool]:
    """Whether this rank holds nothing, by parameter: the premise of the tests above."""
    wholes = [torch.zeros(shape) for shape in SHAPES]
    return [tensor._local_tensor.numel() == 0 for tensor in distribute_all(wholes)]


def test_every_rank_holds_nothing_of_some_parameter() -> None:
    assert run_ranks(check_empty_ranks, 2) == [
        [False, False, False, True, True],
        [False, False, True, False, True],
    ]
    assert run_ranks(check_empty_ranks, 3) == [
        [False, True, False, True, True],
        [False, False, True, False, True],
        [False, False, True, True, True],
    ]


def test_torch_picks_foreach_kernels_for_ragged_tensors() -> None:
    assert RaggedTensor in _foreach_supported_types


def check_zero_grad() -> None:
    wholes = [random(shape) for shape in SHAPES]
    for how in HOW.values():
        parameters = [nn.Parameter(tensor) for tensor in distribute_all(wholes)]
        for parameter, grad in zip(parameters, distribute_all(wholes), strict=True):
            parameter.grad = grad
        optimizer = torch.optim.SGD(parameters, **how)
        optimizer.zero_grad(set_to_none=False)
        for parameter, whole in zip(parameters, wholes, strict=True):
            assert_holds(parameter.grad, torch.zeros_like(whole), like=parameter)
        optimizer.zero_grad()
        assert all(parameter.grad is None for parameter in parameters)


def test_zero_grad_zeroes_in_place_or_drops() -> None:
    run_ranks(check_zero_grad, 2)


def check_state_dict() -> None:
    """A loaded state continues as the one that was saved."""
    wholes = [random(shape) for shape in SHAPES]
    results = []
    for load in (False, True):
        parameters = [nn.Parameter(tensor) for tensor in distribute_all(wholes)]
        optimizer = torch.optim.AdamW(parameters, lr=0.1)
        for step in range(3):
            if load and step == 2:
                state = optimizer.state_dict()
                optimizer = torch.optim.AdamW(parameters, lr=0.5)
                optimizer.load_state_dict(state)
                assert type(optimizer.state[parameters[0]]["exp_avg"]) is RaggedTensor
            grads = [random(shape, seed=step) for shape in SHAPES]
            for parameter, grad in zip(parameters, distribute_all(grads), strict=True):
                parameter.grad = grad
            optimizer.step()
        results.append([parameter.full_tensor().detach() for parameter in parameters])
    for straight, resumed in zip(*results, strict=True):
        assert torch.equal(straight, resumed)


def test_state_dict_round_trip_continues_the_run() -> None:
    run_ranks(check_state_dict, 2)

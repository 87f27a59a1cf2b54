"""Element-wise operators on ragged tensors give the numbers of the dense ones."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate

from vescale_fsdp import RaggedShard, RaggedTensor
from vescale_fsdp.testing import run_ranks

from .helpers import assert_holds, cuts, distributed, make_mesh, random
from .layouts import counted_collectives

WORLD_SIZES = pytest.mark.parametrize("world_size", [2, 3])

POINTWISE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add": lambda x, y: x + y,
    "add with a factor": lambda x, y: torch.add(x, y, alpha=3),
    "number minus tensor": lambda x, y: 2 - x,
    "mul": lambda x, y: x * y * 0.5,
    "div": lambda x, y: x / y,
    "neg": lambda x, y: -x,
    "abs, sqrt": lambda x, y: x.abs().sqrt(),
    "pow": lambda x, y: x**2,
    "exp": lambda x, y: x.exp(),
    "sign": lambda x, y: x.sign(),
    "sigmoid": lambda x, y: torch.sigmoid(x),
    "clamp": lambda x, y: x.clamp(-0.5, 0.5),
    "maximum": lambda x, y: torch.maximum(x, y),
    "lerp with a number": lambda x, y: torch.lerp(x, y, 0.3),
    "lerp with a tensor": lambda x, y: torch.lerp(x, y, y),
    "addcmul": lambda x, y: torch.addcmul(x, y, y, value=0.1),
    "addcdiv": lambda x, y: torch.addcdiv(x, x, y, value=0.1),
    "compare": lambda x, y: x > y,
    "isfinite": lambda x, y: torch.isfinite(x / (y * 0)),
    "nan_to_num": lambda x, y: torch.nan_to_num(x / 0),
    "where": lambda x, y: torch.where(x > 0, x, y),
    "where with a number": lambda x, y: torch.where(x > 0, x, 0.0),
    "where on the other side": lambda x, y: torch.where(x > y, 1.0, x),
    "masked_fill": lambda x, y: x.masked_fill(y > 0, 2.0),
    "masked_fill by a tensor": lambda x, y: x.masked_fill(y > 0, torch.tensor(2.0)),
    "clamp by tensors": lambda x, y: x.clamp(y - 1, y + 1),
    "equal to a number": lambda x, y: (x > 0) == 1,
    "not equal": lambda x, y: x.round() != y.round(),
    "isclose": lambda x, y: torch.isclose(x, y, atol=0.5),
    "copysign": lambda x, y: torch.copysign(x, y),
    "activations": lambda x, y: torch.relu(x) + torch.nn.functional.hardtanh(y),
    "logical": lambda x, y: (x > 0) & (y < 0),
    "integers": lambda x, y: (x * 8).to(torch.int32) % 3,
    "clone": lambda x, y: x.clone(),
    "clone with a memory format": lambda x, y: x.clone(memory_format=torch.preserve_format),
    "detach": lambda x, y: x.detach(),
    "contiguous": lambda x, y: x.contiguous(),
    "first of two results": lambda x, y: torch.frexp(x)[0],
    "second of two results": lambda x, y: torch.frexp(x)[1],
}

LIKE: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "full_like": lambda x: torch.full_like(x, 2.5),
    "full_like of a dtype": lambda x: torch.full_like(x, 2, dtype=torch.int32),
    "new_zeros of its shape": lambda x: x.new_zeros(x.shape),
    "new_full of its shape": lambda x: x.new_full(x.shape, 3, dtype=torch.int64),
    "zeros_like of a dtype": lambda x: torch.zeros_like(x, dtype=torch.int64),
    "zeros_like of a format": lambda x: torch.zeros_like(x, memory_format=torch.preserve_format),
    "empty_like": lambda x: torch.empty_like(x).fill_(3),
}

CONVERT: dict[str, Callable[[Tensor], Tensor]] = {
    "to": lambda x: x.to(torch.bfloat16),
    "double": lambda x: x.double(),
    "half": lambda x: x.half(),
    "there and back": lambda x: x.bfloat16().float(),
    "bool": lambda x: x.bool(),
    "to a copy of the same": lambda x: x.to(torch.float32, copy=True),
    "promotion": lambda x: x + x.double(),
    "integer by number": lambda x: (x * 9).long() * 0.5,
}

IN_PLACE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "add_": lambda x, y: x.add_(y, alpha=0.3),
    "mul_ by a number": lambda x, y: x.mul_(1.5),
    "div_": lambda x, y: x.div_(y),
    "addcmul_": lambda x, y: x.addcmul_(x, y, value=0.3),
    "addcdiv_": lambda x, y: x.addcdiv_(y, x, value=0.3),
    "lerp_ with a number": lambda x, y: x.lerp_(y, 0.3),
    "lerp_ with a tensor": lambda x, y: x.lerp_(y, y),
    "clamp_": lambda x, y: x.clamp_(max=0.1),
    "zero_": lambda x, y: x.zero_(),
    "fill_": lambda x, y: x.fill_(7),
    "masked_fill_": lambda x, y: x.masked_fill_(y > 0, 2.0),
    "masked_fill_ by a tensor": lambda x, y: x.masked_fill_(y > 0, torch.tensor(2.0)),
    "abs_, eq_": lambda x, y: x.abs_().eq_(y),
    "copy_": lambda x, y: x.copy_(y),
    "copy_ with a cast": lambda x, y: x.copy_(y.double() * 2),
    "out=": lambda x, y: torch.add(x, y, out=x),
}

FOREACH: dict[str, Callable[[list[Tensor], list[Tensor]], object]] = {
    "add": lambda xs, ys: torch._foreach_add(xs, ys, alpha=0.3),
    "add a number": lambda xs, ys: torch._foreach_add(xs, 2.0),
    "mul": lambda xs, ys: torch._foreach_mul(xs, ys),
    "mul by a number": lambda xs, ys: torch._foreach_mul(xs, 1.5),
    "mul by numbers": lambda xs, ys: torch._foreach_mul(xs, [2.0, 3.0]),
    "mul by one tensor": lambda xs, ys: torch._foreach_mul(xs, torch.tensor(0.3)),
    "lerp": lambda xs, ys: torch._foreach_lerp(xs, ys, 0.3),
    "addcdiv": lambda xs, ys: torch._foreach_addcdiv(xs, ys, xs, value=0.3),
    "addcmul with numbers": lambda xs, ys: torch._foreach_addcmul(xs, ys, xs, [0.1, 0.2]),
    "maximum": lambda xs, ys: torch._foreach_maximum(xs, ys),
    "abs": lambda xs, ys: torch._foreach_abs(xs),
}

FOREACH_IN_PLACE: dict[str, Callable[[list[Tensor], list[Tensor]], object]] = {
    "add_": lambda xs, ys: torch._foreach_add_(xs, ys, alpha=0.3),
    "mul_": lambda xs, ys: torch._foreach_mul_(xs, 1.5),
    "mul_ by one tensor": lambda xs, ys: torch._foreach_mul_(xs, torch.tensor(0.3)),
    "lerp_": lambda xs, ys: torch._foreach_lerp_(xs, ys, 0.3),
    "addcdiv_": lambda xs, ys: torch._foreach_addcdiv_(xs, ys, xs, value=0.3),
    "sqrt_": lambda xs, ys: torch._foreach_sqrt_(xs),
    "zero_": lambda xs, ys: torch._foreach_zero_(xs),
    "copy_": lambda xs, ys: torch._foreach_copy_(xs, ys),
}


# --- element by element ---------------------------------------------------------------------------


def check_pointwise() -> None:
    whole_x, whole_y = random(seed=1), random(seed=2)
    for x, y in distributed(whole_x, whole_y):
        with counted_collectives() as collectives:
            for operator in POINTWISE.values():
                operator(x, y)
        assert collectives == []
        for operator in POINTWISE.values():
            assert_holds(operator(x, y), operator(whole_x, whole_y), like=x)


@WORLD_SIZES
def test_pointwise_is_the_dense_result_without_communication(world_size: int) -> None:
    run_ranks(check_pointwise, world_size)


def check_conversions() -> None:
    whole = random()
    for (x,) in distributed(whole):
        for operator in [*LIKE.values(), *CONVERT.values()]:
            assert_holds(operator(x), operator(whole), like=x)
        assert x.to(torch.float32) is x


def check_memory_format() -> None:
    """What ``module.to(memory_format=...)`` does: the global tensor stays row-major."""
    whole = random((2, 3, 4, 4))
    x = RaggedTensor.distribute(whole, make_mesh(), [RaggedShard((0, 1), (1, 5))])
    for memory_format in (torch.channels_last, torch.contiguous_format):
        assert_holds(x.to(memory_format=memory_format), whole, like=x)
        assert_holds(torch.ones_like(x, memory_format=memory_format), whole * 0 + 1, like=x)


def test_memory_format_is_left_as_it_is() -> None:
    run_ranks(check_memory_format, 2)


def check_devices() -> None:
    for (x,) in distributed(random()):
        moved = x.to("meta")
        assert type(moved) is RaggedTensor
        assert moved._local_tensor.device.type == moved.device.type == "meta"
        assert moved.placements == x.placements
        back = torch.empty_like(moved, device="cpu")
        assert back._local_tensor.shape == x._local_tensor.shape
        assert x.cpu() is x
        assert torch.zeros_like(x, device="meta").shape == (6, 16)
        assert (moved * 2 + moved.sum()).shape == (6, 16)  # nothing is sent


def test_moves_between_devices_keep_the_cut() -> None:
    run_ranks(check_devices, 2)


@WORLD_SIZES
def test_tensors_like_it_and_conversions_keep_the_cut(world_size: int) -> None:
    run_ranks(check_conversions, world_size)


def check_in_place() -> None:
    for operator in IN_PLACE.values():
        whole_x, whole_y = random(seed=1), random(seed=2)
        for x, y in distributed(whole_x, whole_y):
            address, local = x._local_tensor.data_ptr(), x._local_tensor
            expected = operator(whole_x.clone(), whole_y)
            assert operator(x, y) is x
            assert_holds(x, expected, like=y)
            assert x._local_tensor is local
            assert local.data_ptr() == address
            assert_holds(y, whole_y, like=y)


@WORLD_SIZES
def test_in_place_writes_to_the_local_part_and_returns_its_tensor(world_size: int) -> None:
    run_ranks(check_in_place, world_size)


# --- lists ----------------------------------------------------------------------------------------


def check_foreach() -> None:
    """Position by position: the first tensors are cut in one way, the second in another."""
    wholes_x = [random(seed=1), random((12, 8), seed=2)]
    wholes_y = [random(seed=3), random((12, 8), seed=4)]
    mesh = make_mesh()
    for pair in product(cuts(), cuts()):

        def distribute(wholes: list[Tensor], pair: tuple[RaggedShard, ...] = pair) -> list[Tensor]:
            both = zip(wholes, pair, strict=True)
            return [RaggedTensor.distribute(whole, mesh, [cut]) for whole, cut in both]

        xs, ys = distribute(wholes_x), distribute(wholes_y)
        for operator in FOREACH.values():
            results, expected = operator(xs, ys), operator(wholes_x, wholes_y)
            for result, whole, x in zip(results, expected, xs, strict=True):
                assert_holds(result, whole, like=x)
        for operator in FOREACH_IN_PLACE.values():
            xs, expected = distribute(wholes_x), [whole.clone() for whole in wholes_x]
            operator(xs, ys)
            operator(expected, wholes_y)
            for x, whole, y in zip(xs, expected, ys, strict=True):
                assert_holds(x, whole, like=y)


@WORLD_SIZES
def test_foreach_is_the_dense_result_for_lists_of_different_cuts(world_size: int) -> None:
    run_ranks(check_foreach, world_size)


def fused_adamw(tensors: list[Tensor], grads: list[Tensor], scale: Tensor | None) -> list[Tensor]:
    """Two steps of the fused kernel; returns parameters and both moments."""
    exp_avgs = [torch.zeros_like(tensor) for tensor in tensors]
    exp_avg_sqs = [torch.zeros_like(tensor) for tensor in tensors]
    steps = [torch.tensor(0.0) for _ in tensors]
    for _ in range(2):
        torch._foreach_add_(steps, 1)
        torch._fused_adamw_(
            tensors,
            [grad.clone() for grad in grads],
            exp_avgs,
            exp_avg_sqs,
            [],
            steps,
            lr=0.1,
            beta1=0.9,
            beta2=0.99,
            weight_decay=0.1,
            eps=1e-8,
            amsgrad=False,
            maximize=False,
            grad_scale=scale,
        )
    return [*tensors, *exp_avgs, *exp_avg_sqs]


def fused_sgd(tensors: list[Tensor], grads: list[Tensor], scale: Tensor | None) -> list[Tensor]:
    momenta = [torch.zeros_like(tensor) for tensor in tensors]
    for step in range(2):
        torch._fused_sgd_(
            tensors,
            [grad.clone() for grad in grads],
            momenta,
            weight_decay=0.1,
            momentum=0.9,
            lr=0.1,
            dampening=0.0,
            nesterov=True,
            maximize=False,
            is_first_step=step == 0,
            grad_scale=scale,
        )
    return [*tensors, *momenta]


def check_fused() -> None:
    wholes = [random(seed=1), random(seed=2)]
    whole_grads = [random(seed=3), random(seed=4)]
    for step, scale in product((fused_adamw, fused_sgd), (None, torch.tensor(4.0))):
        expected = step([whole.clone() for whole in wholes], whole_grads, scale)
        for first, second, first_grad, second_grad in distributed(*wholes, *whole_grads):
            results = step([first, second], [first_grad, second_grad], scale)
            for result, whole in zip(results, expected, strict=True):
                assert_holds(result, whole, like=first_grad)


@WORLD_SIZES
def test_fused_optimizer_kernels_are_the_dense_result(world_size: int) -> None:
    run_ranks(check_fused, world_size)


# --- one-element tensors beside ragged ones -------------------------------------------------------

MIXED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "mul": lambda x, one: x * one,
    "the other way round": lambda x, one: one - x,
    "mul_": lambda x, one: x.clone().mul_(one),
    "addcmul": lambda x, one: torch.addcmul(x, x, one),
    "lerp": lambda x, one: torch.lerp(x, x * 2, one),
    "where": lambda x, one: torch.where(x > one, x, one),
    "maximum": lambda x, one: torch.maximum(x, one),
}


def check_mixed(one: Tensor) -> None:
    whole = random()
    for (x,) in distributed(whole):
        replicated = DTensor.from_local(one, x.device_mesh, [Replicate()], run_check=False)
        for operator in MIXED.values():
            expected = operator(whole, one)
            assert_holds(operator(x, one), expected, like=x)
            assert_holds(operator(x, replicated), expected, like=x)


@WORLD_SIZES
@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_one_element_tensors_mix(world_size: int, shape: tuple[int, ...]) -> None:
    run_ranks(check_mixed, world_size, torch.full(shape, 0.3))


def check_one_element_of_more_dimensions() -> None:
    mesh, owner = make_mesh(), RaggedShard.owner(1, 2)
    scalar = RaggedTensor.distribute(torch.tensor(2.0), mesh, [owner])
    with pytest.raises(ValueError, match="full_tensor"):
        scalar * torch.ones(1)  # dense: shape (1,)
    for (x,) in distributed(random()):
        with pytest.raises(ValueError, match="full_tensor"):
            x * torch.ones(1, 1, 1)  # dense: shape (1, 6, 16)


def test_one_element_tensor_that_adds_a_dimension_is_refused() -> None:
    run_ranks(check_one_element_of_more_dimensions, 2)


def check_scalar_promotion() -> None:
    """A ragged scalar takes part in promotion as a scalar, though its local part has a dim."""
    mesh, owner = make_mesh(), RaggedShard.owner(1, dist.get_world_size())
    whole = torch.tensor(1.5, dtype=torch.bfloat16)
    x = RaggedTensor.distribute(whole, mesh, [owner])
    assert_holds(x * 2.0, whole * 2.0, like=x)
    number = torch.tensor(2.0, dtype=torch.float32)
    assert_holds(x * number, whole * number, like=x)  # bf16 of no dims, fp32 of none: fp32


def test_ragged_scalars_promote_like_dense_ones() -> None:
    run_ranks(check_scalar_promotion, 2)


def check_mixed_lists(one: Tensor) -> None:
    """Optimizer steps, and plain parameters of one element, in lists with ragged tensors."""
    whole = random()
    for (x,) in distributed(whole):
        ragged_result, plain_result = torch._foreach_mul([x, one], [x, one])
        assert_holds(ragged_result, whole * whole, like=x)
        assert type(plain_result) is Tensor
        assert torch.equal(plain_result, one * one)
        (result,) = torch._foreach_mul([x], [one])
        assert_holds(result, whole * one, like=x)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)])
def test_plain_tensors_of_one_element_may_be_in_the_lists(shape: tuple[int, ...]) -> None:
    run_ranks(check_mixed_lists, 2, torch.full(shape, 0.3))


def check_scalars_in_lists() -> None:
    """What clipping does, where the first gradient is that of a scalar."""
    owner, factor = RaggedShard.owner(1, dist.get_world_size()), torch.tensor(0.3)
    wholes = [torch.tensor(2.0), random()]
    for (x,) in distributed(random()):
        scalar = RaggedTensor.distribute(wholes[0], x.device_mesh, [owner])
        both: list[Tensor] = [scalar, x.clone()]
        replicated = DTensor.from_local(factor, x.device_mesh, [Replicate()], run_check=False)
        for one in (factor, replicated):
            for result, whole in zip(torch._foreach_mul(both, one), wholes, strict=True):
                assert torch.equal(result.full_tensor(), whole * factor)
        torch._foreach_mul_(both, factor)
        assert_holds(both[0], wholes[0] * factor, like=scalar)
        assert_holds(both[1], wholes[1] * factor, like=x)


def test_lists_that_begin_with_a_scalar_are_scaled_by_a_tensor() -> None:
    run_ranks(check_scalars_in_lists, 2)

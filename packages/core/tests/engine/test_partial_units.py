"""Units that only some ranks run, in forward, in backward, in the first pass or in later ones.

Each test compares losses and gradients over several steps with those of a plain model, averaged
over the ranks. A hang is cut off after `TIMEOUT_S`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from vescale_fsdp import (
    MixedPrecisionPolicy,
    RankMismatchError,
    fully_shard,
    register_fsdp_forward_method,
)
from vescale_fsdp.testing import run_ranks

from . import partial_models as partial
from .helpers import averaged_gradients, full_gradients, shard_units
from .models import inputs_of, make
from .partial_models import (
    Choice,
    Stack,
    assert_all_released,
    assert_same_gradients,
    plain_loss,
    train_like_plain,
)
from .recorders import Recorder

TIMEOUT_S = 30  # and some more, in which the other ranks may return


def check_training(
    world_size: int,
    choice: Choice,
    model_class: Callable[..., nn.Module] = Stack,
    args: tuple[object, ...] = (),
    options: dict[str, Any] | None = None,
    *more: object,
) -> None:
    run_ranks(
        train_like_plain,
        world_size,
        model_class,
        args,
        choice,
        options or {},
        *more,
        timeout_s=TIMEOUT_S,
    )


# Who runs what


@pytest.mark.parametrize(
    "choice",
    [
        partial.everywhere,
        partial.not_on_rank_0_at_first,
        partial.not_on_rank_0_later,
        partial.none_on_rank_1,
        partial.even_or_odd,
        partial.early_exit,
        partial.one_each,
        partial.at_random,
        partial.at_random_after_all,
        partial.new_on_all,
        partial.new_on_rank_0,
    ],
)
@pytest.mark.sampled(6)
def test_blocks_may_be_left_out_on_any_rank_in_any_step(choice: Choice) -> None:
    check_training(2, choice)


@pytest.mark.parametrize("choice", [partial.at_random, partial.one_each])
@pytest.mark.parametrize("world_size", [3, 4])
def test_blocks_may_be_left_out_on_more_ranks(world_size: int, choice: Choice) -> None:
    check_training(world_size, choice)


def test_blocks_may_run_against_the_order_of_registration() -> None:
    check_training(2, partial.in_reverse_after_all)


@pytest.mark.parametrize("model_class", [partial.Nested, partial.Experts, partial.Embeddings])
@pytest.mark.parametrize("world_size", [2, 3])
def test_nested_units_experts_and_embeddings_may_be_left_out(
    world_size: int, model_class: type[nn.Module]
) -> None:
    is_nested = model_class is partial.Nested
    check_training(
        world_size, partial.parts_at_random if is_nested else partial.at_random, model_class
    )


@pytest.mark.parametrize("choice", [partial.at_random, partial.one_each])
def test_each_rank_may_have_other_heads(choice: Choice) -> None:
    check_training(2, choice, partial.Heads)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("how", ["no_grad", "detached", "unused"])
@pytest.mark.parametrize(
    "choice",
    [
        partial.everywhere,
        partial.at_random,
        partial.even_or_odd,
    ],
)
def test_a_unit_may_get_no_gradient_on_one_rank(how: str, choice: Choice) -> None:
    check_training(2, choice, partial.Ungraded, (how,))


# With which options


@pytest.mark.sampled(4)
@pytest.mark.parametrize("reshard_after_forward", [True, False, None])
@pytest.mark.parametrize("in_flight", [1, 2, 4])
def test_whatever_is_kept_and_prefetched(
    in_flight: int, reshard_after_forward: bool | None
) -> None:
    options = {"in_flight": in_flight, "reshard_after_forward": reshard_after_forward}
    check_training(2, partial.parts_at_random, partial.Nested, (), options)


@pytest.mark.parametrize("in_flight", [1, 4])
def test_with_parts_kept_on_neighbours(in_flight: int) -> None:
    options = {"reshard_after_forward": 2, "in_flight": in_flight}
    check_training(4, partial.at_random, Stack, (), options)


def test_without_asking_for_unused_parameters() -> None:
    check_training(2, partial.at_random, Stack, (), {"unused": "zeros"})


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize(
    ("model_class", "args"),
    [
        (partial.Recomputed, (False,)),
        (partial.Recomputed, (True,)),
        (partial.RecomputingBlocks, ()),
    ],
)
def test_with_activation_checkpointing(
    model_class: type[nn.Module], args: tuple[object, ...], in_flight: int
) -> None:
    check_training(2, partial.at_random, model_class, args, {"in_flight": in_flight})


@pytest.mark.parametrize("choice", [partial.at_random, partial.one_each])
def test_with_gradient_accumulation(choice: Choice) -> None:
    check_training(2, choice, Stack, (), {}, 3, 3)


@pytest.mark.parametrize(
    ("mode", "reshard_after_forward"), [(torch.no_grad, None), (torch.inference_mode, False)]
)
@pytest.mark.parametrize("choice", [partial.at_random, partial.not_on_rank_0_later])
def test_in_evaluation_too(
    choice: Choice, mode: Callable[[], Any], reshard_after_forward: bool | None
) -> None:
    options = {"reshard_after_forward": reshard_after_forward}
    check_training(2, choice, Stack, (), options, 4, 1, mode)


def freeze_some(model: nn.Module) -> None:
    model.blocks[0].requires_grad_(False)
    model.blocks[2].inner.bias.requires_grad_(False)


def test_with_frozen_blocks() -> None:
    check_training(2, partial.at_random, Stack, (), {}, 4, 1, None, freeze_some)


def train_in_grid(choice: Choice, options: dict[str, Any], num_micro_batches: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    train_like_plain(Stack, (), choice, {**options, "mesh": mesh}, 4, num_micro_batches)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("options", [{}, {"in_flight": 1, "reshard_after_forward": False}])
@pytest.mark.parametrize("num_micro_batches", [1, 2])
def test_with_replicas(options: dict[str, Any], num_micro_batches: int) -> None:
    run_ranks(train_in_grid, 4, partial.at_random, options, num_micro_batches, timeout_s=TIMEOUT_S)


def train_in_bf16() -> None:
    """The plain model has the rounded weights, and fp32 gradients are averaged."""
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    sharded, plain = make(Stack), make(Stack).to(torch.bfloat16)
    shard_units(sharded, sharded.units, mp_policy=policy)
    rank = dist.get_rank()
    for step in range(3):
        x, chosen = inputs_of(step, rank), partial.at_random(step, rank)
        losses = [model(x.bfloat16(), chosen).sum() for model in (plain, sharded)]
        assert torch.equal(*losses)
        for loss in losses:
            loss.backward()
        wide = make(Stack)  # the plain gradients in fp32
        for parameter, rounded in zip(wide.parameters(), plain.parameters(), strict=True):
            parameter.grad = None if rounded.grad is None else rounded.grad.float()
        assert_same_gradients(full_gradients(sharded), averaged_gradients(wide))
        plain.zero_grad()
        sharded.zero_grad()


def test_in_mixed_precision() -> None:
    run_ranks(train_in_bf16, 2, timeout_s=TIMEOUT_S)


# Passes of other kinds


def several_forwards() -> None:
    """Two forwards before one backward, and one more that nobody uses."""
    sharded, plain = make(Stack), make(Stack)
    shard_units(sharded, sharded.units)
    rank = dist.get_rank()
    for step in range(3):
        chosen = partial.at_random(step, rank)
        losses = []
        for model in (plain, sharded):
            model.zero_grad()
            plain_loss(model, step + 40, partial.at_random)
            found = [model(inputs_of(step + more, rank), chosen) for more in (0, 20)]
            losses.append((found[0] * found[1]).mean())
        torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=1e-6)
        for loss in losses:
            loss.backward()
        assert_same_gradients(full_gradients(sharded), averaged_gradients(plain))
        assert_all_released(sharded)


def test_several_forwards_before_a_backward() -> None:
    run_ranks(several_forwards, 2, timeout_s=TIMEOUT_S)


class WithMethod(Stack):
    def training_step(self, step: int) -> Tensor:
        rank = dist.get_rank()
        return self(inputs_of(step, rank), partial.at_random(step, rank)).square().mean()


def train_by_method() -> None:
    sharded, plain = make(WithMethod), make(WithMethod)
    shard_units(sharded, sharded.units)
    register_fsdp_forward_method(sharded, "training_step")
    for step in range(3):
        for model in (plain, sharded):
            model.zero_grad()
            model.training_step(step).backward()
        assert_same_gradients(full_gradients(sharded), averaged_gradients(plain))


def test_inside_of_a_registered_method() -> None:
    run_ranks(train_by_method, 2, timeout_s=TIMEOUT_S)


def two_roots(in_one_backward: bool) -> str:
    """Two sharded models side by side: "right", or that ranks disagree."""
    pairs = [(make(Stack), make(Stack, seed=1)) for _ in range(2)]
    for model in pairs[1]:
        shard_units(model, model.units)
    for step in range(3):
        for pair in pairs:
            losses = []
            for model, choice in zip(pair, (partial.at_random, partial.even_or_odd), strict=True):
                model.zero_grad()
                losses.append(plain_loss(model, step, choice))
            try:
                for loss in [losses[0] + losses[1]] if in_one_backward else losses:
                    loss.backward()
            except RankMismatchError as error:
                return str(error)
        for plain, sharded in zip(*pairs, strict=True):
            assert_same_gradients(full_gradients(sharded), averaged_gradients(plain))
    return "right"


def test_in_two_roots_of_one_step() -> None:
    assert run_ranks(two_roots, 2, False, timeout_s=TIMEOUT_S) == ["right"] * 2


def test_two_roots_of_one_backward_are_right_or_an_error_on_all_ranks() -> None:
    # Ranks that leave the first root at different times would have to settle an order of both.
    for found in run_ranks(two_roots, 2, True, timeout_s=TIMEOUT_S):
        assert found == "right" or found.startswith("ranks disagree about the next step")


def break_off_and_go_on() -> None:
    """All ranks meet an exception in a step in which they run other units, then go on."""
    sharded, plain = make(Stack), make(Stack)
    shard_units(sharded, sharded.units)
    for step in range(4):
        if step % 2 == 0:
            handle = sharded.last.register_forward_pre_hook(_raise)
            with pytest.raises(ArithmeticError):
                plain_loss(sharded, step, partial.at_random)
            handle.remove()
        for model in (plain, sharded):
            model.zero_grad()
            plain_loss(model, step, partial.at_random).backward()
        assert_same_gradients(full_gradients(sharded), averaged_gradients(plain))


def _raise(*_: object) -> None:
    raise ArithmeticError("the user's own")


def test_after_an_exception_in_forward() -> None:
    run_ranks(break_off_and_go_on, 2, timeout_s=TIMEOUT_S)


class Pair(nn.Module):
    """Two layers that are one unit; a rank may run only one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.a, self.b = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)

    def forward(self, x: Tensor, chosen: Sequence[int]) -> Tensor:
        x = torch.tanh(self.first(x))
        for layer in (self.a, self.b)[: 2 if 0 in chosen else 1]:
            x = torch.tanh(layer(x))
        return x


def train_lists() -> None:
    plain, sharded = make(Pair), make(Pair)
    fully_shard([sharded.a, sharded.b])
    fully_shard(sharded)
    for step in range(5):
        with torch.no_grad():
            plain_loss(sharded, step, partial.at_random)
        for model in (plain, sharded):
            model.zero_grad()
            plain_loss(model, step, partial.at_random).backward()
        assert_same_gradients(full_gradients(sharded), averaged_gradients(plain))


def test_one_module_of_a_list_may_be_left_out() -> None:
    run_ranks(train_lists, 2, timeout_s=TIMEOUT_S)


# What it costs, and what is an error


def collectives_of_a_step(choice: Choice) -> tuple[list[str], list[str]]:
    """Gathers, and reductions. Each has a communicator, and so an order, of its own."""
    model = make(Stack)
    shard_units(model, model.units)
    for step in range(3):
        with Recorder() as recorder:
            plain_loss(model, step, choice).backward()
        model.zero_grad()
    gathers = [event.name for event in recorder.events if event.is_gather]
    return gathers, [event.name for event in recorder.events if event.is_reduction]


@pytest.mark.usefixtures("each_alone")
def test_ranks_issue_the_same_collectives_whatever_they_run() -> None:
    first, second = run_ranks(collectives_of_a_step, 2, partial.even_or_odd, timeout_s=TIMEOUT_S)
    assert first == second
    # 5 gathers in forward, 4 in backward (the root is kept), and 5 reductions. Nobody asks which
    # parameters were used: between them the ranks have used all.
    assert list(map(len, first)) == [9, 5]


class Ordered(Stack):
    """Runs the blocks in the order that is given for its rank."""

    def __init__(self, orders: Sequence[Sequence[int]]) -> None:
        super().__init__()
        self.orders = orders

    def forward(self, x: Tensor, chosen: Sequence[int]) -> Tensor:
        return super().forward(x, self.orders[dist.get_rank()])


def disagree(orders: Sequence[Sequence[int]], pattern: str) -> float:
    """Seconds until this rank is told."""
    model = make(Ordered, orders)
    shard_units(model, model.units)
    begin = time.monotonic()
    with pytest.raises(RankMismatchError, match=pattern):
        plain_loss(model, 0, partial.everywhere).backward()
    return time.monotonic() - begin


@pytest.mark.parametrize("orders", [[(0, 1), (1, 0)], [(0, 1, 2, 3), (0, 3, 2, 1)]])
def test_units_in_opposite_order_are_an_error_on_all_ranks(orders: list[Sequence[int]]) -> None:
    pattern = r"ranks disagree about the next step: .*blocks\.\d"
    assert max(run_ranks(disagree, 2, orders, pattern, timeout_s=TIMEOUT_S)) < TIMEOUT_S

"""Units that only some ranks run, in forward, in backward, in the first pass or in later ones.

Each case trains beside a plain model on the same ranks, and compares losses and the averaged
gradients. `fuzz` draws more such models, and `test_ranks` runs thousands without torch.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import product
from typing import Any
from unittest.mock import patch

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
from vescale_fsdp.testing import assert_equal_across_ranks, run_ranks

from .. import partial_models as partial
from ..helpers import averaged_gradients, full_gradients, shard_units
from ..models import inputs_of, make
from ..partial_models import (
    Choice,
    Stack,
    assert_all_released,
    assert_same_gradients,
    plain_loss,
    train_like_plain,
)
from ..recorders import Recorder
from .asking import Answers, Case, Cases, Outcomes, answer, named, sampled

TIMEOUT_S = 30  # and some more, in which the other ranks may return


def trains(
    choice: Choice,
    model_class: Callable[..., nn.Module] = Stack,
    *args: object,
    ranks: int = 2,
    more: Sequence[object] = (),
    **options: Any,
) -> Case:
    """Training of a model whose blocks are chosen by step and rank."""
    return Case(
        lambda: train_like_plain(model_class, args, choice, options, *more),
        ranks=ranks,
        is_nightly=ranks == 4,
    )


def who_runs_what() -> Cases:
    choices = [
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
    ]
    found = sampled(6, {each.__name__: trains(each) for each in choices})
    found["in_reverse_after_all"] = trains(partial.in_reverse_after_all)
    for choice, ranks in product((partial.at_random, partial.one_each), (3, 4)):
        found[f"{choice.__name__}, {ranks} ranks"] = trains(choice, ranks=ranks)
    for kind, ranks in product((partial.Nested, partial.Experts, partial.Embeddings), (2, 3)):
        choice = partial.parts_at_random if kind is partial.Nested else partial.at_random
        case = trains(choice, kind, ranks=ranks)
        found[f"{kind.__name__}, {ranks} ranks"] = replace(case, is_nightly=ranks == 2)
    for choice in (partial.at_random, partial.one_each):
        found[f"other heads, {choice.__name__}"] = trains(choice, partial.Heads)
    # Blocks that run, and get no gradient on one rank
    choices = [partial.everywhere, partial.at_random, partial.even_or_odd]
    return found | sampled(
        4,
        {
            f"{how}, {choice.__name__}": trains(choice, partial.Ungraded, how)
            for choice, how in product(choices, ("no_grad", "detached", "unused"))
        },
    )


def freeze_some(model: nn.Module) -> None:
    model.blocks[0].requires_grad_(False)
    model.blocks[2].inner.bias.requires_grad_(False)


def trains_in_grid(num_micro_batches: int, **options: Any) -> Case:
    def ask() -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        sharded_in = {**options, "mesh": mesh}
        train_like_plain(Stack, (), partial.at_random, sharded_in, 4, num_micro_batches)

    return Case(ask, ranks=4)


def with_options() -> Cases:
    found = sampled(
        4,
        {
            f"{in_flight} in flight, reshard {reshard}": trains(
                partial.parts_at_random,
                partial.Nested,
                in_flight=in_flight,
                reshard_after_forward=reshard,
            )
            for in_flight, reshard in product((1, 2, 4), (True, False, None))
        },
    )
    for in_flight in (1, 4):
        kept = {"reshard_after_forward": 2, "in_flight": in_flight}
        found[f"parts on neighbours, {in_flight} in flight"] = Case(
            lambda kept=kept: train_like_plain(Stack, (), partial.at_random, kept), ranks=4
        )
    found["zeros for what is unused"] = trains(partial.at_random, unused="zeros")
    models: list[tuple[Any, ...]] = [
        (partial.Recomputed, False),
        (partial.Recomputed, True),
        (partial.RecomputingBlocks,),
    ]
    found |= sampled(
        3,
        {
            f"{kind.__name__}{args}, {in_flight} in flight": trains(
                partial.at_random, kind, *args, in_flight=in_flight
            )
            for in_flight, (kind, *args) in product((1, 2), models)
        },
    )
    for choice in (partial.at_random, partial.one_each):
        found[f"micro-batches, {choice.__name__}"] = trains(choice, more=(3, 3))
    for choice in (partial.at_random, partial.not_on_rank_0_later):
        for mode, reshard in ((torch.no_grad, None), (torch.inference_mode, False)):
            found[f"evaluation in {mode.__name__}, {choice.__name__}"] = trains(
                choice, more=(4, 1, mode), reshard_after_forward=reshard
            )
    found["frozen blocks"] = trains(partial.at_random, more=(4, 1, None, freeze_some))
    options = [{}, {"in_flight": 1, "reshard_after_forward": False}]
    grid = product((1, 2), options)
    replicas = {f"replicas, {n} micro-batches, {o}": trains_in_grid(n, **o) for n, o in grid}
    found |= sampled(2, replicas)
    found["mixed precision"] = Case(train_in_bf16)
    return found


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


def two_roots(in_one_backward: bool = False) -> str:
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


def two_roots_are_right() -> None:
    assert two_roots() == "right"


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


def collectives_of_a_step() -> None:
    """Gathers, and reductions. Each has a communicator, and so an order, of its own."""
    with patch.dict(os.environ, VESCALE_FSDP_SMALL_BYTES="0"):
        model = make(Stack)
        shard_units(model, model.units)
        for step in range(3):
            with Recorder() as recorder:
                plain_loss(model, step, partial.even_or_odd).backward()
            model.zero_grad()
    gathers = [event.name for event in recorder.events if event.is_gather]
    reductions = [event.name for event in recorder.events if event.is_reduction]
    assert_equal_across_ranks([gathers, reductions])
    # 5 gathers in forward, 4 in backward (the root is kept), and 5 reductions. Nobody asks which
    # parameters were used: between them the ranks have used all.
    assert [len(gathers), len(reductions)] == [9, 5]


# Units whose forward runs again in backward, or whose place in an order is odd

Where = Callable[[int, int], bool]  # of step and rank: whether it leaves the unit out


def rank_0(step: int, rank: int) -> bool:
    return rank == 0


def rank_0_later(step: int, rank: int) -> bool:
    return rank == 0 and step > 0


def in_turn(step: int, rank: int) -> bool:
    return (step + rank) % 2 == 0


# How the forwards and backwards of a step follow
ORDERS = {
    "one": ("one",) * 4,
    "sum": ("sum",) * 4,
    "mixed": ("two", "sum", "two", "sum"),
    "crossed": ("crossed", "one", "sum", "crossed"),
}
RUN_AGAIN = [
    partial.Stretch,
    partial.ReentrantStretch,
    partial.InsideOfStretch,
    partial.NestedCheckpoints,
]


def run_backward(outputs: list[Tensor], order: str) -> None:
    if order in ("one", "sum"):
        torch.stack(outputs).sum().backward()
    else:  # "two", or with the last forward first: "crossed"
        for output in outputs[:: -1 if order == "crossed" else 1]:
            output.sum().backward()


def pair_of(model_class: type[nn.Module], *args: object) -> tuple[Any, Any]:
    plain = make(model_class, *args).double()
    return plain, copy.deepcopy(plain)


def compare_and_clear(plain: nn.Module, model: nn.Module, when: str) -> None:
    """The averaged gradients; of what is frozen there are none."""
    found = full_gradients(model)
    for name, gradient in averaged_gradients(plain).items():
        if plain.get_parameter(name).requires_grad:
            torch.testing.assert_close(
                found[name], gradient, msg=lambda m, where=f"{when}: {name}": f"{where} {m}"
            )
    plain.zero_grad()
    model.zero_grad()


def leave_out(
    model_class: type[nn.Module], where: Where, order: str, reshard: bool | None = None
) -> None:
    plain, model = pair_of(model_class)
    shard_units(model, model.units, reshard_after_forward=reshard)
    rank = dist.get_rank()
    for step, each_order in enumerate(ORDERS[order]):
        x = torch.full((2, 4), 0.1 * (step + 1) * (rank + 1), dtype=torch.double)
        for each in (plain, model):
            inputs = x.clone().requires_grad_()
            num_forwards = 1 if each_order == "one" else 2
            outputs = [each(inputs, where(step, rank)) for _ in range(num_forwards)]
            run_backward(outputs, each_order)
        compare_and_clear(plain, model, f"step {step}")


def leave_out_in_second_backwards(
    model_class: type[nn.Module], shard: Callable[[Any], None]
) -> None:
    """The loss is taken twice from one graph, as a GAN's or a meta-learner's.

    The second backward gathers what was kept for the first, on one rank alone, and waits for all
    modules of a unit.
    """
    plain, model = pair_of(model_class)
    shard(model)
    fully_shard(model, reshard_after_forward=False)
    x = torch.ones(2, 4, dtype=torch.double, requires_grad=True)
    for step in range(4):
        leaves_out = step == 0 or in_turn(step, dist.get_rank())
        for each in (plain, model):
            loss = each(x, leaves_out).square().sum()
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=model_class is partial.Twins)
        del loss
        compare_and_clear(plain, model, f"step {step}")


def shard_a(model: Any) -> None:
    fully_shard(model.a, reshard_after_forward=False)


def shard_twins(model: Any) -> None:
    fully_shard(model.between, reshard_after_forward=False)
    fully_shard([model.one, model.other], reshard_after_forward=False)


def leave_out_before_a_frozen_unit() -> None:
    plain, model = pair_of(partial.FrozenBehind)
    shard_units(model, [model.first, model.frozen, model.last], reshard_after_forward=True)
    x, rank = torch.ones(2, 4, dtype=torch.double), dist.get_rank()
    for step in range(4):
        leaves_out, skips_frozen = (step + rank) % 2 == 1, rank == 0 and step == 0
        for each in (plain, model):
            each(x, leaves_out, skips_frozen).square().sum().backward()
        compare_and_clear(plain, model, f"step {step}")


def run_again_without_parameters(reentrant: bool) -> None:
    plain = make(partial.EmptyBetween, reentrant)
    model: Any = copy.deepcopy(plain)
    shard_units(model, model.layers)
    for step in range(3):
        for each in (plain, model):
            each(torch.ones(2, 4, requires_grad=True)).sum().backward()
        compare_and_clear(plain, model, f"step {step}")


def unshard_and_leave_out() -> None:
    """Both ranks unshard a unit by hand, and one runs it."""
    model = nn.Sequential(partial.layer(), partial.layer())
    shard_units(model, model[:1])
    for step in range(3):
        model[0].unshard()
        x = torch.ones(2, 4)
        skips = dist.get_rank() == step % 2
        model.forward = lambda x, skips=skips: model[1](x if skips else model[0](x))  # type: ignore[method-assign,misc]
        model(x).sum().backward()
        with torch.no_grad():
            model(x)


def left_out(kinds: list[type[nn.Module]], wheres: list[Where], orders: list[str]) -> Cases:
    return {
        f"{kind.__name__}, {where.__name__}, {order}": Case(
            lambda kind=kind, where=where, order=order: leave_out(kind, where, order)
        )
        for kind, where, order in product(kinds, wheres, orders)
    }


def other_passes() -> Cases:
    wheres = [rank_0, rank_0_later, in_turn]
    all_kinds = [*RUN_AGAIN, partial.EmptyRoot, partial.EmptyAround]
    found = sampled(9, left_out(all_kinds, wheres, ["one"]))
    found |= sampled(3, left_out(RUN_AGAIN, wheres, ["sum"]))
    for kind, where in product(RUN_AGAIN, wheres):
        found[f"{kind.__name__}, {where.__name__}, sum, kept"] = Case(
            lambda kind=kind, where=where: leave_out(kind, where, "sum", False), is_nightly=True
        )
    found |= sampled(3, left_out(RUN_AGAIN, [rank_0, in_turn], ["mixed", "crossed"]))
    for ask in (
        several_forwards,
        train_by_method,
        two_roots_are_right,
        train_lists,
        collectives_of_a_step,
        leave_out_before_a_frozen_unit,
        unshard_and_leave_out,
    ):
        found[ask.__name__] = Case(ask)
    found |= {
        "second backwards": Case(lambda: leave_out_in_second_backwards(partial.EmptyRoot, shard_a)),
        "second backwards of a list": Case(
            lambda: leave_out_in_second_backwards(partial.Twins, shard_twins)
        ),
    }
    for reentrant in (False, True):
        found[f"without parameters, reentrant {reentrant}"] = Case(
            lambda reentrant=reentrant: run_again_without_parameters(reentrant)
        )
    return found


CASES = who_runs_what() | with_options() | other_passes()


def answers(*names: str) -> Answers:
    return answer(CASES, names)


@pytest.mark.parametrize("name", named(CASES))
def test_gradients_are_those_of_a_plain_model(outcomes: Outcomes, name: str) -> None:
    outcomes.check(name)


# What is an error


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
    # With ranks of its own: they compare all collectives that they have issued so far.
    run_ranks(break_off_and_go_on, 2, timeout_s=TIMEOUT_S)


def test_two_roots_of_one_backward_are_right_or_an_error_on_all_ranks() -> None:
    # Ranks that leave the first root at different times would have to settle an order of both.
    for found in run_ranks(two_roots, 2, True, timeout_s=TIMEOUT_S):
        assert found == "right" or found.startswith("ranks disagree about the next step")


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

"""Frozen parameters and units: what is before them and in them trains, and the input, too.

They are frozen and unfrozen between steps, while gradients wait, between passes, and with other
reductions.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from itertools import product
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from vescale_fsdp import QuantizedReduce, clip_grad_norm_, fully_shard
from vescale_fsdp.engine.quantized import ErrorFeedback
from vescale_fsdp.optim import flatten_

from ..frozen_models import (
    MLP,
    Plan,
    check_gradients,
    inputs,
    is_any,
    is_bias,
    made,
    not_first,
    set_trainable,
    sharded,
)
from ..frozen_models import backward as backward_of
from ..helpers import assert_bit_equal, full_gradients, full_parameters
from .asking import (
    WIDTH,
    Answers,
    Block,
    Case,
    Cases,
    Net,
    Outcomes,
    answer,
    as_one_process,
    backward,
    batch,
    check_models,
    check_rests,
    in_settings,
    is_sharded,
    named,
    pair,
    part,
    squares,
)

Choose = Callable[[Any], Iterator[nn.Module]]
FROZEN: dict[str, Choose] = {
    "all units": lambda model: iter(model.blocks),
    "the first units": lambda model: iter(model.blocks[:2]),
    "a unit in the middle": lambda model: iter(model.blocks[1:2]),
    "a part of each unit": lambda model: (block.a for block in model.blocks),
    "the root's": lambda model: iter([model.head]),
    "all but the first unit": lambda model: iter([*model.blocks[1:], model.head]),
}


def freezing(choose: Choose) -> Callable[[], Net]:
    def make() -> Net:
        model = Net()
        for module in choose(model):
            module.requires_grad_(False)
        return model

    return make


class Adapted(nn.Module):
    """A frozen layer with a product of two thin matrices beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(0.1 * torch.randn(2, WIDTH))
        self.up = nn.Parameter(0.1 * torch.randn(WIDTH, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + x @ self.down.T @ self.up.T


class AdaptedBlock(Block):
    """Begins and ends with what is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.norm.requires_grad_(False)
        self.a = Adapted(self.a)  # type: ignore[assignment]
        self.b.requires_grad_(False)


def with_input(model: Any, x: Tensor) -> Tensor:
    """The gradient by a row does not depend on how many there are."""
    x = x.clone().requires_grad_()
    squares(model, x).backward()
    assert x.grad is not None
    return x.grad * len(x)


def compiled(model: Any, x: Tensor) -> None:
    if is_sharded(model):
        for block in model.blocks:
            block.compile(backend="aot_eager")
    backward(model, x)


class Generator(Net):
    """As wide as what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)


def toggled() -> None:
    """A unit is frozen in every second step."""
    plain, model = pair()
    for step in range(4):
        for each, x in ((plain, batch(step)), (model, part(batch(step)))):
            each.blocks[1].requires_grad_(step % 2 == 0)
            each.zero_grad()
            backward(each, x)
        check_models(plain, model, f"step {step}")
        check_rests(model)


def adversaries() -> None:
    """One learns through the other, which is frozen meanwhile and then learns itself."""
    generators, critics = pair(Generator), pair(Net)
    for step in range(3):
        x = batch(step)
        for generator, critic, rows in zip(generators, critics, (x, part(x)), strict=True):
            for model in (generator, critic):
                model.zero_grad()
            critic.requires_grad_(False)
            critic(generator(rows)).mean().backward()
            critic.requires_grad_(True)
            made = generator(rows).detach()
            (critic(made).square().mean() + critic(rows).mean()).backward()
        for plain, model in (generators, critics):
            check_models(plain, model, f"step {step}")
        check_rests(critics[1])


def without_gradients(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    """Two evaluations, a write, an evaluation, and a step."""
    plain, model = pair()
    x = batch(0)
    for each, rows in ((plain, x), (model, part(x))):
        each.eval()
        found = []
        for _ in range(2):
            with mode():
                found.append(each(rows).clone())
        with torch.no_grad():
            for param in each.parameters():
                param.mul_(1.5)
        with mode():
            found.append(each(rows).clone())
        if each is plain:
            expected = found
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, part(other))
    check_rests(model)
    for each, rows in ((plain, batch(1)), (model, part(batch(1)))):
        backward(each.train(), rows)
    check_models(plain, model)


# Frozen and unfrozen between steps


def steps_with(options: dict[str, Any], shape: tuple[int, ...] = ()) -> None:
    """Biases, then other parts, then all: gradients of each step are those of a plain model."""
    if shape:
        options = options | {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=("a", "b"))}
    plain = made(5)
    model = sharded(copy.deepcopy(plain), **options)
    plans: list[Plan] = [
        is_any,
        is_bias,
        is_bias,
        lambda n: "in_proj" in n and n[0] != "1",
        lambda n: n == "2.out_proj.weight",
        is_any,
    ]
    for step, plan in enumerate(plans):
        for each in (plain, model):
            set_trainable(each, plan)
            each.zero_grad()
            each(inputs(step, 5)).square().sum().backward()
        check_gradients(model, plain)


def zeros_for_unused() -> None:
    """With zeros for what no rank has used: frozen parameters get nothing all the same."""
    model = sharded(made(5), unused="zeros")
    set_trainable(model, is_bias)
    model(inputs(0, 5)).sum().backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == {
        n for n, _ in model.named_parameters() if is_bias(n)
    }


# While gradients wait

PLANS: list[list[Plan]] = [
    [is_any, is_bias, is_any],
    [is_bias, is_any, is_bias],
    [is_bias, not_first, lambda _: False],
    [not_first, is_any, lambda name: not name.startswith("0")],  # a whole group
]


def wait(options: dict[str, Any]) -> None:
    """Three micro-batches, of which the last is reduced; then one step more."""
    for plans in PLANS:
        plain = made(5)
        model = sharded(copy.deepcopy(plain), **options)
        for step, plan in enumerate([*plans, plans[0]]):
            is_last, bits = step >= 2, "sharding" not in options
            model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
            if step == 3:
                check_gradients(model, plain, bits)
                plain.zero_grad()
                model.zero_grad()
            for each in (plain, model):
                set_trainable(each, plan)
                if any(p.requires_grad for p in each.parameters()):
                    backward_of(each, step)
            if step == 2 and not any(p.requires_grad for p in model.parameters()):
                for param in model.parameters():  # nothing has run a backward that reduces
                    param.requires_grad_(True)
                (model(inputs(9, 5)).sum() * 0).backward()
                for param in plain.parameters():
                    param.grad = torch.zeros_like(param) if param.grad is None else param.grad
        check_gradients(model, plain, bits)


def wait_for_replicas(sharding: str) -> None:
    """Gradients that were reduced in each replica wait for the sum over the replicas."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for plans in (*PLANS[:2], PLANS[3]):
        plain = made(5)
        model = sharded(copy.deepcopy(plain), mesh=mesh, sharding=sharding)
        for step, plan in enumerate(plans):
            model.set_requires_all_reduce(step == 2)  # type: ignore[operator]
            for each in (plain, model):
                set_trainable(each, plan)
                backward_of(each, step)
        check_gradients(model, plain)


class Skips(nn.Module):
    """Of which some ranks leave out a part."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = MLP(5), MLP(5)

    def forward(self, x: Tensor, skips: bool) -> Tensor:
        return self.b(x if skips else self.a(x))


def wait_on_one_rank() -> None:
    torch.manual_seed(0)
    plain = Skips()
    model = copy.deepcopy(plain)
    for mlp in (model.a, model.b):
        fully_shard(mlp)
    fully_shard(model)
    for step, plan in enumerate((is_any, lambda name: name != "a.in_proj.weight")):
        model.set_requires_gradient_sync(step == 1)  # type: ignore[operator]
        for each in (plain, model):
            set_trainable(each, plan)
            each(inputs(step, 5), step == 0 and dist.get_rank() == 1).square().sum().backward()
    check_gradients(model, plain)
    assert model.a.in_proj.weight.grad is not None


# Between passes


def between_forwards(options: dict[str, Any]) -> None:
    """A part is frozen for the second of two forwards only, as a discriminator may be."""
    plain = made(5)
    model = sharded(copy.deepcopy(plain), **options)
    for step in range(3):
        for each in (plain, model):
            each.zero_grad()
            first = each(inputs(step, 5))
            set_trainable(each, not_first)
            second = each(first)
            set_trainable(each, is_any)
            (first.sum() + second.square().sum()).backward()
        check_gradients(model, plain)


def before_backward(options: dict[str, Any]) -> None:
    """What is frozen between forward and backward gets no gradient, as autograd has it."""
    plain = made(5)
    model = sharded(copy.deepcopy(plain), **options)
    for step in range(2):
        for each in (plain, model):
            each.zero_grad()
            set_trainable(each, is_any)
            loss = each(inputs(step, 5)).square().sum()
            set_trainable(each, not_first)
            loss.backward()
        check_gradients(model, plain)
        for each in (plain, model):  # and what was frozen then gets some, without a step between
            each.zero_grad()
            set_trainable(each, is_any)
            backward_of(each, step)
        check_gradients(model, plain)


def without_unsharding() -> None:
    """As `between_forwards`, of a unit whose backward needs no weights."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Embedding(6, 4), nn.Linear(4, 4))
    model = copy.deepcopy(plain)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    model[0].set_unshard_in_backward(False)
    tokens = torch.arange(6)
    for _ in range(2):
        for each in (plain, model):
            each.zero_grad()
            first = each(tokens)
            set_trainable(each, lambda name: name != "0.weight")
            second = each(tokens)
            set_trainable(each, is_any)
            (first.sum() + second.square().sum()).backward()
        check_gradients(model, plain)


def between_passes() -> None:
    without_unsharding()
    for options in ({}, {"reshard_after_forward": False}, {"sharding": "zero1"}):
        between_forwards(options)
        before_backward(options)


class Step(nn.Module):
    """Whose forward is a whole step, as Lightning's ``training_step`` is."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, step: int) -> None:
        for plan in (is_bias, not_first):
            set_trainable(self.model, plan)
            backward_of(self.model, step)


def inside_of_a_forward() -> None:
    plain = Step(made(5))
    model = copy.deepcopy(plain)
    for mlp in model.model:  # type: ignore[union-attr]
        fully_shard(mlp)
    fully_shard(model)
    for step in range(3):
        for each in (plain, model):
            each.zero_grad()
            each(step)
        check_gradients(model, plain)


# Other ways to reduce, optimizers, copies


def reduced(freeze_first: bool, world: int, options: dict[str, Any], steps: int = 4) -> Any:
    """Gradients of steps in which only weights of out_proj are trainable."""
    torch.manual_seed(0)
    model = made(16)

    def wanted(name: str) -> bool:
        return name.endswith("out_proj.weight")

    if freeze_first:
        set_trainable(model, wanted)
    sharded(model, **options)
    set_trainable(model, wanted)
    found = []
    for step in range(steps):
        model.zero_grad()
        model(inputs(step, 16)).square().sum().backward()
        found.append(full_gradients(model))
    return found, {n: e.clone() for n, e in ErrorFeedback(model).tensors().items()}


def in_eight_bits(options: dict[str, Any]) -> None:
    world = dist.get_world_size()
    (late, late_errors), (early, early_errors) = (
        reduced(first, world, options) for first in (False, True)
    )
    for ours, expected in zip(late, early, strict=True):
        assert_bit_equal(ours, expected)
    names = {name for name in early_errors if name.endswith("out_proj.weight")}
    assert set(late_errors) == names
    assert_bit_equal(
        {n: late_errors[n] for n in sorted(names)}, {n: early_errors[n] for n in sorted(names)}
    )


def eight_bit_options(error_feedback: bool) -> dict[str, Any]:
    reduce = QuantizedReduce(block=32, error_feedback=error_feedback)
    return {"reduce_codec": reduce}


def errors_follow() -> None:
    """What rounding has taken stays with its tensor when the others come and go."""
    model = sharded(made(16), **eight_bit_options(True))
    model(inputs(0, 16)).square().sum().backward()
    before = {n: e.clone() for n, e in ErrorFeedback(model).tensors().items()}

    def settled(plan: Plan) -> dict[str, Tensor]:
        set_trainable(model, plan)
        for mlp in model:
            for group in mlp._unit().groups:  # type: ignore[operator]
                group.gradients.settle(waits=False)
        return {n: e.clone() for n, e in ErrorFeedback(model).tensors().items()}

    some = settled(not_first)
    assert_bit_equal(dict(some), {n: before[n] for n in some})
    assert set(before) - set(some) == {"0.in_proj.weight"} & set(before)
    back = settled(is_any)
    for name, error in back.items():
        assert torch.equal(error, before[name] if name in some else torch.zeros_like(error))


def in_other_dtypes() -> None:
    for options in (
        {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
        {"mp_policy": MixedPrecisionPolicy(torch.float32, torch.bfloat16)},
    ):
        (late, _), (early, _) = (reduced(first, 2, options) for first in (False, True))
        for ours, expected in zip(late, early, strict=True):
            assert_bit_equal(ours, expected)


def factors_and_hooks() -> None:
    plain = made(5)
    model = sharded(copy.deepcopy(plain))
    sizes: list[int] = []

    def hook(shard: Tensor) -> None:
        sizes.append(shard.numel())
        shard.mul_(2.0)

    for mlp in model:
        mlp.set_gradient_divide_factor(8.0)  # type: ignore[operator]
        mlp.set_all_reduce_hook(hook)  # type: ignore[operator]
    for step, plan in enumerate((is_any, is_bias, not_first)):
        for each in (plain, model):
            set_trainable(each, plan)
            each.zero_grad()
            backward_of(each, step)
        for param in model.parameters():
            if param.grad is not None:
                param.grad.mul_(2.0)  # 8 / 2 instead of the 2 ranks of an average
        check_gradients(model, plain)
    assert sizes[0] == sizes[1] == sizes[2] > 5 * max(sizes[3:6])
    assert sizes[6:8] == sizes[:2]


def train(model: nn.Module, optimizer: Any, clips: Any) -> None:
    plans: list[Plan] = [is_any, is_bias, is_bias, not_first, is_any]
    for step, plan in enumerate(plans):
        set_trainable(model, plan)
        optimizer.zero_grad()
        model(inputs(step, 8)).square().mean().backward()
        clips(model.parameters(), 0.05)
        optimizer.step()


def optimizers_and_clipping(flat: bool) -> None:
    models = []
    for freeze in (False, True):
        model = sharded(made(8))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        if flat and freeze:
            flatten_(optimizer)
        train(model, optimizer, clip_grad_norm_ if freeze else nn.utils.clip_grad_norm_)
        models.append(full_parameters(model))
    for name, tensor in models[0].items():
        torch.testing.assert_close(models[1][name], tensor, rtol=1e-6, atol=1e-7)
    plain = made(8)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.01)

    def average_and_clip(params: Any, max_norm: float) -> None:
        params = list(params)
        for param in params:
            if param.grad is not None:
                dist.all_reduce(param.grad)
                param.grad /= dist.get_world_size()
        nn.utils.clip_grad_norm_(params, max_norm)

    train(plain, optimizer, average_and_clip)
    for name, param in plain.named_parameters():
        torch.testing.assert_close(models[1][name], param.detach(), rtol=1e-5, atol=1e-6)


def copies_and_conversions() -> None:
    model = sharded(made(5))
    set_trainable(model, is_bias)
    backward_of(model, 0)
    twin = copy.deepcopy(model)
    model.double()
    model.float()
    for each in (model, twin):
        each.zero_grad()
        backward_of(each, 1)
    assert_bit_equal(full_gradients(twin), full_gradients(model))
    set_trainable(twin, is_any)
    backward_of(twin, 2)
    assert all(param.grad is not None for param in twin.parameters())


def cases() -> Cases:
    found: Cases = {}
    for name, choose in FROZEN.items():
        make = freezing(choose)
        found[name] = Case(lambda make=make: as_one_process(make))
        found |= in_settings(f"{name}, with an input", as_one_process, make=make, run=with_input)
    middle = freezing(FROZEN["a unit in the middle"])
    found["a unit in the middle, compiled"] = Case(lambda: as_one_process(middle, compiled))
    adapted = lambda: Net(AdaptedBlock)  # noqa: E731
    found |= in_settings("adapters", as_one_process, make=adapted, run=with_input)
    found["adapters, compiled"] = Case(lambda: as_one_process(adapted, compiled))
    found["toggled"] = Case(toggled)
    found["adversaries"] = Case(adversaries)
    found["no_grad"] = Case(lambda: without_gradients(torch.no_grad))
    found["inference_mode"] = Case(lambda: without_gradients(torch.inference_mode))
    return found


def freezing_cases() -> Cases:
    def nightly_on(ask: Callable[[], None], ranks: int, *nightly: int) -> Case:
        return Case(ask, ranks=ranks, is_nightly=ranks in nightly)

    found: Cases = {}
    for ranks in (1, 2, 3, 4):
        found[f"steps, {ranks} ranks"] = nightly_on(lambda: steps_with({}), ranks, 2, 4)
    rows = [{"reshard_after_forward": False}, {"in_flight": 4}]
    rows += [{"sharding": sharding} for sharding in ("ddp", "zero1", "zero2")]
    for options in rows:
        found[f"steps, {options}"] = Case(lambda options=options: steps_with(options))
    for kind in ("hsdp", "hsdp_zero1"):
        found[f"steps, {kind}"] = Case(
            lambda kind=kind: steps_with({"sharding": kind}, (2, 2)), ranks=4
        )
        found[f"sums that wait, {kind}"] = Case(lambda kind=kind: wait_for_replicas(kind), ranks=4)
    for ranks in (1, 2, 3):
        found[f"gradients that wait, {ranks} ranks"] = nightly_on(lambda: wait({}), ranks, 2)
    found["gradients that wait in shards"] = Case(lambda: wait({"sharding": "zero2"}))
    for feedback, ranks in product((False, True), (2, 3)):
        found[f"eight bits, feedback {feedback}, {ranks} ranks"] = nightly_on(
            lambda feedback=feedback: in_eight_bits(eight_bit_options(feedback)), ranks, 2
        )
    found["errors of rounding"] = Case(errors_follow, ranks=3)
    for flat in (False, True):
        found[f"optimizers, flat {flat}"] = Case(
            lambda flat=flat: optimizers_and_clipping(flat), ranks=3
        )
    for ask in (
        zeros_for_unused,
        wait_on_one_rank,
        between_passes,
        inside_of_a_forward,
        in_other_dtypes,
        factors_and_hooks,
        copies_and_conversions,
    ):
        found[ask.__name__] = Case(ask)
    return found


CASES = cases() | freezing_cases()


def answers(*names: str) -> Answers:
    return answer(CASES, names)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.parametrize("name", named(CASES))
def test_training_beside_frozen_parts_is_that_of_one_process(outcomes: Outcomes, name: str) -> None:
    outcomes.check(name)

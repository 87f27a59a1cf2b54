"""Tensors in place of parameters: `torch.func.functional_call`, and replaced parameters."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.func import functional_call
from torch.nn.utils import parametrize

from vescale_fsdp import fully_shard, unsharded
from vescale_fsdp.testing import run_ranks

OPTIONS: dict[str, dict[str, Any]] = {
    "zero3": {},
    "zero1": {"sharding": "zero1"},
    "ddp": {"sharding": "ddp"},
    "unsharded after forward": {"reshard_after_forward": False},
}


class Siamese(nn.Module):
    """A tied weight, and a unit that runs twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.body, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        y = self.body(self.first(x).tanh())
        return self.last(self.body(y.tanh()))  # type: ignore[no-any-return]


def make(*, shards: bool, **options: Any) -> Siamese:
    torch.manual_seed(0)
    model = Siamese()
    if shards:
        fully_shard(model.body, **options)
        fully_shard(model, **options)
    return model


def batch(seed: int, rank: int | None = None) -> Tensor:
    """The whole batch, or the part of a rank."""
    x = torch.randn(6, 4, generator=torch.Generator().manual_seed(seed))
    return x if rank is None else x.chunk(dist.get_world_size())[rank]


def whole(tensor: Tensor | None) -> Tensor:
    assert tensor is not None
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def scaled(model: nn.Module, factor: float = 0.5) -> dict[str, Tensor]:
    return {name: p.detach() * factor for name, p in model.named_parameters()}


def whole_scaled(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(p.detach()) * 0.5 for name, p in model.named_parameters()}


def evaluates(model: nn.Module, rank: int | None, values: Callable[..., Any]) -> list[Tensor]:
    """With other values before the first forward, between steps, and then the model's own."""
    optimizer, found = torch.optim.SGD(model.parameters(), 0.1), []
    for step in range(3):
        with torch.no_grad():
            found += [functional_call(model, values(model), (batch(9),)) for _ in range(2)]
        model(batch(step, rank)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*found, model(batch(9)).detach(), *(whole(p.detach()) for p in model.parameters())]


def adapts(model: nn.Module, rank: int | None) -> list[Tensor]:
    """Steps with the gradient at weights that have made a step already (MAML of first order)."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        model(batch(step, rank)).square().mean().backward()
        adapted = {
            name: (p.detach() - 0.3 * p.grad).requires_grad_()  # type: ignore[operator]
            for name, p in model.named_parameters()
        }
        functional_call(model, adapted, (2 * batch(step, rank),)).square().mean().backward()
        for name, p in model.named_parameters():
            p.grad = adapted[name].grad
        optimizer.step()
    return [whole(p.detach()) for p in model.parameters()]


def differentiates_values(model: nn.Module, rank: int | None) -> list[Tensor]:
    """Of a part of the parameters, by the name that the model has for them."""
    value = model.body.weight * 0.5  # type: ignore[operator]
    output = functional_call(model, {"body.weight": value}, (batch(0, rank),))
    output.square().mean().backward()
    return [whole(p.grad) for p in model.parameters()]


RUNS: dict[str, Callable[..., list[Tensor]]] = {
    "evaluates": lambda model, rank: evaluates(model, rank, scaled),
    "evaluates with plain tensors": lambda model, rank: evaluates(model, rank, whole_scaled),
    "adapts": adapts,
    "differentiates values": differentiates_values,
}


def compared(options: dict[str, Any]) -> None:
    for name, run in RUNS.items():
        expected = run(make(shards=False), None)
        found = run(make(shards=True, **options), dist.get_rank())
        torch.testing.assert_close(found, expected, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_tensors_of_a_functional_call_are_used(options: dict[str, Any]) -> None:
    run_ranks(compared, 2, options)


def own_parameters(options: dict[str, Any]) -> None:
    """They stay those of the optimizer, in the caller's dictionary too, and train as ever."""
    expected, model = make(shards=False), make(shards=True, **options)
    grads = []
    for each in (expected, model):
        values = dict(each.named_parameters())
        given = dict(values)
        output = functional_call(
            each, values, (batch(0, None if each is expected else dist.get_rank()),)
        )
        assert all(values[name] is param for name, param in given.items())
        means = torch.autograd.grad(output.mean(), [*values.values()], retain_graph=True)
        grads.append([whole(grad) for grad in means])
        output.square().mean().backward()
    torch.testing.assert_close(*grads)
    found = [whole(p.grad) for p in model.parameters()]
    torch.testing.assert_close(found, [whole(p.grad) for p in expected.parameters()])


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_models_own_parameters_are_handed_back(options: dict[str, Any]) -> None:
    run_ranks(own_parameters, 2, options)


def handed_back() -> None:
    model = make(shards=True)
    before = list(model.parameters())
    values = {name: each.requires_grad_() for name, each in scaled(model).items()}
    given = copy.copy(values)
    functional_call(model, values, (batch(0),)).sum().backward()
    assert all(values[name] is each and each.is_leaf for name, each in given.items())
    model(batch(0)).sum().backward()
    assert all(a is b for a, b in zip(model.parameters(), before, strict=True))


def test_the_callers_tensors_and_the_parameters_are_as_before() -> None:
    run_ranks(handed_back, 2)


def parameters_of_another_first() -> None:
    """The first call of a model has parameters of another one, which must stay what they are."""
    model, other, plain = make(shards=True), make(shards=True), make(shards=False)
    with torch.no_grad():
        for param in other.parameters():
            param.mul_(2)
    values = dict(other.named_parameters())
    given = copy.copy(values)
    before = list(model.parameters())
    for _ in range(2):
        found = functional_call(model, values, (batch(0),))
        whole_values = {name: 2 * p.detach() for name, p in plain.named_parameters()}
        torch.testing.assert_close(found, functional_call(plain, whole_values, (batch(0),)))
        assert all(values[name] is each for name, each in given.items())
        torch.testing.assert_close(model(batch(0)), plain(batch(0)))
        with unsharded(model):
            assert not any(isinstance(p, DTensor) for p in model.parameters())
        assert all(a is b for a, b in zip(model.parameters(), before, strict=True))


def test_parameters_of_another_model_in_the_first_call() -> None:
    run_ranks(parameters_of_another_first, 2)


class Nested(Siamese):
    """Calls itself with other values."""

    values: dict[str, Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        values, self.values = self.values, None
        y = super().forward(x)
        return y if values is None else y + functional_call(self, values, (x,))


def nested_and_pinned() -> None:
    outputs = []
    for shards in (False, True):
        torch.manual_seed(0)
        model = Nested()
        if shards:
            fully_shard(model.body)
            fully_shard(model)
        values = {name: each.requires_grad_() for name, each in scaled(model).items()}
        model.values, given = values, copy.copy(values)
        found = [model(batch(0))]
        found[0].square().mean().backward()
        assert all(values[name] is each for name, each in given.items())
        found += [whole(each.grad) for each in values.values()]
        for context in (torch.no_grad(), torch.enable_grad()):
            with unsharded(model) if shards else contextlib.nullcontext(), context:
                found.append(functional_call(model, values, (batch(1),)).detach())
        outputs.append([*found, *(whole(p.grad) for p in model.parameters())])
    torch.testing.assert_close(*outputs)


def test_calls_within_a_forward_and_within_unsharded() -> None:
    run_ranks(nested_and_pinned, 2)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 1), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.first(x), self.second(x)


def unused_outputs() -> None:
    """Backward meets the second head's values, and brings no gradient for them."""
    grads: list[list[Tensor | None]] = []
    for shards in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 4), Heads())
        if shards:
            fully_shard(model[1])
            fully_shard(model)
        values = {name: 0.5 * param for name, param in model.named_parameters()}
        functional_call(model, values, (batch(0),))[0].sum().backward()
        grads.append([p.grad if p.grad is None else whole(p.grad) for p in model.parameters()])
    assert [grad is None for grad in grads[1]] == [False] * 4 + [True] * 2
    torch.testing.assert_close(grads[1], grads[0])


def test_values_of_an_output_that_no_loss_uses_get_no_gradient() -> None:
    run_ranks(unused_outputs, 2)


def in_two_dtypes() -> None:
    model = make(shards=True, mp_policy=MixedPrecisionPolicy(torch.bfloat16))
    expected = model(batch(0))
    for values in (scaled(model, 1.0), {n: whole(p) for n, p in model.named_parameters()}):
        assert torch.equal(functional_call(model, values, (batch(0),)), expected)


def test_values_are_cast_as_parameters_are() -> None:
    run_ranks(in_two_dtypes, 2)


def replaced() -> None:
    model = make(shards=True)
    model(batch(0))
    model.reshard()  # type: ignore[operator]
    model.body.weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ValueError, match=r"'body.weight' was replaced by a plain nn.Parameter"):
        model(batch(0))


def test_a_plain_parameter_in_place_of_a_sharded_one_is_refused() -> None:
    run_ranks(replaced, 2)


class Double(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def parametrized() -> None:
    model = make(shards=True)
    parametrize.register_parametrization(model.body, "weight", Double())
    with pytest.raises(RuntimeError, match=r"'weight' is no longer registered .* before fully_sh"):
        model(batch(0))


def test_a_parametrization_comes_before_sharding() -> None:
    run_ranks(parametrized, 2)

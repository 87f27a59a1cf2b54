"""What happens between, around and after the ordinary steps: evaluation in the middle, errors,
graphs that somebody keeps. Each test compares with the plain model, or expects a clear error."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_fsdp import MixedPrecisionPolicy, clip_grad_norm_, fully_shard, unsharded
from vescale_fsdp.testing import run_ranks

from .helpers import full_gradients, full_parameters, shard_units
from .partial_models import Stretch


class Net(nn.Module):
    """Three layers, of which the first and the last belong to the root."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def make(**options: Any) -> nn.Module:
    torch.manual_seed(1)
    model = Net()
    return shard_units(model, [model.middle], **options)


def make_plain() -> nn.Module:
    torch.manual_seed(1)
    return Net()


def x(seed: int) -> Tensor:
    """The same on every rank, so that averages over ranks change nothing."""
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))


def outputs(scenario: Callable[[nn.Module], Any], options: dict[str, Any]) -> tuple[Any, Any]:
    return scenario(make(**options)), scenario(make_plain())


def assert_like_plain(scenario: Callable[[nn.Module], Any], **options: Any) -> None:
    for ours, plain in run_ranks(outputs, 2, scenario, options, timeout_s=30):
        torch.testing.assert_close(ours, plain, rtol=0, atol=1e-6)


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    optimizer.zero_grad()
    model(x(seed)).sum().backward()
    optimizer.step()


def keeps_a_graph_over_a_step(model: nn.Module) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(x(0)).sum().backward()
    kept = model(x(1))  # never used, never freed
    optimizer.step()
    out = model(x(2)).detach()
    assert kept.requires_grad
    return out


def only_rank_0_keeps_a_graph(model: nn.Module) -> Tensor:
    kept = model(x(0))
    if dist.get_rank():
        del kept
    return model(x(1)).detach()


def evaluates_between_backward_and_step(model: nn.Module) -> Tensor:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model(x(0)).sum().backward()
    with torch.no_grad():
        model(x(1))
    optimizer.step()
    with torch.no_grad():
        return model(x(2))


@pytest.mark.parametrize("reshard_after_forward", [None, False])
@pytest.mark.parametrize(
    "scenario",
    [keeps_a_graph_over_a_step, only_rank_0_keeps_a_graph, evaluates_between_backward_and_step],
)
def test_a_forward_never_sees_weights_from_before_the_step(
    scenario: Callable[[nn.Module], Tensor], reshard_after_forward: bool | None
) -> None:
    assert_like_plain(scenario, reshard_after_forward=reshard_after_forward)


def optimizer_after_a_dry_run(model: nn.Module) -> dict[str, Any]:
    model(x(0))  # leaves the root gathered, for a backward that never comes
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for seed in range(3):
        step(model, optimizer, seed)
    return full_parameters(model)


def zero_grad_after_a_dry_run(model: nn.Module) -> dict[str, Any]:
    model(x(0)).sum().backward()
    model(x(1))
    model.zero_grad()
    model(x(2)).sum().backward()
    return full_gradients(model)


def clip_after_a_dry_run(model: nn.Module) -> dict[str, Any]:
    model(x(0)).sum().backward()
    model(x(1))
    clip_grad_norm_(model, 0.1)
    return full_gradients(model)


@pytest.mark.parametrize(
    "scenario", [optimizer_after_a_dry_run, zero_grad_after_a_dry_run, clip_after_a_dry_run]
)
def test_parameters_between_passes_are_the_sharded_ones(
    scenario: Callable[[nn.Module], dict[str, Any]],
) -> None:
    assert_like_plain(scenario)


class Breaks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor) -> Tensor:
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise ArithmeticError("in backward")


def backward_that_raises(model: nn.Module) -> dict[str, Any]:
    model(x(0)).sum().backward()
    model.zero_grad()
    handle = model.middle.register_forward_hook(lambda *args: Breaks.apply(args[-1]))
    with pytest.raises(ArithmeticError):
        model(x(1)).sum().backward()
    handle.remove()
    # Unlike the module's, it knows nothing of gradients that are not in ``.grad`` yet.
    torch.optim.SGD(model.parameters(), lr=0.5).zero_grad()
    model(x(2)).sum().backward()
    return full_gradients(model)


def forward_that_raises(model: nn.Module) -> dict[str, Any]:
    with pytest.raises(RuntimeError):
        model(torch.ones(3, 5))  # of another width
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for seed in range(2):
        step(model, optimizer, seed)
    return full_parameters(model)


@pytest.mark.parametrize("scenario", [backward_that_raises, forward_that_raises])
def test_the_step_after_an_exception_is_right(
    scenario: Callable[[nn.Module], dict[str, Any]],
) -> None:
    assert_like_plain(scenario)


def gradient_of_the_input(model: nn.Module) -> dict[str, Any]:
    model(x(0)).sum().backward()  # all parameters are used: from now on that is known
    model.zero_grad()
    value = x(1).requires_grad_()
    (gradient,) = torch.autograd.grad(model(value).sum(), value)
    assert gradient is not None
    return full_gradients(model)


def test_autograd_grad_of_the_input_leaves_no_gradients() -> None:
    assert_like_plain(gradient_of_the_input)


def forgets_what_was_accumulated(model: nn.Module) -> dict[str, Any]:
    sync = getattr(model, "set_requires_gradient_sync", lambda _: None)
    sync(False)
    model(x(0)).sum().backward()
    model.zero_grad()
    sync(True)
    model(x(1)).sum().backward()
    return full_gradients(model)


def test_zero_grad_of_the_module_drops_gradients_that_wait() -> None:
    assert_like_plain(forgets_what_was_accumulated)


def converted_in_part(model: nn.Module) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model.first.to(torch.float64).to(torch.float32)  # no unit: nobody tells the engine
    for seed in range(2):
        step(model, optimizer, seed)
    return full_parameters(model)


def test_a_part_that_is_no_unit_may_be_converted() -> None:
    assert_like_plain(converted_in_part)


def looks_into_a_child_first(model: nn.Module) -> Tensor:
    if hasattr(model.middle, "unshard"):
        with unsharded(model.middle):
            assert type(model.middle.weight) is nn.Parameter
        model.middle.unshard()
    return model(x(0)).detach()


def test_a_child_may_be_unsharded_before_the_first_forward() -> None:
    assert_like_plain(looks_into_a_child_first)


def state_dict_in_a_context() -> None:
    model, plain = make(), make_plain()
    with unsharded(model):
        state = model.state_dict()
        with pytest.raises(RuntimeError, match="load_state_dict inside of `unsharded"):
            model.load_state_dict(state)
        with pytest.raises(RuntimeError, match="converting or moving"):
            model.to(torch.bfloat16)
    for name, value in plain.state_dict().items():
        assert torch.equal(state[name], value), name


def test_a_state_dict_taken_in_unsharded_outlives_it_and_changes_are_refused() -> None:
    run_ranks(state_dict_in_a_context, 2)


class Aside(nn.Module):
    """Sets a tensor that depends on a parameter, and does not return it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, value: Tensor) -> Tensor:
        self.sum = self.linear.weight.sum()
        self.penalty = self.linear.weight.square().sum()
        return self.linear(value)


def way_around_the_outputs() -> None:
    model = nn.Sequential(fully_shard(Aside()), nn.Tanh())
    fully_shard(model)
    weight = model[0].linear.weight
    for _ in range(3):
        output = model(x(0))
        model[0].sum.backward()
        assert torch.equal(weight.grad.full_tensor(), torch.ones(4, 4))
        model.zero_grad()
        del output
    model(x(0))
    with pytest.raises(RuntimeError, match="is at version 107374182"):  # it reads the weight
        model[0].penalty.backward()


def test_a_gradient_that_comes_around_the_outputs_counts_unless_it_reads_the_weight() -> None:
    run_ranks(way_around_the_outputs, 2)


class TwoGroups(nn.Module):
    """One unit with two dtypes, and so two groups, of which one may be left out."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.offset = nn.Parameter(torch.zeros(4, dtype=torch.float64))

    def forward(self, value: Tensor, use: bool) -> Tensor:
        value = value * self.weight
        return value + self.offset if use else value


def accumulates_on_one_rank_only() -> Tensor:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = fully_shard(TwoGroups(), mp_policy=policy)
    value = torch.ones(2, 4)
    model.set_requires_gradient_sync(False)
    model(value, dist.get_rank() == 0).sum().backward()
    model.set_requires_gradient_sync(True)
    model(value, True).sum().backward()
    assert model.offset.grad is not None
    return model.offset.grad.full_tensor()


def test_ranks_that_accumulated_differently_reduce_in_one_dtype() -> None:
    # 2 rows give a gradient of 2 per backward: 4 and 2 on the two ranks, so 3 on average.
    for gradient in run_ranks(accumulates_on_one_rank_only, 2, timeout_s=30):
        assert torch.equal(gradient, torch.full((4,), 3.0, dtype=torch.float64))


def check_after_units_were_left_out() -> None:
    """Ranks issue a reduction before or after the next all-gather, by what they leave out."""
    model = Stretch().double()
    shard_units(model, model.units)
    inputs = torch.ones(2, 4, dtype=torch.double)
    for step in range(3):
        runs_it = (step + dist.get_rank()) % 2 == 0
        model(inputs.clone().requires_grad_(), runs_it).sum().backward()
        model.zero_grad()

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    handle = model.first.register_forward_pre_hook(fail)
    with pytest.raises(ZeroDivisionError):
        model(inputs, False)
    handle.remove()
    model(inputs.clone().requires_grad_(), False).sum().backward()
    assert all(param.grad is not None for param in model.first.parameters())


def test_ranks_that_left_out_units_go_on_after_an_exception_on_all_of_them() -> None:
    run_ranks(check_after_units_were_left_out, 2)

"""Parameters that several units use, and several modules that are one unit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_fsdp import FSDPModule, fully_shard
from vescale_fsdp.engine.unit import unit_of, units_in
from vescale_fsdp.testing import run_ranks

from .helpers import averaged_gradients, full_gradients, full_parameters
from .models import inputs_of, make
from .recorders import Recorder

WORLD_SIZE = 2


class Tied(nn.Module):
    """The first and the last layer share a weight; each has a bias of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = (nn.Linear(5, 5) for _ in range(3))
        self.last.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.middle(torch.tanh(self.first(x)))))


def shard_first_then_root(model: Tied) -> None:
    fully_shard(model.first)
    fully_shard(model)


def shard_both_then_root(model: Tied) -> None:
    fully_shard(model.first)
    fully_shard(model.middle)
    fully_shard(model.last)
    fully_shard(model)


def shard_both_as_one(model: Tied) -> None:
    fully_shard([model.first, model.last])
    fully_shard(model)


def check_equal_to_a_plain_model(shard: Callable[[Tied], None]) -> None:
    rank = dist.get_rank()
    plain, model = make(Tied), make(Tied)
    shard(model)
    assert model.first.weight is model.last.weight
    assert sorted(dict(model.named_parameters())) == sorted(dict(plain.named_parameters()))
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(3):
        for each in (plain, model):
            each(inputs_of(step, rank)).square().sum().backward()
        expected = averaged_gradients(plain)
        for name, gradient in full_gradients(model).items():
            assert torch.equal(gradient, expected[name]), name
        for parameter, gradient in zip(plain.parameters(), expected.values(), strict=True):
            parameter.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    whole = full_parameters(model)
    for name, parameter in plain.named_parameters():
        assert torch.equal(whole[name], parameter), name
    assert model.first.weight is model.last.weight


@pytest.mark.parametrize("shard", [shard_first_then_root, shard_both_then_root, shard_both_as_one])
def test_a_weight_tied_across_units_trains_as_in_a_plain_model(
    shard: Callable[[Tied], None],
) -> None:
    run_ranks(check_equal_to_a_plain_model, WORLD_SIZE, shard)


def check_owner() -> None:
    model = make(Tied)
    shard_both_then_root(model)
    owned = {
        name: [
            fsdp_param.fqn for group in unit_of(module).groups for fsdp_param in group.fsdp_params
        ]
        for name, module in model.named_modules()
    }
    assert owned == {
        "": ["first.weight"],
        "first": ["bias"],
        "middle": ["weight", "bias"],
        "last": ["bias"],
    }


def test_the_unit_around_all_uses_owns_the_weight() -> None:
    run_ranks(check_owner, WORLD_SIZE)


class Shared(nn.Module):
    """A layer with a buffer, that several blocks contain."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(5, 5)
        self.scale = nn.Parameter(torch.ones(3, 5))
        self.register_buffer("shift", torch.full((5,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x) * self.scale.sum(0) + self.shift


class Block(nn.Module):
    def __init__(self, shared: nn.Module) -> None:
        super().__init__()
        self.shared, self.own = shared, nn.Linear(5, 5)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.own(self.shared(x).tanh())


class Sharing(nn.Module):
    """Four blocks with one layer; the first two are in a part of their own, which uses it too."""

    def __init__(self) -> None:
        super().__init__()
        shared = Shared()
        self.part = nn.Sequential(Block(shared), Block(shared), shared)
        self.third, self.fourth = Block(shared), Block(shared)

    def forward(self, x: Tensor) -> Tensor:
        return self.fourth(self.third(self.part(x)))


# Each: the calls in their order, and the unit that has the parameters of the shared layer.
SHARINGS: dict[str, tuple[list[str], str]] = {
    "siblings": (["third", "fourth", ""], ""),
    "three": (["part.0", "part.1", "third", ""], ""),
    "nested": (["part.0", "part.1", "part", "third", "fourth", ""], ""),
    "nested last": (["third", "part.0", "part.1", "part", "fourth", ""], ""),
    "around and inside": (["part.0", ""], ""),
    "a list": (["part.0", "part.1+third", "fourth", ""], ""),
    "one list": (["part+third+fourth", ""], "third"),
    "a unit": (["third.shared", "part.0", "third", ""], "third.shared"),
}


def check_shared_module(kind: str) -> None:
    plain, model = make(Sharing), make(Sharing)
    calls, owner = SHARINGS[kind]
    for names in calls:
        modules = [model.get_submodule(name) for name in names.split("+")]
        fully_shard(modules if len(modules) > 1 else modules[0])  # type: ignore[call-overload]
    every = [param for unit in units_in(model).values() for param in unit.fsdp_params()]
    assert len(every) == len([*plain.parameters()]), "each is in one unit"
    owned = {
        id(fsdp_param.sharded) for fsdp_param in unit_of(model.get_submodule(owner)).fsdp_params()
    }
    assert owned.issuperset(id(param) for param in model.third.shared.parameters())
    assert [name for name, _ in model.named_parameters()] == [
        name for name, _ in plain.named_parameters()
    ]
    check_trains_alike(plain, model)


def check_trains_alike(plain: nn.Module, model: nn.Module) -> None:
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    for step in range(3):
        for each in (plain, model):
            each(inputs_of(step, dist.get_rank())).square().mean().backward()
        for parameter, gradient in zip(
            plain.parameters(), averaged_gradients(plain).values(), strict=True
        ):
            parameter.grad = gradient
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    whole = full_parameters(model)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(whole[name], parameter.detach(), rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("kind", SHARINGS)
def test_a_module_in_several_units_trains_as_in_a_plain_model(kind: str) -> None:
    run_ranks(check_shared_module, WORLD_SIZE, kind)


def check_shared_and_tied() -> None:
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        shared, head = Shared(), nn.Linear(5, 5)
        head.weight = shared.inner.weight
        made.append(nn.Sequential(Block(shared), Block(shared), head))
    plain, model = made
    for module in (model[0], model[1], model):
        fully_shard(module)
    assert model[2].weight is model[0].shared.inner.weight
    check_trains_alike(plain, model)


def test_a_parameter_of_a_shared_module_may_be_tied_too() -> None:
    run_ranks(check_shared_and_tied, WORLD_SIZE)


def blocks_of_one_layer() -> nn.Sequential:
    shared = Shared()
    return nn.Sequential(Block(shared), Block(shared))


def check_lent_module(has_root: bool) -> None:
    plain, model = make(blocks_of_one_layer), make(blocks_of_one_layer)
    for block in model:
        fully_shard(block)
    if has_root:
        model[0](inputs_of(0, 0))  # an optimizer may have states for its shards now
        fully_shard(model)
    check_trains_alike(plain, model)


@pytest.mark.filterwarnings("ignore:parameters were tied after fully_shard")
@pytest.mark.filterwarnings("ignore:one backward has reached")  # no parameter is outside of them
@pytest.mark.parametrize("has_root", [False, True])
def test_units_that_have_run_or_are_in_no_other_lend_each_other_a_module(has_root: bool) -> None:
    run_ranks(check_lent_module, WORLD_SIZE, has_root)


def check_no_unit_around() -> None:
    model = make(Tied)
    fully_shard(model.first)
    fully_shard(model.last)
    with pytest.raises(ValueError, match=r"'weight' is shared between units.*fully_shard\(\["):
        model.first(inputs_of(0, 0))


def test_a_tie_that_no_unit_contains_is_refused_at_the_first_forward() -> None:
    run_ranks(check_no_unit_around, WORLD_SIZE)


def check_one_gather_for_several_modules() -> None:
    model = make(Tied)
    fully_shard([model.first, model.middle])
    fully_shard(model)
    with Recorder() as recorder:
        out = model(inputs_of(0, dist.get_rank()))
    assert recorder.count("gathers") == 2  # the pair, and the root with the last layer
    unit = unit_of(model.first)
    assert unit is unit_of(model.middle)
    assert unit.is_sharded
    with Recorder() as recorder:
        out.sum().backward()
    assert recorder.count("reductions") == 2


def test_modules_of_one_unit_share_a_gather_and_a_reduction() -> None:
    run_ranks(check_one_gather_for_several_modules, WORLD_SIZE)


def check_list_arguments() -> None:
    modules = [nn.Linear(2, 2), nn.Linear(2, 2)]
    assert fully_shard(modules) is modules
    assert [isinstance(module, FSDPModule) for module in modules] == [True, True]
    with pytest.raises(RuntimeError, match="FSDP requires a single root module but got"):
        modules[0](torch.ones(1, 2))
    with pytest.raises(ValueError, match="empty list"):
        fully_shard([])
    outer = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    fully_shard([outer, outer[0]])  # the inner one is part of the outer one
    assert unit_of(outer[0]) is None
    assert len(unit_of(outer).groups[0].fsdp_params) == 4


def test_lists_of_modules() -> None:
    run_ranks(check_list_arguments, WORLD_SIZE)


def check_conversion_of_a_list() -> None:
    plain, model = make(Tied), make(Tied)
    fully_shard([model.first, model.middle])
    fully_shard(model)
    x = inputs_of(0, 0).double()
    assert torch.equal(model.double()(x), plain.double()(x))
    state = model.state_dict()
    with torch.device("meta"):
        meta = Tied()
    fully_shard([meta.first, meta.middle])
    fully_shard(meta)
    meta.double().to_empty(device="cpu")
    meta.load_state_dict(state)
    assert torch.equal(meta(x), plain(x))


def test_modules_of_one_unit_are_converted_together() -> None:
    run_ranks(check_conversion_of_a_list, WORLD_SIZE)


def check_small_parameters_from_meta() -> None:
    """One rank holds nothing of the norm."""
    model = nn.Sequential(nn.RMSNorm(5, device="meta"), nn.Linear(5, 5, device="meta"))
    fully_shard(model[0])
    fully_shard(model)
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    assert torch.isfinite(model(inputs_of(0, 0))).all()


def test_a_rank_without_elements_leaves_meta_too() -> None:
    run_ranks(check_small_parameters_from_meta, WORLD_SIZE)


def check_ignored_tie() -> None:
    model = make(Tied)
    weight = model.first.weight
    fully_shard(model.first)
    fully_shard(model.last)
    fully_shard(model, ignored_params={weight})
    assert model.first.weight is weight
    assert model.last.weight is weight
    model(inputs_of(0, 0))


def test_a_tied_parameter_may_be_ignored_by_the_outer_call() -> None:
    run_ranks(check_ignored_tie, WORLD_SIZE)

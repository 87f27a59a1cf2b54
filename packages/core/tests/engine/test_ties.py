"""Parameters that several units use, and several modules that are one unit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_fsdp import FSDPModule, fully_shard
from vescale_fsdp.engine.unit import unit_of
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
        name: [slot.fqn for group in unit_of(module).groups for slot in group.slots]
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
    assert len(unit_of(outer).groups[0].slots) == 4


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

"""Where parameters and gradients lie, what is copied, and when memory goes."""

from __future__ import annotations

import gc
import weakref
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from vescale_fsdp import MixedPrecisionPolicy, fully_shard, unsharded
from vescale_fsdp.engine.unit import unit_of
from vescale_fsdp.testing import run_ranks

from .helpers import full_parameters, shard_units
from .models import MLP, make
from .recorders import Recorder

WORLD_SIZE = 2


class Recording(nn.Module):
    """Several layers in one unit; notes what its parameters are while it runs."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 5) for _ in range(num_layers)])
        self.seen: list[list[nn.Parameter]] = []
        self.storages: list[torch.UntypedStorage] = []
        self.addresses: list[list[int]] = []

    def forward(self, x: Tensor) -> Tensor:
        parameters = [each for layer in self.layers for each in (layer.weight, layer.bias)]
        self.seen.append(parameters)
        self.storages = [parameter.untyped_storage() for parameter in parameters]
        self.addresses.append([parameter.data_ptr() for parameter in parameters])
        for parameter in parameters:
            assert isinstance(parameter, nn.Parameter), "what libraries ask for"
            assert not isinstance(parameter, DTensor), "whole"
            assert parameter.is_contiguous()
        for layer in self.layers:
            x = layer(x)
        return x


class Chain(nn.Module):
    def __init__(self, length: int) -> None:
        super().__init__()
        self.units = nn.ModuleList([Recording(2) for _ in range(length)])

    def forward(self, x: Tensor) -> Tensor:
        for unit in self.units:
            x = unit(x)
        return x


def check_views_of_one_buffer(dtype: torch.dtype) -> None:
    model = Recording()
    fully_shard(model, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    model(torch.ones(2, 5)).sum().backward()
    parameters = model.seen[0]
    assert [tuple(parameter.shape) for parameter in parameters] == [(5, 5), (5,)] * 3
    assert {parameter.dtype for parameter in parameters} == {dtype}
    assert len({storage._cdata for storage in model.storages}) == 1
    assert all(address % 16 == 0 for address in model.addresses[0])
    spans = sorted(
        (parameter.storage_offset(), parameter.storage_offset() + parameter.numel())
        for parameter in parameters
    )
    assert all(end <= start for (_, end), (start, _) in pairwise(spans))
    assert spans[-1][1] >= 90  # 3 x (25 + 5) elements


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_are_aligned_views_of_one_gathered_buffer(dtype: torch.dtype) -> None:
    run_ranks(check_views_of_one_buffer, WORLD_SIZE, dtype)


def check_same_memory_at_every_step() -> None:
    model = fully_shard(Recording())
    for _ in range(3):
        model(torch.ones(2, 5)).sum().backward()
    assert model.addresses[1:] == [model.addresses[0]] * 2
    for parameters in model.seen[1:]:  # each forward has views of its own
        for new, old in zip(parameters, model.seen[0], strict=True):
            assert new is not old
            assert new.untyped_storage()._cdata == old.untyped_storage()._cdata


def test_full_parameters_have_the_same_memory_at_every_step() -> None:
    # A backward reads what autograd has saved in the forward: views of that memory.
    run_ranks(check_same_memory_at_every_step, WORLD_SIZE)


def has_full_memory(module: nn.Module) -> bool:
    """Whether there is memory under the gathered parameters of a unit."""
    unit = unit_of(module)
    assert unit is not None
    return any(group.buffer.full.is_materialized for group in unit.groups)


def check_release() -> None:
    model = Recording()
    fully_shard(model, reshard_after_forward=True)
    out = model(torch.ones(2, 5))
    assert not has_full_memory(model)
    out.sum().backward()
    assert not has_full_memory(model)
    model.unshard()
    assert has_full_memory(model)
    model.reshard()
    assert not has_full_memory(model)


def test_gathered_buffer_is_empty_after_forward_and_after_backward() -> None:
    run_ranks(check_release, WORLD_SIZE)


def check_kept() -> None:
    model = Recording()
    fully_shard(model, reshard_after_forward=False)
    out = model(torch.ones(2, 5))
    assert has_full_memory(model)
    out.sum().backward()
    assert not has_full_memory(model)


def test_gathered_buffer_stays_until_backward_if_asked() -> None:
    run_ranks(check_kept, WORLD_SIZE)


def check_shards() -> int:
    model = make(MLP)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    fully_shard(model)
    shards = [parameter.to_local() for parameter in model.parameters()]
    assert all(shard.dim() == 1 for shard in shards)
    assert len({shard.untyped_storage().data_ptr() for shard in shards if shard.numel()}) == 1
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.full_tensor(), start[name])
        assert parameter.shape == start[name].shape
    return sum(shard.numel() for shard in shards)


def test_shards_are_flat_views_of_one_buffer_and_hold_each_element_once() -> None:
    assert sum(run_ranks(check_shards, WORLD_SIZE)) == 90  # 3 x (5 x 5 + 5)


def copies_of_a_gather() -> int:
    model = fully_shard(Recording())
    with Recorder() as recorder:
        model.unshard()
    assert recorder.count("gathers") == 1
    return recorder.num_copied


def test_gather_copies_nothing_out() -> None:
    # At most this rank's shard on its way in: half of 90 elements, and some padding.
    assert max(run_ranks(copies_of_a_gather, WORLD_SIZE)) <= 64


def copies_before_reduction() -> int:
    model = fully_shard(Recording())
    for _ in range(2):
        loss = model(torch.ones(2, 5)).sum()
        model.zero_grad()
        with Recorder() as recorder:
            loss.backward()
    (reduction,) = [event for event in recorder.events if event.is_reduction]
    return reduction.num_copied  # the reduction itself may copy: gloo does, and so does a sum


def test_gradients_are_copied_once() -> None:
    assert run_ranks(copies_before_reduction, WORLD_SIZE) == [90, 90]


def operators_of_a_gather(num_layers: int) -> int:
    model = fully_shard(Recording(num_layers))
    for _ in range(3):
        with Recorder() as recorder:
            model.unshard()
            model.reshard()
    return recorder.num_operators


def test_gather_and_release_take_no_operator_per_parameter() -> None:
    few, many = (run_ranks(operators_of_a_gather, WORLD_SIZE, n)[0] for n in (1, 20))
    assert few == many


def num_full_buffers(in_flight: int) -> list[int]:
    """The most gathered buffers that exist at once, over forward and over backward."""
    model = Chain(6)
    shard_units(model, model.units, in_flight=in_flight)
    x = torch.ones(2, 5, requires_grad=True)
    model(x).sum().backward()  # from now on every unit knows its storage
    counts: list[int] = []

    def count(*_: object) -> None:
        counts.append(sum(has_full_memory(unit) for unit in model.units))

    for unit in model.units:
        unit.layers[0].register_forward_pre_hook(count)
    out = model(x)
    forward = max(counts)
    counts.clear()
    for unit in model.units:
        for parameter in unit.seen[-1]:
            parameter.register_hook(count)
    out.sum().backward()
    assert counts, "no gradient was seen"
    return [forward, max(counts)]


@pytest.mark.parametrize("in_flight", [1, 2])
def test_no_more_buffers_exist_than_one_in_use_and_those_in_flight(in_flight: int) -> None:
    for most in run_ranks(num_full_buffers, WORLD_SIZE, in_flight):
        assert max(most) <= 1 + in_flight


def check_deletion() -> None:
    # The first DTensor of a process imports torch._dynamo, which keeps the frame it came from.
    fully_shard(nn.Linear(2, 2))
    gc.collect()
    gc.disable()
    try:
        model = make(MLP)
        shard_units(model, model.layers)
        for _ in range(2):
            model(torch.ones(2, 5)).sum().backward()
        references = {name: weakref.ref(unit) for name, unit in model.named_modules()}
        references |= {name: weakref.ref(p) for name, p in model.named_parameters()}
        del model
        assert [name for name, reference in references.items() if reference() is not None] == []
    finally:
        gc.enable()


def test_deleted_model_goes_at_once_without_the_garbage_collector() -> None:
    run_ranks(check_deletion, WORLD_SIZE)


def check_unsharded() -> None:
    model = make(MLP)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    shard_units(model, model.layers)
    sharded = list(model.parameters())
    with unsharded(model):
        for name, parameter in model.named_parameters():
            assert type(parameter) is nn.Parameter, name
            assert torch.equal(parameter, start[name]), name
    assert all(new is old for new, old in zip(model.parameters(), sharded, strict=True))
    for name, value in full_parameters(model).items():
        assert torch.equal(value, start[name]), name


def test_unsharded_registers_full_parameters_for_a_while() -> None:
    run_ranks(check_unsharded, WORLD_SIZE)


def check_own_parameters() -> None:
    model = make(MLP)
    shard_units(model, model.layers[:1])
    inputs = torch.ones(2, 5)
    with torch.no_grad():
        expected = model(inputs)
        with unsharded(model, recurse=False):
            for _ in range(2):  # before a forward, and after it
                assert isinstance(model.layers[0].weight, DTensor)
                assert not isinstance(model.layers[1].weight, DTensor)
                assert torch.equal(model(inputs), expected)
    assert isinstance(model.layers[1].weight, DTensor)


def test_without_recurse_units_below_stay_sharded() -> None:
    run_ranks(check_own_parameters, WORLD_SIZE)


def check_writeback(dtype: torch.dtype | None) -> None:
    model, plain = make(MLP), make(MLP)
    shard_units(model, model.layers, mp_policy=MixedPrecisionPolicy(param_dtype=dtype))
    with unsharded(model, writeback=True):
        model.layers[0].weight.data[1, 2] = 3.0  # around the version counter
        with torch.no_grad():
            model.layers[1].bias.mul_(2.0)
    with unsharded(model):
        model.layers[2].weight.data.zero_()  # dropped
    with torch.no_grad():
        plain.layers[0].weight[1, 2] = 3.0
        plain.layers[1].bias.copy_(plain.layers[1].bias.to(dtype or torch.float32) * 2.0)
    for name, parameter in full_parameters(model).items():
        assert torch.equal(parameter, plain.get_parameter(name)), name


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_changes_are_written_back_and_the_rest_keeps_its_precision(
    dtype: torch.dtype | None,
) -> None:
    run_ranks(check_writeback, WORLD_SIZE, dtype)

"""Copies of sharded modules: averages of weights, and models that go their own way."""

from __future__ import annotations

import copy
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._composable.checkpoint_activation import checkpoint as recompute
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from vescale_fsdp import (
    FSDPModule,
    RaggedTensor,
    fully_shard,
    late_modules,
    register_fsdp_forward_method,
    unsharded,
)
from vescale_fsdp.engine.unit import unit_of
from vescale_fsdp.testing import run_ranks

from .helpers import full_parameters, shard_units
from .models import MLP, TinyGPT, gpt_loss, inputs_of, make, tokens_of

WORLD_SIZE = 2


def step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> Tensor:
    loss = gpt_loss(model, tokens_of(number, dist.get_rank()))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.detach()


def check_copy_trains_alike() -> None:
    model = make(TinyGPT)
    shard_units(model, model.blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer, 0)
    twin = copy.deepcopy(model)
    assert type(twin) is type(model)
    names, twin_names = dict(model.named_parameters()), dict(twin.named_parameters())
    assert names.keys() == twin_names.keys()
    for name, parameter in twin_names.items():
        assert type(parameter) is RaggedTensor
        assert parameter is not names[name]
        assert torch.equal(parameter.to_local(), names[name].to_local())
    assert twin.head.weight is twin.embedding.weight
    assert unit_of(twin.blocks[0]) is not unit_of(model.blocks[0])
    before = full_parameters(twin)
    losses = [step(model, optimizer, number) for number in (1, 2)]
    for name, parameter in full_parameters(twin).items():
        assert torch.equal(parameter, before[name]), "the copy has memory of its own"
    twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    assert losses == [step(twin, twin_optimizer, number) for number in (1, 2)]
    ours, theirs = full_parameters(model), full_parameters(twin)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_a_copy_has_its_own_parameters_and_trains_alike() -> None:
    run_ranks(check_copy_trains_alike, WORLD_SIZE)


def check_copy_through_a_proxy() -> None:
    """As of a Lightning module: its Trainer's profiler has a weak proxy of it."""
    model = make(MLP)
    shard_units(model, model.layers)
    model(inputs_of(0, 0))
    model.__dict__["owner"] = {"model": weakref.proxy(model)}
    twin = copy.deepcopy(model)
    assert twin.owner["model"] is twin
    assert torch.equal(twin(inputs_of(1, 0)), model(inputs_of(1, 0)))


def test_a_model_that_something_in_it_has_a_weak_proxy_of_is_copied_once() -> None:
    run_ranks(check_copy_through_a_proxy, WORLD_SIZE)


class Counted(MLP):
    """Its pickles have more than a dictionary in them."""

    def __getstate__(self) -> Any:
        return ["version 1", self.__dict__]

    def __setstate__(self, state: Any) -> None:
        version, own = state
        assert version == "version 1"
        self.__dict__.update(own)


def check_copy_of_another_state() -> None:
    model = make(Counted)
    shard_units(model, model.layers)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(inputs_of(1, 0)), model(inputs_of(1, 0)))


def test_a_model_whose_state_is_no_dictionary() -> None:
    run_ranks(check_copy_of_another_state, WORLD_SIZE)


def check_copy_with_gradients(options: dict[str, str]) -> None:
    """A copy after a backward has the gradients too, and they are its own."""
    model = make(MLP)
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    model(inputs_of(0, dist.get_rank())).square().sum().backward()
    twin = copy.deepcopy(model)
    for each in (model, twin):
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    expected = full_parameters(model)
    found = full_parameters(twin)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    gradient = next(iter(twin.parameters())).grad
    model.zero_grad(set_to_none=False)
    assert gradient is not None
    assert gradient.norm() > 0
    for each in (model, twin):
        each.zero_grad()
        each(inputs_of(1, dist.get_rank())).square().sum().backward()
    for ours, theirs in zip(twin.parameters(), model.parameters(), strict=True):
        assert ours.grad is not None
        assert torch.equal(ours.grad.to_local(), theirs.grad.to_local())


@pytest.mark.parametrize("sharding", ["ddp", "zero2", "zero3"])
def test_a_copy_after_a_backward_has_its_gradients(sharding: str) -> None:
    run_ranks(check_copy_with_gradients, WORLD_SIZE, {"sharding": sharding})


def check_average() -> None:
    model, plain = make(MLP), make(MLP)
    shard_units(model, model.layers)
    averages = [torch.optim.swa_utils.AveragedModel(each) for each in (plain, model)]
    for number in range(3):
        for each, average in zip((plain, model), averages, strict=True):
            with torch.no_grad():
                for parameter in each.parameters():
                    parameter.mul_(1.0 + number)
            average.update_parameters(each)
    expected = dict(averages[0].module.named_parameters())
    for name, parameter in full_parameters(averages[1].module).items():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-6, atol=0)
    x = inputs_of(0, 0)
    torch.testing.assert_close(averages[1](x), averages[0](x), rtol=1e-6, atol=1e-6)


def test_torch_averaged_model_works_on_a_sharded_model() -> None:
    run_ranks(check_average, WORLD_SIZE)


class Generating(MLP):
    def generate(self, x: Tensor) -> Tensor:
        return self(x) + self.layers[0].weight.sum()


def check_methods_of_a_copy() -> None:
    model = make(Generating)
    fully_shard(model)
    register_fsdp_forward_method(model, "generate")
    x = inputs_of(0, 0)
    expected = model.generate(x)
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(twin.generate(x), expected)
    del model
    assert torch.equal(twin.generate(x), expected)


def test_registered_methods_of_a_copy_work_on_the_copy() -> None:
    run_ranks(check_methods_of_a_copy, WORLD_SIZE)


class CopiesItself(MLP):
    def forward(self, x: Tensor) -> Tensor:
        copy.deepcopy(self)
        return super().forward(x)


def check_copy_in_forward() -> None:
    model = fully_shard(make(CopiesItself))
    with pytest.raises(RuntimeError, match="copy it between steps"):
        model(inputs_of(0, 0))


def test_a_copy_in_the_middle_of_a_step_is_refused() -> None:
    run_ranks(check_copy_in_forward, WORLD_SIZE)


def check_settings() -> None:
    model = make(MLP)
    shard_units(model, model.layers)
    model.set_reduce_scatter_unused_params(True)
    model.set_reduce_scatter_max_input_buffers(3)
    model.layers[0].set_unshard_in_backward(False)
    model.layers[0].set_modules_to_forward_prefetch([model.layers[2]])
    twin = copy.deepcopy(model)
    first = unit_of(twin.layers[0])
    assert first.gives_zeros
    assert first.max_reductions == 3
    assert not first.unshard_in_backward
    assert first.forward_prefetch == [unit_of(twin.layers[2])]


def test_a_copy_has_the_settings_of_its_original() -> None:
    run_ranks(check_settings, WORLD_SIZE)


def check_one_of_a_list() -> None:
    model = make(MLP, 2)
    fully_shard([model.layers[0], model.layers[1]])
    fully_shard(model)
    x = inputs_of(0, 0)
    twin = fully_shard(nn.Sequential(copy.deepcopy(model.layers[0])))
    assert torch.equal(twin(x), make(MLP, 2).layers[0](x))


def test_one_module_of_a_list_can_be_copied() -> None:
    run_ranks(check_one_of_a_list, WORLD_SIZE)


class WithHead(MLP):
    """A head, which calls of ``fully_shard`` may be told to ignore."""

    def __init__(self) -> None:
        super().__init__(2)
        self.head = nn.Sequential(nn.Linear(5, 5))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(super().forward(x))
        return out


def shards(module: nn.Module) -> list[bool]:
    return [isinstance(param, RaggedTensor) for param in module.parameters()]


def sharded(model: WithHead, **options: Any) -> None:
    for layer in model.layers:
        fully_shard(layer, activations="recompute", **options)
    fully_shard(model, **options)


def check_marks_of_a_plain_copy() -> None:
    model = make(WithHead)
    ignored = {*model.head.parameters()}
    sharded(model, ignored_params=ignored)
    model.layers[0].compile(backend="eager")
    x = inputs_of(0, 0)
    before = model(x)
    with unsharded(model):
        twin = copy.deepcopy(model)
    # Dynamo, and ``generate`` of transformers, ask for it.
    assert not any(getattr(each, "_is_fsdp_managed_module", False) for each in twin.modules())
    assert not any(map(recompute.state, twin.modules()))
    sharded(twin)  # and ignores nothing
    assert all(shards(twin))
    optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
    twin(inputs_of(0, dist.get_rank())).square().sum().backward()
    optimizer.step()
    assert torch.equal(model(x), before)
    assert not torch.equal(twin(x), before)


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")  # Dynamo
def test_a_plain_copy_inherits_no_marks() -> None:
    run_ranks(check_marks_of_a_plain_copy, WORLD_SIZE)


def check_marks_of_a_sharded_copy() -> None:
    model = make(WithHead)
    sharded(model, ignored_params={*model.head.parameters()})
    twin = copy.deepcopy(model)
    assert late_modules(twin) == []  # it ignores what the model does
    assert shards(twin.head) == [False, False]
    whole = {name: value.full_tensor() for name, value in twin.layers.state_dict().items()}
    twin.layers.load_state_dict(whole)  # each rank takes its part
    with unsharded(model):
        plain = copy.deepcopy(model.layers[0])
    for part in (plain, copy.deepcopy(model.layers[0]), copy.deepcopy(model.head)):
        twin.head = nn.Sequential(part)
        if late_modules(twin):
            assert not isinstance(part, FSDPModule)
            fully_shard(twin.head)
        assert all(shards(twin))
        twin(inputs_of(0, dist.get_rank())).square().sum().backward()
        assert all(param.grad is not None for param in part.parameters())


def test_a_copy_of_a_part_is_sharded_where_it_is_added() -> None:
    run_ranks(check_marks_of_a_sharded_copy, WORLD_SIZE)


def check_tensor_parallel() -> None:
    """What a copy of a DTensor inherits does not say that the data axes shard it."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = make(MLP, 2, 4)
    weight = distribute_tensor(model.layers[0].weight.data, mesh["tensor"], [Shard(0)])
    model.layers[0].weight = nn.Parameter(weight)
    fully_shard(model, mesh=mesh["data"])
    with unsharded(model):
        twin = copy.deepcopy(model)
    fully_shard(twin, mesh=mesh["data"])
    assert twin.layers[0].weight.placements == model.layers[0].weight.placements
    assert torch.equal(twin.layers[0].weight.to_local(), model.layers[0].weight.to_local())


def test_a_plain_copy_of_a_tensor_parallel_model_is_sharded_again() -> None:
    run_ranks(check_tensor_parallel, 4)

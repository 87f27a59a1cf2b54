"""Attributes of users on parameters: no weight decay, a scale, which optimizer.

Optimizer groups are made by them. They may be older than ``fully_shard``.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from vescale_fsdp import CPUOffloadPolicy, QuantizedGather, fully_shard, late_modules, unsharded
from vescale_fsdp.ragged import distribute_tensor
from vescale_fsdp.testing import run_ranks

from .subclasses import Narrow, wrap_weights

WIDTH = 16


class Model(nn.Module):
    """The weight of the second layer is that of the third. Forward reads an attribute."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.layers[2].weight = self.layers[1].weight
        self.read: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        self.read = [getattr(layer.weight, "scale", None) for layer in self.layers]
        return x


def make() -> Model:
    torch.manual_seed(3)
    return Model()


def put(model: Model) -> Model:
    for number, layer in enumerate(model.layers[:2]):
        layer.weight.scale = 0.5 + number
        layer.bias.no_decay = True
    return model


def found(model: nn.Module) -> list[Any]:
    """What `put` has set, in the order of the layers."""
    layers: Any = model.layers
    scales = [getattr(layer.weight, "scale", None) for layer in layers]
    return [*scales, *(hasattr(layer.bias, "no_decay") for layer in layers)]


EXPECTED = [0.5, 1.5, 1.5, True, True, False]


def shard(model: Model, **options: Any) -> Model:
    """The tied parameter is taken twice: the second layer gives it back."""
    fully_shard(model.layers[0], **options)
    fully_shard(model.layers[1], **options)
    return fully_shard(model, **options)


def step(model: nn.Module) -> None:
    model(torch.ones(2, WIDTH)).square().sum().backward()
    model.zero_grad()


OPTIONS: dict[str, dict[str, Any]] = {
    **{row: {"sharding": row} for row in ("ddp", "zero1", "zero3")},
    "second dimension": {"shard_placement_fn": lambda param: Shard(param.dim() - 1)},
    "offloaded": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "decoded": {"gather_codec": QuantizedGather(block=WIDTH)},
    "codes": {"gather_codec": QuantizedGather(block=WIDTH, decode=False)},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_they_are_on_sharded_and_on_unsharded_parameters(name: str) -> None:
    run_ranks(check_options, 2, name)


def check_options(name: str) -> None:
    model = shard(put(make()), **OPTIONS[name])
    assert found(model) == EXPECTED
    for _ in range(2):
        step(model)
        assert model.read == EXPECTED[:3]
        assert found(model) == EXPECTED
    with unsharded(model):
        assert found(model) == EXPECTED
    if name != "codes":
        model.layers[0].weight.scale = 7.0  # follows a schedule
        step(model)
        assert model.read == [7.0, 1.5, 1.5]


def test_they_are_on_parameters_of_tensor_parallelism() -> None:
    run_ranks(check_tensor_parallel, 4)


def check_tensor_parallel() -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    model = make()
    parallelize_module(model.layers[0], mesh["tensor"], ColwiseParallel())
    model.layers[0].weight.scale = 0.5
    fully_shard(model, mesh=mesh["data"])
    assert model.layers[0].weight.scale == 0.5
    with unsharded(model):
        assert isinstance(model.layers[0].weight, DTensor)
        assert model.layers[0].weight.scale == 0.5


def test_they_are_on_parameters_that_gather_themselves() -> None:
    """And those of the tensor subclass are not, which hold the whole tensor."""
    run_ranks(check_extension, 2)


def check_extension() -> None:
    model = make()
    wrap_weights(model, Narrow)
    model.layers[0].weight.scale = 0.5
    shard(model)
    weight = model.layers[0].weight
    assert weight.scale == 0.5
    assert "held" not in vars(weight)
    model.layers[0].weight = nn.Parameter(weight.detach().clone())
    step(model)
    assert model.read[0] == 0.5
    assert model.layers[0].weight.scale == 0.5


def convert(model: nn.Module) -> None:
    model.to(torch.float64)


def empty(model: nn.Module) -> None:
    model.to_empty(device="cpu")


def assign(model: nn.Module) -> None:
    state = {name: value.clone() for name, value in model.state_dict().items()}
    model.load_state_dict(state, assign=True)


def replace(model: Any) -> None:
    for layer in model.layers[:2]:
        old = layer.weight
        new = distribute_tensor(torch.ones(old.shape), old.device_mesh, old.placements)
        layer.weight = nn.Parameter(new)
    model.layers[2].weight = layer.weight


@pytest.mark.parametrize("change", [convert, empty, assign, replace])
def test_they_stay_when_parameters_are_converted_or_replaced(
    change: Callable[[nn.Module], None],
) -> None:
    run_ranks(check_change, 2, change)


def check_change(change: Callable[[nn.Module], None]) -> None:
    dtype = torch.float64 if change is convert else torch.float32
    model = fully_shard(put(make()))
    model.layers[2].bias.no_decay = True  # on the sharded one
    expected = [*EXPECTED[:5], True]
    change(model)
    model(torch.ones(2, WIDTH, dtype=dtype)).sum().backward()
    assert model.read == expected[:3]
    assert found(model) == expected


def test_a_new_parameter_has_its_own_first() -> None:
    run_ranks(check_own_first, 2)


def check_own_first() -> None:
    model = fully_shard(put(make()))
    old = model.layers[0].weight
    old.other = 1
    new = distribute_tensor(torch.ones(old.shape), old.device_mesh, old.placements)
    model.layers[0].weight = nn.Parameter(new)
    model.layers[0].weight.scale = 9.0
    step(model)
    weight = model.layers[0].weight
    assert (weight.scale, weight.other) == (9.0, 1)


def test_they_are_on_copies_on_parts_in_other_models_and_on_modules_added_later() -> None:
    run_ranks(check_others, 2)


def check_others() -> None:
    model = shard(put(make()))
    weight: Any = model.layers[0].weight
    weight.lock, weight.owner = threading.Lock(), model  # which cannot be copied, or not with it
    step(model)
    twin = copy.deepcopy(model)
    assert found(twin) == EXPECTED
    twin_weight: Any = twin.layers[0].weight
    assert (twin_weight.lock, twin_weight.owner) == (weight.lock, model)
    twin_weight.scale = 0.5
    twin_weight.lock = None
    assert weight.lock is not None, "each has attributes of its own"
    step(twin)
    assert twin.read == EXPECTED[:3]
    former = fully_shard(put(make()))
    other = fully_shard(nn.Sequential(*former.layers))  # takes over its parameters
    assert [getattr(layer.weight, "scale", None) for layer in other] == EXPECTED[:3]
    added = nn.Linear(WIDTH, WIDTH)
    added.weight.scale = 3.0
    twin.layers.append(added)
    for modules in late_modules(twin):
        fully_shard(modules)
    assert isinstance(added.weight, DTensor)
    step(twin)
    assert twin.read == [*EXPECTED[:3], 3.0]


def test_units_that_give_parameters_back_give_what_was_set_on_them_since() -> None:
    run_ranks(check_given_back, 2)


def check_given_back() -> None:
    model = put(make())
    fully_shard(model.layers[1])
    model.layers[1].weight.scale = 2.5  # on the sharded one
    fully_shard(model)  # takes the tied one
    step(model)
    assert model.read == [0.5, 2.5, 2.5]
    shared = nn.Linear(WIDTH, WIDTH)
    before: Any = shared.weight
    before.scale = 0.5
    twice = nn.Sequential(nn.Sequential(shared, nn.Tanh()), nn.Sequential(nn.Tanh(), shared))
    fully_shard(twice[0])
    shared.weight.scale = 2.5  # type: ignore[assignment]
    fully_shard(twice[1])
    fully_shard(twice)
    assert shared.weight.scale == 2.5


def test_a_copy_of_a_sharded_or_unsharded_parameter_is_not_taken_for_it() -> None:
    run_ranks(check_copies_of_parameters, 2)


def check_copies_of_parameters() -> None:
    """What marks it as ours is in the attributes, which a copy has too."""
    model = fully_shard(put(make()))
    names = [name for name, _ in model.named_parameters()]
    with unsharded(model):
        shallow = copy.copy(model.layers[0].weight)
    assert shallow.scale == 0.5
    other = nn.Linear(WIDTH, WIDTH)
    other.weight = shallow
    fully_shard(other)
    assert other.weight.scale == 0.5
    assert [name for name, _ in model.named_parameters()] == names
    dist.barrier()

"""The same mistake is made with FSDP2 and with ours: same type of error, same first words.

What FSDP2 refuses and our layout can do works here, and has the gradients that it should have.
"""

from __future__ import annotations

import copy
import re
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from .fsdp2_mistakes import (
    BY_NAME,
    MISTAKES,
    a_missing_method,
    on_mesh,
    whole_mesh,
)
from .libraries import Library, Observe, Outcomes, layers, linear, observe_all, ones, whole

WORLD_SIZE = 2


def gradient(model: nn.Module, param: nn.Parameter, x: Tensor | None = None) -> Any:
    model(ones() if x is None else x).sum().backward()
    return whole(param.grad)


# What FSDP2 refuses and our layout can do


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.scale


def a_scalar(library: Library) -> Any:
    model = library.fully_shard(Scaled())
    return gradient(model, model.scale)


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4, 3).t())

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight)


def a_transposed_parameter(library: Library) -> Any:
    model = library.fully_shard(Transposed())
    return gradient(model, model.weight)


def columns_that_do_not_divide(library: Library) -> Any:
    model = nn.Linear(5, 2, bias=False)
    library.fully_shard(model, shard_placement_fn=lambda _: Shard(1))
    assert model.weight.placements == (Shard(1),)
    return gradient(model, model.weight, torch.ones(2, 5))


class TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow = nn.Parameter(torch.ones(4))
        self.wide = nn.Parameter(torch.ones(4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.narrow).double() * self.wide


def two_trainable_dtypes(library: Library) -> Any:
    model = library.fully_shard(TwoDtypes())
    return gradient(model, model.narrow), whole(model.wide.grad)


def a_second_dtype_that_is_unfrozen_later(library: Library) -> Any:
    model = TwoDtypes()
    model.wide.requires_grad_(False)
    library.fully_shard(model)
    gradient(model, model.narrow)
    model.zero_grad()
    model.wide.requires_grad_(True)
    return gradient(model, model.narrow), whole(model.wide.grad)


def a_weight_tied_across_units(library: Library) -> Any:
    model = layers(2)
    nn.init.eye_(model[0].weight)
    nn.init.zeros_(model[0].bias)
    model[1].weight = model[0].weight
    library.shard(model, *model)
    return gradient(model, model[0].weight)


def a_deep_copy(library: Library) -> Any:
    model = copy.deepcopy(library.fully_shard(linear()))
    return gradient(model, model.weight)


def two_descriptions_of_one_mesh(library: Library) -> Any:
    mesh = init_device_mesh("cpu", (2,))
    model = linear()
    library.fully_shard(
        model, shard_placement_fn=lambda _: ShardPlacementResult(None, FSDPMeshInfo(mesh, 0))
    )
    return gradient(model, model.weight)


def a_divide_factor(library: Library) -> Any:
    model = library.fully_shard(linear())
    model.set_gradient_divide_factor(8.0)
    return gradient(model, model.weight)


class Reshaped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = linear()

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).view(-1)


def an_output_that_is_a_view(library: Library) -> Any:
    model = library.fully_shard(Reshaped())
    return gradient(model, model.inner.weight)


def a_size_to_reshard_to_with_axes_by_name(library: Library) -> Any:
    mesh = whole_mesh()
    model = on_mesh(mesh, Replicate(), Replicate())
    library.fully_shard(model, mesh=mesh, dp_mesh_dims=BY_NAME, reshard_after_forward=2)
    x = distribute_tensor(torch.ones(4, 4), mesh, [Shard(0), Replicate()])  # two rows on each rank
    return gradient(model, model.weight, x)


def a_part_before_the_whole(library: Library) -> Any:
    model = layers(2)
    library.shard(model, model[0])
    model[0](ones())
    return gradient(model, model[1].bias)


def all_of(number: float, *shape: int) -> Any:
    return torch.full(shape, number).tolist()


UNIFORM = "FSDP expects uniform original parameter dtype but got {"
BOTH_2 = (all_of(2, 4), all_of(2, 4))

# FSDP2's error and its first words, and the gradient with ours
REFUSED_BY_FSDP2: dict[Observe, tuple[type[Exception], str, Any]] = {
    a_scalar: (
        ValueError,
        "fully_shard doesn't support scalar parameters. Change scale to a 1D tensor with numel "
        "equal to 1.",
        8.0,  # the sum of 2 x 4 ones
    ),
    a_transposed_parameter: (
        NotImplementedError,
        "FSDP does not support non-contiguous parameters yet: param.shape=torch.Size([3, 4]) "
        "param.stride()=(1, 3)",
        all_of(2, 3, 4),
    ),
    columns_that_do_not_divide: (
        NotImplementedError,
        "FSDP does not support uneven sharding on dim 1: torch.Size([2, 5]) (world size: 2)",
        all_of(2, 2, 5),
    ),
    two_trainable_dtypes: (AssertionError, UNIFORM, BOTH_2),
    a_weight_tied_across_units: (
        ValueError,
        "Parameter '1.weight' is shared with a parameter already managed by another FSDP group.",
        all_of(4, 4, 4),  # both layers have ones as input, and 2 rows
    ),
    a_deep_copy: (
        AssertionError,
        "FSDP does not support deepcopy. Please use state dict for serialization.",
        all_of(2, 4, 4),
    ),
    two_descriptions_of_one_mesh: (
        ValueError,
        "Params sharing the same process group must use the same FSDPMeshInfo object, but got",
        all_of(2, 4, 4),
    ),
    a_divide_factor: (
        RuntimeError,
        "Cannot use ReduceOp.PREMUL_SUM with Gloo",
        all_of(0.5, 4, 4),  # 2 on each of two ranks, by 8
    ),
    an_output_that_is_a_view: (
        UserWarning,  # an error in these tests
        "FSDP2-wrapped module (FSDPReshaped) returned a view tensor.",
        all_of(2, 4, 4),
    ),
    a_size_to_reshard_to_with_axes_by_name: (
        NotImplementedError,
        "reshard_after_forward as int is not yet supported with SPMD mesh (dp_mesh_dims)",
        all_of(2, 4, 4),
    ),
    a_part_before_the_whole: (
        RuntimeError,
        "FSDP state has already been lazily initialized for 0\nFSDP requires running forward "
        "through the root module first",
        all_of(2, 4),
    ),
}
if cast(Any, torch.__version__) < (2, 15):  # since then FSDP2 can, too
    REFUSED_BY_FSDP2[a_second_dtype_that_is_unfrozen_later] = (
        AssertionError,
        "FSDP reduce-scatter expects uniform gradient dtype but got {",
        BOTH_2,
    )


LIBRARIES = ["ours", pytest.param("fsdp2", marks=pytest.mark.nightly)]


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return observe_all([*MISTAKES, a_missing_method, *REFUSED_BY_FSDP2], WORLD_SIZE)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.__name__)
def test_a_mistake_is_refused_by_both_in_the_same_words(
    outcomes: Outcomes, mistake: Observe, library: str
) -> None:
    error, words = MISTAKES[mistake]
    for type_name, message in outcomes[library, mistake.__name__]:
        assert type_name == error.__name__, message
        assert message.startswith(words)


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_missing_method_is_refused_by_both_in_the_same_words(
    outcomes: Outcomes, library: str
) -> None:
    for type_name, message in outcomes[library, "a_missing_method"]:
        assert type_name == "ValueError"
        assert re.fullmatch(r"<class '.*Linear'> does not have a method generate", message)


@pytest.mark.parametrize("observe", REFUSED_BY_FSDP2, ids=lambda observe: observe.__name__)
def test_what_our_layout_can_do_is_refused_by_fsdp2_only(
    outcomes: Outcomes, observe: Observe
) -> None:
    error, words, expected = REFUSED_BY_FSDP2[observe]
    for type_name, message in outcomes["fsdp2", observe.__name__]:
        assert type_name == error.__name__, message
        assert message.startswith(words)
    for outcome in outcomes["ours", observe.__name__]:
        assert outcome == ("returned", expected)


def a_size_to_reshard_to_after_tensor_parallelism(library: Library) -> Any:
    mesh = init_device_mesh("cpu", (4, 1), mesh_dim_names=("data", "tensor"))
    model = linear()
    parallelize_module(model, mesh["tensor"], ColwiseParallel())
    library.fully_shard(model, mesh=mesh["data"], reshard_after_forward=2)
    return gradient(model, model.weight)


def test_a_size_to_reshard_to_is_refused_by_fsdp2_only_after_tensor_parallelism() -> None:
    found = observe_all([a_size_to_reshard_to_after_tensor_parallelism], 4)
    words = "Resharding to smaller mesh is not supported for DTensor parameters yet"
    ours, fsdp2 = (
        found[library, "a_size_to_reshard_to_after_tensor_parallelism"]
        for library in ("ours", "fsdp2")
    )
    assert fsdp2 == [("NotImplementedError", words)] * 4
    assert ours == [("returned", all_of(2, 4, 4))] * 4

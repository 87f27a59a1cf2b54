"""The arguments of FSDP2's fully_shard do the same with ours: each is watched with both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, UnshardHandle

import vescale_fsdp
from vescale_fsdp.testing import free_port, run_ranks

from .libraries import (
    LIBRARIES,
    Library,
    Observe,
    Outcomes,
    gradient_after,
    is_sharded,
    layers,
    linear,
    number,
    observe_all,
    ones,
    sees,
)
from .recorders import Recorder

WORLD_SIZE = 2
SEEN: dict[Observe, Any] = {}  # what each function says, with either library


@sees(SEEN, [True, True, True])
def fully_shard_returns_what_was_passed(library: Library) -> Any:
    passed: list[Any] = [linear(), [linear()], (linear(), linear())]
    return [library.fully_shard(each) is each for each in passed]


@sees(SEEN, ["FSDPLinear(in_features=4, out_features=4, bias=True)", True, True, True])
def a_class_is_swapped_and_made_once(library: Library) -> Any:
    model, other = library.fully_shard(linear()), library.fully_shard(linear())
    kinds = [isinstance(model, kind) for kind in (nn.Linear, FSDPModule)]
    return [repr(model), type(model) is type(other), *kinds]


@sees(SEEN, [True, False, True, True])
def a_slice_of_a_container_has_the_original_class(library: Library) -> Any:
    model = layers(3)
    library.shard(model, *model)
    part = model[1:]
    kinds = [isinstance(each, FSDPModule) for each in (part, part[0])]
    return [type(part) is nn.Sequential, *kinds, part[0] is model[1]]


class Chain(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


@sees(SEEN, [2, 4])
def a_list_of_modules_with_a_forward_can_be_sharded(library: Library) -> Any:
    return list(library.fully_shard(Chain([linear()]))(ones()).shape)


@sees(SEEN, ["cpu", [0, 1]])
def the_default_mesh_has_all_ranks(library: Library) -> Any:
    mesh = library.fully_shard(linear()).weight.device_mesh
    return [mesh.device_type, mesh.mesh.tolist()]


@sees(SEEN, [True, True, True])
def names_and_buffers_stay(library: Library) -> Any:
    model = nn.Sequential(linear(), nn.BatchNorm1d(4))
    names, buffers = [list(dict(model.named_parameters()))], dict(model.named_buffers())
    library.shard(model, model[0])
    after = dict(model.named_buffers())
    same = all(after[name] is buffer for name, buffer in buffers.items())
    return [[list(dict(model.named_parameters()))] == names, list(after) == list(buffers), same]


@sees(SEEN, [["meta"], 168.0])
def meta_stays_meta_until_it_is_materialized(library: Library) -> Any:
    with torch.device("meta"):
        model = layers(2)
        model.register_buffer("extra", torch.zeros(1))
    library.shard(model, model[0])
    tensors = [*model.parameters(), *model.buffers()]
    devices = sorted({tensor.device.type for tensor in tensors})
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        nn.init.ones_(parameter)
    # 4 + 1 is 5, 5 * 4 + 1 is 21, eight times
    return [devices, model(ones()).sum().item()]


@sees(SEEN, [True, False, 2.0, 3.0])
def ignored_parameters_are_neither_sharded_nor_reduced(library: Library) -> Any:
    model = linear()
    weight = model.weight
    library.fully_shard(model, ignored_params={weight})
    factor = dist.get_rank() + 1
    (factor * model(ones())).sum().backward()
    mine = set((weight.grad / factor).flatten().tolist())
    # Of the bias: 2 rows, and factors of 1 and 2
    return [model.weight is weight, is_sharded(model), *mine, number(model.bias.grad)]


@sees(SEEN, [[True, True, False], [True, True, False]])
def dynamo_finds_the_modules_that_are_not_ignored(library: Library) -> Any:
    model = layers(2)
    library.fully_shard(model, ignored_params=set(model[1].parameters()))
    flags = ("_is_fsdp_managed_module", "_fsdp_use_orig_params")
    return [[bool(getattr(each, flag, None)) for each in model.modules()] for flag in flags]


@sees(SEEN, [[True, False, 1], [True, True, 2], [False, False, 0]])
def between_forward_and_backward_parameters_are_as_asked(library: Library) -> Any:
    seen = []
    for reshard in (None, True, False):
        model = nn.Sequential(linear(), nn.PReLU(4))
        library.shard(model, model[0], reshard_after_forward=reshard)
        loss = model(ones()).sum()
        state = [is_sharded(model[0]), is_sharded(model[1])]
        with Recorder() as recorder:
            loss.backward()
        seen.append([*state, recorder.count("gathers")])
    return seen


@sees(SEEN, [[2, 4], None, True])
def a_module_without_parameters_is_a_unit_without_work(library: Library) -> Any:
    model = nn.Sequential(nn.Tanh())
    library.shard(model, model[0])
    handle = model.unshard(async_op=True)
    handle.wait()
    return [list(model(ones()).shape), model.unshard(), isinstance(handle, UnshardHandle)]


# The tests


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    return observe_all([*SEEN], WORLD_SIZE)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("observe", SEEN, ids=lambda observe: observe.__name__)
def test_both_do_the_same(outcomes: Outcomes, observe: Observe, library: str) -> None:
    for outcome in outcomes[library, observe.__name__]:
        assert outcome == ("returned", SEEN[observe])


def check_default_group(port: int) -> None:
    rank = dist.get_rank()
    dist.barrier()  # the other rank may still connect, and would lose its peer
    dist.destroy_process_group()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MASTER_ADDR", "127.0.0.1")
        patch.setenv("MASTER_PORT", str(port))
        patch.setenv("RANK", str(rank))
        patch.setenv("WORLD_SIZE", str(WORLD_SIZE))
        model = vescale_fsdp.fully_shard(linear())
    assert model.weight.device_mesh.size() == WORLD_SIZE
    assert gradient_after(model) == 2.0


def test_the_process_group_is_made_if_there_is_none() -> None:
    run_ranks(check_default_group, WORLD_SIZE, free_port())

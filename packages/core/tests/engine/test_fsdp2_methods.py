"""The methods of FSDP2 do the same with ours: each is watched with both."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, UnshardHandle
from torch.utils._python_dispatch import TorchDispatchMode

import vescale_fsdp
from vescale_fsdp.testing import run_ranks

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

pytestmark = pytest.mark.filterwarnings("ignore:.* has no effect here")  # test_without_effect

WORLD_SIZE = 2
SEEN: dict[Observe, Any] = {}  # what each function says, with either library


def counts(model: Any) -> list[int]:
    """Gathers in forward, and gathers and reductions in backward."""
    with Recorder() as forward:
        loss = model(ones()).sum()
    with Recorder() as backward:
        loss.backward()
    return [forward.count("gathers"), backward.count("gathers"), backward.count("reductions")]


# unshard and reshard


@sees(SEEN, [True, 1, True, False, 0, True])
def an_unshard_under_way_ends_when_its_handle_is_waited_for(library: Library) -> Any:
    model = library.fully_shard(linear())
    with Recorder() as first:
        handle = model.unshard(async_op=True)
    before = is_sharded(model)
    handle.wait()
    handle.wait()
    gathered = is_sharded(model)
    with Recorder() as second:
        model.unshard()
    model.reshard()
    model.reshard()
    calls = [recorder.count("gathers") for recorder in (first, second)]
    kind = isinstance(handle, UnshardHandle)
    return [kind, calls[0], before, gathered, calls[1], is_sharded(model)]


@sees(SEEN, [False, True])
def unshard_leaves_units_inside_alone(library: Library) -> Any:
    model = nn.Sequential(linear(), nn.PReLU(4))
    library.shard(model, model[0])
    model.unshard()
    return [is_sharded(model[1]), is_sharded(model[0])]


@sees(SEEN, [2, True])
def a_forward_takes_over_an_unshard_under_way(library: Library) -> Any:
    model = layers(3)
    library.shard(model, *model)
    model[1].unshard(async_op=True)
    with Recorder() as recorder:
        model(ones())
    return [recorder.count("gathers"), all(map(is_sharded, model))]


@sees(SEEN, [torch.bfloat16, torch.float32])
def unshard_gathers_in_the_dtype_of_compute(library: Library) -> Any:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = library.fully_shard(linear(), mp_policy=policy)
    model.unshard()
    gathered = model.weight.dtype
    model.reshard()
    return [gathered, model.weight.dtype]


@sees(SEEN, [[3, 3], [3, 2], [3, 3]])
def a_root_that_is_told_to_reshard_gathers_again_in_backward(library: Library) -> Any:
    seen = []
    for runs_before in (False, True):
        model = nn.Sequential(*layers(2), nn.PReLU(4))
        library.shard(model, *model[:2])
        if runs_before:
            seen.append(counts(model)[:2])
        model.set_reshard_after_forward(True)
        seen.append(counts(model)[:2])
    return seen


@sees(SEEN, [[3, 0], [3, 3], [3, 2]])
def reshard_after_forward_can_be_set_for_all_or_one(library: Library) -> Any:
    model = nn.Sequential(*layers(2), nn.PReLU(4))
    library.shard(model, *model[:2])
    seen = []
    for reshards, recurse in ((False, True), (True, True), (False, False)):
        model.set_reshard_after_forward(reshards, recurse=recurse)
        seen.append(counts(model)[:2])
    return seen


@sees(SEEN, [[3, 2], [0, 2], [3, 2], [2, 2]])
def parameters_kept_after_backward_are_not_gathered_in_the_next_forward(library: Library) -> Any:
    model = nn.Sequential(*layers(2), nn.PReLU(4))
    library.shard(model, *model[:2])
    model.set_requires_gradient_sync(False)  # micro-batches: no optimizer comes between them
    seen = []
    for keeps in (True, True, False):
        model.set_reshard_after_backward(not keeps)
        if not keeps:  # from the start
            for module in model.modules():
                if isinstance(module, FSDPModule):
                    module.reshard()
        seen.append(counts(model)[:2])
    model.set_reshard_after_backward(False, recurse=False)
    counts(model)
    return [*seen, counts(model)[:2]]


# Gradients


@sees(SEEN, 2.0)
def a_reset_drops_gradients_that_wait_for_the_replicas(library: Library) -> Any:
    model = library.fully_shard(linear(), mesh=replicas())
    model.set_requires_all_reduce(False)
    gradient_after(model)
    model.reset_iter_state()
    model.set_requires_all_reduce(True)
    return gradient_after(model)


@sees(SEEN, 4.0)
def a_backward_that_is_not_the_last_adds_to_it(library: Library) -> Any:
    model = library.fully_shard(linear())
    model.set_is_last_backward(False)
    gradient_after(model)
    model.set_is_last_backward(True)
    return gradient_after(model)


@sees(SEEN, [[True, True, False], [False, True, True]])
def synchronization_is_switched_for_one_unit_or_those_below(library: Library) -> Any:
    seen = []
    for index, recurse in ((None, False), (0, True)):
        model = nn.Sequential(layers(1), linear(), nn.PReLU(4))
        library.shard(model, model[0][0], model[0], model[1])
        switched = model if index is None else model[index]
        switched.set_requires_gradient_sync(False, recurse=recurse)
        model(ones()).sum().backward()
        weights = [model[0][0].weight, model[1].weight, model[2].weight]
        seen.append([weight.grad is not None for weight in weights])
    return seen


@sees(SEEN, [None, 6.0])
def units_are_switched_one_by_one_as_lightning_does(library: Library) -> Any:
    model = library.fully_shard(linear())
    seen = []
    for syncs, scale in ((False, 1.0), (True, 2.0)):
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_requires_gradient_sync(syncs, recurse=False)
        seen.append(gradient_after(model, scale))
    return seen


def replicas() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))


@sees(SEEN, [None, None, 18.0])
def the_sum_over_replicas_waits_for_its_switch(library: Library) -> Any:
    model = library.fully_shard(linear(), mesh=replicas())
    seen = []
    for step in range(3):
        model.set_requires_all_reduce(step == 2)
        # 2 rows, and factors of 1 and 2: 3 on average, times 1 + 2 + 3
        seen.append(gradient_after(model, (step + 1.0) * (dist.get_rank() + 1)))
    return seen


@sees(SEEN, 3.0)
def synchronization_switches_the_sum_over_replicas_along(library: Library) -> Any:
    model = library.fully_shard(linear(), mesh=replicas())
    model.set_requires_all_reduce(False)
    model.set_requires_gradient_sync(True)
    return gradient_after(model, dist.get_rank() + 1.0)


@sees(SEEN, [True, False])
def the_sum_over_replicas_is_switched_for_one_unit(library: Library) -> Any:
    model = nn.Sequential(linear(), nn.PReLU(4))
    library.shard(model, model[0], mesh=replicas())
    model.set_requires_all_reduce(False, recurse=False)
    model(ones()).sum().backward()
    return [layer.weight.grad is not None for layer in model]


@sees(SEEN, [[(1, torch.float32)], 4.0])
def the_hook_works_in_place_on_the_flat_reduced_shard(library: Library) -> Any:
    model = library.fully_shard(nn.Linear(4, 4, bias=False))
    seen: list[Any] = []

    def double(shard: Tensor) -> None:
        seen.append((shard.dim(), shard.dtype))
        shard.mul_(2.0)

    model.set_all_reduce_hook(double)
    return [seen, gradient_after(model)]


@sees(SEEN, [0, 0, 1])
def the_hook_waits_for_synchronization_and_for_the_replicas(library: Library) -> Any:
    model = library.fully_shard(linear(), mesh=replicas())
    calls: list[int] = []
    model.set_all_reduce_hook(lambda _: calls.append(1))
    seen = []
    for syncs, sums in ((False, False), (True, False), (True, True)):
        model.set_requires_gradient_sync(syncs)
        model.set_requires_all_reduce(sums)
        gradient_after(model)
        seen.append(len(calls))
    return seen


@sees(SEEN, 0.5)
def a_divide_factor_is_used_with_sums_only(library: Library) -> Any:
    model = library.fully_shard(linear())
    model.set_gradient_divide_factor(8.0)
    model.set_force_sum_reduction_for_comms(True)
    return gradient_after(model)  # 2 on each of two ranks, by 8


@sees(SEEN, [0, 2, 0.0])
def hooks_on_accumulated_gradients_run_once_a_reduction(library: Library) -> Any:
    model = library.fully_shard(linear())
    calls: list[nn.Parameter] = []
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(calls.append)
    model.weight.register_post_accumulate_grad_hook(lambda weight: weight.grad.zero_())
    seen = []
    for syncs in (False, True):
        model.set_requires_gradient_sync(syncs)
        gradient_after(model)
        seen.append(len(calls))  # with weight and bias
    return [*seen, number(model.weight.grad)]


# How it communicates


def events_of_backward(model: Any) -> str:
    """Gathers and reductions in the order of issue."""
    loss = model(ones()).sum()
    with Recorder() as recorder:
        loss.backward()
    return "".join("g" if event.is_gather else "r" for event in recorder.events)


@sees(SEEN, ["ggrgrr", "gggrrr", "ggrgrr"])
def an_empty_prefetch_list_restores_the_default(library: Library) -> Any:
    model = layers(3)
    library.shard(model, *model)
    for _ in range(2):
        events_of_backward(model)
    seen = [events_of_backward(model)]
    for modules in ([model[1], model[0]], []):
        model[2].set_modules_to_backward_prefetch(modules)
        seen.append(events_of_backward(model))
    return seen


@sees(SEEN, [2, 1])
def a_unit_that_is_not_unsharded_in_backward_is_not_gathered(library: Library) -> Any:
    model = layers(2)
    library.shard(model, *model)
    seen = []
    for unshards in (True, False):
        model[0].set_unshard_in_backward(unshards)  # no gradient of its input is wanted
        seen.append(counts(model)[1])
    return seen


@sees(SEEN, [2.0, 2.0, 2.0, 2.0, 2.0])
def what_tunes_communication_leaves_gradients_alone(library: Library) -> Any:
    model = library.fully_shard(linear())
    library.share_comm_ctx([])
    library.share_comm_ctx([model, library.fully_shard(linear())])
    seen = []
    for name, value in (
        ("set_allocate_memory_from_process_group_for_comm", True),
        ("set_allocate_memory_from_process_group_for_comm", False),
        ("set_separate_reduce_scatter_group", True),
        ("set_reduce_scatter_max_input_buffers", 2),
        ("_set_unshard_async_op", True),
    ):
        getattr(model, name)(value)
        model.zero_grad()
        seen.append(gradient_after(model))
    return seen


@sees(SEEN, 2.0)
def an_event_to_wait_for_may_be_one_of_the_cpu(library: Library) -> Any:
    model = library.fully_shard(linear())
    model.set_post_optim_event(torch.cpu.Event())
    return gradient_after(model)


@sees(SEEN, [True, torch.float64, torch.float64])
def a_conversion_keeps_the_parameters(library: Library) -> Any:
    model = layers(2)
    library.shard(model, model[0])
    before = list(model.parameters())
    model.double()
    same = all(new is old for new, old in zip(model.parameters(), before, strict=True))
    return [same, model[0].weight.dtype, model(ones().double()).dtype]


# The tests


@pytest.fixture(scope="module")
def outcomes() -> Outcomes:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VESCALE_FSDP_SMALL_BYTES", "0")
        return observe_all([*SEEN], WORLD_SIZE)


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("observe", SEEN, ids=lambda observe: observe.__name__)
def test_both_do_the_same(outcomes: Outcomes, observe: Observe, library: str) -> None:
    for outcome in outcomes[library, observe.__name__]:
        assert outcome == ("returned", SEEN[observe])


def check_reset() -> None:
    model = vescale_fsdp.fully_shard(linear())
    model.set_requires_gradient_sync(False)
    gradient_after(model)
    model.reset_iter_state()
    model.set_requires_gradient_sync(True)
    assert gradient_after(model) == 2.0


def test_a_reset_drops_gradients_that_were_not_synchronized() -> None:
    # FSDP2 promises so, and keeps them.
    run_ranks(check_reset, WORLD_SIZE)


class GatherSizes(TorchDispatchMode):
    """Lists over how many ranks each gather is."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.name == "c10d::_allgather_base_":
            self.sizes.append(args[0].numel() // args[1].numel())
        return func(*args, **(kwargs or {}))


def ranks_that_gather(library: Library) -> list[list[int]]:
    model = nn.Linear(8, 8, bias=False)
    library.fully_shard(model, reshard_after_forward=2)
    seen = []
    for reshards in (None, True, False):
        if reshards is not None:
            model.set_reshard_after_forward(reshards)
        with GatherSizes() as mode:
            model(torch.ones(2, 8)).sum().backward()
        seen.append(mode.sizes)
    return seen


def test_set_reshard_after_forward_takes_back_a_size_to_reshard_to() -> None:
    for outcomes in observe_all([ranks_that_gather], 4).values():
        assert outcomes == [("returned", [[4, 2], [4, 4], [4]])] * 4

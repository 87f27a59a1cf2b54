"""A flattened optimizer gives the bits of the plain one, whatever happens between the steps."""

from __future__ import annotations

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
from torch.optim import SGD, Adam, AdamW, Optimizer, adam

from vescale_fsdp import Granularity, fully_shard
from vescale_fsdp.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from vescale_fsdp.optim import flat as space
from vescale_fsdp.optim import flatten_
from vescale_fsdp.testing import run_ranks

from .helpers import (
    MakeOptimizer,
    Training,
    assert_same,
    backward,
    local,
    long_from,
    make_adamw,
    make_net,
    pair,
    train,
)

optim = torch.optim
OPTIMIZERS: dict[str, tuple[type[Optimizer], dict[str, Any]]] = {
    "sgd": (SGD, {"lr": 0.1}),
    "sgd, momentum": (SGD, {"momentum": 0.9, "weight_decay": 0.1, "dampening": 0.1}),
    "sgd, nesterov": (SGD, {"momentum": 0.9, "nesterov": True}),  # foreach changes gradients
    "adam": (Adam, {"weight_decay": 0.1}),
    "adam, maximize": (Adam, {"maximize": True}),
    "adamw": (AdamW, {"weight_decay": 0.1}),
    "adamw, amsgrad": (AdamW, {"amsgrad": True}),
    "nadam": (optim.NAdam, {"weight_decay": 0.1}),
    "radam": (optim.RAdam, {"weight_decay": 0.1, "decoupled_weight_decay": True}),
    "adagrad": (optim.Adagrad, {"weight_decay": 0.1, "lr_decay": 0.1}),
    "rmsprop": (optim.RMSprop, {"weight_decay": 0.1}),
    "rmsprop, centered": (optim.RMSprop, {"centered": True, "momentum": 0.9}),
    "adadelta": (optim.Adadelta, {"weight_decay": 0.1}),
    "adamax": (optim.Adamax, {"weight_decay": 0.1}),
    "asgd": (optim.ASGD, {"weight_decay": 0.1}),
}
Case = tuple[str, dict[str, Any]]
SINGLE, FOREACH, FUSED = {"foreach": False}, {"foreach": True}, {"fused": True}


def in_two_groups(net: nn.Module) -> list[dict[str, Any]]:
    """Matrices, and what lies between them in the shards."""
    matrices = [param for param in net.parameters() if param.dim() > 1]
    others = [param for param in net.parameters() if param.dim() < 2]
    return [{"params": matrices}, {"params": others, "weight_decay": 0.0, "lr": 0.02}]


def make_named(name: str, how: dict[str, Any]) -> MakeOptimizer:
    optimizer_class, options = OPTIMIZERS[name]
    return lambda net: optimizer_class(in_two_groups(net), **options, **how)


# Numbers


def check_numbers(cases: list[Case], **options: Any) -> None:
    """Three steps; in one a layer is not used, and its states lag behind. A bias is frozen."""
    for name, how in cases:
        flat, plain = pair(make_named(name, how), **options)
        for net, optimizer in (flat, plain):
            net.last.bias.requires_grad_(False)
            train(net, optimizer, range(3), skip=(1,))
        assert_same(flat, plain)


CASES: list[Case] = [
    *((name, SINGLE) for name in OPTIMIZERS),
    *((name, FOREACH) for name in ("sgd, nesterov", "adamw, amsgrad", "nadam", "adagrad", "asgd")),
]


def test_every_optimizer_gives_the_bits_of_the_plain_one() -> None:
    run_ranks(check_numbers, 2, CASES)


def check_where_the_end_matters() -> None:
    check_numbers([(name, FUSED) for name in ("sgd", "sgd, momentum", "adam", "adamw, amsgrad")])
    cases = [("adamw", SINGLE), ("sgd, nesterov", FOREACH), ("adam", FUSED)]
    check_numbers(cases, dtype=torch.bfloat16)


def test_so_it_does_where_bits_depend_on_the_end_of_a_tensor() -> None:
    """Fused kernels and 16-bit parameters, on a CPU."""
    run_ranks(check_where_the_end_matters, 2)


def check_whole_registers() -> None:
    """The parts of this model are multiples of 64 bytes on each rank, but for those of the last."""

    def trained(change: Any, dtype: torch.dtype) -> tuple[nn.Module, Optimizer]:
        torch.manual_seed(0)
        net = nn.Sequential(*(nn.LayerNorm(32) for _ in range(6)), nn.Linear(32, 5)).to(dtype)
        fully_shard(net, granularity=Granularity.elements(32))
        optimizer = change(AdamW(net.parameters(), lr=0.05, fused=True))
        for step in range(3):
            optimizer.zero_grad()
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(step))
            net(x.to(dtype)).square().sum().backward()
            optimizer.step()
        return net, optimizer

    numbers: list[int] = []  # of the tensors in each call of the kernels
    kernels = adam.adam

    def counted(params: list[Tensor], *args: Any, **kwargs: Any) -> None:
        numbers.append(len(params))
        kernels(params, *args, **kwargs)

    adam.adam = counted
    try:
        for dtype in (torch.float32, torch.float64):
            flat, plain = trained(flatten_, dtype), trained(lambda optimizer: optimizer, dtype)
            assert_same(flat, plain)
            assert numbers[2] < numbers[5] / 2, numbers
            numbers.clear()
    finally:  # other tests run in this process
        adam.adam = kernels


def test_fused_kernels_on_a_cpu_step_on_joined_parts_that_fill_registers() -> None:
    run_ranks(check_whole_registers, 2)


def check_long_segments() -> None:
    with long_from(20):
        check_numbers([("adamw", SINGLE), ("sgd, momentum", FOREACH)])


def test_so_it_does_with_some_stepped_in_place_and_others_packed() -> None:
    run_ranks(check_long_segments, 2)


def check_small_spaces() -> None:
    """Whole parameters, so that some ranks hold little; states in several flat tensors."""
    cases = [("adamw", SINGLE), ("adamw", FUSED), ("sgd, momentum", FOREACH)]
    check_numbers(cases, granularity=Granularity.whole())
    space._MAX_ELEMENTS, before = 10, space._MAX_ELEMENTS
    check_numbers(cases)
    space._MAX_ELEMENTS = before


def test_so_it_does_where_a_rank_or_a_space_holds_little() -> None:
    run_ranks(check_small_spaces, 3)


def check_rprop() -> None:
    net, plain = make_net(), make_net(shard=lambda *_: None)
    train(net, flatten_(optim.Rprop(net.parameters())), range(4))
    train(plain, optim.Rprop(plain.parameters()), range(4))
    for param, expected in zip(net.parameters(), plain.parameters(), strict=True):
        assert torch.equal(param.full_tensor(), expected)


def test_rprop_gives_the_bits_of_an_unsharded_model() -> None:
    """The plain one does not run on shards."""
    run_ranks(check_rprop, 2)


# What users do between steps. Each does the same to both trainings.


def clip(net: nn.Module, optimizer: Optimizer) -> None:
    for step in range(3):
        optimizer.zero_grad()
        backward(net, step)
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()


def accumulate(net: nn.Module, optimizer: Optimizer) -> None:
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        backward(net, step)
        backward(net, step + 10, skip=True)
        optimizer.step()


def set_gradients(net: nn.Module, optimizer: Optimizer) -> None:
    """Each in memory of its own, or one after the other in another order."""
    for step in range(4):
        optimizer.zero_grad()
        backward(net, step)
        grads = [param.grad for param in net.parameters() if param.grad is not None]
        backwards = [local(grad) for grad in reversed(grads)]
        memory = torch.cat([*backwards, torch.ones(1000)])
        parts = memory.split([*map(len, backwards), 1000])[-2::-1]
        for grad, part in zip(grads, parts, strict=True):
            grad._local_tensor = part if step % 2 else local(grad) * 2
        optimizer.step()


def unfreeze(net: nn.Module, optimizer: Optimizer) -> None:
    net.middle[1].requires_grad_(False)
    train(net, optimizer, range(2))
    net.middle[1].requires_grad_(True)
    train(net, optimizer, range(2, 4))


def edit_states(net: nn.Module, optimizer: Optimizer) -> None:
    """In place, by new tensors, and by dropping all of a parameter's."""
    train(net, optimizer, range(2))
    optimizer.state[net.first.weight]["step"].fill_(7.0)
    train(net, optimizer, range(2, 4))
    state = optimizer.state[net.middle[0].weight]
    state["exp_avg"] = state["exp_avg"] * 2
    train(net, optimizer, range(4, 5))
    del optimizer.state[net.last.weight]
    train(net, optimizer, range(5, 7))


def change_options(net: nn.Module, optimizer: Optimizer) -> None:
    for step, (lr, fused) in enumerate([(0.1, None), (0.2, True), (0.3, False)]):
        for group in optimizer.param_groups:
            group["lr"], group["fused"] = lr, fused
        train(net, optimizer, range(step, step + 1))


def take_tensor_lr(net: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(0.1)
    train(net, optimizer, range(3))


def give_closures(net: nn.Module, optimizer: Optimizer) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        return backward(net, 0)

    losses = [optimizer.step(closure) for _ in range(3)]
    assert losses[0] > losses[2]


def use_hooks(net: nn.Module, optimizer: Optimizer) -> None:
    """They see parameters and states as a plain optimizer has them, before and after a step."""
    steps: list[set[float]] = []

    def double(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        for param in optimizer.param_groups[0]["params"]:
            if param.grad is not None:
                param.grad.mul_(2)

    def look(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        assert set(optimizer.state) <= set(optimizer.param_groups[0]["params"])
        steps.append({state["step"].item() for state in optimizer.state.values()})

    optimizer.register_step_pre_hook(double)
    optimizer.register_step_post_hook(look)
    train(net, optimizer, range(3))
    assert steps == [{1.0}, {2.0}, {3.0}]


def schedule(net: nn.Module, optimizer: Optimizer) -> None:
    scheduler = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    for step in range(3):
        train(net, optimizer, range(step, step + 1))
        scheduler.step()  # warns, and so fails, if the scheduler has not seen the step


def scale_losses(net: nn.Module, optimizer: Optimizer) -> None:
    """As a GradScaler does: fused kernels divide the gradients, and skip a step with infinities."""
    optimizer.param_groups[0]["fused"] = True
    for step, is_skipped in enumerate([0.0, 1.0, 0.0]):
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(is_skipped)
        train(net, optimizer, range(step, step + 1))


def add_group(net: nn.Module, optimizer: Optimizer) -> None:
    group = optimizer.param_groups[0]
    late = group["params"].pop()
    train(net, optimizer, range(2))
    optimizer.add_param_group({"params": [late], "lr": 0.3})
    train(net, optimizer, range(2, 4))


def make_differentiable(net: nn.Module, optimizer: Optimizer) -> None:
    optimizer.param_groups[0]["differentiable"] = True
    train(net, optimizer, range(3))


SCENARIOS = {
    scenario.__name__: scenario
    for scenario in (
        *(clip, accumulate, set_gradients, unfreeze, edit_states, change_options, take_tensor_lr),
        *(give_closures, use_hooks, schedule, scale_losses, add_group),
        make_differentiable,
    )
}


def check_scenario(name: str) -> None:
    flat, plain = pair()
    for training in (flat, plain):
        SCENARIOS[name](*training)
    assert_same(flat, plain)


@pytest.mark.parametrize("name", SCENARIOS)
@pytest.mark.sampled(6)
def test_numbers_are_the_same_when_users(name: str) -> None:
    run_ranks(check_scenario, 2, name)


def check_broken_step() -> None:
    """It raises while it collects the tensors of its second group: the first has been stepped."""
    flat, plain = pair(make_named("adamw", {}))
    for net, optimizer in (flat, plain):
        train(net, optimizer, range(2))
        group = optimizer.param_groups[1]
        group["lr"], group["foreach"] = torch.tensor(0.1), True
        with pytest.raises(RuntimeError, match="lr as a Tensor"):
            train(net, optimizer, range(2, 3))
    assert_same(flat, plain)
    for net, optimizer in (flat, plain):
        group = optimizer.param_groups[1]
        group["lr"], group["foreach"] = 0.1, None
        train(net, optimizer, range(3, 5), skip=(3,))
    assert_same(flat, plain)


def test_step_that_raises_leaves_what_the_plain_one_leaves() -> None:
    run_ranks(check_broken_step, 2)


def check_late_momentum() -> None:
    flat, plain = pair(make_named("sgd", {}))
    for net, optimizer in (flat, plain):
        for momentum in (0.0, 0.9, 0.0, 0.8):
            for group in optimizer.param_groups:
                group["momentum"] = momentum
            train(net, optimizer, range(3))
    assert_same(flat, plain)


def test_momentum_may_come_and_go() -> None:
    run_ranks(check_late_momentum, 2)


# Other tensors in the same group


def make_mixed() -> Training:
    """Ragged ones, a plain one, a replicated DTensor, and one that is cut along its columns."""
    torch.manual_seed(0)
    net = make_net()
    layer = nn.Linear(3, 3)
    fully_shard(layer, shard_placement_fn=lambda param: Shard(1) if param.dim() > 1 else None)
    replicated = distribute_tensor(torch.ones(3), init_device_mesh("cpu", (2,)), [Replicate()])
    extra = [*layer.parameters(), nn.Parameter(replicated), nn.Parameter(torch.ones(3))]
    for index, param in enumerate(extra):
        net.register_parameter(f"extra_{index}", param)
    return net, AdamW(net.parameters(), foreach=True)


def check_mixed() -> None:
    plain = make_mixed()
    net, optimizer = make_mixed()
    flat = net, flatten_(optimizer)
    for net, optimizer in (flat, plain):
        for step in range(3):
            optimizer.zero_grad()
            backward(net, step)
            for index in range(4):
                param = getattr(net, f"extra_{index}")
                param.grad = param.detach() * (step + 1)
            optimizer.step()
    assert local(flat[0].extra_0).stride() == (1, 3)
    assert_same(flat, plain)


def test_plain_and_other_distributed_tensors_may_be_mixed_in() -> None:
    run_ranks(check_mixed, 2)


# States that are saved and loaded


def load_directly(source: Training, target: Training) -> None:
    target[1].load_state_dict(copy.deepcopy(source[1].state_dict()))


def load_by_name(source: Training, target: Training) -> None:
    state = copy.deepcopy(get_optimizer_state_dict(*source))
    options = StateDictOptions(strict=False)  # one layer never has a gradient
    set_optimizer_state_dict(*target, state, options=options)


def check_resume(load: Any, name: str, how: dict[str, Any]) -> None:
    """From plain to flat, back to plain, and straight."""
    make = make_named(name, how)
    flat, plain = pair(make)
    straight, last = make_net(), make_net()
    straight_training, last_training = (straight, make(straight)), (last, make(last))
    train(*straight_training, range(6), skip=(1,))
    train(*plain, range(2), skip=(1,))
    for source, target, steps in (
        (plain, flat, range(2, 4)),
        (flat, last_training, range(4, 6)),
    ):
        target[0].load_state_dict(source[0].state_dict())
        load(source, target)
        train(*target, steps)
    assert_same(last_training, straight_training)


def check_resumes() -> None:
    for load in (load_directly, load_by_name):
        for name, how in (("adamw", SINGLE), ("sgd, momentum", FOREACH), ("nadam", SINGLE)):
            check_resume(load, name, how)


def test_states_are_loaded_from_a_plain_optimizer_and_into_one() -> None:
    run_ranks(check_resumes, 2)


def check_state_dict_after_every_step() -> None:
    """Whoever keeps state dicts as they are, without copies, sees the live states."""
    (net, optimizer), (plain, expected) = pair()
    state = None
    for step in range(3):
        train(net, optimizer, range(step, step + 1))
        train(plain, expected, range(step, step + 1))
        found, wanted = optimizer.state_dict(), expected.state_dict()
        assert found["param_groups"] == wanted["param_groups"]
        assert found["state"].keys() == wanted["state"].keys()
        if step == 1:
            state = found
    assert state is not None
    for key, each in wanted["state"].items():
        for name, value in each.items():
            assert torch.equal(local(state["state"][key][name]), local(value))


def test_state_dict_has_the_names_of_the_plain_one_and_the_live_states() -> None:
    run_ranks(check_state_dict_after_every_step, 2)


def check_copy() -> None:
    net = make_net()
    optimizer = flatten_(make_adamw(net))
    train(net, optimizer, range(2))
    other_net, other = copy.deepcopy((net, optimizer))
    expected_net = make_net()
    expected = make_adamw(expected_net)
    train(expected_net, expected, range(4))
    train(other_net, other, range(2, 4))
    assert_same((other_net, other), (expected_net, expected))
    train(net, optimizer, range(2, 4))
    assert_same((net, optimizer), (expected_net, expected))


def test_deep_copy_is_a_plain_optimizer_with_states_of_its_own() -> None:
    run_ranks(check_copy, 2)


# The rest of the interface


def check_late_call() -> None:
    """After a scheduler and a hook were there, and again."""
    trainings = [(net, make_adamw(net)) for net in (make_net(), make_net())]
    steps: list[set[float]] = []
    for net, optimizer in trainings:
        scheduler = optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        optimizer.register_step_post_hook(
            lambda optimizer, args, kwargs: steps.append(
                {state["step"].item() for state in optimizer.state.values()}
            )
        )
        if net is trainings[0][0]:
            assert flatten_(flatten_(optimizer)) is optimizer
        for step in range(3):
            train(net, optimizer, range(step, step + 1))
            scheduler.step()
    assert steps == [{1.0}, {2.0}, {3.0}] * 2
    assert_same(*trainings)


def test_it_may_be_called_late_and_twice() -> None:
    run_ranks(check_late_call, 2)


def check_versions() -> None:
    net = make_net()
    optimizer = flatten_(make_adamw(net))
    train(net, optimizer, range(2))
    before = [param._version for param in net.parameters()]
    train(net, optimizer, range(2, 3))
    for param, version in zip(net.parameters(), before, strict=True):
        assert (param._version > version) == (param.grad is not None)


def test_versions_of_the_parameters_count_the_step() -> None:
    run_ranks(check_versions, 2)


def check_is_freed() -> None:
    net = make_net()
    optimizer = flatten_(make_adamw(net))
    train(net, optimizer, range(2))
    gc.disable()
    try:
        old = weakref.ref(optimizer.state[net.last.weight]["exp_avg"]._local_tensor)
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert old() is None
        train(net, optimizer, range(2, 3))
        last = weakref.ref(optimizer.state[net.last.weight]["exp_avg"]._local_tensor)
        assert last() is not None
        del optimizer
        assert last() is None
    finally:
        gc.enable()


def test_states_are_freed_when_others_are_loaded_or_the_optimizer_is_deleted() -> None:
    run_ranks(check_is_freed, 2)


class Derived(AdamW):
    pass


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda params: optim.LBFGS(params), "LBFGS: its direction depends on all parameters"),
        (lambda params: optim.Muon(params), "Muon: it takes each matrix as a whole"),
        (lambda params: optim.Adafactor(params), "Adafactor: it takes means over the rows"),
        (lambda params: optim.SparseAdam(params), "SparseAdam: its gradients are sparse"),
        (lambda params: Derived(params), r"Derived, .* It takes .*AdamW.* not their subclasses"),
    ],
)
def test_other_optimizers_are_refused_by_name(make: Any, words: str) -> None:
    optimizer = make([nn.Parameter(torch.ones(2, 2))])
    with pytest.raises(TypeError, match=words):
        flatten_(optimizer)

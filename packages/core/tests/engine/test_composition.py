"""What people put around, into and beside sharded modules works as with a plain model."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from vescale_fsdp import fully_shard
from vescale_fsdp.engine.unit import units_in
from vescale_fsdp.testing import run_ranks
from vescale_fsdp.testing.ranks import close_pools

from . import composition_scenarios as scenarios
from .composition_scenarios import WIDTH, Net, Shard, alone, inputs, sharded
from .helpers import full_gradients, full_parameters
from .models import make

Scenario = Callable[[Shard], Any]


def results(scenario: Scenario) -> tuple[Any, Any]:
    try:
        ours = scenario(fully_shard)
    except Exception as error:  # noqa: BLE001  # all ranks raise it, and live on
        ours = f"{type(error).__name__}: {error}"
    return ours, scenario(alone)


# Dynamo looks for the ``.grad`` of every input; torch loads its forward-mode formulas by a script.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf")
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
@pytest.mark.parametrize(
    "scenario",
    [
        scenarios.checkpointed_before,
        scenarios.checkpointed_after,
        scenarios.wrapper_around_unit,
        scenarios.wrapper_in_unit,
        scenarios.reentrant_wrapper_around_unit,
        scenarios.reentrant_wrapper_in_unit,
        scenarios.selective_around_unit,
        scenarios.selective_in_unit,
        scenarios.selective_by_function,
        scenarios.compiled_blocks,
        scenarios.compiled_root,
        scenarios.forward_mode,
        scenarios.forward_mode_of_a_kept_root,
        scenarios.forward_mode_of_a_tangent_alone,
        scenarios.assigned,
        scenarios.loaded_in_part,
        scenarios.meta_with_assigned_state,
        scenarios.meta_with_state_of_another,
        scenarios.adversaries,
        scenarios.loss_in_parts_of_a_head,
        scenarios.loss_in_parts_of_norm_and_head,
        scenarios.optimizer_in_backward,
        scenarios.eight_bit_integers,
        scenarios.sixty_four_bit_integers,
        scenarios.scripted,
        scenarios.any_shape,
        scenarios.functional_forward_mode,
        scenarios.eight_bit_floats,
    ],
    ids=lambda scenario: scenario.__name__,
)
@pytest.mark.sampled(6)
def test_results_are_those_of_a_plain_model(scenario: Scenario) -> None:
    for ours, plain in run_ranks(results, 2, scenario, timeout_s=30):
        assert not isinstance(ours, str), ours
        torch.testing.assert_close(ours, plain, rtol=0, atol=0)


def functional_gradient() -> None:
    model, x = sharded(fully_shard, make(Net)), inputs()
    with pytest.raises(NotImplementedError, match=r"torch\.func\.grad.*torch\.autograd\.grad"):
        torch.func.grad(lambda x: model(x).sum())(x)
    (gradient,) = torch.autograd.grad(model(x.requires_grad_()).sum(), x)
    (expected,) = torch.autograd.grad(make(Net)(x).sum(), x)
    assert torch.equal(gradient, expected)


def test_functional_gradients_are_refused_with_the_way_out() -> None:
    run_ranks(functional_gradient, 2, timeout_s=30)


# Hooks on sharded parameters, beside FSDP2


class PartlyUsed(Net):
    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(WIDTH, WIDTH)
        self.blocks[0].down.requires_grad_(False)


def with_hooks(shard: Shard, hook: Callable[..., None], **options: Any) -> nn.Module:
    """A model whose trainable parameters have ``hook``, which is given their name too."""
    model = sharded(shard, make(PartlyUsed), **options)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(partial(hook, name=name))
    return model


def hook_calls(shard: Shard, switch: str, **options: Any) -> list[list[str]]:
    """The parameters whose hooks run in each of four backwards, where the third has its switch off.

    In the last one the gradients of the one before are still there.
    """
    calls: list[str] = []

    def note(parameter: Tensor, name: str) -> None:
        assert parameter.grad is not None
        assert parameter.grad.placements == parameter.placements
        calls.append(name)

    model = with_hooks(shard, note, **options)
    found = []
    for step, is_on in enumerate((True, True, False, True)):
        if step == 1:
            model.zero_grad()
        getattr(model, switch)(is_on)
        model(inputs(step)).square().mean().backward()
        found.append(sorted(calls))
        calls.clear()
    return found


def hook_calls_of_both(switch: str, has_replicas: bool) -> list[list[list[str]]]:
    options: dict[str, Any] = {}
    if has_replicas:
        names = ("replicate", "shard")
        options["mesh"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=names)
    return [hook_calls(shard, switch, **options) for shard in (fully_shard, torch_fully_shard)]


USED = [
    "blocks.0.up.bias",
    "blocks.0.up.weight",
    "blocks.1.down.bias",
    "blocks.1.down.weight",
    "blocks.1.up.bias",
    "blocks.1.up.weight",
    "first.bias",
    "first.weight",
]


@pytest.mark.parametrize(
    ("world_size", "switch"),
    [(2, "set_requires_gradient_sync"), (4, "set_requires_all_reduce")],
)
def test_hooks_on_sharded_parameters_run_once_for_each_reduction(
    world_size: int, switch: str
) -> None:
    expected = [USED, USED, [], USED]
    for ours, theirs in run_ranks(hook_calls_of_both, world_size, switch, world_size == 4):
        assert theirs == expected
        assert ours == expected


def gathered_at_hooks(shard: Shard) -> list[str]:
    """The parameters that the model does not have in their sharded form when their hook runs."""
    gathered: list[str] = []

    def look(parameter: Tensor, name: str) -> None:
        if parameter is not model_ref().get_parameter(name):
            gathered.append(name)

    model = with_hooks(shard, look)
    model_ref = weakref.ref(model)  # no cycle through the hooks, which nobody would collect
    model(inputs()).sum().backward()
    return gathered


def gathered_at_hooks_of_both() -> list[list[str]]:
    return [gathered_at_hooks(shard) for shard in (fully_shard, torch_fully_shard)]


def test_hooks_find_the_sharded_parameters_in_the_model() -> None:
    assert run_ranks(gathered_at_hooks_of_both, 2) == [[[], []]] * 2


# Deletion


def after_forward(model: nn.Module) -> Any:
    return model(inputs())


def after_backward(model: nn.Module) -> Any:
    loss = model(inputs()).sum()
    loss.backward()
    return loss


def while_gradients_wait(model: nn.Module) -> Any:
    model.set_requires_gradient_sync(False)
    model(inputs()).sum().backward()
    return model(inputs())


def after_a_broken_forward(model: nn.Module) -> Any:
    with pytest.raises(RuntimeError):
        model(torch.ones(3, WIDTH + 1))


def while_unsharded(model: nn.Module) -> Any:
    return model.blocks[0].unshard(async_op=True)


def what_outlives(stage: Callable[[nn.Module], Any]) -> list[str]:
    fully_shard(nn.Linear(2, 2))  # the first of a process imports what keeps a frame alive
    gc.disable()
    try:
        model = sharded(fully_shard, make(Net))
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(inputs()).sum().backward()
            optimizer.step()
        kept = stage(model)
        watched = {}
        for name, unit in units_in(model).items():
            watched[f"unit {name}"] = weakref.ref(unit)
            for group in unit.groups:
                full_buffer = group.buffer.full
                watched[f"shard of {name}"] = weakref.ref(group.buffer.shard)
                watched[f"gathered memory of {name}"] = weakref.ref(full_buffer.region)
                watched[f"scratch memory of {name}"] = weakref.ref(group.pool)
        del model, optimizer, kept, unit, group, full_buffer
        for _ in range(500):  # gloo's threads let go of what they have sent a moment later
            alive = [name for name, reference in watched.items() if reference() is not None]
            if not alive:
                break
            time.sleep(0.01)
        return alive
    finally:
        gc.enable()


@pytest.mark.parametrize(
    "stage",
    [after_forward, after_backward, while_gradients_wait, after_a_broken_forward, while_unsharded],
)
def test_all_memory_of_a_model_goes_with_it_at_any_time(stage: Callable[[nn.Module], Any]) -> None:
    close_pools()  # models use the same scratch memory, and tests before may have kept one
    assert run_ranks(what_outlives, 2, stage) == [[], []]


# Any number of ranks


class Mixed(nn.Module):
    """Embedding, convolutions, norms and a head: sizes that no number of ranks divides."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(
            [
                nn.Sequential(nn.Conv1d(6, 7, 3), nn.GroupNorm(7, 7), nn.Tanh()),
                nn.Sequential(nn.Conv1d(7, 5, 3), nn.GroupNorm(1, 5), nn.Tanh()),
            ]
        )
        self.norm, self.head = nn.LayerNorm(5), nn.Linear(5, 11)

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, length] -> [batch, length - 4, 11]
        x = self.embedding(tokens).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x.transpose(1, 2)))


def mixed_loss(model: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    tokens = torch.randint(11, (2, 9), generator=generator)
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens[:, 4:].flatten())


def check_parity(tolerance: float) -> None:
    """Against one process that has the batches of all ranks."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    plain, model = make(Mixed), sharded(fully_shard, make(Mixed))
    optimizers = [
        torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (plain, model)
    ]
    for step in range(3):
        for other in range(world_size):
            mixed_loss(plain, step, other).backward()
        for parameter in plain.parameters():
            parameter.grad /= world_size
        mixed_loss(model, step, rank).backward()
        close = partial(torch.testing.assert_close, rtol=0, atol=tolerance)
        close(full_gradients(model), full_gradients(plain))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        close(full_parameters(model), full_parameters(plain))


@pytest.mark.parametrize(("world_size", "tolerance"), [(1, 0.0), (2, 0.0), (3, 1e-6), (4, 1e-6)])
def test_training_is_that_of_one_process_on_any_number_of_ranks(
    world_size: int, tolerance: float
) -> None:
    # Halving is exact. More ranks multiply by their inverse, where one process divides.
    run_ranks(check_parity, world_size, tolerance)

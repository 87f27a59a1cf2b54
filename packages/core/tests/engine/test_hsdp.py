"""Hybrid sharding: shards along the inner axis of a mesh, replicas along the outer one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.tensor import Replicate

from vescale_fsdp import RaggedShard, RaggedTensor, clip_grad_norm_, fully_shard
from vescale_fsdp.engine.unit import units_in
from vescale_fsdp.testing import run_ranks

from .helpers import averaged_gradients, full_gradients, full_parameters, shard_units
from .models import MLP, TinyGPT, gpt_loss, inputs_of, make, tokens_of
from .recorders import Recorder

WORLD_SIZE = 4


def grid() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))


def check_placements() -> None:
    model = fully_shard(make(MLP, 1), mesh=grid())
    for parameter in model.parameters():
        assert type(parameter.data) is RaggedTensor
        outer, inner = parameter.placements
        assert outer == Replicate()
        assert isinstance(inner, RaggedShard)
        assert inner.num_shards == 2
    model(inputs_of(0, dist.get_rank())).sum().backward()
    for parameter in model.parameters():
        assert parameter.grad is not None
        assert parameter.grad.placements == parameter.placements


def test_parameters_and_gradients_are_sharded_inside_and_replicated_outside() -> None:
    run_ranks(check_placements, WORLD_SIZE)


def check_gradients() -> None:
    rank = dist.get_rank()
    plain = make(TinyGPT)
    model = make(TinyGPT)
    shard_units(model, model.blocks, mesh=grid())
    for step in range(3):  # the third adds to gradients that are there
        if step < 2:
            plain.zero_grad()
            model.zero_grad()
        gpt_loss(plain, tokens_of(step, rank)).backward()
        gpt_loss(model, tokens_of(step, rank)).backward()
        expected, got = averaged_gradients(plain), full_gradients(model)
        for name, gradient in expected.items():
            torch.testing.assert_close(got[name], gradient, rtol=1e-5, atol=1e-7, msg=name)


def test_gradients_are_the_mean_over_all_ranks() -> None:
    run_ranks(check_gradients, WORLD_SIZE)


def check_training(num_steps: int) -> None:
    rank = dist.get_rank()
    ours, theirs = make(TinyGPT), make(TinyGPT)
    shard_units(ours, ours.blocks, mesh=grid())
    for block in theirs.blocks:
        torch_fully_shard(block, mesh=grid())
    torch_fully_shard(theirs, mesh=grid())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-3) for model in (ours, theirs)]
    for step in range(num_steps):
        losses = []
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            loss = gpt_loss(model, tokens_of(step, rank))
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.detach())
        torch.testing.assert_close(losses[0], losses[1], rtol=1e-6, atol=1e-6)
    expected = full_parameters(theirs)
    for name, parameter in full_parameters(ours).items():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-5, atol=1e-5, msg=name)


def test_twenty_clipped_steps_equal_those_of_fsdp2() -> None:
    run_ranks(check_training, WORLD_SIZE, 20)


def check_without_all_reduce() -> None:
    rank = dist.get_rank()
    plain, model = make(MLP), make(MLP)
    shard_units(model, model.layers, mesh=grid())
    for step in range(3):
        model.set_requires_all_reduce(step == 2)
        plain(inputs_of(step, rank)).sum().backward()
        with Recorder() as recorder:
            model(inputs_of(step, rank)).sum().backward()
        sums = [event for event in recorder.events if event.name == "allreduce_"]
        assert len(sums) == (3 if step == 2 else 0)  # one for each layer
        assert (model.layers[0].weight.grad is not None) == (step == 2)
    expected = averaged_gradients(plain)
    for name, gradient in full_gradients(model).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6, msg=name)


def test_accumulation_within_replicas_is_summed_by_the_last_backward() -> None:
    run_ranks(check_without_all_reduce, WORLD_SIZE)


def check_gathers_of_micro_batches(expected_gathers: list[int], options: dict[str, Any]) -> None:
    """Without an all-reduce no optimizer step follows, so parameters stay as without any sync."""
    rank = dist.get_rank()
    plain, model = make(MLP), make(MLP)
    shard_units(model, model.layers, mesh=grid(), **options)
    for set_last in (model.set_requires_gradient_sync, model.set_requires_all_reduce) * 2:
        plain.zero_grad()
        model.zero_grad()
        gathers = []
        for batch in range(3):
            set_last(batch == 2)
            model.set_reshard_after_backward(batch == 2)
            plain(inputs_of(batch, rank)).sum().backward()
            with Recorder() as recorder:
                model(inputs_of(batch, rank)).sum().backward()
            gathers.append(recorder.count("gathers"))
        assert gathers == expected_gathers, set_last.__name__
        assert all(not unit.leases for unit in units_in(model).values())
        expected = averaged_gradients(plain)
        for name, gradient in full_gradients(model).items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6, msg=name)
        with torch.no_grad():  # a step, which the next gather has to see
            for each in (*plain.parameters(), *model.parameters()):
                each.mul_(1.5)


@pytest.mark.usefixtures("each_alone")
@pytest.mark.parametrize(
    ("expected_gathers", "options"),
    [
        ([3, 0, 0], {"reshard_after_forward": False}),
        # First over the outer axis; then backward gathers what was resharded after forward.
        ([3 + 3 + 3, 3, 3], {"sharding": "hsdp_zero1"}),
    ],
)
def test_micro_batches_without_all_reduce_gather_once(
    expected_gathers: list[int], options: dict[str, Any]
) -> None:
    run_ranks(check_gathers_of_micro_batches, WORLD_SIZE, expected_gathers, options)


def check_norm() -> None:
    rank = dist.get_rank()
    plain, model = make(MLP), make(MLP)
    shard_units(model, model.layers, mesh=grid())
    plain(inputs_of(0, rank)).sum().backward()
    model(inputs_of(0, rank)).sum().backward()
    gradients = averaged_gradients(plain).values()
    expected = torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients if g is not None]))
    torch.testing.assert_close(clip_grad_norm_(model, 1e9), expected, rtol=1e-5, atol=0)


def test_the_norm_counts_replicas_once() -> None:
    run_ranks(check_norm, WORLD_SIZE)


def check_divide_factor(factor: float) -> None:
    rank = dist.get_rank()
    plain, model = make(MLP, 1), make(MLP, 1)
    fully_shard(model, mesh=grid())
    model.set_gradient_divide_factor(factor)
    plain(inputs_of(0, rank)).sum().backward()
    model(inputs_of(0, rank)).sum().backward()
    expected = averaged_gradients(plain)  # the sum over 4 ranks by 4
    for name, gradient in full_gradients(model).items():
        wanted = expected[name] * 4 / factor
        torch.testing.assert_close(gradient, wanted, rtol=1e-5, atol=1e-6, msg=name)


@pytest.mark.parametrize("factor", [1.0, 10.0])
def test_a_divide_factor_replaces_the_number_of_ranks(factor: float) -> None:
    run_ranks(check_divide_factor, WORLD_SIZE, factor)

"""A budget where ranks have accelerators, and groups that take nothing else. See `accelerator`."""

from __future__ import annotations

from unittest import mock

import torch
from torch.distributed.device_mesh import init_device_mesh

import vescale_fsdp
from vescale_fsdp import MixedPrecisionPolicy, repeated_blocks
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_tune import Budget, fully_shard, tuning_of
from vescale_fsdp_tune.budget import overhead, rates
from vescale_fsdp_tune.budget.apply import apply
from vescale_fsdp_tune.budget.trials import Subject, divide
from vescale_fsdp_tune.costs import Tuning

from ....core.tests.engine.accelerator import DEVICE, nccl_like_world
from ....core.tests.engine.models import MLP, inputs_of, make


def losses_of(model: torch.nn.Module) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    losses = []
    for step in range(2):
        loss = model(inputs_of(step, 0).to(DEVICE)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def tuned() -> Tuning:
    # It sends through the store.
    small = mock.patch.multiple(rates, _SIZES=(64, 1024, 4096), _LARGER=1, _RUNS=1)
    few = mock.patch.multiple(overhead, _WARMUPS=1, _RUNS=2)
    with nccl_like_world("stand_in"), small, few:
        mesh = init_device_mesh(DEVICE.type, (2,))
        model = make(MLP)
        budget = Budget(memory="1GiB", inputs=inputs_of(0, 0))
        fully_shard(model, mesh=mesh, budget=budget)
        tuning = tuning_of(model)
        assert tuning is not None
        again = make(MLP)
        apply(
            again, tuning.chosen.candidate, vescale_fsdp.fully_shard, mesh, MixedPrecisionPolicy()
        )
        assert losses_of(model) == losses_of(again)
        return tuning


def test_all_is_measured_on_the_accelerator() -> None:
    one, other = run_ranks(tuned, 2)
    assert one == other
    assert {"keep", "recompute"} == {each.candidate.activations for each in one.predictions}
    assert {"compute", "optimizer"} <= set(one.chosen.seconds)


def traced() -> set[str]:
    with nccl_like_world("stand_in"):
        model = make(MLP)
        budget = Budget(inputs=inputs_of(0, 0), allow=["offload"])
        policy = MixedPrecisionPolicy()
        return {*divide(Subject(model, DEVICE, policy, budget), repeated_blocks(model)).traces}


def test_offload_is_traced_where_there_is_a_host() -> None:
    assert run_ranks(traced, 1) == [{"keep", "recompute", "offload", "recompute+offload"}]

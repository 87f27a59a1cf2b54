"""The machine as ranks measure it."""

from __future__ import annotations

import os

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from vescale_fsdp import fully_shard
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_tune.budget import rates
from vescale_fsdp_tune.budget.machine import measured_machine, mesh_by_node
from vescale_fsdp_tune.budget.rates import Sent, link_of
from vescale_fsdp_tune.costs import Link, Machine
from vescale_fsdp_tune.costs.settings import OptimizerName


def measured(sizes: tuple[int, ...]) -> Machine:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("replicate", "shard")[-len(sizes) :])
    return measured_machine(mesh, mesh, fully_shard, torch.float32, 1 << 30)


def test_two_ranks() -> None:
    for machine in run_ranks(measured, 2, (2,)):
        assert (machine.backend, machine.ranks_per_node) == ("gloo", 2)
        assert 1e6 < machine.inside.bytes_per_s < 1e11
        assert 0 < machine.inside.latency_s < 1
        assert machine.link(2) == machine.inside
        assert 1e8 < machine.copy_bytes_per_s < 1e12
        assert 1e6 < machine.optimizer_elements_per_s < 1e11
        assert machine.sending_s_per_byte > 0
        assert 0 < machine.unit_s + machine.collective_s < 1


@pytest.mark.nightly
def test_replicas_are_between_nodes() -> None:
    machine = run_ranks(measured, 4, (2, 2))[0]
    assert machine.ranks_per_node == 2
    assert machine.link(2) == machine.inside
    assert machine.link(2, 2) == machine.between


def nodes(per_node: str) -> tuple[int, ...]:
    os.environ["LOCAL_WORLD_SIZE"] = per_node
    try:
        return tuple(mesh_by_node(init_device_mesh("cpu", (4,))).mesh.shape)
    finally:
        del os.environ["LOCAL_WORLD_SIZE"]


def test_a_mesh_of_nodes() -> None:
    assert run_ranks(nodes, 4, "2") == [(2, 2)] * 4
    assert run_ranks(nodes, 4, "4") == [(4,)] * 4
    assert run_ranks(nodes, 4, "3") == [(4,)] * 4  # they do not divide


def test_one_rank_sends_nothing() -> None:
    machine = run_ranks(measured, 1, (1,))[0]
    assert machine.sending_s_per_byte == 0
    assert machine.inside.seconds(1 << 30) < 1e-5


def test_latency_and_bandwidth_are_those_of_a_line() -> None:
    points = [Sent(num_bytes, 1e-3 + num_bytes / 1e9) for num_bytes in (1000, 500_000, 10**6)]
    link = link_of(points)
    assert abs(link.bytes_per_s / 1e9 - 1) < 1e-6
    assert abs(link.latency_s - 1e-3) < 1e-9
    assert link.seconds(0) == 0
    assert link == Link(link.bytes_per_s, link.latency_s)


def test_a_busy_machine_is_no_network_of_any_speed() -> None:
    """Other programs took the processor while the small messages were measured."""
    for small_s in (0.9e-3, 1e-3, 4e-3):
        link = link_of([Sent(1000, small_s), Sent(500_000, 1e-3), Sent(10**6, 1e-3)])
        assert 1e9 < link.bytes_per_s < 4.001e9
        assert 0 < link.latency_s < 1e-3
        assert link.seconds(10**6) == pytest.approx(1e-3, rel=0.01)


def check_fused_rates() -> None:
    cpu = torch.device("cpu")
    names: list[OptimizerName] = ["adamw", "adamw_fused", "sgd", "sgd_fused", "none"]
    found = {name: rates.optimizer_elements_per_s(cpu, torch.float32, name) for name in names}
    assert all(rate > 0 for rate in found.values()), found


def test_optimizers_are_measured_by_name() -> None:
    run_ranks(check_fused_rates, 1)

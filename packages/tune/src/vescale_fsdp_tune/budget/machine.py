"""The machine of a job, measured on all of its ranks."""

from __future__ import annotations

import os
from functools import partial

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vescale_fsdp.spi import Axes, backend_name, comm_for, devices
from vescale_fsdp_tune.budget import rates
from vescale_fsdp_tune.budget.apply import Shard
from vescale_fsdp_tune.budget.overhead import engine_times
from vescale_fsdp_tune.costs.machine import Link, Machine
from vescale_fsdp_tune.costs.settings import OptimizerName

_ALONE = Link(1e15)  # of one rank, which sends nothing


def mesh_by_node(mesh: DeviceMesh) -> DeviceMesh:
    """Return a mesh of nodes and of the ranks of each. Collective.

    It is ``mesh`` itself if there is one node, or ``LOCAL_WORLD_SIZE`` does not say how large they
    are.
    """
    per_node = int(os.environ.get("LOCAL_WORLD_SIZE", mesh.size()))
    if mesh.ndim > 1 or per_node <= 1 or per_node >= mesh.size() or mesh.size() % per_node:
        return mesh
    sizes = (mesh.size() // per_node, per_node)
    return init_device_mesh(mesh.device_type, sizes, mesh_dim_names=("replicate", "shard"))


def measured_machine(
    mesh: DeviceMesh,
    by_node: DeviceMesh,
    shard: Shard,
    dtype: torch.dtype,
    memory_bytes: int,
    optimizer: OptimizerName = "adamw",
) -> Machine:
    """Measure the machine with the process groups of its meshes. Collective.

    Args:
        mesh: of one or two axes, for the engine's own time.
        by_node: of two axes: inside of a node, and between. Of one: a node has all ranks.
        shard: ``fully_shard``.
        dtype: of the shards, for the optimizer.

    Cost: about a second. Each rank has its own figures.
    """
    device = devices.current_device(mesh.device_type)
    axes = Axes.of(by_node)
    comm = comm_for(axes)
    inside = outside = _ALONE
    sending = rates.SendingTimes(0.0, 0.0)
    if axes.num_shards > 1:
        points = rates.link_times(comm, device)
        inside = outside = rates.link_of(points)
        if device.type == "cpu":
            sending = rates.sending_times(comm)
    if axes.num_replicas > 1:
        outside = rates.link_of(rates.replica_times(comm, device))
    times = engine_times(partial(shard, mesh=mesh), mesh.size(), device)
    cpu = torch.device("cpu")
    has_host = devices.has_streams(device)
    return Machine(
        name=f"measured on {mesh.size()} ranks",
        backend="gloo" if backend_name(axes.groups[0], device) == "gloo" else "nccl",
        memory_bytes=memory_bytes,
        ranks_per_node=axes.num_shards,
        inside=inside,
        between=outside,
        copy_bytes_per_s=rates.copy_bytes_per_s(device),
        optimizer_elements_per_s=rates.optimizer_elements_per_s(device, dtype, optimizer),
        unit_s=times.unit_s,
        collective_s=times.collective_s,
        parameter_s=times.parameter_s,
        sending_s_per_byte=sending.gather_s_per_byte,
        summing_s_per_byte=sending.sum_s_per_byte,
        host_bytes_per_s=rates.host_bytes_per_s(device) if has_host else 1e15,
        host_elements_per_s=rates.optimizer_elements_per_s(cpu, dtype, optimizer),
        workspace_bytes=rates.workspace_bytes(device),
    )

"""Shards a model over the ranks of another world, in place.

A process that has survived the loss of others keeps its modules, parameters and compiled code. Only
the flat buffers are made again, for the new number of ranks. Parameters keep their identity, so an
optimizer and hooks that hold them need not be made again. Their values are gone: load them::

    dist.destroy_process_group(); dist.init_process_group(...)     3 ranks instead of 4
    remesh(model)                                                  buffers for 3 ranks
    optimizer.state.clear(); checkpoint.load(...)                  their values
"""

from __future__ import annotations

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vescale_fsdp import compat
from vescale_fsdp.dbuffer import hand_back, plain_tensors
from vescale_fsdp.engine.axes import Axes
from vescale_fsdp.engine.extension import ExtensionGroup
from vescale_fsdp.engine.unit import Unit, units_in


def check_remesh(module: nn.Module) -> None:
    """Raise if `remesh` does not support this model.

    Raises:
        NotImplementedError: it is sharded over several axes or a part of the ranks, is a DTensor on
            another mesh, or has a parameter that gathers itself.
    """
    for name, unit in units_in(module).items():
        for group in unit.groups:
            axes, where = group.axes, f"the unit {name!r}" if name else "the root"
            if axes.whole is not None or axes.mesh.ndim > 1:
                found = f"is sharded over the axes {axes.mesh.mesh_dim_names} of a mesh"
            elif axes.mesh.size() != dist.get_world_size():
                found = f"is on {axes.mesh.size()} of {dist.get_world_size()} ranks"
            elif any(fsdp_param.inner is not None for fsdp_param in group.fsdp_params):
                found = "has parameters that are DTensors of another parallelism"
            elif isinstance(group, ExtensionGroup):
                found = "has a parameter that gathers itself"
            else:
                continue
            raise NotImplementedError(
                f"remesh: {where} {found}; so far a model can move to other ranks only if it is "
                "sharded over all ranks, by one axis. Restart the processes instead"
            )


def remesh(module: nn.Module) -> None:
    """Shard a model over all ranks of the default group that there is now.

    Call it on every rank, after ``init_process_group``, when nothing of the former world is under
    way: its communicators are closed. A step that was broken off is forgotten. The parameters are
    the same objects, uninitialized, without gradients; buffers of modules stay.

    Args:
        module: the root.

    Cost: the shards are allocated. The communicators are made in the next forward.
    """
    meshes: dict[DeviceMesh, DeviceMesh] = {}
    with plain_tensors():
        for unit in units_in(module).values():
            unit.engine, unit.is_root = None, False
            unit.forget_running()
            unit.forget_calls()
            unit.buffers_are_due = True
            for group in unit.groups:
                group.move_to(_moved(group.axes, unit, meshes))
    hand_back()
    compat.forget_meshes()


def _moved(axes: Axes, unit: Unit, meshes: dict[DeviceMesh, DeviceMesh]) -> Axes:
    mesh = axes.mesh
    if mesh not in meshes:
        size, names = (dist.get_world_size(),), mesh.mesh_dim_names
        meshes[mesh] = init_device_mesh(mesh.device_type, size, mesh_dim_names=names)
    return Axes.of(meshes[mesh]).as_in(unit.row)

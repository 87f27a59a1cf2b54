"""Expert parallelism: experts are spread over processes that get different data.

Eight processes, ``tensor_parallel_size=2`` and ``expert_parallel_size=4``::

    process            0     1     2     3     4     5     6     7
    data               [ batch 0 ] [ batch 1 ] [ batch 2 ] [ batch 3 ]  sharded over these 4
    tensor_parallel    0     1     0     1     0     1     0     1      layers, by configure_model
    expert_parallel    0     1     2     3     0     1     2     3      experts, by configure_model
    expert_data        0     0     0     0     1     1     1     1      experts sharded over these 2
"""

from __future__ import annotations

from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

__all__ = ["EXPERT", "expert_data", "expert_modules", "make_expert_mesh"]

EXPERT, EXPERT_DATA, REPLICATE = "expert_parallel", "expert_data", "replicate"


def make_expert_mesh(data: DeviceMesh, size: int, world_size: int) -> DeviceMesh:
    """Make the mesh of experts: (``replicate``,) ``expert_data`` and ``expert_parallel``.

    Collective.

    Args:
        data: the mesh over which other parameters are sharded.
        size: of the axis ``expert_parallel``.

    Raises:
        ValueError: ``size`` does not divide the processes of a replica.
    """
    replicas = data.size(0) if data.ndim == 2 else 1
    of_a_replica = world_size // replicas
    if of_a_replica % size:
        raise ValueError(
            f"VeScaleFSDPStrategy(expert_parallel_size={size}) must divide the {of_a_replica} "
            f"processes of a replica ({world_size} processes, {replicas} replicas)"
        )
    sizes, names = [of_a_replica // size, size], [EXPERT_DATA, EXPERT]
    if replicas > 1:
        sizes, names = [replicas, *sizes], [REPLICATE, *names]
    return init_device_mesh(data.device_type, tuple(sizes), mesh_dim_names=tuple(names))


def expert_data(mesh: DeviceMesh) -> DeviceMesh:
    """Return the axes of the mesh of experts over which experts are sharded and replicated."""
    if REPLICATE in (mesh.mesh_dim_names or ()):
        return mesh[REPLICATE, EXPERT_DATA]
    return mesh[EXPERT_DATA]


def expert_modules(module: nn.Module) -> list[nn.Module]:
    """Return the modules with parameters over the axis ``expert_parallel``, inner ones first.

    Raises:
        ValueError: one of them has other parameters too, which need another mesh.
    """
    found = []
    for name, child in reversed(list(module.named_modules())):
        if not any(_is_of_expert(param) for param in child.parameters(recurse=False)):
            continue
        if not all(_is_of_expert(param) for param in child.parameters()):
            raise ValueError(
                f"{name or type(module).__name__} has parameters of experts, on the axis "
                f"{EXPERT!r}, and others; put the experts in a module of their own"
            )
        found.append(child)
    return found


def _is_of_expert(param: object) -> bool:
    return isinstance(param, DTensor) and EXPERT in (param.device_mesh.mesh_dim_names or ())

"""The types that ``spmd_types`` puts on plain tensors, if that package is in use.

torchtitan's default backend cuts parameters itself, and says by a type for each axis of a mesh what
a rank has. FSDP2 of torch 2.14 reads the same types.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

_PACKAGE = "spmd_types"


def spmd_types_of(tensor: torch.Tensor) -> dict[Any, Any]:
    """Return the types of a plain tensor by mesh axis; empty if it has none."""
    if _PACKAGE not in sys.modules:
        return {}
    runtime, types = (import_module(f"{_PACKAGE}.{name}") for name in ("runtime", "types"))
    found = dict(sys.modules[_PACKAGE].get_local_type(tensor))
    dims = runtime.get_partition_spec(tensor)
    return found if dims is None else {**found, **types.partition_spec_to_shard_types(dims)}


def take_spmd_type(types: dict[Any, Any], group: dist.ProcessGroup) -> tuple[Placement, Placement]:
    """Remove the type along a group; return the placements of the tensor and of its gradient.

    Raises:
        KeyError: there is no type for it.
        ValueError: the type is no placement.
    """
    package = sys.modules[_PACKAGE]
    kind = types.pop(package.MeshAxis.of(group))
    if isinstance(kind, package.types.Shard):
        return Shard(kind.dim), Shard(kind.dim)
    if kind is package.R:
        return Replicate(), Partial()
    if kind is package.I:
        return Replicate(), Replicate()
    raise ValueError(f"{kind}")


def is_replicated_type(types: Mapping[Any, Any]) -> bool:
    """Whether all types say that each rank has the same, and that gradients are to be summed."""
    return all(kind is sys.modules[_PACKAGE].R for kind in types.values())

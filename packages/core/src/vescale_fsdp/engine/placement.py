"""What ``shard_placement_fn`` may say of a parameter: FSDP2's answers, checked, and laid out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Shard

from vescale_fsdp import compat
from vescale_fsdp.engine.axes import Axes
from vescale_fsdp.planner import ShardLayout, TensorSpec


def placement_of(
    choose: Callable[[nn.Parameter], Any] | None, param: nn.Parameter, axes: Axes, fqn: str
) -> tuple[Axes, int | None]:
    """The axes that shard a parameter, and d where it shall be ``Shard(d)`` (None: ragged).

    A parameter with ``Shard(d)`` travels in a group of its own; sizes need not divide. One that is
    a DTensor already, such as experts over their own mesh axis, is sharded in whole blocks where
    ``Shard(0)``, FSDP2's default, is the answer.

    Raises:
        ValueError: the answer is neither None, nor a ``Shard``, nor a ``ShardPlacementResult``.
        AssertionError: there is no such dimension.
        NotImplementedError: another ``Shard`` for a parameter that is a DTensor already.
    """
    answer = None if choose is None else choose(param)
    if isinstance(answer, compat.ShardPlacementResult):
        info = answer.mesh_info
        shard: int | None = info.shard_mesh_dim
        assert info.mesh is not None, "FSDPMeshInfo has checked it"
        assert shard is not None, "FSDPMeshInfo has checked it"
        axes = Axes(info.mesh, shard, getattr(info, "replicate_mesh_dim", None))
        answer = answer.placement
    if answer is None:
        return axes, None
    if type(answer) is not Shard:
        raise ValueError(f"Invalid shard_placement_fn result: {answer}, for parameter {fqn!r}")
    dim = answer.dim + param.dim() if answer.dim < 0 else answer.dim
    if not 0 <= dim < param.dim():
        raise AssertionError(
            f"Shard dim {dim} is invalid for {param.dim()}D tensor: {param.shape}\n"
            f"Found for parameter {fqn!r}"
        )
    if isinstance(param, DTensor):
        if dim == 0:
            return axes, None
        raise NotImplementedError(
            f"fully_shard: shard_placement_fn wants {answer} for {fqn!r}, which is a DTensor on "
            f"{param.device_mesh} and can be sharded along dimension 0 only, in whole blocks: "
            "return Shard(0) for it, with the same mesh"
        )
    return axes, dim


def even_chunks(specs: list[TensorSpec], num_shards: int) -> ShardLayout:
    """The layout of one tensor as ``Shard`` has it: equal numbers of rows, the last ones fewer."""
    (spec,) = specs
    rows = spec.shape[0]
    row = spec.numel // rows if rows else 0
    return ShardLayout(
        specs=(TensorSpec(spec.name, spec.shape, max(row, 1)),),
        num_shards=num_shards,
        alignment=1,
        shard_size=-(-rows // num_shards) * row,
        offsets=(0,),
        order=(0,),
        exact=True,
    )

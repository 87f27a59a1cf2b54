"""Redistribution: from any placements to any others that name the same tensor.

| from -> to, on one axis | communication | elements received by a rank |
|---|---|---|
| Replicate -> Ragged | none | 0 |
| Ragged -> Ragged, Ragged <-> Shard | one uneven all-to-all | those it needs and lacks |
| Partial -> Ragged | one uneven all-to-all, summed in rank order | (ranks - 1) * its part |
| Ragged -> Replicate, equal parts | one even all-gather, in place | numel - its part |
| Ragged -> Replicate, unequal parts | one broadcast per holder, in place | numel - its part |
| ... with more than 16 holders | one padded all-gather, if that wastes less than a quarter | |

An all-to-all that is summed in rank order is a reduce-scatter, byte for byte; parts may differ in
size, and gloo's own reduce-scatter is an all-reduce inside, which moves 2 to 6 times as much.

On several axes, one uneven all-to-all: a rank gets what it needs from those that share its
coordinate on every axis where the source is replicated, and so whatever is there already is not
sent. A ``Partial`` that becomes ``Replicate`` is all-reduced.

Gradients take the way back: they come in whatever placement they have and leave in that of the
source, with ``Replicate`` where that was ``Partial`` (as DTensor does).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import product
from typing import Any, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp import compat
from vescale_fsdp.backends import collective_device
from vescale_fsdp.compat import DTensorSpec, TensorMeta
from vescale_fsdp.ragged.exchange import Combination, InFlight, as_bytes, done, exchange
from vescale_fsdp.ragged.holdings import (
    Holding,
    check_placements,
    holding_of,
    normalized,
    ragged_axis_of,
    remaining_box,
)
from vescale_fsdp.ragged.placement import RaggedShard
from vescale_fsdp.ragged.regions import contiguous_strides

# Broadcasts send the least, but each is a collective; beyond this many, one padded all-gather.
_MOST_BROADCASTS = 16

_JOIN: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


def respecified(spec: DTensorSpec, placements: Sequence[Placement]) -> DTensorSpec:
    """The spec of the same tensor with other placements, checked.

    Raises:
        ValueError: the placements do not say where the tensor is.
        NotImplementedError: a placement that is not known here.
        RuntimeError: ``Partial`` where the tensor is not, as DTensor raises.
    """
    meta = spec.tensor_meta
    assert meta is not None, "every DTensor that exists has its meta"
    if len(placements) != spec.mesh.ndim:
        raise ValueError(
            f"got {tuple(placements)} for a mesh of {spec.mesh.ndim} axes, expected one placement "
            "per axis of the mesh"
        )
    placements = normalized(placements, len(meta.shape))
    for axis, (have, want) in enumerate(zip(spec.placements, placements, strict=True)):
        if isinstance(want, Partial) and have != want:
            raise RuntimeError(
                f"axis {axis} cannot be redistributed from {have} to {want}: sums are made by "
                "operators; use DTensor.from_local to declare one"
            )
    if ragged_axis_of(placements) is not None:
        check_placements(meta.shape, placements, spec.mesh.shape)
    for p in (*spec.placements, *placements):
        if not isinstance(p, RaggedShard | Replicate | Partial) and type(p) is not Shard:
            raise NotImplementedError(
                f"a RaggedShard cannot be redistributed from or to {p} yet; go over Replicate "
                "or Shard, or use full_tensor()"
            )
    meta = TensorMeta(meta.shape, contiguous_strides(meta.shape), meta.dtype)
    return DTensorSpec(spec.mesh, placements, meta)


def move(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec) -> InFlight:
    """Start to turn a local tensor of ``source`` into one of ``target``. No autograd.

    At least one of the two has a RaggedShard; both passed `respecified`. The result has the
    local shape that the target says.
    """
    if source.placements == target.placements:
        return done(local)
    if math.prod(source.shape) == 0 or local.is_meta:
        return done(local.new_empty(_holding(target, target.mesh.get_coordinate()).local_shape))
    axis = ragged_axis_of(source.placements)
    if axis is not None and _replaced(source, axis, Replicate()).placements == target.placements:
        return _gather(local, source, axis)
    local, source = _all_reduced(local, source, target)
    return _exchanged(local.contiguous().view(-1), source, target)


def scatter(full: torch.Tensor, target: DTensorSpec, source_rank: int) -> InFlight:
    """Start to cut ``full`` into the parts of ``target``, with the values of one rank.

    Args:
        full: of the whole shape, on every rank; only its values on the source are read.
        target: has no ``Partial``.
        source_rank: the place of the source on each axis of the mesh.

    Cost: one uneven all-to-all; the source sends each rank its part.
    """
    mesh = target.mesh
    members = list(product(*map(range, mesh.shape)))
    group, members = _group_of(mesh, list(range(mesh.ndim)), members)
    replicated = [Replicate()] * mesh.ndim
    whole = holding_of(target.shape, replicated, mesh.shape, members[0])
    sources = [whole if set(member) == {source_rank} else Holding([], (0,)) for member in members]
    targets = [_holding(target, member) for member in members]
    rank = members.index(tuple(cast("list[int]", mesh.get_coordinate())))
    moving = exchange(full.contiguous().view(-1), sources, targets, rank, group, None)
    finish = moving.finish
    moving.finish = lambda: finish().view(targets[rank].local_shape)
    return moving


def _all_reduced(
    local: torch.Tensor, source: DTensorSpec, target: DTensorSpec
) -> tuple[torch.Tensor, DTensorSpec]:
    """Without the partial sums that the target wants on every rank of their axis."""
    for axis, (have, want) in enumerate(zip(source.placements, target.placements, strict=True)):
        if isinstance(have, Partial) and want.is_replicate():
            device = collective_device(compat.mesh_group(source.mesh, axis), local.device)
            local = have._reduce_value(local.to(device), source.mesh, axis).to(local.device)
            source = _replaced(source, axis, Replicate())
    return local, source


def _exchanged(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec) -> InFlight:
    axes = _axes_to_cross(source.placements, target.placements)
    here = cast("list[int]", source.mesh.get_coordinate())
    members = [
        tuple(there[axes.index(axis)] if axis in axes else here[axis] for axis in range(len(here)))
        for there in product(*(range(source.mesh.size(axis)) for axis in axes))
    ]
    group, members = _group_of(source.mesh, axes, members)
    sources = [_holding(source, member) for member in members]
    targets = [_holding(target, member) for member in members]
    rank = members.index(tuple(here))
    partial = {axis: source.placements[axis] for axis in axes}
    combination = _combination(partial, source.mesh)
    if combination is None and sources == targets:  # the same cut in other words
        return done(local.clone())
    moving = exchange(local, sources, targets, rank, group, combination)
    shape, finish = targets[rank].local_shape, moving.finish
    moving.finish = lambda: finish().view(shape)
    return moving


def _axes_to_cross(source: tuple[Placement, ...], target: tuple[Placement, ...]) -> list[int]:
    """The axes along which a rank may lack something that it needs.

    Where a ``Shard`` comes or goes, what the other axes divide changes as well, so all axes that
    divide count. Along an axis where the source is replicated nobody lacks anything.
    """
    pairs = list(zip(source, target, strict=True))
    differ = {axis for axis, (have, want) in enumerate(pairs) if have != want}
    if any(type(p) is Shard for axis in differ for p in pairs[axis]):
        divides = (RaggedShard, Shard)
        differ |= {
            axis for axis, pair in enumerate(pairs) if any(isinstance(p, divides) for p in pair)
        }
    return [axis for axis in sorted(differ) if not source[axis].is_replicate()]


def _combination(placements: dict[int, Placement], mesh: DeviceMesh) -> Combination | None:
    """How to combine the partial values along the axes that are crossed."""
    partial = {axis: p for axis, p in placements.items() if isinstance(p, Partial)}
    if not partial:
        return None
    operations = {p.reduce_op for p in partial.values()}
    operation = next(iter(operations))
    # Subclasses (norms, masked embeddings) are more than a sum.
    is_plain = all(type(p) is Partial for p in partial.values())
    if len(operations) > 1 or operation not in _JOIN or not is_plain:
        raise NotImplementedError(
            f"{list(partial.values())} cannot be reduced to a RaggedShard at once; redistribute to "
            "Replicate first"
        )
    divisor = math.prod(mesh.size(axis) for axis in partial) if operation == "avg" else 1
    return Combination(_JOIN[operation], divisor)


def _group_of(
    mesh: DeviceMesh, axes: list[int], members: list[tuple[int, ...]]
) -> tuple[dist.ProcessGroup, list[tuple[int, ...]]]:
    """The process group over ``axes`` through this rank, and its members in its order."""
    if len(axes) <= 1:
        group = compat.mesh_group(mesh, axes[0] if axes else 0)
    else:
        like = compat.mesh_group(mesh, axes[0])
        group = compat.group_over([int(mesh.mesh[member]) for member in members], like)
    if not axes:
        return group, members
    order = dist.get_process_group_ranks(group)
    return group, sorted(members, key=lambda member: order.index(int(mesh.mesh[member])))


def _gather(local: torch.Tensor, source: DTensorSpec, axis: int) -> InFlight:
    """Gather the parts along the ragged axis into what the other axes leave of the tensor."""
    mesh = source.mesh
    here = cast("list[int]", mesh.get_coordinate())
    placement = cast(RaggedShard, source.placements[axis])
    sizes = remaining_box(source.shape, source.placements, mesh.shape, here).sizes
    num_shards = placement.num_shards
    if num_shards == 1 or math.prod(sizes) == 0:
        return done(local.clone().view(sizes))
    group = compat.mesh_group(mesh, axis)
    # The ranks of the group, and so its collectives, may have another order than the axis.
    line = compat.axis_ranks(mesh, axis)
    ranges = {r: placement.local_range(sizes, k) for k, r in enumerate(line)}
    lengths = {r: stop - start for r, (start, stop) in ranges.items()}
    longest, holders = max(lengths.values()), [r for r in line if lengths[r]]
    out, numel = local.new_empty(math.prod(sizes)), math.prod(sizes)
    in_order = line == dist.get_process_group_ranks(group)
    if longest * num_shards == numel and in_order:
        work = compat.all_gather_single(as_bytes(out), as_bytes(local.contiguous()), group)
        return InFlight(lambda: out.view(sizes), [work], (local,))
    if len(holders) > _MOST_BROADCASTS and longest * num_shards <= 1.25 * numel and in_order:
        padded = local.new_zeros(longest)
        padded[: local.numel()].copy_(local)
        parts = local.new_empty(num_shards, longest)
        work = compat.all_gather_single(as_bytes(parts), as_bytes(padded), group)

        def cut() -> torch.Tensor:
            torch.cat([parts[k, : lengths[r]] for k, r in enumerate(line)], out=out)
            return out.view(sizes)

        return InFlight(cut, [work], (padded,))
    works = []
    for holder in holders:
        part = out[slice(*ranges[holder])]
        if holder == dist.get_rank():
            part.copy_(local)
        works.append(compat.broadcast(as_bytes(part), holder, group))
    return InFlight(lambda: out.view(sizes), works, (out,))


def _holding(spec: DTensorSpec, coordinate: Sequence[int] | None) -> Any:
    assert coordinate is not None, "this rank is part of the mesh"
    return holding_of(spec.shape, spec.placements, spec.mesh.shape, coordinate)


def _replaced(spec: DTensorSpec, axis: int, placement: Placement) -> DTensorSpec:
    placements = (*spec.placements[:axis], placement, *spec.placements[axis + 1 :])
    return DTensorSpec(spec.mesh, placements, spec.tensor_meta)

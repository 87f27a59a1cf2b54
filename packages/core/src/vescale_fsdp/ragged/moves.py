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

The all-to-all takes a tensor from any layout to any other. Both are lists of boxes (file
`holdings`); what rank j needs of rank i is where the boxes that i holds meet those that j shall
hold. Each rank packs these pieces for every other rank into one message; what stays on a rank is
copied there. Rows 0 to 5 of a tensor from (1, 0, 3, 2) to (2, 2, 1, 1) on four ranks::

    row      0   1   2   3   4   5
    before   0   2   2   2   3   3
    after    0   0   1   1   2   3        rows 1, 2, 3 leave rank 2, row 4 leaves rank 3

The backward redistributes in the other direction: gradients come in any placement and get that of
the source, with ``Replicate`` where that was ``Partial`` (as DTensor does).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, product
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp import compat
from vescale_fsdp.backends import collective_device
from vescale_fsdp.compat import AsyncCollectiveTensor, DTensorSpec, pytree
from vescale_fsdp.ragged.holdings import (
    Box,
    Holding,
    check_placements,
    contiguous_strides,
    holding_of,
    intersection,
    normalized,
    ragged_axis_of,
)
from vescale_fsdp.ragged.placement import RaggedShard
from vescale_fsdp.ragged.recuts import coordinate_of, held_here, respecified_as, sizes_here
from vescale_fsdp.ranks import collectives

# Broadcasts send the least, but each is a collective; beyond this many, one padded all-gather.
_MOST_BROADCASTS = 16

_Join = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
_JOIN: dict[str, _Join] = {
    "sum": torch.add,
    "avg": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "product": torch.mul,
}


@dataclass
class InFlight:
    """A tensor whose communication has started: works to wait for, and a function that makes it."""

    finish: Callable[[], torch.Tensor]
    works: list[dist.Work] = field(default_factory=list)
    held: tuple[torch.Tensor, ...] = ()  # inputs of the collective: nobody may free them before

    def wait(self) -> torch.Tensor:
        """Wait for the communication and return the local tensor. Call it once."""
        for work in self.works:
            work.wait()
        self.works, self.held = [], ()
        return self.finish()


def done(local: torch.Tensor) -> InFlight:
    """What needs no communication."""
    return InFlight(lambda: local)


class PendingTensor(AsyncCollectiveTensor):
    """A local tensor under way, inside of the result of ``redistribute(async_op=True)``.

    A subclass of what torch's functional collectives return, so that DTensor and users treat it
    alike: any operator on it, ``wait()`` and ``trigger_wait()`` finish the communication first.
    Unlike torch's, it may have something to do when the bytes have arrived (to put them in
    their places).
    """

    __slots__ = ["_moving"]

    _moving: InFlight | None

    @staticmethod
    def __new__(
        cls, moving: InFlight, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> PendingTensor:
        pending = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        pending.completed = False
        pending._moving = moving
        return pending

    def __init__(self, *_: Any) -> None:
        """All is done by ``__new__``, as for every wrapper subclass."""

    def trigger_wait(self) -> torch.Tensor:
        """Finish the communication, once, and return the tensor."""
        if self._moving is not None:
            self.elem = self._moving.wait()
            self._moving = None
            self.completed = True
        return self.elem

    def wait(self) -> torch.Tensor:
        """As `trigger_wait`."""
        return self.trigger_wait()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def arrived(leaf: Any) -> Any:
            return leaf.trigger_wait() if isinstance(leaf, PendingTensor) else leaf

        args, kwargs = pytree.tree_map(arrived, (args, kwargs or {}))
        return func(*args, **kwargs)


def respecified(spec: DTensorSpec, placements: Sequence[Placement]) -> DTensorSpec:
    """The spec of the same tensor with other placements, checked.

    Raises:
        ValueError: the placements do not say where the tensor is.
        NotImplementedError: a placement that is not known here.
        RuntimeError: ``Partial`` where the tensor is not, as DTensor raises.
    """
    if len(placements) != spec.mesh.ndim:
        raise ValueError(
            f"got {tuple(placements)} for a mesh of {spec.mesh.ndim} axes, expected one placement "
            "per axis of the mesh"
        )
    placements = normalized(placements, len(spec.shape))
    for axis, (have, want) in enumerate(zip(spec.placements, placements, strict=True)):
        if isinstance(want, Partial) and have != want:
            raise RuntimeError(
                f"axis {axis} cannot be redistributed from {have} to {want}: only operators make "
                "a Partial; use DTensor.from_local to declare one"
            )
    if ragged_axis_of(placements) is not None:
        check_placements(spec.shape, placements, spec.mesh.shape)
    for p in (*spec.placements, *placements):
        if not isinstance(p, RaggedShard | Replicate | Partial) and type(p) is not Shard:
            raise NotImplementedError(
                f"a RaggedShard cannot be redistributed from or to {p} yet; redistribute to "
                "Replicate or Shard first, or use full_tensor()"
            )
    return respecified_as(spec, placements=placements)


def move(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec) -> InFlight:
    """Start to turn a local tensor of ``source`` into one of ``target``. No autograd.

    At least one of the two has a RaggedShard; both passed `respecified`. The result has the
    local shape that the target says.
    """
    if source.placements == target.placements:
        return done(local)
    local = _plain(local, source)
    if math.prod(source.shape) == 0 or local.is_meta:
        return done(local.new_empty(held_here(target).local_shape))
    axis = ragged_axis_of(source.placements)
    if axis is not None and _replicated(source, axis).placements == target.placements:
        return _gather(local, source, axis)
    for axis, (have, want) in enumerate(zip(source.placements, target.placements, strict=True)):
        if isinstance(have, Partial) and want.is_replicate():
            device = collective_device(collectives.mesh_group(source.mesh, axis), local.device)
            local = have._reduce_value(local.to(device), source.mesh, axis).to(local.device)
            source = _replicated(source, axis)
    return _exchanged(local.contiguous().view(-1), source, target)


def _plain(local: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """The numbers of a local tensor of another class: parts of it are no ranges of bytes.

    The states of torchao's optimizers are quantized, by each rank as its part allows.
    """
    has_numbers = hasattr(local, "dequantize") and compat.is_wrapper(local)
    if not has_numbers or isinstance(local, AsyncCollectiveTensor):
        return local
    assert spec.tensor_meta is not None, "specs of ragged tensors are made with their meta"
    numbers: torch.Tensor = local.dequantize()
    return numbers.to(spec.tensor_meta.dtype)


def scatter(full: torch.Tensor, target: DTensorSpec, source_rank: int) -> InFlight:
    """Start to cut ``full`` into the parts of ``target``, with the values of one rank.

    Args:
        full: of the whole shape, on every rank; only its values on the source are read.
        target: has no ``Partial``.
        source_rank: the place of the source on each axis of the mesh.

    Cost: one uneven all-to-all; the source sends each rank its part.
    """
    mesh = target.mesh
    group, members = _group_of(mesh, range(mesh.ndim), list(product(*map(range, mesh.shape))))
    whole = holding_of(target.shape, [Replicate()] * mesh.ndim, mesh.shape, members[0])
    sources = [whole if set(member) == {source_rank} else Holding([], (0,)) for member in members]
    targets = _holdings(target, members)
    rank = members.index(tuple(coordinate_of(target)))
    return exchange(full.contiguous().view(-1), sources, targets, rank, group, None)


def _replicated(spec: DTensorSpec, axis: int) -> DTensorSpec:
    placements = (*spec.placements[:axis], Replicate(), *spec.placements[axis + 1 :])
    return respecified_as(spec, placements=placements)


def _holdings(spec: DTensorSpec, members: Sequence[Sequence[int]]) -> list[Holding]:
    return [holding_of(spec.shape, spec.placements, spec.mesh.shape, member) for member in members]


def _exchanged(local: torch.Tensor, source: DTensorSpec, target: DTensorSpec) -> InFlight:
    axes, here = _axes_to_cross(source.placements, target.placements), coordinate_of(source)
    group, members = group_along(source, axes)
    sources, targets = _holdings(source, members), _holdings(target, members)
    combination = _combination([source.placements[axis] for axis in axes], axes, source.mesh)
    if combination is None and sources == targets:  # the same cut in other words
        return done(local.clone())
    return exchange(local, sources, targets, members.index(tuple(here)), group, combination)


def _axes_to_cross(source: tuple[Placement, ...], target: tuple[Placement, ...]) -> list[int]:
    """The axes along which a rank may lack something that it needs.

    If a ``Shard`` is added or removed, the parts of the other sharding axes change too, so all of
    them count. An axis on which the source is replicated needs no communication.
    """
    pairs = list(zip(source, target, strict=True))
    differ = {axis for axis, (have, want) in enumerate(pairs) if have != want}
    if any(type(p) is Shard for axis in differ for p in pairs[axis]):
        divides = (RaggedShard, Shard)
        differ |= {
            axis for axis, pair in enumerate(pairs) if any(isinstance(p, divides) for p in pair)
        }
    return [axis for axis in sorted(differ) if not source[axis].is_replicate()]


class Combination(NamedTuple):
    """How several values for one element make one."""

    join: _Join
    divisor: int = 1


def _combination(
    placements: Sequence[Placement], axes: Sequence[int], mesh: DeviceMesh
) -> Combination | None:
    """How to combine the partial values along the axes that are crossed."""
    partial = {axis: p for axis, p in zip(axes, placements, strict=True) if isinstance(p, Partial)}
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


def group_along(
    spec: DTensorSpec, axes: Sequence[int]
) -> tuple[dist.ProcessGroup, list[tuple[int, ...]]]:
    """The process group along axes of a mesh through this rank, and its ranks' coordinates."""
    here = coordinate_of(spec)
    members = [
        tuple(there[axes.index(axis)] if axis in axes else here[axis] for axis in range(len(here)))
        for there in product(*(range(spec.mesh.size(axis)) for axis in axes))
    ]
    return _group_of(spec.mesh, axes, members)


def _group_of(
    mesh: DeviceMesh, axes: Sequence[int], members: list[tuple[int, ...]]
) -> tuple[dist.ProcessGroup, list[tuple[int, ...]]]:
    """The process group over ``axes`` through this rank, and its members in its order."""
    group = collectives.mesh_group(mesh, axes[0] if axes else 0)
    if len(axes) > 1:
        group = collectives.group_over([int(mesh.mesh[member]) for member in members], group)
    if not axes:
        return group, members
    order = dist.get_process_group_ranks(group)
    return group, sorted(members, key=lambda member: order.index(int(mesh.mesh[member])))


def _gather(local: torch.Tensor, source: DTensorSpec, axis: int) -> InFlight:
    """Gather the parts along the ragged axis into what the other axes leave of the tensor."""
    placement, sizes = cast(RaggedShard, source.placements[axis]), sizes_here(source)
    num_shards, numel = placement.num_shards, math.prod(sizes)
    if num_shards == 1 or numel == 0:
        return done(local.clone().view(sizes))
    group = collectives.mesh_group(source.mesh, axis)
    # The ranks of the group, and so its collectives, may have another order than the axis.
    line = collectives.axis_ranks(source.mesh, axis)
    ranges = {r: placement.local_range(sizes, k) for k, r in enumerate(line)}
    lengths = {r: stop - start for r, (start, stop) in ranges.items()}
    longest, holders = max(lengths.values()), [r for r in line if lengths[r]]
    out = local.new_empty(numel)
    in_order = line == dist.get_process_group_ranks(group)
    if longest * num_shards == numel and in_order:
        work = collectives.all_gather_single(as_bytes(out), as_bytes(local.contiguous()), group)
        return InFlight(lambda: out.view(sizes), [work], (local,))
    if len(holders) > _MOST_BROADCASTS and longest * num_shards <= 1.25 * numel and in_order:
        padded = local.new_zeros(longest)
        padded[: local.numel()].copy_(local)
        parts = local.new_empty(num_shards, longest)
        work = collectives.all_gather_single(as_bytes(parts), as_bytes(padded), group)

        def cut() -> torch.Tensor:
            torch.cat([parts[k, : lengths[r]] for k, r in enumerate(line)], out=out)
            return out.view(sizes)

        return InFlight(cut, [work], (padded,))
    works = []
    for holder in holders:
        part = out[slice(*ranges[holder])]
        if holder == dist.get_rank():
            part.copy_(local)
        works.append(collectives.broadcast(as_bytes(part), holder, group))
    return InFlight(lambda: out.view(sizes), works, (out,))


# --- the packed all-to-all ------------------------------------------------------------------------


class Piece(NamedTuple):
    """A box of elements inside a flat local tensor."""

    start: int
    sizes: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def is_run(self) -> bool:
        """Whether its elements lie next to each other, in order."""
        run = contiguous_strides(self.sizes)
        return all(n == 1 or a == b for n, a, b in zip(self.sizes, self.strides, run, strict=True))

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """The view of these elements."""
        return flat.as_strided(self.sizes, self.strides, flat.storage_offset() + self.start)


def pieces(source: Holding, target: Holding) -> Iterator[tuple[Piece, Piece]]:
    """Where what ``source`` holds lies in it, and in ``target``; in one order for both ends."""
    for have in source.boxes:
        for need in target.boxes:
            common = intersection(have, need)
            if common is not None:
                yield _piece(have, common), _piece(need, common)


def _piece(box: Box, part: Box) -> Piece:
    """``part`` of ``box``, which lies row-major at ``box.start``."""
    strides = contiguous_strides(box.sizes)
    inside = map(int.__sub__, part.offsets, box.offsets)
    return Piece(box.start + sum(map(int.__mul__, inside, strides)), part.sizes, strides)


def exchange(
    local: torch.Tensor,
    sources: Sequence[Holding],
    targets: Sequence[Holding],
    rank: int,
    group: dist.ProcessGroup,
    combination: Combination | None,
) -> InFlight:
    """Start to turn ``local``, which is ``sources[rank]``, into ``targets[rank]``.

    Args:
        local: flat and contiguous.
        sources: what each rank of the group holds, in the order of its ranks.
        targets: what each rank of the group shall hold.
        rank: of the caller in the group.
        group: may have one rank; then all is local.
        combination: for elements that several ranks hold; None if each has one holder.

    Cost: one uneven all-to-all of the elements that change their rank, and a copy of them on
    either side where they do not lie in one run.
    """
    outgoing = [[here for here, _ in pieces(sources[rank], target)] for target in targets]
    incoming = [[there for _, there in pieces(source, targets[rank])] for source in sources]
    sent_counts, counts = _counts(outgoing, rank), _counts(incoming, rank)
    start = _one_run(outgoing, rank)
    if start is not None:  # what goes to the others lies one after the other
        sent = local[start : start + sum(sent_counts)]
    else:
        views = [p.of(local) for k, found in enumerate(outgoing) if k != rank for p in found]
        sent = _joined(views, local)
    out = local.new_empty(targets[rank].numel)
    place = None if combination else _one_run(incoming, rank)
    received = local.new_empty(sum(counts)) if place is None else out[place : place + sum(counts)]
    works = []
    if len(sources) > 1:
        size = local.element_size()
        splits = [[count * size for count in each] for each in (counts, sent_counts)]
        # Bytes, whatever the dtype: gloo knows few.
        works = [collectives.all_to_all_single(as_bytes(received), as_bytes(sent), group, *splits)]

    def finish() -> torch.Tensor:
        whole = out
        stays = list(pieces(sources[rank], targets[rank]))
        arrived = list(received.split(counts))
        if combination is not None:
            arrived[rank] = _joined([here.of(local) for here, _ in stays], local)
            whole = _combine(arrived, incoming, out, combination)
        else:
            for here, there in stays:
                there.of(out).copy_(here.of(local))
            if place is None:
                for view, values in _placed(arrived, incoming, out):
                    view.copy_(values)
        return whole.view(targets[rank].local_shape)

    return InFlight(finish, works, (sent, received))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor: collectives of bytes work for every dtype."""
    # A single element may have any stride (0 where it was expanded) and still be contiguous.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8)


def _joined(views: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.cat([view.reshape(-1) for view in views]) if views else like.new_empty(0)


def _counts(per_rank: list[list[Piece]], rank: int) -> list[int]:
    """Elements for or from each other rank."""
    return [sum(p.numel for p in found) if k != rank else 0 for k, found in enumerate(per_rank)]


def _one_run(per_rank: list[list[Piece]], rank: int) -> int | None:
    """Where the pieces of all other ranks lie in one run, in order; None if they do not."""
    parts = [piece for k, found in enumerate(per_rank) if k != rank for piece in found]
    if not parts:
        return 0
    ends = list(accumulate((p.numel for p in parts), initial=parts[0].start))
    in_order = all(p.start == end for p, end in zip(parts, ends, strict=False))
    return parts[0].start if in_order and all(p.is_run for p in parts) else None


def _placed(
    arrived: list[torch.Tensor], incoming: list[list[Piece]], out: torch.Tensor
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Places in ``out``, and the values that have come for them, in rank order."""
    for part, places in zip(arrived, incoming, strict=True):
        if part.numel():
            for place, values in zip(places, part.split([p.numel for p in places]), strict=True):
                yield place.of(out), values.view(place.sizes)


def _combine(
    arrived: list[torch.Tensor],
    incoming: list[list[Piece]],
    out: torch.Tensor,
    combination: Combination,
) -> torch.Tensor:
    """Join what the ranks sent, in rank order; sums of half precision are made in fp32."""
    is_half = out.dtype in (torch.float16, torch.bfloat16)
    total = out.float() if is_half else out
    written: set[tuple[int, ...]] = set()
    for view, values in _placed(arrived, incoming, total):
        values = values.to(total.dtype)
        key = (view.storage_offset(), *view.shape)
        view.copy_(combination.join(view, values) if key in written else values)
        written.add(key)
    if combination.divisor > 1:
        total = total.div_(combination.divisor) if total.is_floating_point() else total
    return total.to(out.dtype)

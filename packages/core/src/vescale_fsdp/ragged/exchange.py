"""One packed all-to-all that takes a tensor from any layout to any other.

Both layouts are lists of boxes (file `holdings`). What rank j needs of rank i is where the boxes
that i holds meet the boxes that j shall hold. Each rank packs these pieces for every other rank
into one message; nothing is sent twice, and what stays on a rank is copied there. So the bytes
on the wire are those of the elements that change their rank, no more. Rows 0 to 5 of a tensor
from (1, 0, 3, 2) to (2, 2, 1, 1) on four ranks::

    row      0   1   2   3   4   5
    before   0   2   2   2   3   3
    after    0   0   1   1   2   3        rows 1, 2, 3 leave rank 2, row 4 leaves rank 3

Pieces that several ranks send for the same element (partial sums) are combined in rank order, so
that the result is the same on every run. Bytes are sent, whatever the dtype: gloo knows few.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist

from vescale_fsdp import compat
from vescale_fsdp.ragged.holdings import Holding
from vescale_fsdp.ragged.regions import Box, contiguous_strides, intersection


@dataclass
class InFlight:
    """A tensor on its way: what to wait for, and how to make it of what has arrived."""

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


class Combination(NamedTuple):
    """How several values for one element make one."""

    join: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    divisor: int = 1


def pieces(source: Holding, target: Holding) -> Iterator[tuple[Piece, Piece]]:
    """Where what ``source`` holds lies in it, and in ``target``; in one order for both ends."""
    for have in source.boxes:
        for need in target.boxes:
            common = intersection(have, need)
            if common is not None:
                yield _piece(have, common), _piece(need, common)


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
    sent, sent_counts = _pack(local, sources[rank], targets, rank)
    incoming = [[there for _, there in pieces(source, targets[rank])] for source in sources]
    counts = [sum(p.numel for p in got) if k != rank else 0 for k, got in enumerate(incoming)]
    out = local.new_empty(targets[rank].numel)
    landing = None if combination else _one_run(incoming, rank)
    if landing is None:
        received = local.new_empty(sum(counts))
    else:
        received = out[landing : landing + sum(counts)]
    works = []
    if len(sources) > 1:
        works = [_start(received, sent, counts, sent_counts, group)]

    def finish() -> torch.Tensor:
        stays = list(pieces(sources[rank], targets[rank]))
        if combination is not None:
            arrived = _split(received, counts)
            arrived[rank] = _joined([here.of(local) for here, _ in stays], local)
            return _combine(arrived, incoming, out, combination)
        for here, there in stays:
            there.of(out).copy_(here.of(local))
        if landing is None:
            _unpack(_split(received, counts), incoming, out)
        return out

    return InFlight(finish, works, (sent, received))


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of a contiguous tensor: collectives of bytes work for every dtype."""
    # A single element may have any stride (0 where it was expanded) and still be contiguous.
    flat = tensor.as_strided((tensor.numel(),), (1,))
    return flat.view(torch.uint8)


def _piece(box: Box, part: Box) -> Piece:
    """``part`` of ``box``, which lies row-major at ``box.start``."""
    strides = contiguous_strides(box.sizes)
    inside = map(int.__sub__, part.offsets, box.offsets)
    return Piece(box.start + sum(map(int.__mul__, inside, strides)), part.sizes, strides)


def _pack(
    local: torch.Tensor, source: Holding, targets: Sequence[Holding], rank: int
) -> tuple[torch.Tensor, list[int]]:
    """What goes to each other rank, one after the other; without a copy if it lies so."""
    outgoing = [[here for here, _ in pieces(source, target)] for target in targets]
    counts = [sum(p.numel for p in sent) if k != rank else 0 for k, sent in enumerate(outgoing)]
    start = _one_run(outgoing, rank)
    if start is not None:
        return local[start : start + sum(counts)], counts
    views = [p.of(local) for k, sent in enumerate(outgoing) if k != rank for p in sent]
    return _joined(views, local), counts


def _joined(views: list[torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    return torch.cat([view.reshape(-1) for view in views]) if views else like.new_empty(0)


def _one_run(per_rank: list[list[Piece]], rank: int) -> int | None:
    """Where the pieces of all other ranks lie in one run, in order; None if they do not."""
    parts = [piece for k, found in enumerate(per_rank) if k != rank for piece in found]
    if not parts:
        return 0
    ends = list(accumulate((p.numel for p in parts), initial=parts[0].start))
    in_order = all(p.start == end for p, end in zip(parts, ends, strict=False))
    return parts[0].start if in_order and all(p.is_run for p in parts) else None


def _start(
    received: torch.Tensor,
    sent: torch.Tensor,
    received_counts: list[int],
    sent_counts: list[int],
    group: dist.ProcessGroup,
) -> dist.Work:
    size = sent.element_size()
    return compat.all_to_all_single(
        as_bytes(received),
        as_bytes(sent),
        group,
        [count * size for count in received_counts],
        [count * size for count in sent_counts],
    )


def _split(received: torch.Tensor, counts: list[int]) -> list[torch.Tensor]:
    return list(received.split(counts))


def _unpack(arrived: list[torch.Tensor], incoming: list[list[Piece]], out: torch.Tensor) -> None:
    for part, places in zip(arrived, incoming, strict=True):
        if part.numel():
            for place, values in zip(places, part.split([p.numel for p in places]), strict=True):
                place.of(out).copy_(values.view(place.sizes))


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
    for part, places in zip(arrived, incoming, strict=True):
        for place, values in zip(places, part.split([p.numel for p in places]), strict=True):
            view, values = place.of(total), values.view(place.sizes).to(total.dtype)
            key = (place.start, *place.sizes)
            view.copy_(combination.join(view, values) if key in written else values)
            written.add(key)
    if combination.divisor > 1:
        total = total.div_(combination.divisor) if total.is_floating_point() else total
    return total.to(out.dtype)

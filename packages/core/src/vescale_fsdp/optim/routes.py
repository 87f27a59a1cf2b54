"""Computes which rank sends which elements to which rank, so that owners get whole matrices.

Matrices are sent in buckets. For each bucket a rank sends at most one message to each other rank
before the computation (gather) and one after it (scatter). A bucket has an equal share of each
owner's matrices, because a rank without work in a bucket would wait for the others. Matrices that
need no gather are computed first, while the others are being sent.

Owners gather from ranks of their own replica, and send results to all replicas. Elements that are
on the owner are not sent.

This module uses only integers. Every rank computes the same routes, without communication.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from vescale_fsdp.optim.layout import Matrix, Part

# A bucket with fewer elements per rank takes more time to start than to send.
_LEAST_ELEMENTS = 1 << 17
# The number of buckets, if there are enough elements. All but the first gather and the last scatter
# overlap with computation.
_FEW_BUCKETS = 4

Grid = Sequence[Sequence[int]]  # the global rank by replica and position
Places = dict[int, tuple[int, int]]  # replica and position, by global rank


class Run(NamedTuple):
    """Consecutive elements in the flat local tensor of a parameter."""

    param: int
    start: int
    stop: int


@dataclass
class Bucket:
    """The routes of one rank for some of the matrices. Sizes are in elements.

    Messages to all ranks are one flat tensor, in the order of the members; so are those received.
    """

    ready: list[int] = field(default_factory=list)  # computed here, without a gather
    gathered: list[int] = field(default_factory=list)  # computed here, after the gather
    sends: list[Run] = field(default_factory=list)  # to the owners
    send_counts: list[int] = field(default_factory=list)  # by member
    receive_counts: list[int] = field(default_factory=list)
    # For each matrix its parts in order, each with its start in the received tensor. None: the part
    # is on this rank.
    assembly: dict[int, list[tuple[Part, int | None]]] = field(default_factory=dict)
    returns: list[tuple[int, Part]] = field(default_factory=list)  # (matrix, part)
    return_counts: list[int] = field(default_factory=list)
    arrivals: list[tuple[Run, int]] = field(default_factory=list)  # run, first matrix
    arrival_counts: list[int] = field(default_factory=list)
    longest_send: int = 0  # the longest message from any rank to an owner; the same on all ranks
    longest_return: int = 0  # the longest message from any owner to a rank


@dataclass(frozen=True)
class Traffic:
    """Elements that each member sends, in the order of ``members``."""

    gathers: tuple[int, ...]
    scatters: tuple[int, ...]
    num_whole: int  # number of matrices that are whole on their owner


@dataclass(frozen=True)
class Routes:
    """The routes of one rank, in all buckets."""

    members: tuple[int, ...]  # the global ranks, in the order of their process group
    buckets: list[Bucket]


def routes_of(
    matrices: Sequence[Matrix],
    owners: Sequence[int],
    costs: Sequence[int],
    grids: Sequence[Grid],
    members: Sequence[int],
    here: int,
    bucket_elements: int,
) -> Routes:
    """Compute the routes of one rank.

    Args:
        matrices: the matrices of parameters on the same ranks.
        owners: for each matrix the global rank that computes it.
        costs: for each matrix its cost.
        grids: for each parameter the global rank by replica and position.
        members: the global ranks, in the order of their process group.
        here: the global rank to compute routes for.
        bucket_elements: approximate number of elements that a rank receives in a bucket.
    """
    places = _places_of(grids)
    missing = [
        sum(part.numel for part in matrix.parts if part.position != places[matrix.param][owner][1])
        for matrix, owner in zip(matrices, owners, strict=True)
    ]
    numbers = _bucket_numbers(missing, owners, costs, len(members), bucket_elements)
    by_bucket: list[list[int]] = [[] for _ in range(max(numbers, default=-1) + 1)]
    for index, number in enumerate(numbers):
        by_bucket[number].append(index)
    buckets = [
        _bucket(chosen, matrices, owners, grids, places, members, here)
        for chosen in by_bucket
        if chosen
    ]
    return Routes(tuple(members), buckets)


def traffic_of(
    matrices: Sequence[Matrix],
    owners: Sequence[int],
    grids: Sequence[Grid],
    members: Sequence[int],
) -> Traffic:
    """Compute the number of elements that each rank sends."""
    place = {rank: index for index, rank in enumerate(members)}
    places = _places_of(grids)
    gathers, scatters = [0] * len(members), [0] * len(members)
    num_whole = 0
    for matrix, owner in zip(matrices, owners, strict=True):
        grid = grids[matrix.param]
        own, _ = places[matrix.param][owner]
        num_whole += all(grid[own][part.position] == owner for part in matrix.parts)
        for part in matrix.parts:
            holder = grid[own][part.position]
            if holder != owner:
                gathers[place[holder]] += part.numel
            others = sum(row[part.position] != owner for row in grid)
            scatters[place[owner]] += others * part.numel
    return Traffic(tuple(gathers), tuple(scatters), num_whole)


def _places_of(grids: Iterable[Grid]) -> list[Places]:
    """Return replica and position of each rank, by parameter. Equal grids are computed once."""
    made: dict[int, Places] = {}
    places = []
    for grid in grids:
        if id(grid) not in made:
            made[id(grid)] = {
                rank: (replica, position)
                for replica, row in enumerate(grid)
                for position, rank in enumerate(row)
            }
        places.append(made[id(grid)])
    return places


def _bucket_numbers(
    missing: Sequence[int],
    owners: Sequence[int],
    costs: Sequence[int],
    num_members: int,
    bucket_elements: int,
) -> list[int]:
    """Return the number of the bucket of each matrix.

    Each owner's matrices are divided so that it gathers as many elements in each bucket.

    Args:
        missing: for each matrix the number of elements that are not on its owner.
    """
    per_member = sum(missing) / max(num_members, 1)
    size = min(bucket_elements, max(per_member / _FEW_BUCKETS, _LEAST_ELEMENTS))
    num_buckets = max(1, round(per_member / size))
    # Matrices that need no gather are divided by cost, the others by elements to gather.
    weights = [m or c for m, c in zip(missing, costs, strict=True)]
    queues: dict[tuple[int, bool], list[int]] = {}
    for index, owner in enumerate(owners):
        queues.setdefault((owner, missing[index] > 0), []).append(index)
    numbers = [0] * len(owners)
    for queue in queues.values():
        ends = list(accumulate(weights[index] for index in queue))
        for index, end in zip(queue, ends, strict=True):
            middle = end - weights[index] / 2
            numbers[index] = min(int(middle / ends[-1] * num_buckets), num_buckets - 1)
    return numbers


def _bucket(
    chosen: Sequence[int],
    matrices: Sequence[Matrix],
    owners: Sequence[int],
    grids: Sequence[Grid],
    places: Sequence[Places],
    members: Sequence[int],
    here: int,
) -> Bucket:
    bucket = Bucket()
    sends: dict[int, list[Run]] = {rank: [] for rank in members}
    receives: dict[int, list[tuple[int, Part]]] = {rank: [] for rank in members}
    returns: dict[int, list[tuple[int, Part]]] = {rank: [] for rank in members}
    arrivals: dict[int, list[tuple[Run, int]]] = {rank: [] for rank in members}
    to_owner: Counter[tuple[int, int]] = Counter()
    from_owner: Counter[tuple[int, int]] = Counter()
    for index in chosen:
        matrix, owner = matrices[index], owners[index]
        grid = grids[matrix.param]
        own, _ = places[matrix.param][owner]
        is_ready = True
        for part in matrix.parts:
            run = Run(matrix.param, part.local, part.local + part.numel)
            for replica, row in enumerate(grid):
                holder = row[part.position]
                if holder == owner:
                    continue
                from_owner[owner, holder] += part.numel
                if owner == here:
                    returns[holder].append((index, part))
                elif holder == here:
                    _append(arrivals[owner], run, index, matrices)
                if replica == own:
                    to_owner[holder, owner] += part.numel
                    is_ready = False
                    if owner == here:
                        receives[holder].append((index, part))
                    elif holder == here:
                        sends[owner].append(run)
        if owner == here:
            (bucket.ready if is_ready else bucket.gathered).append(index)
    bucket.longest_send = max(to_owner.values(), default=0)
    bucket.longest_return = max(from_owner.values(), default=0)
    bucket.sends = [run for rank in members for run in _joined(sends[rank])]
    bucket.send_counts = [_elements(run for run in sends[rank]) for rank in members]
    bucket.receive_counts = [sum(p.numel for _, p in receives[rank]) for rank in members]
    bucket.returns = [each for rank in members for each in returns[rank]]
    bucket.return_counts = [sum(p.numel for _, p in returns[rank]) for rank in members]
    bucket.arrivals = [each for rank in members for each in arrivals[rank]]
    bucket.arrival_counts = [_elements(run for run, _ in arrivals[rank]) for rank in members]
    received = [each for rank in members for each in receives[rank]]
    starts = accumulate((part.numel for _, part in received), initial=0)
    place = {(index, part): start for (index, part), start in zip(received, starts, strict=False)}
    bucket.assembly = {
        index: [(part, place.get((index, part))) for part in matrices[index].parts]
        for index in bucket.gathered
    }
    return bucket


def _elements(runs: Iterable[Run]) -> int:
    return sum(run.stop - run.start for run in runs)


def _joined(runs: Sequence[Run]) -> list[Run]:
    """Join runs that follow each other."""
    joined: list[Run] = []
    for run in runs:
        if joined and joined[-1].param == run.param and joined[-1].stop == run.start:
            joined[-1] = joined[-1]._replace(stop=run.stop)
        else:
            joined.append(run)
    return joined


def _append(
    arrivals: list[tuple[Run, int]], run: Run, index: int, matrices: Sequence[Matrix]
) -> None:
    """Add a run. If it follows the last one and its matrix has the same shape, extend the last."""
    if arrivals:
        last, first = arrivals[-1]
        a, b = matrices[first], matrices[index]
        is_alike = last.param == run.param and (a.rows, a.cols) == (b.rows, b.cols)
        if is_alike and last.stop == run.start:
            arrivals[-1] = (last._replace(stop=run.stop), first)
            return
    arrivals.append((run, index))

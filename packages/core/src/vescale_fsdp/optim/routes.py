"""What each rank sends to whom, so that every matrix is whole on its owner for a moment.

Matrices are sent in buckets: one message to each other rank and bucket on the way to the owners,
one on the way back. A bucket has an equal share of what each owner computes, because a rank that
has nothing to do in it waits for the others. What needs no gather comes first in its bucket, and is
computed while the rest is on its way.

On the way there a part comes from the owner's own replica; what comes back goes to all replicas.
Nothing is sent for a part that its owner holds.

Pure integers: every rank works out the same routes of all ranks, without communication.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from vescale_fsdp.optim.layout import Matrix, Part

# Fewer elements to a rank than this, and a bucket costs more time to start than to send.
_LEAST_ELEMENTS = 1 << 17
# So many buckets, if there are elements for them: what is not hidden is the first and the last one.
_FEW_BUCKETS = 4

Grid = Sequence[Sequence[int]]  # the global rank by replica and position
Places = dict[int, tuple[int, int]]  # replica and position by global rank


class Run(NamedTuple):
    """Elements next to each other in the flat local tensor of a parameter."""

    param: int
    start: int
    stop: int


@dataclass
class Bucket:
    """The routes of one rank for some of the matrices; elements are counted, not bytes.

    A flat message holds what is sent and received, rank by rank in the order of the members.
    """

    ready: list[int] = field(default_factory=list)  # computed here, without a gather
    gathered: list[int] = field(default_factory=list)  # computed here, after it
    sends: list[Run] = field(default_factory=list)  # to the owners
    send_counts: list[int] = field(default_factory=list)  # by member
    receive_counts: list[int] = field(default_factory=list)
    # By matrix, its parts in order and where each begins in what was received; None: it is here.
    assembly: dict[int, list[tuple[Part, int | None]]] = field(default_factory=dict)
    returns: list[tuple[int, Part]] = field(default_factory=list)  # to the holders: (matrix, part)
    return_counts: list[int] = field(default_factory=list)
    arrivals: list[tuple[Run, int]] = field(default_factory=list)  # with the first matrix of each
    arrival_counts: list[int] = field(default_factory=list)
    longest_send: int = 0  # the most that any rank sends to an owner; all ranks know it
    longest_return: int = 0  # the most that any owner sends to a rank


@dataclass(frozen=True)
class Traffic:
    """Elements that leave each member, by its place in ``members``."""

    gathers: tuple[int, ...]
    scatters: tuple[int, ...]
    num_whole: int  # matrices that lie whole on their owner


@dataclass(frozen=True)
class Routes:
    """All buckets, from the view of one rank."""

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
    """The routes from the view of one rank.

    Args:
        matrices: of parameters that lie on the same ranks.
        owners: the global rank that computes each matrix; one of the members.
        costs: of computing each.
        grids: by parameter, the global rank for each replica and position.
        members: the global ranks, in the order of their process group.
        here: the global rank whose view it is.
        bucket_elements: that a rank receives in a bucket, about.
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
    """What all ranks send, in elements."""
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
    """Where each rank is, by parameter. Made once for those that share a grid."""
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
    """The bucket of each matrix: in each owner's queue, equal shares of what is to be gathered.

    Args:
        missing: elements of each matrix that its owner lacks.
    """
    per_member = sum(missing) / max(num_members, 1)
    size = min(bucket_elements, max(per_member / _FEW_BUCKETS, _LEAST_ELEMENTS))
    num_buckets = max(1, round(per_member / size))
    # Those that are ready fill the time of all buckets: they share by cost, the others by elements.
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
    """Runs that go on where the one before them ends become one."""
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
    """Add a run; if it goes on with a matrix of the same shape, to the last one."""
    if arrivals:
        last, first = arrivals[-1]
        a, b = matrices[first], matrices[index]
        is_alike = last.param == run.param and (a.rows, a.cols) == (b.rows, b.cols)
        if is_alike and last.stop == run.start:
            arrivals[-1] = (last._replace(stop=run.stop), first)
            return
    arrivals.append((run, index))

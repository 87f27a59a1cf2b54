"""Which rank computes which matrix: balanced by cost, with a preference for who holds the data.

The longest jobs are placed first, so that short ones level what is left (longest processing time
first). A job goes to the rank that holds the most of its matrix, as long as that keeps the rank
within a tolerance of the least time that any assignment needs; else to the rank with the least to
do. Two ranks, tolerance 5%, four matrices of cost 4, 3, 2, 1, of which rank 0 holds all but the
last::

    lower bound   (4 + 3 + 2 + 1) / 2 = 5, limit 5.25
    cost 4        rank 0 holds it: 4 <= 5.25              -> rank 0, nothing moves
    cost 3        rank 0 would have 7                     -> rank 1, the least loaded
    cost 2        rank 0 would have 6                     -> rank 1
    cost 1        rank 1 would have 6, and holds it       -> rank 0: loads 5 and 5

Parameters that lie on the same ranks are assigned together. Ranks know of a parameter only if they
hold it, so an assignment may depend on that of parameters that lie on all of these ranks and more,
and on no other: larger sets of ranks come first, and the loads they give count for the smaller
ones inside of them. So all ranks of a set come to the same result, without communication.

Source: Graham 1969 for the order; the preference within a tolerance is ours.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vescale_fsdp.optim.layout import Layout, Matrix, matrices_of
from vescale_fsdp.optim.routes import Grid, traffic_of


class Job(NamedTuple):
    """A matrix that one rank computes."""

    cost: int  # any unit, floating-point operations for example
    num_bytes: int  # of the matrix; of equal costs the larger one comes first
    name: str  # decides between equals, and then the order of the jobs
    held: Sequence[tuple[int, int]]  # (rank, elements that it holds); several may hold the same


@dataclass(frozen=True)
class Balance:
    """How even an assignment is."""

    loads: tuple[int, ...]  # cost by rank
    lower_bound: float  # no assignment has a smaller greatest load

    @property
    def ratio(self) -> float:
        """The greatest load divided by the lower bound; 1 is perfect."""
        return max(self.loads, default=0) / self.lower_bound if self.lower_bound else 1.0


def assign_owners(
    jobs: Sequence[Job],
    num_ranks: int,
    *,
    tolerance: float = 0.05,
    loads: Sequence[int] | None = None,
) -> list[int]:
    """The rank of each job, in the order of the jobs.

    Args:
        jobs: with ranks below ``num_ranks`` as holders.
        tolerance: how far above the lower bound a holder's load may go for the sake of locality.
        loads: what the ranks have to do already.

    Cost: O(jobs * (log(jobs) + log(ranks) + holders)).
    """
    before = list(loads) if loads is not None else [0] * num_ranks
    limit = (1 + tolerance) * _lower_bound(jobs, before)
    queue = _LeastLoaded(before)
    owners = [0] * len(jobs)
    order = [(-job.cost, -job.num_bytes, job.name, index) for index, job in enumerate(jobs)]
    for *_, index in sorted(order):
        job = jobs[index]
        holders = sorted(job.held, key=lambda part: (-part[1], queue.loads[part[0]], part[0]))
        fitting = (rank for rank, _ in holders if queue.loads[rank] + job.cost <= limit)
        owner = next(fitting, None)
        owners[index] = queue.least() if owner is None else owner
        queue.add(owners[index], job.cost)
    return owners


def balance_of(
    jobs: Sequence[Job], owners: Sequence[int], num_ranks: int, loads: Sequence[int] | None = None
) -> Balance:
    """How even an assignment is, ``loads`` included."""
    before = list(loads) if loads is not None else [0] * num_ranks
    bound = _lower_bound(jobs, before)
    for job, owner in zip(jobs, owners, strict=True):
        before[owner] += job.cost
    return Balance(tuple(before), bound)


def _lower_bound(jobs: Iterable[Job], loads: Sequence[int]) -> float:
    """The longest job, the longest load there is, or all work in equal parts."""
    costs = [job.cost for job in jobs]
    return max([0.0, *costs, *loads, (sum(costs) + sum(loads)) / max(len(loads), 1)])


class _LeastLoaded:
    """Loads by rank, and the rank with the least (of equals, the first)."""

    def __init__(self, loads: list[int]) -> None:
        self.loads = loads
        self._heap = [(load, rank) for rank, load in enumerate(loads)]
        heapq.heapify(self._heap)

    def add(self, rank: int, cost: int) -> None:
        self.loads[rank] += cost
        heapq.heappush(self._heap, (self.loads[rank], rank))

    def least(self) -> int:
        while self._heap[0][0] != self.loads[self._heap[0][1]]:  # it has got more since
            heapq.heappop(self._heap)
        return self._heap[0][1]


class Entry(NamedTuple):
    """A parameter to assign."""

    layout: Layout
    split_rows: int | Sequence[int] | None
    cost: Callable[[int, int], int]  # of a matrix of so many rows and columns


@dataclass(frozen=True)
class Assignment:
    """The matrices on one set of ranks."""

    members: tuple[int, ...]  # global ranks, ascending
    params: list[int]  # of the given ones, those that lie on these ranks
    matrices: list[Matrix]  # their ``param`` is an index into ``params``
    costs: list[int]
    owners: list[int]  # global ranks
    grids: Sequence[Grid]  # by parameter: the global rank by replica and position
    balance: Balance  # by place in ``members``


def assignments_of(entries: Sequence[Entry], tolerance: float = 0.05) -> list[Assignment]:
    """Assign the matrices of all parameters; larger sets of ranks first.

    Args:
        entries: in the same order on all ranks that hold them.
        tolerance: see `assign_owners`.
    """
    sets: dict[tuple[int, ...], list[int]] = {}
    for index, entry in enumerate(entries):
        sets.setdefault(entry.layout.members, []).append(index)
    done: list[Assignment] = []
    for members in sorted(sets, key=lambda ranks: (-len(ranks), ranks)):
        loads = _loads_before(members, done)
        done.append(_assign(members, sets[members], entries, loads, tolerance))
    return done


def _loads_before(members: tuple[int, ...], done: Sequence[Assignment]) -> list[int]:
    """What the larger sets that contain these ranks have given them to do."""
    loads = dict.fromkeys(members, 0)
    for larger in done:
        if set(members) < set(larger.members):
            for owner, cost in zip(larger.owners, larger.costs, strict=True):
                if owner in loads:
                    loads[owner] += cost
    return list(loads.values())


def _assign(
    members: tuple[int, ...],
    params: list[int],
    entries: Sequence[Entry],
    loads: list[int],
    tolerance: float,
) -> Assignment:
    place = {rank: index for index, rank in enumerate(members)}
    grids = [entries[index].layout.grid() for index in params]
    matrices: list[Matrix] = []
    jobs: list[Job] = []
    for number, index in enumerate(params):
        entry = entries[index]
        for matrix in matrices_of(entry.layout, number, entry.split_rows):
            held: dict[int, int] = {}  # a holder may have several parts
            for part in matrix.parts:
                held[part.position] = held.get(part.position, 0) + part.numel
            by_rank = [(place[row[p]], n) for row in grids[number] for p, n in held.items()]
            cost = entry.cost(matrix.rows, matrix.cols)
            jobs.append(Job(cost, matrix.numel, "", by_rank))
            matrices.append(matrix)
    owners = assign_owners(jobs, len(members), tolerance=tolerance, loads=loads)
    return Assignment(
        members,
        params,
        matrices,
        [job.cost for job in jobs],
        [members[owner] for owner in owners],
        grids,
        balance_of(jobs, owners, len(members), loads),
    )


@dataclass(frozen=True)
class CommunicationPlan:
    """The work and the messages of a step, for the ranks that share parameters with this one.

    Bytes count messages to other ranks, by the global rank that sends them.
    """

    gather_bytes: dict[int, int]  # to owners
    scatter_bytes: dict[int, int]  # from owners
    loads: dict[int, int]  # cost of what each rank computes
    lower_bound: float  # the greatest load is not smaller, whoever computes what
    num_matrices: int
    num_whole: int  # of those, matrices that lie whole on their owner

    @property
    def total_bytes(self) -> int:
        """Both ways, all ranks."""
        return sum(self.gather_bytes.values()) + sum(self.scatter_bytes.values())

    @property
    def balance(self) -> float:
        """The greatest load divided by the lower bound; 1 is perfect."""
        return max(self.loads.values(), default=0) / self.lower_bound if self.lower_bound else 1.0

    def sent_bytes(self, rank: int) -> int:
        """Bytes that a rank sends, both ways."""
        return self.gather_bytes.get(rank, 0) + self.scatter_bytes.get(rank, 0)


def communication_of(
    assignments: Sequence[Assignment], gather_bytes: int, scatter_bytes: int
) -> CommunicationPlan:
    """The communication of assignments, with so many bytes per element each way."""
    gathers: dict[int, int] = {}
    scatters: dict[int, int] = {}
    loads: dict[int, int] = {}
    num_whole = 0
    for each in assignments:
        traffic = traffic_of(each.matrices, each.owners, each.grids, each.members)
        num_whole += traffic.num_whole
        for rank, gather, scatter in zip(
            each.members, traffic.gathers, traffic.scatters, strict=True
        ):
            gathers[rank] = gathers.get(rank, 0) + gather * gather_bytes
            scatters[rank] = scatters.get(rank, 0) + scatter * scatter_bytes
        for owner, cost in zip(each.owners, each.costs, strict=True):
            loads[owner] = loads.get(owner, 0) + cost
    bound = max((each.balance.lower_bound for each in assignments), default=0.0)
    loads = {rank: loads.get(rank, 0) for rank in sorted(gathers)}
    num_matrices = sum(len(each.matrices) for each in assignments)
    return CommunicationPlan(gathers, scatters, loads, bound, num_matrices, num_whole)

"""Assigns matrices to the ranks that compute them, their owners. Loads are balanced by cost.

The matrices with the highest cost are assigned first (longest processing time first). A matrix is
assigned to the rank that holds most of its elements, if the load of this rank then exceeds the
lower bound for any assignment by at most a tolerance; else to the rank with the smallest load.
Example with two ranks, tolerance 5% and four matrices of cost 4, 3, 2, 1; rank 0 holds all but the
last::

    lower bound   (4 + 3 + 2 + 1) / 2 = 5, limit 5.25
    cost 4        rank 0 holds it: 4 <= 5.25              -> rank 0, nothing is sent
    cost 3        rank 0 would have 7                     -> rank 1, the least loaded
    cost 2        rank 0 would have 6                     -> rank 1
    cost 1        rank 1 would have 6, and holds it       -> rank 0: loads 5 and 5

Parameters on the same set of ranks are assigned together. A rank knows only the parameters that it
holds. So the assignment for a set of ranks may depend only on parameters that all of these ranks
hold. Larger sets are assigned first, and their loads count for smaller sets within them. Then all
ranks of a set compute the same result without communication.

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

    cost: int  # in any unit, for example floating-point operations
    num_bytes: int  # of the matrix; if costs are equal, the larger one is assigned first
    name: str  # decides if both are equal; after that the order of the jobs
    held: Sequence[tuple[int, int]]  # (rank, elements that it holds); replicas hold the same


def assign_owners(
    jobs: Sequence[Job],
    num_ranks: int,
    *,
    tolerance: float = 0.05,
    loads: Sequence[int] | None = None,
) -> list[int]:
    """Return the rank of each job, in the order of the jobs.

    Args:
        jobs: the ranks in ``held`` are below ``num_ranks``.
        tolerance: by how much the load of a rank that holds the matrix may exceed the lower bound.
        loads: the loads that the ranks already have.

    Cost: O(jobs * (log(jobs) + log(ranks) + holders)).
    """
    before = list(loads) if loads is not None else [0] * num_ranks
    limit = (1 + tolerance) * lower_bound_of(jobs, before)
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


def lower_bound_of(jobs: Iterable[Job], loads: Sequence[int]) -> float:
    """Return a highest load that no assignment is below.

    It is the largest of: the highest cost, the highest load, the mean of all work per rank.
    """
    costs = [job.cost for job in jobs]
    return max([0.0, *costs, *loads, (sum(costs) + sum(loads)) / max(len(loads), 1)])


class _LeastLoaded:
    """Loads by rank, and the rank with the smallest load (if equal, the first)."""

    def __init__(self, loads: list[int]) -> None:
        self.loads = loads
        self._heap = [(load, rank) for rank, load in enumerate(loads)]
        heapq.heapify(self._heap)

    def add(self, rank: int, cost: int) -> None:
        self.loads[rank] += cost
        heapq.heappush(self._heap, (self.loads[rank], rank))

    def least(self) -> int:
        while self._heap[0][0] != self.loads[self._heap[0][1]]:  # its load has changed since
            heapq.heappop(self._heap)
        return self._heap[0][1]


class Entry(NamedTuple):
    """A parameter to assign."""

    layout: Layout
    split_rows: int | Sequence[int] | None
    cost: Callable[[int, int], int]  # cost of a matrix, from its rows and columns


@dataclass(frozen=True)
class Assignment:
    """The matrices on one set of ranks, with their owners."""

    members: tuple[int, ...]  # global ranks, ascending
    params: list[int]  # indices of the entries that are on these ranks
    matrices: list[Matrix]  # their ``param`` is an index into ``params``
    costs: list[int]
    owners: list[int]  # global ranks
    grids: Sequence[Grid]  # by parameter: the global rank by replica and position
    lower_bound: float  # no assignment has a smaller highest load


def assignments_of(entries: Sequence[Entry]) -> list[Assignment]:
    """Assign the matrices of all parameters, larger sets of ranks first.

    Args:
        entries: in the same order on all ranks that hold them.
    """
    sets: dict[tuple[int, ...], list[int]] = {}
    for index, entry in enumerate(entries):
        sets.setdefault(entry.layout.members, []).append(index)
    done: list[Assignment] = []
    for members in sorted(sets, key=lambda ranks: (-len(ranks), ranks)):
        loads = _loads_before(members, done)
        done.append(_assign(members, sets[members], entries, loads))
    return done


def _loads_before(members: tuple[int, ...], done: Sequence[Assignment]) -> list[int]:
    """Return the loads that these ranks have from larger sets."""
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
) -> Assignment:
    place = {rank: index for index, rank in enumerate(members)}
    grids = [entries[index].layout.grid() for index in params]
    matrices: list[Matrix] = []
    jobs: list[Job] = []
    for number, index in enumerate(params):
        entry = entries[index]
        for matrix in matrices_of(entry.layout, number, entry.split_rows):
            held: dict[int, int] = {}  # a rank may have several parts
            for part in matrix.parts:
                held[part.position] = held.get(part.position, 0) + part.numel
            by_rank = [(place[row[p]], n) for row in grids[number] for p, n in held.items()]
            cost = entry.cost(matrix.rows, matrix.cols)
            jobs.append(Job(cost, matrix.numel, "", by_rank))
            matrices.append(matrix)
    owners = assign_owners(jobs, len(members), loads=loads)
    return Assignment(
        members,
        params,
        matrices,
        [job.cost for job in jobs],
        [members[owner] for owner in owners],
        grids,
        lower_bound_of(jobs, loads),
    )


@dataclass(frozen=True)
class CommunicationPlan:
    """The work and the messages of a step, for the ranks that share parameters with this one.

    Bytes count messages to other ranks, by the global rank that sends them.
    """

    gather_bytes: dict[int, int]  # gradients, to owners
    scatter_bytes: dict[int, int]  # updates, from owners
    loads: dict[int, int]  # cost of the matrices that each rank computes
    lower_bound: float  # no assignment has a smaller highest load
    num_matrices: int
    num_whole: int  # number of matrices that are whole on their owner

    @property
    def total_bytes(self) -> int:
        """Bytes in both directions, of all ranks."""
        return sum(self.gather_bytes.values()) + sum(self.scatter_bytes.values())

    @property
    def balance(self) -> float:
        """The highest load divided by the lower bound. 1 is perfect."""
        return max(self.loads.values(), default=0) / self.lower_bound if self.lower_bound else 1.0

    def sent_bytes(self, rank: int) -> int:
        """Return the bytes that a rank sends in both directions."""
        return self.gather_bytes.get(rank, 0) + self.scatter_bytes.get(rank, 0)


def communication_of(
    assignments: Sequence[Assignment], gather_bytes: int, scatter_bytes: int
) -> CommunicationPlan:
    """Return the communication of assignments.

    Args:
        gather_bytes: bytes per element of a message to an owner.
        scatter_bytes: bytes per element of a message from an owner.
    """
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
    bound = max((each.lower_bound for each in assignments), default=0.0)
    loads = {rank: loads.get(rank, 0) for rank in sorted(gathers)}
    num_matrices = sum(len(each.matrices) for each in assignments)
    return CommunicationPlan(gathers, scatters, loads, bound, num_matrices, num_whole)

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

Pure integers and floats of metadata that all ranks have: every rank computes the same assignment
without communication.

Source: Graham 1969 for the order; the preference within a tolerance is ours.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple


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
        """The greatest load by the lower bound; 1 is perfect."""
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

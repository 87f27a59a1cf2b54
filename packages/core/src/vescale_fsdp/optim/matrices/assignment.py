"""The matrices of many parameters, and a rank that computes each.

Parameters that lie on the same ranks are assigned together. Ranks know of a parameter only if they
hold it, so an assignment may depend on that of parameters that lie on all of these ranks and more,
and on no other: larger sets of ranks come first, and the loads they give count for the smaller
ones inside of them. So all ranks of a set come to the same result, without communication.

Pure integers: nothing here communicates or looks at data.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vescale_fsdp.optim.matrices.layout import Layout, Matrix, matrices_of
from vescale_fsdp.optim.matrices.owners import Balance, Job, assign_owners, balance_of
from vescale_fsdp.optim.matrices.routes import Grid, traffic_of


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
    """What a step computes and sends, as far as the ranks that this one shares parameters with.

    The bytes are those of messages to other ranks, by the global rank that sends them.
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
        """The greatest load by the lower bound; 1 is perfect."""
        return max(self.loads.values(), default=0) / self.lower_bound if self.lower_bound else 1.0

    def sent_bytes(self, rank: int) -> int:
        """What a rank sends, both ways."""
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

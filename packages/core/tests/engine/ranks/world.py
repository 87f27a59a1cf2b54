"""What simulated ranks share: communicators, rounds of agreement, and whose turn it is."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence

from greenlet import getcurrent, greenlet

from vescale_fsdp.program.executor import Executor
from vescale_fsdp.program.order import Bundles, Program, Sendable
from vescale_fsdp.program.record import Record, merge
from vescale_fsdp.program.reductions import Reduction
from vescale_fsdp.program.residency import TRANSITIONS, Lease, Residency, State


class Circle(AssertionError):
    """Every rank waits for another."""


class Mismatch(Exception):
    """Ranks have said that something is wrong."""


class World:
    """Ranks that take turns, each until it has to wait for another.

    Attributes:
        gathers, reductions: by rank, what it has issued: the units, or groups, of each message.
        num_rounds: of agreement.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.gathers: list[list[tuple[int, ...]]] = [[] for _ in range(size)]
        self.reductions: list[list[tuple[int, ...]]] = [[] for _ in range(size)]
        self.said: list[list[object]] = [[] for _ in range(size)]
        self.answers: list[object] = []
        self.stalls: set[tuple[int, int]] = set()  # a backward, and a rank that is behind in it
        self.waits = [""] * size
        self.num_rounds = 0

    def run(self, program: Callable[[int], None], first: int = 0) -> None:
        """Run ``program`` on every rank to its end.

        Raises:
            Circle: no rank can go on.
        """
        scheduler = getcurrent()
        ranks = [greenlet(program, scheduler) for _ in range(self.size)]
        started = [False] * self.size
        order = [(first + k) % self.size for k in range(self.size)]
        while alive := [rank for rank in order if not ranks[rank].dead]:
            before = [self._progress(rank) for rank in range(self.size)]
            for rank in alive:
                if started[rank]:
                    ranks[rank].switch()
                else:
                    started[rank] = True
                    ranks[rank].switch(rank)
            after = [self._progress(rank) for rank in range(self.size)]
            if before == after and all(ranks[rank].dead == (rank not in alive) for rank in order):
                raise Circle({rank: self.waits[rank] for rank in alive})

    def _progress(self, rank: int) -> tuple[object, ...]:
        counts = (len(self.gathers[rank]), len(self.reductions[rank]), len(self.said[rank]))
        return (*counts, self.waits[rank], len(self.stalls))

    def wait(self, rank: int, what: str, is_over: Callable[[], bool]) -> None:
        """Let other ranks run until ``is_over``."""
        while not is_over():
            self.waits[rank] = what
            parent = getcurrent().parent
            assert parent is not None, "ranks are started by `run`"
            parent.switch()
        self.waits[rank] = f"runs after {what}"

    def everyone(self, rank: int, mine: object, merged: Callable[[list[object]], object]) -> object:
        """A round: what ``merged`` makes of what all ranks say."""
        number = len(self.said[rank])
        self.said[rank].append(mine)
        self.wait(rank, f"round {number}: {mine}", lambda: all(len(s) > number for s in self.said))
        if len(self.answers) == number:
            self.answers.append(merged([said[number] for said in self.said]))
            self.num_rounds += 1
        return self.answers[number]


def sendable_of(unit: int) -> Sendable | None:
    """Two of three units are so small that they travel together."""
    return Sendable(1, "any") if unit % 3 else None


class Unit(Residency):
    """A unit whose all-gathers are entries in a list."""

    has_streams = False

    def __init__(self, world: World, rank: int, sizes: Sequence[int], frozen: bool) -> None:
        super().__init__()
        self._world, self._rank, self.sizes, self._is_frozen = world, rank, sizes, frozen
        self.state = State.SHARDED
        self.number = 0  # of the all-gather that is under way
        self.executor: Simulated | None = None

    def _move(self, state: State) -> None:
        assert state in TRANSITIONS[self.state], (self.index, self.state, state, self.leases)
        self.state = state

    @property
    def is_sharded(self) -> bool:
        return self.state is State.SHARDED

    is_stale = False
    version = 0

    @property
    def trainable(self) -> bool:
        return not self._is_frozen and bool(self.sizes)

    @property
    def all_trainable(self) -> bool:
        return self.trainable

    def start_unshard(self, *, in_backward: bool = False) -> None:
        if self.state is State.SHARDED and self.sizes:
            self._issue()
            self._move(State.UNSHARDING)

    def _issue(self) -> None:
        assert self.executor is not None, "the model has set it"
        self.number = self.executor.send(self.index)

    def _arrive(self) -> None:
        issued, number = self._world.gathers, self.number
        what = f"all-gather {number} of {self.index}"
        self._world.wait(self._rank, what, lambda: all(len(each) > number for each in issued))

    def wait_for_unshard(self) -> None:
        if self.state is State.UNSHARDING:
            self._arrive()
            self._move(State.UNSHARDED)

    def join_unshard(self) -> None:
        self._issue()
        self._arrive()

    def park(self) -> None:
        if self.state is State.UNSHARDED:
            self._move(State.UNSHARDING)

    def free(self) -> None:
        assert Lease.PINNED not in self.leases
        if self.state is not State.SHARDED:
            if self.state is State.UNSHARDING:
                self._arrive()
            self._move(State.SHARDED)

    def free_but_part(self) -> None:
        self.free()


class Group(Reduction):
    """The group of a unit."""

    def __init__(self, world: World, rank: int, unit: Unit, executor: Simulated) -> None:
        self._world, self._rank, self.unit, self._executor = world, rank, unit, executor
        self.number, self._place = unit.index, 0
        self.waiting = 0  # gradients that no reduction has sent yet
        self.sendable = sendable_of(unit.index)

    @property
    def has_gradients(self) -> bool:
        return self.waiting > 0

    def start(self, place: int) -> None:
        self._place, self.waiting = place, 0

    def _is_over(self) -> bool:
        return all(len(each) > self._place for each in self._world.reductions)

    def finish(self) -> None:
        self._world.wait(self._rank, f"reduction of {self.number}", self._is_over)

    def has_arrived(self) -> bool:
        what = f"reduction of {self.number}, or one behind"
        self._world.wait(self._rank, what, lambda: self._is_over() or self._executor.is_stalled)
        return self._is_over()


class Simulated(Executor):
    """Carries out nothing but what ranks see of each other."""

    def __init__(self, world: World, rank: int) -> None:
        self.world, self.rank = world, rank
        self.groups: dict[int, Group] = {}  # by unit
        self.num_backwards = 0
        self.num_reduced: dict[int, int] = {}  # by group, in the backward that runs
        self.reduces = True
        self._bundles: Bundles | None = None  # of the pass that runs
        self._parts: dict[int, int] = {}  # by unit: the all-gather that has brought it

    def begin_walk(self, program: Program, *, in_backward: bool) -> None:
        self._bundles = Bundles(program, sendable_of)

    def end_walk(self) -> None:
        self._bundles, self._parts = None, {}

    def send(self, unit: int) -> int:
        """Issue the all-gather of ``unit``, perhaps with others; returns the place of it."""
        together = None if self._bundles is None else self._bundles.send_with(unit)
        if together != []:
            issued = self.world.gathers[self.rank]
            units = (unit,) if together is None else tuple(together)
            self._parts.update(dict.fromkeys(units, len(issued)))
            issued.append(units)
        return self._parts[unit]

    def settle(self, mine: Record, timeout_s: float | None) -> Record:
        def together(said: list[object]) -> object:
            half = (len(said) + 1) // 2  # as along a tree
            records = [Record(**json.loads(str(text))) for text in said]
            parts = [merge(part) for part in (records[:half], records[half:]) if part]
            return json.dumps(merge(parts).__dict__)

        text = self.world.everyone(self.rank, json.dumps(mine.__dict__), together)
        found = Record(**json.loads(str(text)))
        if found.wrong:
            raise Mismatch(found.wrong)
        return found

    def compare(self, entries: Sequence[str], unit: Residency | None) -> None:
        def differ(said: list[object]) -> object:
            return any(each != said[0] for each in said)

        if self.world.everyone(self.rank, list(entries), differ):
            raise Mismatch(entries)

    def stall(self) -> None:
        self.world.stalls.add((self.num_backwards, self.rank))

    @property
    def is_stalled(self) -> bool:
        return any(number == self.num_backwards for number, _ in self.world.stalls)

    def due(self) -> Sequence[Reduction]:
        self.num_backwards += 1
        self.num_reduced = {}
        if not self.reduces:
            return []
        groups = [group for group in self.groups.values() if group.unit.trainable]
        return groups[::-1]

    def start_reductions(self, batch: Sequence[Reduction]) -> None:
        issued = self.world.reductions[self.rank]
        for group in batch:
            assert isinstance(group, Group)
            self.num_reduced[group.number] = self.num_reduced.get(group.number, 0) + 1
            group.start(len(issued))
        issued.append(tuple(group.number for group in batch))

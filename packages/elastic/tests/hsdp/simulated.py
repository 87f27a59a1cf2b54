"""Replicas as greenlets in a simulated time, which are killed, held up and cut off at random.

The protocol's real code runs (`quorum`, `meeting`, `exchange`). A board in memory stands for the
folder, and `SimulatedLink` for the connections: it fails whenever a real one might. A gradient is
the name of the member that has it, so a sum is the set of those that are in it.
"""

from __future__ import annotations

import heapq
import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from greenlet import getcurrent, greenlet

from vescale_fsdp.errors import RankMismatchError
from vescale_fsdp_elastic.hsdp.exchange import Exchange
from vescale_fsdp_elastic.hsdp.meeting import Life, Meeting, others_wait, wishes
from vescale_fsdp_elastic.hsdp.quorum import Age, Member, Quorum, Report

TIMEOUT_S, HANG_S = 3.0, 3_000.0
Sum = tuple[int, frozenset[Member], bool]  # step, who is in it, whether a replica wants to join


class Hang(Exception):
    """Simulated time is over."""


class World:
    """The clock, the order of events, and who is dead."""

    def __init__(self, seed: int) -> None:
        self.chance, self.now = random.Random(seed), 0.0
        self._queue: list[tuple[float, int, greenlet]] = []
        self._numbers = itertools.count()
        self.dead: dict[greenlet, float] = {}  # since when
        self.held: dict[greenlet, tuple[float, float]] = {}  # from when to when
        self._main = getcurrent()

    def start(self, run: Callable[[], None], delay_s: float = 0.0) -> greenlet:
        made = greenlet(run, self._main)
        self._push(made, delay_s)
        return made

    def _push(self, who: greenlet, delay_s: float) -> None:
        heapq.heappush(self._queue, (self.now + delay_s, next(self._numbers), who))

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self._push(getcurrent(), seconds * self.chance.uniform(0.9, 1.1))
        self._main.switch()

    def step(self) -> None:
        """Let others run: any operation on the board or the network takes time."""
        self.sleep(self.chance.choice([0.0001, 0.001, 0.02]))

    def run(self) -> None:
        while self._queue:
            self.now, _, who = heapq.heappop(self._queue)
            if self.now > HANG_S:
                raise Hang
            if who in self.dead or who.dead:
                continue
            until = self.held.get(who, (0.0, 0.0))[1]
            if until > self.now:
                self._push(who, until - self.now)
            else:
                who.switch()


@dataclass
class MemoryBoard:
    """A board that costs time at each call, so that members die and meet between the calls."""

    world: World
    tasks: dict[Member, greenlet] = field(default_factory=dict)
    gone: set[Member] = field(default_factory=set)
    told: dict[int, dict[Member, Report]] = field(default_factory=dict)
    failed: dict[int, list[int]] = field(default_factory=dict)
    decided: dict[int, Quorum] = field(default_factory=dict)
    finished: int = 0

    def register(self, replica: int) -> Member:
        start = 1 + max((each.start for each in self.tasks if each.replica == replica), default=0)
        member = Member(replica, start)
        self.tasks[member] = getcurrent()
        return member

    def is_replaced(self, member: Member) -> bool:
        return Member(member.replica, member.start + 1) in self.tasks

    def has_left(self, member: Member) -> bool:
        return member in self.gone

    def beats(self, member: Member, rank: int | None = None) -> dict[str, str]:
        world, task = self.world, self.tasks[member]
        time = world.dead.get(task, world.now)
        if task in world.held and world.held[task][1] > world.now:
            time = min(time, world.held[task][0])
        return {"beat-0": str(int(time * 2))}

    def report(self, number: int, report: Report) -> None:
        self.world.step()
        self.told.setdefault(number, {})[report.member] = report
        self.world.step()

    def reports(self, number: int) -> list[Report]:
        self.world.step()
        return [*self.told.get(number, {}).values()]

    def give_up(self, number: int, step: int) -> None:
        self.failed.setdefault(number, []).append(step)
        self.world.step()

    def failures(self, number: int) -> list[int]:
        return self.failed.get(number, [])

    def decide(self, quorum: Quorum) -> None:
        self.world.step()
        self.decided.setdefault(quorum.number, quorum)
        self.world.step()

    def decision(self, number: int) -> Quorum | None:
        return self.decided.get(number)

    def last(self) -> Quorum | None:
        self.world.step()
        return self.decided[max(self.decided)] if self.decided else None


class SimulatedLink:
    """The connections of one member.

    Args:
        wires: shared by all: what members have put there, by quorum and purpose.
        faults: the probability that a connection breaks, at each use.
    """

    def __init__(
        self, board: MemoryBoard, member: Member, wires: dict[Any, Any], num: int, faults: float
    ) -> None:
        self.board, self.world, self.member = board, board.world, member
        self.wires, self.faults = wires, faults
        self.life = Life(board, self.world, TIMEOUT_S)
        self.meeting = Meeting(
            board, self.world, self.life, stall_s=60.0, num_replicas=num, wait_s=10.0
        )
        self.kept: Sum | None = None
        self.history: list[Sum] = []

    def meet(self, report: Report, previous: Quorum | None) -> Quorum:
        return self.meeting.meet(report, previous)

    def connect(self, quorum: Quorum) -> bool:
        self._put((quorum.number, "connect"), True)
        end = self.world.now + TIMEOUT_S
        return self._all((quorum.number, "connect"), quorum.members, lambda: self.world.now > end)

    def sum(self, quorum: Quorum, report: Report) -> bool:
        wish = wishes(self.board, self.life.is_alive, quorum)
        key = (quorum.number, "sum", report.age.step)
        self._put(key, wish)
        if not self._all(key, quorum.members, lambda: self._lost(quorum, report)):
            self.board.give_up(quorum.number + 1, report.age.step)
            return False
        parts = self.wires[key]
        self.kept = (report.age.step, frozenset(quorum.members), any(parts.values()))
        self.history.append(self.kept)
        return True

    def hand_over(self, quorum: Quorum, report: Report) -> bool:
        source, key = quorum.source, (quorum.number, "hand over")
        assert source is not None
        if self.member not in (source, *quorum.behind):
            return True
        self._put(key, self.kept)
        parties = (source, *quorum.behind)
        if not self._all(key, parties, lambda: self._lost(quorum, report)):
            return False
        if self.member in quorum.behind:
            self.kept = self.wires[key][source]
            assert self.kept[0] == report.age.step == len(self.history)
            self.history.append(self.kept)
        return True

    def give(self, quorum: Quorum, report: Report) -> bool:
        return self._state(quorum, report)

    def receive(self, quorum: Quorum, report: Report) -> bool:
        if not self._state(quorum, report):
            return False
        self.world.sleep(self.world.chance.uniform(0.1, 3.0))  # it loads
        self.history = list(self.wires[quorum.number, "state"][quorum.donor])
        return True

    def _state(self, quorum: Quorum, report: Report) -> bool:
        key = (quorum.number, "state")
        self._put(key, list(self.history))
        assert quorum.donor is not None
        parties = (quorum.donor, *quorum.joining)
        return self._all(key, parties, lambda: self._lost(quorum, report))

    def _put(self, key: Any, value: Any) -> None:
        self.wires.setdefault(key, {})[self.member] = value

    def _all(self, key: Any, parties: tuple[Member, ...], gives_up: Callable[[], bool]) -> bool:
        """Whether all have put something there, and nothing broke on this side."""
        while not self.wires[key].keys() >= set(parties):
            if gives_up() or any(self.board.tasks[p] in self.world.dead for p in parties):
                return False
            self.world.step()
        self.world.step()
        return self.world.chance.random() >= self.faults

    def _lost(self, quorum: Quorum, report: Report) -> bool:
        return others_wait(self.board, self.life.is_alive, quorum, report)


class Training:
    """Some replicas that train for ``until`` steps, and are started again when they have died."""

    def __init__(self, seed: int, replicas: int, until: int, *, deaths: float, faults: float):
        self.world = World(seed)
        self.board = MemoryBoard(self.world)
        self.wires: dict[Any, Any] = {}
        self.replicas, self.until, self.deaths, self.faults = replicas, until, deaths, faults
        self.made: dict[tuple[int, int], set[Sum]] = {}  # by quorum and step
        self.results: dict[int, list[Sum] | None] = {}
        self.num_died = self.num_behind = 0
        self.saved: dict[int, tuple[Age, list[Sum]]] = {}  # the last checkpoint of each replica
        for replica in range(replicas):
            self.world.start(lambda replica=replica: self._program(replica))  # type: ignore[misc]
        self.world.start(self._trouble)

    def run(self) -> None:
        self.world.run()

    def _program(self, replica: int) -> None:
        world, board = self.world, self.board
        world.sleep(world.chance.uniform(0.5, 4.0))
        member = board.register(replica)
        link = SimulatedLink(board, member, self.wires, self.replicas, self.faults)
        age, history = self.saved.get(replica, (Age(0, 0), []))
        link.history = list(history)
        exchange = Exchange(link, member, age)
        try:
            exchange.join()
            while exchange.step < self.until and board.finished < self.until:
                world.sleep(world.chance.uniform(0.1, 1.0))
                exchange.reduce()
                assert exchange.quorum is not None
                assert len(link.history) == exchange.step
                kept = link.history[-1]
                self.made.setdefault((exchange.quorum.number, exchange.step), set()).add(kept)
                if exchange.step == self.until:
                    exchange.finish()
                if world.chance.random() < 0.2:
                    self.saved[replica] = (exchange.age, list(link.history))
                if kept[2] and exchange.step < self.until:
                    exchange.admit()
            board.finished = max(board.finished, exchange.step)
            # A replica that comes when the others have ended has nothing to do.
            self.results[replica] = link.history if exchange.step == self.until else None
        except RankMismatchError:
            self.num_behind += 1
            world.start(lambda: self._program(replica))
        board.gone.add(member)

    def _trouble(self) -> None:
        """Kill and hold up members at random times, and start the killed ones again."""
        world = self.world
        while len(self.results) < self.replicas:
            world.sleep(world.chance.expovariate(self.deaths))
            alive = [m for m, t in self.board.tasks.items() if not t.dead and t not in world.dead]
            if not alive:
                continue
            member = world.chance.choice(alive)
            task = self.board.tasks[member]
            if world.chance.random() < 0.3:
                length = world.chance.uniform(0.1, 3 * TIMEOUT_S)
                world.held[task] = (world.now, world.now + length)
                continue
            world.dead[task] = world.now
            self.num_died += 1
            if world.chance.random() < 0.5:  # another rank of the replica has said so
                self.board.gone.add(member)
            delay_s = world.chance.uniform(0.0, 10.0)
            world.start(lambda replica=member.replica: self._program(replica), delay_s)  # type: ignore[misc]

"""All ranks stop at the same step, whoever gets the signal, and nobody waits for ever."""

from __future__ import annotations

import copy
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.distributed as dist

from vescale_fsdp import RankMismatchError, checkpoint
from vescale_fsdp.checkpoint.stop import Tally
from vescale_fsdp.ranks import everyone, waits
from vescale_fsdp.testing import run_ranks

# Every order of events: the real `Tally`, with threads, store and steps as a model


@dataclass
class Rank:
    """A rank that makes ``num_steps`` steps, and its thread."""

    tally: Tally = field(default_factory=Tally)
    step: int = 1  # that it is in, or has just ended
    at_boundary: bool = False
    left: str = ""  # "stopped" or "finished"
    has_signal: bool = False
    has_announced: bool = False
    woken: bool = False
    unsent: int | None = None  # it has taken its number, and not told yet
    told: int | None = None

    def take_number(self) -> None:
        if not self.tally.has_told:
            self.unsent = self.tally.tell()


@dataclass
class World:
    ranks: list[Rank]
    num_steps: int
    are_coupled: bool  # nobody ends a step that another has not begun

    def copied(self) -> World:
        ranks = [replace(rank, tally=copy.copy(rank.tally)) for rank in self.ranks]
        return World(ranks, self.num_steps, self.are_coupled)

    def key(self) -> str:
        return repr([vars(rank) | vars(rank.tally) | {"tally": None} for rank in self.ranks])

    def moves(self) -> Iterator[Callable[[World], None]]:
        for i, rank in enumerate(self.ranks):
            if not rank.has_signal and not rank.left:
                yield lambda world, i=i: setattr(world.ranks[i], "has_signal", True)
            if not rank.left and not rank.at_boundary and self.can_end_step(rank):
                yield lambda world, i=i: setattr(world.ranks[i], "at_boundary", True)
            if rank.at_boundary and self.may_leave_boundary(rank):
                yield lambda world, i=i: world.leave_boundary(world.ranks[i])
            if rank.woken and not rank.tally.has_told:
                yield lambda world, i=i: world.ranks[i].take_number()
            if rank.unsent is not None and rank.told is None:
                yield lambda world, i=i: setattr(world.ranks[i], "told", rank_unsent(world, i))
            if rank.tally.has_told and rank.tally.last is None and self.told() is not None:
                yield lambda world, i=i: world.ranks[i].tally.learn(world.told() or [])

    def told(self) -> list[int] | None:
        numbers = [rank.told for rank in self.ranks if rank.told is not None]
        return numbers if len(numbers) == len(self.ranks) else None

    def can_end_step(self, rank: Rank) -> bool:
        if not self.are_coupled:
            return True
        return all(other.step >= rank.step for other in self.ranks)

    def may_leave_boundary(self, rank: Rank) -> bool:
        announces = rank.has_signal and not rank.has_announced
        return announces or copy.copy(rank.tally).arrive() is not None

    def leave_boundary(self, rank: Rank) -> None:
        if rank.has_signal and not rank.has_announced:
            rank.has_announced = True
            for other in self.ranks:
                other.woken = True
            rank.take_number()
            return
        stops = rank.tally.arrive()
        if stops or rank.step == self.num_steps:
            rank.left, rank.at_boundary = "stopped" if stops else "finished", False
            rank.take_number()  # it closes
        else:
            rank.step, rank.at_boundary = rank.step + 1, False


def rank_unsent(world: World, i: int) -> int | None:
    return world.ranks[i].unsent


def ends(num_ranks: int, num_steps: int, are_coupled: bool) -> list[World]:
    """The worlds in which nothing can happen any more, in every order of events."""
    first = World([Rank() for _ in range(num_ranks)], num_steps, are_coupled)
    seen, todo, found = {first.key()}, [first], []
    while todo:
        world = todo.pop()
        moved = 0
        for move in world.moves():
            moved += 1
            after = world.copied()
            move(after)
            key = after.key()
            if key not in seen:
                seen.add(key)
                todo.append(after)
        if not moved:
            found.append(world)
    return found


def outcomes(worlds: list[World]) -> set[tuple[tuple[str, int], ...]]:
    return {tuple((rank.left, rank.step) for rank in world.ranks) for world in worlds}


@pytest.mark.parametrize("are_coupled", [True, False], ids=["collectives", "running ahead"])
def test_in_every_order_of_events_all_ranks_stop_at_one_step(are_coupled: bool) -> None:
    every = {(("stopped", k),) * 2 for k in (1, 2, 3)} | {(("finished", 3),) * 2}
    assert outcomes(ends(2, 3, are_coupled)) == every


def test_in_every_order_of_events_three_ranks_stop_at_one_step() -> None:
    every = {(("stopped", k),) * 3 for k in (1, 2)} | {(("finished", 2),) * 3}
    assert outcomes(ends(3, 2, True)) == every


def test_the_model_sees_a_rank_that_goes_on_after_it_has_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The premise of the tests above: without the wait some order leaves a rank alone."""

    def arrive(self: Tally) -> bool:
        if self.last is not None and self.num_passed >= self.last:
            return True
        self.num_passed += 1
        return False

    monkeypatch.setattr(Tally, "arrive", arrive)
    assert len({steps for steps in outcomes(ends(2, 3, True)) if len(set(steps)) > 1}) > 0


# Real signals, threads and stores


def train(num_steps: int, signals: dict[int, tuple[int, ...]], slow: int = -1) -> tuple[int, int]:
    """Steps with a collective each; some ranks signal themselves within a step.

    Returns the step after which this rank stopped, or 0, and the exit code.
    """
    rank = dist.get_rank()
    with checkpoint.StopOnSignal() as stop:
        for step in range(1, num_steps + 1):
            if rank in signals.get(step, ()):
                os.kill(os.getpid(), signal.SIGTERM)
            if rank == slow:
                time.sleep(0.02)
            dist.all_reduce(torch.ones(1))
            if stop.requested():
                assert stop.signal is signal.SIGTERM
                return step, stop.exit_code
    return 0, stop.exit_code


def many_runs() -> list[tuple[int, int]]:
    return [
        train(6, {}),
        train(6, {3: (1,)}),
        train(6, {3: (0, 1, 2)}),
        train(6, {2: (0,)}, slow=2),
        train(6, {2: (2,)}, slow=2),
        train(6, {6: (1,)}, slow=0),
        train(6, {2: (0,), 3: (1,), 4: (2,)}),
    ]


def test_all_ranks_stop_after_the_same_step_whoever_gets_the_signal() -> None:
    first, *others = run_ranks(many_runs, 3)
    assert others == [first, first]
    quiet, one, every, fast, slow, at_the_end, staggered = first
    assert quiet == (0, 0)
    assert one in [(3, 143), (4, 143)]  # the others may have begun step 4
    assert every == (3, 143)
    assert fast in [(2, 143), (3, 143)]
    assert slow in [(2, 143), (3, 143)]
    assert at_the_end in [(6, 143), (0, 0)]  # the others may have left the loop
    assert staggered in [(2, 143), (3, 143)]


def handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGTERM)
    stop = checkpoint.StopOnSignal(signal.SIGTERM, signal.SIGUSR2)
    assert signal.getsignal(signal.SIGUSR2) == signal.getsignal(signal.SIGTERM) != before
    stop.close()
    assert signal.getsignal(signal.SIGTERM) == before
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
    assert "vescale-fsdp stop" not in [thread.name for thread in threading.enumerate()]
    stop.close()  # does nothing


def test_closing_gives_back_the_handlers_and_ends_the_thread() -> None:
    run_ranks(handlers_come_back, 2)


def rank_0_waits_for_one_that_never_comes() -> float:
    if dist.get_rank() == 1:
        everyone().store(60.0)  # it has begun as the others, and goes no further
        dist.barrier()
        return 0.0
    with checkpoint.StopOnSignal(timeout_s=0.5) as stop:
        os.kill(os.getpid(), signal.SIGTERM)
        begin = time.monotonic()
        with pytest.raises(RankMismatchError, match=r"rank 1 did not report .* within 0 s"):
            stop.requested()
        took = time.monotonic() - begin
    dist.barrier()
    return took


def test_a_rank_that_does_not_answer_is_named() -> None:
    assert 0.4 < run_ranks(rank_0_waits_for_one_that_never_comes, 2)[0] < 15.0


def test_one_process_needs_no_process_group() -> None:
    with checkpoint.StopOnSignal(signal.SIGUSR1) as stop:
        assert not stop.requested()
        assert (stop.signal, stop.exit_code) == (None, 0)
        os.kill(os.getpid(), signal.SIGUSR1)
        assert stop.requested()
        assert (stop.signal, stop.exit_code) == (signal.SIGUSR1, 138)  # 128 + 10


def test_one_of_several_processes_must_know_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match=r"one of 2 processes.*after .*init_process_group"):
        checkpoint.StopOnSignal()
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


class Gone:
    """A store on a host that is gone: no call returns."""

    def __getattr__(self, _: str) -> Callable[..., None]:
        return lambda *_: threading.Event().wait()


def leaves_a_store_that_is_gone() -> None:
    stop = checkpoint.StopOnSignal()
    assert stop._peers is not None
    stop._peers._store = Gone()
    stop.close()


@pytest.mark.timeout(40)
def test_closing_ends_if_the_store_is_gone() -> None:
    run_ranks(leaves_a_store_that_is_gone, 2, timeout_s=20)


def waits_until_it_is_cut_off() -> None:
    with checkpoint.StopOnSignal(timeout_s=100) as stop:
        if dist.get_rank() == 1:
            return  # it does not answer
        os.kill(os.getpid(), signal.SIGTERM)
        threading.Timer(0.5, waits.abort, ("rank 1 is gone", [dist.group.WORLD])).start()
        stop._peers._tally.tell()  # so that only an answer would end the wait
        with pytest.raises(RankMismatchError):
            stop.requested()


@pytest.mark.timeout(40)
def test_a_rank_that_is_cut_off_does_not_wait_for_answers() -> None:
    run_ranks(waits_until_it_is_cut_off, 2, timeout_s=20)


def leaves_when_the_other_has_died() -> float:
    if dist.get_rank() == 1:
        everyone().store(60.0)  # it has begun as the other, and goes no further
        return 0.0
    stop = checkpoint.StopOnSignal(timeout_s=100)  # of the wait of its thread
    os.kill(os.getpid(), signal.SIGTERM)
    waits.abort("rank 1 has died", [dist.group.WORLD])
    with pytest.raises(RankMismatchError):
        stop.requested()
    begin = time.monotonic()
    stop.close()
    return time.monotonic() - begin


def test_a_rank_that_is_cut_off_leaves_at_once() -> None:
    assert run_ranks(leaves_when_the_other_has_died, 2)[0] < 3.0

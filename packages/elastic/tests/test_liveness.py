"""A rank that is lost is noticed by all others, also by those that wait for another rank."""

from __future__ import annotations

import contextlib
import threading
import time

import pytest
import torch
import torch.distributed as dist

from vescale_fsdp.ranks import Ranks
from vescale_fsdp.testing import RankError, run_ranks
from vescale_fsdp_elastic import liveness, sockets
from vescale_fsdp_elastic.beginning import _own_ranks

SLEEP_S = 100  # longer than the timeout of a test's ranks


def waits_for_a_sleeper(victim: int) -> str:
    """The rank before the last waits for the last one, which sleeps; the victim hangs up."""
    ranks, group = _own_ranks()
    ring = liveness.watch(ranks, group)
    last = ranks.size - 1
    if ranks.rank == victim:
        time.sleep(1)  # the others wait
        ring._is_over = True  # it does not notice itself
        for connection in ring._neighbours.values():
            with contextlib.suppress(OSError):  # its thread closes the other one, too
                connection.shutdown(2)  # as the kernel does for the dead
        ring.close()
        return ""
    if ranks.rank != last:
        with pytest.raises(RuntimeError):
            dist.recv(torch.empty(1), group=group, group_src=last)
    end = time.monotonic() + SLEEP_S
    while not ring.reason and time.monotonic() < end:
        time.sleep(0.01)
    ring.close()
    return ring.reason


@pytest.mark.parametrize("victim", [0, 1])
def test_all_ranks_learn_that_one_has_died(victim: int) -> None:
    reasons = run_ranks(waits_for_a_sleeper, 4, victim)
    assert [reasons[rank] for rank in range(4) if rank != victim] == [f"rank {victim} has died"] * 3


def stays() -> None:
    ranks, group = _own_ranks()
    liveness._leave_s = lambda: 0.5
    ring = liveness.watch(ranks, group)
    if ranks.rank == 1:
        (connection,) = ring._neighbours.values()
        connection.shutdown(2)
        ring.close()
        return
    time.sleep(SLEEP_S)


def test_a_rank_that_does_not_notice_ends() -> None:
    with pytest.raises(RankError, match="rank 0 died with exit code 1"):
        run_ranks(stays, 2, timeout_s=40)


def leave(size: int) -> tuple[str, float]:
    ranks, group = _own_ranks()
    ring = liveness.watch(ranks, group)
    assert len(ring._neighbours) == min(2, size - 1)
    if ranks.rank == 0:
        ring.close()
    ranks.together("a message after rank 0 has left", lambda: time.sleep(0.2))
    reason = ring.reason
    ring.close()
    ring.close()
    return reason, Ranks.linked(group).together("another one", lambda: 1.0, lambda values: values)


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_that_leaves_is_not_lost(size: int) -> None:
    assert run_ranks(leave, size, size) == [("", 1.0)] * size


def not_connected() -> str:
    ranks, group = _own_ranks()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(sockets, "of_network", lambda: "203.0.113.1")  # of no interface here
        ring = liveness.watch(ranks, group)
    ranks.together("a message", lambda: None)
    return str(ring._neighbours)


def test_a_ring_that_cannot_be_connected_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VESCALE_FSDP_TIMEOUT_S", "2")
    assert run_ranks(not_connected, 2) == ["{}", "{}"]


def test_a_rank_may_take_as_long_as_it_wants_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VESCALE_FSDP_TIMEOUT_S", "0")  # no limit
    assert not threading.Event().wait(0 * liveness._leave_s())

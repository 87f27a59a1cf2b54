"""How long a rank waits for others, and how it stops."""

import datetime
import math
import os
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vescale_fsdp import RankMismatchError, compat
from vescale_fsdp.dbuffer.transport import Exchange
from vescale_fsdp.ranks import Ranks, collectives, everyone, limit_s, notes, over, ranks, waits
from vescale_fsdp.testing import run_ranks


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("", 60.0), ("3", 3.0), ("0.5", 0.5), ("0", math.inf), ("inf", math.inf)],
)
def test_the_limit_is_what_the_variable_says(
    text: str, seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VESCALE_FSDP_TIMEOUT_S", text)
    assert limit_s() == seconds


@pytest.mark.parametrize("text", ["soon", "-1", "nan"])
def test_anything_else_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VESCALE_FSDP_TIMEOUT_S", text)
    with pytest.raises(ValueError, match="VESCALE_FSDP_TIMEOUT_S must be a number of seconds"):
        limit_s()


def waits_alone(limit: str, as_exchange: bool) -> float:
    """Seconds for which rank 0 waits in a group whose own timeout is two seconds."""
    os.environ["VESCALE_FSDP_TIMEOUT_S"] = limit
    group = dist.new_group(timeout=datetime.timedelta(seconds=2))
    dist.all_reduce(torch.zeros(1), group=group)
    begun = time.monotonic()
    if dist.get_rank() == 0:
        own, full = torch.zeros(1 << 14), torch.zeros(2 << 14)
        if as_exchange:
            work: waits.Waitable = Exchange([own, own], list(full.view(2, -1).unbind()), 0, group)
        else:
            work = collectives.all_gather_single(full, own, group)
        with pytest.raises(
            RankMismatchError, match=r"rank 0 has waited .* rank 1 waits for no collective"
        ):
            work.wait()
        with pytest.raises(RankMismatchError, match="no longer connected: rank 0 has waited"):
            collectives.all_gather_single(full, own, group).wait()
    seconds = time.monotonic() - begun
    dist.barrier()
    return seconds


@pytest.mark.parametrize("as_exchange", [False, True])
@pytest.mark.parametrize(("limit", "seconds"), [("0.5", 0.5), ("60", 2), ("0", 2)])
@pytest.mark.sampled(2)
def test_the_shorter_of_the_limit_and_the_timeout_of_the_group_holds(
    limit: str, seconds: float, as_exchange: bool
) -> None:
    waited, _ = run_ranks(waits_alone, 2, limit, as_exchange, timeout_s=60)
    assert seconds <= waited < seconds + 15


def messages_of_other_sizes() -> str:
    os.environ["VESCALE_FSDP_TIMEOUT_S"] = "1"
    group = collectives.new_group([0, 1])
    rank = dist.get_rank()
    size = (1 << 14) + rank * 64  # gloo aborts the process that receives the longer one
    own, full = torch.zeros(size), torch.zeros(2 * size)
    with pytest.raises(RankMismatchError) as caught:
        Exchange([own, own], list(full.view(2, -1).unbind()), rank, group).wait()
    dist.barrier()
    return str(caught.value)


def test_messages_of_other_sizes_do_not_meet() -> None:
    assert len(run_ranks(messages_of_other_sizes, 2, timeout_s=30)) == 2


def after_a_restart() -> str:
    os.environ["VESCALE_FSDP_TIMEOUT_S"] = "0.5"
    former = collectives.new_group([0, 1])
    collectives.all_gather_single(torch.zeros(2), torch.zeros(1), former).wait()
    store = compat.default_store()
    rank = dist.get_rank()
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=rank, world_size=2)
    group = collectives.new_group([0, 1])
    text = ""
    if rank == 0:
        with pytest.raises(RankMismatchError, match=r"rank 0 has waited \d+\.\d s") as caught:
            collectives.all_gather_single(torch.zeros(2), torch.zeros(1), group).wait()
        text = str(caught.value)
    dist.barrier()
    assert former is not None  # somebody still has it
    return text


def test_communicators_from_before_a_restart_are_left_alone() -> None:
    assert "The others: rank 1" in run_ranks(after_a_restart, 2, timeout_s=30)[0]


class Gone:
    """A store whose process has ended."""

    def check(self, keys: list[str]) -> bool:
        raise ConnectionError("broken pipe")


def test_ranks_whose_notes_cannot_be_read_are_not_said_to_wait_for_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(notes, "_stores", {(0, 1, 2): Gone})
    monkeypatch.setattr(notes.here, "world", lambda: dist.group.WORLD)
    text = notes.of([0, 2])
    assert text.startswith("rank 0 cannot be asked: the process that holds the store has ended")
    assert "rank 2 cannot be asked" in text


def misses_a_rank() -> tuple[bool, str]:
    everyone().barrier("the beginning")
    if dist.get_rank() == 0:
        os.environ["VESCALE_FSDP_TIMEOUT_S"] = "0.5"
        with pytest.raises(RankMismatchError, match="rank 1 did not come"):
            everyone().barrier("the end")
    return waits.is_cut(), str(waits._no_longer_connected())


def test_later_waits_say_which_rank_has_not_come() -> None:
    (is_cut, text), _ = run_ranks(misses_a_rank, 2, timeout_s=30)
    assert is_cut
    assert "no longer connected: rank 0 gave up in the end: rank 1 did not come" in text


def several_groups_of_the_same_ranks() -> bool:
    world = dist.group.WORLD
    assert world is not None
    assert over(world).group is world
    other = dist.new_group([0, 1])
    return over(other).group is other


def test_the_group_that_was_passed_last_is_closed_where_a_rank_does_not_come() -> None:
    assert run_ranks(several_groups_of_the_same_ranks, 2) == [True, True]


class TimedOut:
    def wait(self, timeout: datetime.timedelta) -> None:
        raise RuntimeError("timed out")


class Meanwhile:
    """Ends after the receive of another thread has timed out."""

    def __init__(self, data: torch.Tensor) -> None:
        self._data = data

    def wait(self, timeout: datetime.timedelta) -> None:
        with pytest.raises(RuntimeError, match="timed out"):
            Ranks((), 0)._end(TimedOut(), self._data, 1.0)


def test_what_is_received_late_is_kept_whatever_others_receive() -> None:
    late = torch.zeros(1)
    Ranks((), 0)._end(Meanwhile(late), torch.zeros(1), 1.0)
    assert any(each is late for each in ranks._LATE)


def test_an_answer_counts_also_if_the_first_rank_dies_after_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def send(*_: object) -> None:
        raise RuntimeError("Connection closed by peer")

    link: Any = object()
    monkeypatch.setattr(Ranks, "_post", lambda *_: None)
    monkeypatch.setattr(Ranks, "_receive", lambda *_: ["an answer", None])
    monkeypatch.setattr(Ranks, "_isend", send)
    assert Ranks([0, 1], 1, link=link).together("a test", lambda: 1, list) == "an answer"


def returns_no_json(combines: bool) -> tuple[float, str]:
    everyone().barrier("the beginning")
    begun = time.monotonic()
    result = {1} if dist.get_rank() == 1 and not combines else 1
    with pytest.raises(TypeError) as caught:  # the first rank combines
        everyone().together(
            "a test", lambda: result, lambda said: [{1}, {1}, {1}] if combines else said
        )
    assert everyone().together("the next", lambda: 2, list) == 2
    return time.monotonic() - begun, str(caught.value)


@pytest.mark.parametrize("combines", [False, True])
def test_all_raise_if_a_result_cannot_be_sent(combines: bool) -> None:
    found = run_ranks(returns_no_json, 3, combines, timeout_s=60)
    assert max(seconds for seconds, _ in found) < 10
    assert all("set is not JSON serializable" in text for _, text in found)
    del found[0 if combines else 1]  # its own error
    assert all(text.startswith(f"on rank {0 if combines else 1}: ") for _, text in found)

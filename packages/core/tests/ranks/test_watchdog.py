"""``VESCALE_FSDP_WATCHDOG_S``: a rank that waits for long says so, and goes on."""

from __future__ import annotations

import logging
import math
import threading
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale_fsdp import fully_shard
from vescale_fsdp.ranks import limits, notes, waits
from vescale_fsdp.testing import run_ranks


class Kept(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


def train(width: int, where: str, seconds: str) -> list[str]:
    kept = Kept()
    waits._log.addHandler(kept)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(width, width) for _ in range(3)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    is_late = [False]

    def sleep(*_: object) -> None:
        if is_late[0] and dist.get_rank() == 0:
            is_late[0] = False
            time.sleep(2.5)

    if where == "forward":
        model[0].register_forward_hook(sleep)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VESCALE_FSDP_WATCHDOG_S", seconds)
        for step in range(3):
            is_late[0] = step == 2
            if where == "step":
                sleep()
            model(torch.ones(2, width)).sum().backward()
        dist.barrier()
    waits._log.removeHandler(kept)
    return kept.texts


@pytest.mark.parametrize("width", [4, 128])
@pytest.mark.parametrize("where", ["forward", "step"])
@pytest.mark.sampled(1)
def test_a_rank_that_waits_says_for_what_and_for_whom(width: int, where: str) -> None:
    _, waits = run_ranks(train, 2, width, where, "1")
    # On a busy machine there may be others.
    assert any(
        "rank 1 has waited 1 s for the" in text
        and "forward" in text
        and "rank 0 waits for no collective: it computes" in text
        for text in waits
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seconds", ["", "0", "50"])
def test_nothing_is_said_before(seconds: str) -> None:
    assert run_ranks(train, 2, 4, "step", seconds) == [[], []]


def refused() -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VESCALE_FSDP_WATCHDOG_S", "soon")
        with pytest.raises(ValueError, match="VESCALE_FSDP_WATCHDOG_S must be") as caught:
            limits.watchdog_s()
    return str(caught.value)


def test_what_is_no_number_is_refused() -> None:
    assert "got 'soon'" in refused()


def fails() -> None:
    with waits.Waiting("a test", [0]):
        time.sleep(0.6)
        raise RuntimeError("cut off")


def fail_after_a_while() -> str:
    """The note that this rank leaves for the others."""
    store = dist.HashStore()
    notes.begin()
    notes.share([0], store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VESCALE_FSDP_WATCHDOG_S", "0.1")
        with pytest.raises(RuntimeError, match="cut off"):
            fails()
    return store.get("waits/0").decode()


def test_the_note_of_a_wait_that_failed_stays_for_the_others() -> None:
    (note,) = run_ranks(fail_after_a_while, 1)
    assert "waits for a test" in note


def fail_after_rest() -> str:
    with waits.Waiting("another test", [0]):
        pass
    end = time.monotonic() + 20
    while waits._begun.is_set():  # until the watcher has nothing to look at
        assert time.monotonic() < end, "the watcher goes on looking"
        time.sleep(0.05)
    return fail_after_a_while()


def test_the_watcher_rests_without_waits_and_looks_at_the_next_one() -> None:
    (note,) = run_ranks(fail_after_rest, 1)
    assert "waits for a test" in note


def test_it_is_refused_where_a_wait_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "_watcher", None)
    monkeypatch.setenv("VESCALE_FSDP_WATCHDOG_S", "soon")
    with pytest.raises(ValueError, match="VESCALE_FSDP_WATCHDOG_S must be"), waits.Waiting("", [0]):
        pass
    assert not waits._waits


def test_the_note_of_a_wait_that_ends_while_it_is_looked_at_does_not_stay(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    begun, goes_on, me = threading.Event(), threading.Event(), threading.get_ident()
    waiting = waits.Waiting("a test", [0])

    def wait() -> None:
        with waiting:
            begun.set()
            goes_on.wait()

    thread = threading.Thread(target=wait)

    class Ends(dict[int, waits.Waiting]):
        def values(self) -> Any:
            found = [*super().values()]
            if threading.get_ident() == me:
                goes_on.set()
                thread.join(0.2)
            return found

    written: list[str] = []
    monkeypatch.setattr(waits, "_waits", Ends())
    monkeypatch.setattr(notes, "write", lambda _, note: written.append(note))
    thread.start()
    begun.wait()
    waiting.look(-1.0, math.inf)
    thread.join()
    assert len(written) == 2
    assert written[-1] == ""

"""A replica that joins, while the donor is slow, its memory is full or it cannot be reached."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from torch import nn

import vescale_fsdp_elastic as elastic
from vescale_fsdp.errors import CheckpointWriteError
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_elastic.hsdp.catching_up import State
from vescale_fsdp_elastic.hsdp.lanes import Lane, LaneError

from .test_replicas import Numbers, digest, make_sharded, split

UNTIL = 100
LATE_S = 3.0  # longer than the timeout


@contextlib.contextmanager
def warnings_of(texts: list[str]) -> Iterator[None]:
    """Collect the warnings of this package."""
    handler = logging.Handler()
    handler.emit = lambda record: texts.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("vescale_fsdp_elastic.hsdp")
    handler.setLevel(logging.WARNING)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)


def train(root: Path, replica: int, texts: list[str]) -> str:
    """Train until both replicas have made three steps together."""
    model, optimizer = make_sharded(0)
    together = 0
    with warnings_of(texts), elastic.replicas(
        root / "run", model, optimizer, replica=replica, num_replicas=2, timeout_s=2.0,
        wait_s=30.0, every_on_disk=None, every=1000, signals=(), memory_directory=root / "memory",
    ) as run:  # fmt: skip
        for step in run.batches(Numbers(), global_batch=8, until=UNTIL):
            for x, y in step:
                step.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            (root / f"present-{replica}-{step.number}-{len(run.present)}").touch()
            together = together + 1 if len(run.present) == 2 else 0
            if together == 3:
                return digest(model, optimizer)
            time.sleep(0.05)
    return f"never together; {run.present}"


def fails_at_first(root: Path, how: str) -> tuple[str, list[str], list[str]]:
    """The donor's first state is late, or it has no room for it, or no connection is made."""
    replica, texts, num = split(root, 1), list[str](), [0]
    write = State.write

    def faulty(self: State, *args: Any) -> bytes:
        num[0] += 1
        if how == "slow":
            time.sleep(LATE_S)
        if how == "full" and num[0] == 1:
            raise CheckpointWriteError("there is no room")
        return write(self, *args)

    with mock.patch.object(State, "write", faulty):
        result = train(root, replica, texts)
    present = [path.name for path in root.glob(f"present-{replica}-*-1")]
    return result, texts, present


@pytest.mark.nightly
def test_a_donor_that_needs_longer_than_the_timeout_is_waited_for(tmp_path: Path) -> None:
    results = run_ranks(fails_at_first, 2, tmp_path, "slow")
    assert results[0][0] == results[1][0]
    assert [texts for _, texts, _ in results] == [[], []]


def test_a_donor_without_room_goes_on_and_is_asked_again(tmp_path: Path) -> None:
    (first, told, alone), (second, told_too, _) = run_ranks(fails_at_first, 2, tmp_path, "full")
    assert first == second
    assert alone  # it has made steps in between
    assert "could not give its state to those that join (replicas 1)" in told[0]
    assert "there is no room" in told_too[0]


def unreachable(root: Path) -> str:
    replica, texts = split(root, 1), list[str]()
    made = Lane.__init__

    def fails(self: Lane, file: Path, index: int, size: int, timeout_s: float) -> None:
        if replica == 1:
            raise LaneError("no route")
        made(self, file, index, size, 0.2)

    with (
        mock.patch.object(Lane, "__init__", fails),
        mock.patch("vescale_fsdp_elastic.hsdp.links._LONGEST_PAUSE_S", 0.2),
    ):
        if replica == 0:
            return train(root, replica, texts)
        with pytest.raises(ConnectionError, match=r"for the 5\. time in a row") as caught:
            train(root, replica, texts)
    assert len(texts) == 4
    return str(caught.value)


@pytest.mark.nightly
def test_a_replica_that_cannot_be_reached_ends_and_the_others_go_on(tmp_path: Path) -> None:
    first, second = run_ranks(unreachable, 2, tmp_path)
    assert first.startswith("never together")
    assert "GLOO_SOCKET_IFNAME" in second

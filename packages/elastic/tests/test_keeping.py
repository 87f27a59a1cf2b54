"""Memory checkpoints in the background, and waits for them."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from vescale_fsdp import RankMismatchError
from vescale_fsdp.spi import threads, waits
from vescale_fsdp_elastic.keeping import Keeper


@pytest.fixture(autouse=True)
def _left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(waits._fault, "text", "")
    yield
    threads.disable(RuntimeError("the test is over"))


def test_a_rank_does_not_wait_for_a_memory_checkpoint_that_hangs() -> None:
    threads.enable()
    forever = threading.Event()
    keeper = object.__new__(Keeper)
    keeper._thread = threading.Thread(target=forever.wait, daemon=True)
    keeper._thread.start()
    threading.Timer(0.2, lambda: waits.abort("a host is gone")).start()
    with pytest.raises(RankMismatchError, match="no longer connected"):
        keeper.finish()
    forever.set()

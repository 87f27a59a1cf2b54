"""Waits that another thread can end."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator

import pytest

from vescale_fsdp.ranks import threads, waits


@pytest.fixture(autouse=True)
def _left_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(waits._fault, "text", "")
    yield
    threads.disable(RuntimeError("the test is over"))


def where() -> threading.Thread:
    found: list[threading.Thread] = []
    threads.carry_out(lambda: found.append(threading.current_thread()))
    return found[0]


def test_another_thread_waits_only_while_it_is_enabled() -> None:
    here = threading.current_thread()
    assert where() is here
    threads.enable()
    assert where() is not here
    threads.disable(RuntimeError("over"))
    assert where() is here


def test_a_wait_that_begins_after_the_end_raises() -> None:
    threads.enable()
    for why in ("first", "second"):
        threads.end(RuntimeError(why))
        with pytest.raises(RuntimeError, match="first"):
            threads.carry_out(lambda: pytest.fail("it waits"))
    threads.enable()  # the next ring
    assert where() is not threading.current_thread()


def test_errors_of_the_call_are_raised() -> None:
    threads.enable()
    with pytest.raises(ZeroDivisionError):
        threads.carry_out(lambda: divmod(1, 0) and None)
    assert where() is not threading.current_thread(), "it goes on"


@pytest.mark.parametrize("num_threads", [1, 3])
def test_all_that_wait_are_ended(num_threads: int) -> None:
    threads.enable()
    forever, errors = threading.Event(), []

    def wait() -> None:
        try:
            threads.carry_out(lambda: forever.wait() and None)
        except RuntimeError as error:
            errors.append(str(error))

    those = [threading.Thread(target=wait, daemon=True) for _ in range(num_threads)]
    for each in those:
        each.start()
    threading.Timer(0.2, lambda: threads.end(RuntimeError("over"))).start()
    for each in those:
        each.join(30.0)
    assert errors == ["over"] * num_threads
    forever.set()


def test_the_handler_of_a_signal_can_raise_during_a_wait() -> None:
    """As a script's own handler does, which ends the training with an exception."""

    def handle(*_: object) -> None:
        raise InterruptedError

    threads.enable()
    forever, before = threading.Event(), signal.signal(signal.SIGUSR1, handle)
    try:
        threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGUSR1)).start()
        with pytest.raises(InterruptedError):
            threads.carry_out(lambda: forever.wait() and None)
    finally:
        signal.signal(signal.SIGUSR1, before)
    forever.set()
    assert where() is not threading.current_thread(), "it goes on"

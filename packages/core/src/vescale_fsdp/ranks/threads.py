"""Calls in other threads: with a limit, or so that another thread can end the wait for them.

gloo forgets a message of which a part is sent or received when its connection is closed (torch
2.13), and a wait for it ends only with its timeout. So where hosts may be lost (`enable`), a thread
waits for messages, and the thread that needs them waits for that one::

    with a ring of ranks        rank ---- carry_out ---- raises
    (`enable`)                    other thread   wait for what is forgotten ------------------> ends
                                  the ring               ^ `end`

A wait that begins after `end` raises at once: its messages may be forgotten already.

Cost: two switches of threads for each wait, between `enable` and `disable`; else none.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any


class Call:
    """A call that another thread makes. Wait for ``ended``, then call `result`."""

    def __init__(self, function: Callable[[], Any]) -> None:
        self._function = function
        self._value: Any = None
        self.error: BaseException | None = None
        self.ended = threading.Event()

    def run(self) -> None:
        """Make the call, in the thread that calls this."""
        try:
            self._value = self._function()
        except BaseException as error:  # noqa: BLE001  for the thread that waits for it
            self.error = error
        del self._function  # with what it holds
        self.ended.set()

    def start(self) -> Call:
        """Make the call in a thread of its own. Python does not wait for it when it exits."""
        threading.Thread(target=self.run, name="vescale-fsdp call", daemon=True).start()
        return self

    def result(self) -> Any:
        """What the call has returned or raised."""
        if self.error is not None:
            raise self.error
        return self._value


class _Worker:
    """A daemon thread for one call after the other. It may hang in the last one."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._waited_for: set[Call] = set()
        self._lock = threading.Lock()
        self.error: BaseException | None = None  # that of `end`
        threading.Thread(target=self._run, name="vescale-fsdp waits", daemon=True).start()

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            call.run()
            del call

    def carry_out(self, function: Callable[[], Any]) -> None:
        call = Call(function)
        with self._lock:
            if self.error is not None:
                raise self.error
            self._waited_for.add(call)
            self._calls.put(call)
        try:
            call.ended.wait()
        finally:  # the handler of a signal may raise
            self._waited_for.discard(call)
        call.result()

    def end(self, error: BaseException) -> None:
        with self._lock:
            if self.error is not None:
                return
            self.error = error
            for call in [*self._waited_for]:
                call.error = call.error or error
                call.ended.set()
            self._calls.put(None)


_worker: _Worker | None = None


def enable() -> None:
    """From now on, waits can be ended."""
    global _worker
    if _worker is None or _worker.error is not None:
        _worker = _Worker()


def end(error: BaseException) -> None:
    """Let all waits under way raise ``error``, and those that begin before `disable` or `enable`.

    Does nothing if waits cannot be ended.
    """
    if _worker is not None:
        _worker.end(error)


def disable(error: BaseException) -> None:
    """`end` the waits under way. Later ones cannot be ended."""
    global _worker
    end(error)
    _worker = None


def carry_out(function: Callable[[], Any]) -> None:
    """Call a function that waits.

    Raises:
        BaseException: what it raised, or what `end` was given.
    """
    worker = _worker
    if worker is None:
        function()
    else:
        worker.carry_out(function)

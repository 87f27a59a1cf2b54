"""Waits that another thread can end.

gloo forgets a message of which a part is sent or received when its connection is closed (torch
2.13), and a wait for it ends only with its timeout. So where hosts may be lost (`elastic`), a
thread waits for messages, and the thread that needs them waits for that one::

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


class _Job:
    def __init__(self, call: Callable[[], None]) -> None:
        self.call = call
        self.error: BaseException | None = None
        self.ended = threading.Event()


class _Worker:
    """A daemon thread for one call after the other. It may hang in the last one."""

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._waited_for: set[_Job] = set()
        self._lock = threading.Lock()
        self._error: BaseException | None = None
        threading.Thread(target=self._run, name="vescale-fsdp waits", daemon=True).start()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job.call()
            except BaseException as error:  # noqa: BLE001  for the thread that waits for it
                job.error = error
            job.ended.set()
            del job  # with what its call holds

    def carry_out(self, call: Callable[[], None]) -> None:
        job = _Job(call)
        with self._lock:
            if self._error is not None:
                raise self._error
            self._waited_for.add(job)
            self._jobs.put(job)
        try:
            job.ended.wait()
        finally:  # the handler of a signal may raise
            self._waited_for.discard(job)
        if job.error is not None:
            raise job.error

    @property
    def has_ended(self) -> bool:
        return self._error is not None

    def end(self, error: BaseException) -> None:
        """Let all waits raise, and the thread end after its call."""
        with self._lock:
            if self._error is not None:
                return
            self._error = error
            for job in [*self._waited_for]:
                job.error = job.error or error
                job.ended.set()
            self._jobs.put(None)


_worker: _Worker | None = None


def enable() -> None:
    """From now on, waits can be ended."""
    global _worker
    if _worker is None or _worker.has_ended:
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


def carry_out(call: Callable[[], None]) -> None:
    """Call a function that waits.

    Raises:
        BaseException: what it raised, or what `end` was given.
    """
    worker = _worker
    if worker is None:
        call()
    else:
        worker.carry_out(call)

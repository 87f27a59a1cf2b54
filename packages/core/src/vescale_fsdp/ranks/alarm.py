"""An alarm: ranks whose devices wait for NCCL learn that another rank has given up.

With gloo, a rank that gives up closes connections, and whoever waits gets an error (`waits`). NCCL
keeps the device of a rank, and not its host, which may be in the user's code (``loss.item()``). So
the reason goes through the store, where a thread of each rank looks for it::

    rank 0   gives up: reason --------> | alarm |    aborts its communicators, raises
    rank 1   its host waits for its device, which waits for rank 0
               its thread: looks, looks --- hears    aborts its communicators
                                                     the host goes on, and is stopped by `waits`

There is such a thread only where this package has made a communicator of NCCL. Cost: one operation
of the store a rank every `LOOK_S` seconds, on a connection of its own. torch's own monitor of NCCL
looks there each second.
"""

from __future__ import annotations

import atexit
import contextlib
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from vescale_fsdp import compat
from vescale_fsdp.ranks.threads import Call

LOOK_S = 3.0
_KEY = "vescale_fsdp/alarm"
_STORE_S = 2.0  # time for the store to answer
ABORT_S = 10.0  # time for NCCL to abort communicators


class Alarm:
    """The alarm of one default group. `present` finds that of the present one.

    Args:
        ring: called with the reason of the rank that was first to give up, in the thread.
    """

    def __init__(self, ring: Callable[[str], None]) -> None:
        world = dist.group.WORLD
        assert world is not None, "a communicator has been made"
        self._world = weakref.ref(world)
        self._ring, self._is_rung = ring, False
        store: Any = compat.default_store()
        self._store = store.clone()
        self._before = self._said()  # by another default group, if the store had one
        self._held: Any = None
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="vescale-fsdp alarm", daemon=True)
        self._thread.start()

    @property
    def is_of_present(self) -> bool:
        """Whether the default group is that for which it was made."""
        world = self._world()
        return world is not None and world is dist.group.WORLD

    def tell(self, why: str) -> None:
        """Let all ranks hear ``why``, unless one was first. At most one operation of the store."""
        if not self._is_rung:
            self._hold()
            call = Call(lambda: self._store.compare_set(_KEY, self._before, why)).start()
            call.ended.wait(_STORE_S)

    def end(self) -> None:
        """Look no more. Ends the thread."""
        self._end.set()

    def join(self) -> None:
        """`end`, and wait for the thread: it must not be within torch when Python ends."""
        self.end()
        self._thread.join(_STORE_S + ABORT_S + LOOK_S + 1)

    def _hold(self) -> None:
        # This process may be that of the store, and must not end before the others have looked.
        self._is_rung, self._held = True, compat.default_store()

    def _said(self) -> str:
        return self._store.get(_KEY).decode() if self._store.check([_KEY]) else ""

    def _listen(self) -> None:
        with contextlib.suppress(RuntimeError):  # the process of the store has ended
            while not self._end.wait(LOOK_S) and self.is_of_present:
                if (said := self._said()) != self._before:
                    self._hold()
                    self._ring(said)
                    break
        if self._is_rung:
            time.sleep(LOOK_S + 1)
        self._held = None


_alarm: Alarm | None = None


def present() -> Alarm | None:
    """The alarm of the present default group.

    None: this package has made no communicator of NCCL in it.
    """
    return _alarm if _alarm is not None and _alarm.is_of_present else None


def install(ring: Callable[[str], None]) -> None:
    """Make the alarm of the present default group, unless there is one.

    Call it before a communicator connects: no rank can give up in it before the others listen.
    """
    global _alarm
    if present() is None:
        if _alarm is not None:
            _alarm.end()
        # A store in Python may lack what it takes. Then NCCL's watchdog alone ends waits.
        with contextlib.suppress(RuntimeError):
            _alarm = Alarm(ring)


@atexit.register
def _join() -> None:
    if _alarm is not None:
        _alarm.join()

"""gloo's network threads must not push aside the rank that they wait for.

Each gloo communicator has a thread that waits for the network. A rank that sends holds a lock for
some microseconds; if data arrives just then, the thread wakes, and where every core computes the
system lets it run in the rank's place. It then asks for the lock, over and over, until its time
slice ends: 3 to 7 ms, several times in each step. As a batch thread it waits for its turn, as long
as the rank has one (docs/design/performance.md, 5).
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_NAME = "gloo_tcp_loop"
_THREADS = Path("/proc/self/task")


def let_ranks_go_first() -> None:
    """Schedule the network threads of gloo's communicators as batch threads (``SCHED_BATCH``).

    Call it when communicators have been made. Threads that have another policy than the usual one,
    and systems that have no such thing, stay as they are.
    """
    if not hasattr(os, "SCHED_BATCH") or not _THREADS.is_dir():
        return
    for thread in _THREADS.iterdir():
        with contextlib.suppress(OSError):  # it has ended, or the system refuses
            if (thread / "comm").read_text().strip() != _NAME:
                continue
            number = int(thread.name)
            if os.sched_getscheduler(number) == os.SCHED_OTHER:
                os.sched_setscheduler(number, os.SCHED_BATCH, os.sched_param(0))

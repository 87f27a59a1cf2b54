"""Tells whether this process has something to send, so that copies can wait until it has not.

The kernel knows it: each TCP connection has a queue of bytes that the other host has not received.
No communicator can tell. gloo's ``is_completed`` is false for all sends and receives (torch 2.13),
and an all-gather that was started early has often ended long before it is waited for.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import sys
import termios
import threading
import time
from pathlib import Path

_OPEN = Path("/proc/self/fd")
_POLL_S = 0.003
_SHARE = 0.05  # of a processor, for the looks


class Connections:
    """The TCP connections that this process has when this is made. Empty where /proc is not."""

    def __init__(self) -> None:
        self._numbers = _connected() if _OPEN.is_dir() else []

    def wait_idle(self, end: float, over: threading.Event) -> None:
        """Return when nothing waits to be sent, at the time ``end``, or when it is over."""
        while (began := time.monotonic()) < end and self._is_sending() and not over.is_set():
            now = time.monotonic()
            time.sleep(max(min(_POLL_S, end - now), (now - began) / _SHARE, 0.0))

    def _is_sending(self) -> bool:
        for place, number in enumerate(self._numbers):
            if _queued(number):
                self._numbers[0], self._numbers[place] = number, self._numbers[0]  # next time first
                return True
        return False


def _connected() -> list[int]:
    found = []
    for name in os.listdir(_OPEN):
        number = int(name)
        with contextlib.suppress(OSError):  # it was closed meanwhile, or is not connected
            if stat.S_ISSOCK(os.fstat(number).st_mode) and _is_connected(number):
                found.append(number)
    return found


def _is_connected(number: int) -> bool:
    borrowed = socket.socket(fileno=number)
    try:
        is_tcp = borrowed.type == socket.SOCK_STREAM and borrowed.family in (
            socket.AF_INET,
            socket.AF_INET6,
        )
        return is_tcp and bool(borrowed.getpeername())
    finally:
        borrowed.detach()


def _queued(number: int) -> int:
    """The bytes that the other host has not acknowledged; 0 for what is not a connection now."""
    try:
        answer = fcntl.ioctl(number, termios.TIOCOUTQ, bytes(4))
    except OSError:
        return 0
    return int.from_bytes(answer, sys.byteorder)

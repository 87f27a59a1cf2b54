"""Notices a host that is gone without a word: it has no power, or no network.

A process that dies closes its connections, and the others notice at once. A host that dies closes
none, and a rank that receives from it waits for the timeout of its group, which is 30 minutes. So
each rank is connected to the next one, in a ring, and the kernel asks whether the other host is
there. It answers also while the process computes, is slow or is stopped::

    rank 0 ---- rank 1 ---- rank 2 - X - rank 3 (no power)
      |                                    X
      +------------------------------------+

    rank 2  no answer for 7 s: tells rank 1 why, closes the connections of its communicators
    rank 1  is told: tells rank 0, closes those of its own
    rank 0  ...

All waits then raise an error that names the reason. A rank that stays much longer ends. A
process that is killed is noticed at once, also by ranks that wait for others. A rank that leaves
the training says so, and is not lost.
"""

from __future__ import annotations

import contextlib
import logging
import os
import selectors
import socket
import threading
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from vescale_fsdp.spi import Ranks, limit_s, threads, waits
from vescale_fsdp_elastic import sockets

_log = logging.getLogger(__name__)
_LEAVE_S = 10.0  # for a rank to leave the training after another one was lost
_GOODBYE, _LOSS = b".", b"!"
_MOST_BYTES = 1024  # of a reason
_WHAT = "the connection of the ring"


class Ring:
    """This rank's connections to the ranks before and after it. `watch` makes it.

    Args:
        neighbours: connections, by rank.
        groups: communicators that are closed when a rank is lost, beside those of this package.
    """

    def __init__(
        self, neighbours: dict[int, socket.socket], groups: Iterable[dist.ProcessGroup]
    ) -> None:
        self._neighbours, self._groups = dict(neighbours), list(groups)
        self._lock = threading.Lock()
        self._wake, self._woken = socket.socketpair()
        self._is_over = not neighbours
        self._has_left = threading.Event()
        if neighbours:
            threads.enable()
        self.reason = ""  # why it was closed; empty: all are there
        self._thread = threading.Thread(target=self._run, name="vescale-fsdp liveness", daemon=True)
        if neighbours:
            self._thread.start()

    def close(self) -> None:
        """Leave the ring as it should be left. May be called again."""
        with self._lock:
            is_first, self._is_over = not self._is_over, True
        if is_first:
            self._say(_GOODBYE)
            self._wake.send(b"x")
        self._has_left.set()
        threads.disable(RuntimeError("this rank has left the training"))
        if self._thread.ident is not None:
            self._thread.join()  # it closes communicators of this world, and must not of the next
        for each in (self._wake, self._woken):
            each.close()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._woken, selectors.EVENT_READ)
            for rank, connection in self._neighbours.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            while True:
                for key, _ in selector.select():
                    if key.fileobj is self._woken:
                        self._hang_up()
                        return
                    why = self._heard(key.data)
                    if why is not None:
                        self._lost(why)
                        return
                    selector.unregister(key.fileobj)

    def _heard(self, rank: int) -> str | None:
        """What a neighbour's connection says: why it is lost, or None if it left as it should."""
        try:
            data = self._neighbours[rank].recv(_MOST_BYTES)
        except OSError as error:
            return (
                f"the host of rank {rank} does not answer ({error.strerror or error}): it is down, "
                "or the network is cut"
            )
        if data.startswith(_LOSS):
            return data[len(_LOSS) :].decode(errors="replace")
        return None if data == _GOODBYE else f"rank {rank} has died"

    def _lost(self, why: str) -> None:
        """A rank is lost: tell the other neighbour, and close all."""
        with self._lock:
            is_first, self._is_over = not self._is_over, True
        if not is_first:  # this rank leaves at the same time
            self._hang_up()
            return
        self.reason = why
        self._say(_LOSS + why.encode()[: _MOST_BYTES - 1])
        self._hang_up()
        _log.info("%s", why)
        waits.abort(why, self._groups)
        # A test's receive of gloo (torch 2.13) did not end when it began while its connection was
        # being closed, and a kernel of NCCL waits for its watchdog.
        limit_s = _leave_s()
        if not self._has_left.wait(limit_s):
            _log.critical("%s, and this rank has not noticed in %g s: it ends here", why, limit_s)
            logging.shutdown()
            os._exit(1)

    def _say(self, data: bytes) -> None:
        for connection in self._neighbours.values():
            with contextlib.suppress(OSError):
                connection.send(data, socket.MSG_DONTWAIT)

    def _hang_up(self) -> None:
        for connection in self._neighbours.values():
            connection.close()


def _leave_s() -> float:
    """How long a rank has to leave the training after another one was lost: a step may be long."""
    return min(max(_LEAVE_S, limit_s()), threading.TIMEOUT_MAX)


def watch(ranks: Ranks, group: dist.ProcessGroup | None) -> Ring:
    """Connect the ranks to a ring. Collective, of all ranks.

    If they cannot be connected, the ring has no connections: then hosts that are gone are only
    noticed by timeouts, which the log says.

    Args:
        ranks, group: of all ranks; the group is closed when a rank is lost. None: a single rank.

    Cost: two connections and a thread a rank. While all are there, two packets a second, of 66
    bytes, on each connection.
    """
    if group is None:
        return Ring({}, [])
    servers: list[sockets.Server] = []

    def offer() -> list[Any]:
        """Listen. Returns [error, offer]."""
        try:
            servers.append(sockets.Server())
        except OSError as error:
            return [f"rank {ranks.rank}: {error}", None]
        return ["", servers[0].offer]

    def divide(offers: list[Any]) -> list[Any]:
        """To each rank the offer of the next one."""
        failed = next((each for each in offers if each[0]), None)
        return offers[1:] + offers[:1] if failed is None else [failed] * len(offers)

    neighbours: dict[int, socket.socket] = {}
    try:
        error, there = ranks.together(_WHAT, offer, divide)
        if not error:
            try:
                neighbours = _connect(ranks, servers[0], there)
            except OSError as caught:
                error = f"rank {ranks.rank}: {caught}"
        errors = ranks.together(_WHAT, lambda: error, lambda values: [values] * len(values))
    finally:
        for each in servers:
            each.close()
    errors = [each for each in errors if each]
    if not errors:
        world = dist.group.WORLD
        return Ring(neighbours, [group] if world is None else [group, world])
    for connection in neighbours.values():
        connection.close()
    if ranks.is_first:
        _log.warning(
            "hosts that are gone without a word are only noticed by timeouts, because the ring of "
            "ranks was not connected (%s)",
            errors[0],
        )
    return Ring({}, [])


def _connect(ranks: Ranks, server: sockets.Server, offer: list[Any]) -> dict[int, socket.socket]:
    """Return the connections to the ranks before and after this one."""
    before, after = (ranks.rank - 1) % ranks.size, (ranks.rank + 1) % ranks.size
    to_next = sockets.connect(offer, ranks.rank)
    try:
        _, from_last = server.accept()
    except OSError:
        to_next.close()
        raise
    # Of two ranks each is before and after the other; one connection is enough.
    if before == after:
        kept, other = (to_next, from_last) if ranks.is_first else (from_last, to_next)
        other.close()
        return {after: kept}
    return {before: from_last, after: to_next}

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
import secrets
import selectors
import socket
import threading
from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from vescale_fsdp import waiting
from vescale_fsdp.checkpoint.ranks import Ranks
from vescale_fsdp.elastic import addresses

_log = logging.getLogger(__name__)
# The kernel asks after a second without a packet, then each second, until it has asked six times.
# So a cut of 5 s is not noticed here, and one of 7 s is.
SILENCE_S = 7
_OPTIONS = (("TCP_KEEPIDLE", 1), ("TCP_KEEPINTVL", 1), ("TCP_KEEPCNT", SILENCE_S - 1))
_CONNECT_S = 10.0
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
        waiting.close(self._groups, why)
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
    return max(_LEAVE_S, waiting.limit_s())


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
    secret = secrets.token_bytes(16)  # what connects to this rank must know it
    with contextlib.ExitStack() as stack:
        servers: list[socket.socket] = []

        def offer() -> list[Any]:
            """Listen. Returns [error, address, port, secret]."""
            try:
                servers.append(stack.enter_context(socket.create_server((_address(), 0))))
            except OSError as error:
                return [f"rank {ranks.rank}: {error}", "", 0, ""]
            return ["", *servers[0].getsockname()[:2], secret.hex()]

        def divide(offers: list[Any]) -> list[Any]:
            """To each rank the offer of the next one."""
            failed = next((each for each in offers if each[0]), None)
            return offers[1:] + offers[:1] if failed is None else [failed] * len(offers)

        error, *there = ranks.exchange(_WHAT, offer, divide)
        neighbours: dict[int, socket.socket] = {}
        if not error:
            try:
                neighbours = _connect(ranks, servers[0], secret, *there)
            except OSError as caught:
                error = f"rank {ranks.rank}: {caught}"
        errors = ranks.exchange(_WHAT, lambda: error, lambda values: [values] * len(values))
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


def _connect(
    ranks: Ranks, server: socket.socket, own: bytes, address: str, port: int, secret: str
) -> dict[int, socket.socket]:
    """Return the connections to the ranks before and after this one."""
    before, after = (ranks.rank - 1) % ranks.size, (ranks.rank + 1) % ranks.size
    server.settimeout(_CONNECT_S)
    to_next = socket.create_connection((address, port), timeout=_CONNECT_S)
    to_next.sendall(bytes.fromhex(secret))
    while True:
        from_last, _ = server.accept()
        from_last.settimeout(_CONNECT_S)
        if from_last.recv(len(own), socket.MSG_WAITALL) == own:
            break
        from_last.close()
    for connection in (to_next, from_last):
        connection.settimeout(None)
        _ask_often(connection)
    # Of two ranks each is before and after the other; one connection is enough.
    if before == after:
        kept, other = (to_next, from_last) if ranks.is_first else (from_last, to_next)
        other.close()
        return {after: kept}
    return {before: from_last, after: to_next}


def _ask_often(connection: socket.socket) -> None:
    """Let the kernel ask whether the other host is there."""
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _OPTIONS:
        option = getattr(socket, name, None)  # macOS has other names
        if option is not None:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)


def _address() -> str:
    """This host's address on the network of the ranks.

    It is that of gloo's interface, if one is named, else that by which rank 0's host is reached.
    """
    named = addresses.of_interface()
    if named is not None:
        return named
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((os.environ.get("MASTER_ADDR", "127.0.0.1"), 9))  # sends nothing
        return str(probe.getsockname()[0])

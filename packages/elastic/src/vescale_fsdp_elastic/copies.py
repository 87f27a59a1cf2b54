"""Sends files from rank to rank, from memory to memory, while the network is idle.

A rank that sends has a TCP connection to each of its receivers, beside those of gloo. It waits
until the training has nothing to send, and sends a piece::

    training    | all-gather |              | reduce-scatter      |           |
    sender      | waits      | 0 | 1 | 2 | 3 | waits              | 4 | 5 | 6 |

Messages of gloo took four times the CPU time, which the training needs (docs/design/elastic.md).
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from vescale_fsdp.errors import CheckpointWriteError
from vescale_fsdp.spi import Ranks, limit_s
from vescale_fsdp_elastic import idle, memory, sockets
from vescale_fsdp_elastic.choice import Transfer

# A sender gives the kernel so many bytes at once, which queues up to _QUEUE of them. They delay a
# collective that begins: by 1 ms at 1 Gbit/s. Larger ones took more time of the steps.
_PIECE, _QUEUE = 1 << 17, 1 << 15
_READ = 1 << 19


class Copying:
    """This rank's part of some transfers.

    Args:
        ranks: all of them.
        folder: the generation's, on this host.
        transfers: the same list on every rank.
    """

    def __init__(self, ranks: Ranks, folder: Path, transfers: Iterable[Transfer]) -> None:
        self._ranks, self._folder, self._transfers = ranks, folder, list(transfers)
        self._outgoing: dict[int, list[Transfer]] = {}  # by receiver
        self._incoming: dict[int, list[Transfer]] = {}  # by sender
        for each in self._transfers:
            if each.sender == ranks.rank:
                self._outgoing.setdefault(each.receiver, []).append(each)
            if each.receiver == ranks.rank:
                self._incoming.setdefault(each.sender, []).append(each)
        self._server: sockets.Server | None = None
        self._streams: list[_Stream] = []
        self._is_over = threading.Event()

    @property
    def files(self) -> list[str]:
        """The files that this rank receives."""
        return [each.file for several in self._incoming.values() for each in several]

    @property
    def num_bytes(self) -> tuple[int, int]:
        """The bytes that this rank sends and receives."""
        sent, received = (
            sum(each.num_bytes for several in which.values() for each in several)
            for which in (self._outgoing, self._incoming)
        )
        return sent, received

    def carry_out(
        self, what: str, confirm: Callable[[list[str]], None], patience_s: float = 0.0
    ) -> None:
        """Send and receive. Collective: returns when all ranks have confirmed what has arrived.

        Cost: two messages a rank, beside the files; a connection for each pair of ranks, with a
        thread at either end.

        Args:
            what: names the work in messages.
            confirm: called with the files that this rank has received; raises if one is damaged.
            patience_s: for so long, send only while this process has nothing else to send. After
                that, send at once.

        Raises:
            CheckpointWriteError: a rank has no memory for its files, or a connection was cut.
            Exception: what ``confirm`` raised.
        """

        def copy() -> None:
            self._copy(offers, patience_s)
            confirm(self.files)

        try:
            offers = self._ranks.together(what, self._listen, self._to_senders)
            self._ranks.together(what, copy)
        finally:
            self.close()
            for each in self._streams:
                each.join()
            if self._server is not None:
                self._server.close()

    def close(self) -> None:
        """End what is under way. May be called by another thread."""
        self._is_over.set()
        for each in self._streams:
            each.end()

    def _listen(self) -> Any:
        """Allocate the memory for the files of this rank. Returns where it can be reached."""
        for several in self._incoming.values():
            for each in several:
                memory.reserve(self._folder / each.file, each.num_bytes)
        if not self._incoming:
            return None
        with _cut("no rank can connect to this one for copies"):
            self._server = sockets.Server(len(self._incoming))
            return self._server.offer

    def _to_senders(self, offers: list[Any]) -> list[Any]:
        """To each rank the offers of its receivers."""
        answers: list[dict[str, Any]] = [{} for _ in offers]
        for each in self._transfers:
            answers[each.sender][str(each.receiver)] = offers[each.receiver]
        return answers

    def _copy(self, offers: dict[str, Any], patience_s: float) -> None:
        rank, end = self._ranks.rank, time.monotonic() + patience_s
        others = idle.Connections()
        for receiver, several in self._outgoing.items():
            with _cut(f"rank {rank} cannot connect to rank {receiver} for copies"):
                connection = sockets.connect(offers[str(receiver)], rank)
            if patience_s:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _QUEUE)
            self._start(connection, _send, self._paths(several), others, end, self._is_over)
        for _ in self._incoming:
            assert self._server is not None, "it listens"
            with _cut(f"rank {rank} waits for ranks {sorted(self._incoming)} to connect"):
                sender, connection = self._server.accept()
            _limit(connection, patience_s + limit_s())
            self._start(connection, _receive, self._paths(self._incoming[sender]))
        for each in self._streams:
            with _cut(f"a copy from or to rank {rank} was cut"):
                each.finish()

    def _start(self, connection: socket.socket, call: Callable[..., None], *args: Any) -> None:
        self._streams.append(_Stream(connection, call, *args))
        if self._is_over.is_set():
            self._streams[-1].end()

    def _paths(self, several: Iterable[Transfer]) -> list[tuple[Path, int]]:
        return [(self._folder / each.file, each.num_bytes) for each in several]


def _send(
    connection: socket.socket,
    files: Iterable[tuple[Path, int]],
    others: idle.Connections,
    end: float,
    is_over: threading.Event,
) -> None:
    for path, num_bytes in files:
        with path.open("rb") as file:
            start = 0
            while start < num_bytes:
                others.wait_idle(end, is_over)
                count = min(_PIECE, num_bytes - start)
                sent = os.sendfile(connection.fileno(), file.fileno(), start, count)
                if not sent:
                    raise OSError(f"{path} has become shorter: {start} of {num_bytes} bytes")
                start += sent


def _receive(connection: socket.socket, files: Iterable[tuple[Path, int]]) -> None:
    # A buffer that stays in the cache. To receive into the mapped file took twice the time.
    with memoryview(bytearray(_READ)) as buffer:
        for path, num_bytes in files:
            with path.open("r+b") as file:
                start = 0
                while start < num_bytes:
                    count = min(_READ, num_bytes - start)
                    received = connection.recv_into(buffer, count, socket.MSG_WAITALL)
                    if not received:
                        raise ConnectionResetError("the sender has closed the connection")
                    os.pwrite(file.fileno(), buffer[:received], start)
                    start += received


def _limit(connection: socket.socket, seconds: float) -> None:
    """Let reads end after so long without a byte: the sender may hang."""
    # Not `settimeout`: a read would then return whatever is there, in many small parts.
    whole = 0 if math.isinf(seconds) else math.ceil(seconds)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", whole, 0))


@contextlib.contextmanager
def _cut(what: str) -> Iterator[None]:
    """Errors of the network are errors of the checkpoint."""
    try:
        yield
    except OSError as error:
        raise CheckpointWriteError(
            f"{what}: {error.strerror or error}. Copies need connections between all hosts, as "
            "gloo does"
        ) from error


class _Stream:
    """Files that go through a connection, in a thread. A daemon: the other rank may hang.

    Args:
        call: is given the connection and ``args``.
    """

    def __init__(self, connection: socket.socket, call: Callable[..., None], *args: Any) -> None:
        self._connection, self._call, self._args = connection, call, args
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="vescale-fsdp copies", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call(self._connection, *self._args)
        except Exception as error:  # noqa: BLE001  `finish` raises it
            self._error = error
        finally:
            self.end()  # else the other rank would wait for what does not come

    def finish(self) -> None:
        """Wait for the call, and raise what it has raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error

    def end(self) -> None:
        """End the call under way. What was sent still arrives."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def join(self) -> None:
        """Wait for the call, and close the connection."""
        self._thread.join()
        self._connection.close()

"""Sends files from rank to rank, from mapped memory into mapped memory, while the network is idle.

The sender waits until no collective of the training is under way, and sends a piece. The receiver
acknowledges it, and the next one may be sent::

    training    | all-gather |              | reduce-scatter      |           |
    sender      | waits      | 0 | 1 | 2 | 3 | waits              | 4 | 5 | 6 |
    receiver                   |ack|ack|ack|ack                   |ack|ack|ack

An acknowledgement is needed because gloo does not say when a message has left, or that a receiver
has died (see `checkpoint.ranks`). A wait for a receive ends in both cases. Only one message is
under way: with two, torch 2.13's gloo sometimes writes one for which no receive is posted, and the
thread of the receiver polls for ever.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vescale_fsdp import waiting
from vescale_fsdp.elastic import memory
from vescale_fsdp.elastic.choice import Transfer

_TAG, _ACKNOWLEDGED = 7_653, 7_654  # not those of `checkpoint.ranks`
# Bytes of a message. Those that are under way delay a collective that begins: by 2 ms at 1 Gbit/s.
SMALL_PIECE, LARGE_PIECE = 1 << 18, 8 << 20
_POLL_S = 0.002


class Copying:
    """This rank's part of some transfers. Call `reserve`, then `carry_out`, on every rank.

    Args:
        rank: this one.
        folder: the generation's, on this host.
        transfers: the same list on every rank.
        piece_bytes: of a message; the same on every rank.
    """

    def __init__(
        self,
        rank: int,
        folder: Path,
        transfers: Iterable[Transfer],
        piece_bytes: int = SMALL_PIECE,
    ) -> None:
        self._folder, self._piece_bytes = folder, piece_bytes
        each = list(transfers)
        self._sent = [transfer for transfer in each if transfer.sender == rank]
        self._received = [transfer for transfer in each if transfer.receiver == rank]
        self._held: list[Any] = []

    @property
    def files(self) -> list[str]:
        """The files that this rank receives."""
        return [transfer.file for transfer in self._received]

    @property
    def num_bytes(self) -> tuple[int, int]:
        """The bytes that this rank sends and receives."""
        sent = sum(transfer.num_bytes for transfer in self._sent)
        return sent, sum(transfer.num_bytes for transfer in self._received)

    def reserve(self) -> None:
        """Allocate the memory for the files that this rank receives.

        Raises:
            CheckpointWriteError: there is not so much memory.
        """
        for transfer in self._received:
            memory.reserve(self._folder / transfer.file, transfer.num_bytes)

    def carry_out(self, group: dist.ProcessGroup, patience_s: float = 0.0) -> None:
        """Send and receive. Returns when this rank has received its files and its sends arrived.

        Cost: an acknowledgement of one byte for each message, and a thread for each sender.

        Args:
            patience_s: for so long, send only while no collective of the training is under way, so
                that copies use the time in which the network is idle. After that, send at once.

        Raises:
            RuntimeError: another rank has died.
        """
        senders = sorted({transfer.sender for transfer in self._received})
        receiving = [_Background(lambda s=each: self._receive(group, s)) for each in senders]  # type: ignore[misc]
        self._send(group, time.monotonic() + patience_s)
        for each in receiving:
            each.finish()

    def _send(self, group: dist.ProcessGroup, end: float) -> None:
        answer = torch.empty(1, dtype=torch.uint8)
        for transfer in self._sent:
            to = transfer.receiver
            for piece in self._pieces(transfer, shared=False):
                _wait_while(waiting.is_network_busy, end)
                sent = dist.isend(piece, group=group, group_dst=to, tag=_TAG)
                dist.recv(answer, group=group, group_src=to, tag=_ACKNOWLEDGED)
                del sent  # the acknowledgement shows that it has arrived

    def _receive(self, group: dist.ProcessGroup, sender: int) -> None:
        answer, sent = torch.zeros(1, dtype=torch.uint8), None
        for transfer in self._received:
            if transfer.sender != sender:
                continue
            for piece in self._pieces(transfer, shared=True):
                dist.recv(piece, group=group, group_src=sender, tag=_TAG)
                # The piece shows that the acknowledgement before it has arrived.
                sent = dist.isend(answer, group=group, group_dst=sender, tag=_ACKNOWLEDGED)
        self._held.append((sent, answer))

    def _pieces(self, transfer: Transfer, *, shared: bool) -> Iterable[torch.Tensor]:
        path = str(self._folder / transfer.file)
        mapped: torch.Tensor = torch.from_file(
            path, shared=shared, size=transfer.num_bytes, dtype=torch.uint8
        )
        pieces: tuple[torch.Tensor, ...] = mapped.split(self._piece_bytes)
        return pieces


class _Background:
    """A call in a thread of its own. A daemon: it may wait for a rank that hangs."""

    def __init__(self, call: Callable[[], None]) -> None:
        self._call = call
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="vescale-fsdp copies", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._call()
        except Exception as error:  # noqa: BLE001  `finish` raises it
            self._error = error

    def finish(self) -> None:
        """Wait for the call, and raise what it has raised."""
        self._thread.join()
        if self._error is not None:
            raise self._error


def _wait_while(condition: Callable[[], bool], end: float) -> None:
    """Return when the condition is false, or at the time ``end``."""
    while time.monotonic() < end and condition():
        time.sleep(_POLL_S)

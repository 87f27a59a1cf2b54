"""Sends files from rank to rank, from mapped memory into mapped memory."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vescale_fsdp import waiting
from vescale_fsdp.elastic import memory
from vescale_fsdp.elastic.choice import Transfer

_TAG = 7_653  # not those of `checkpoint.ranks`
# Bytes of a message: those under way delay a collective. At 1 Gbit/s 1 MiB takes 9 ms.
_PIECE, _MOST_PIECES = 1 << 20, 1024
_POLL_S = 0.002


class Copying:
    """This rank's part of some transfers. Call `reserve`, then `carry_out`, on every rank.

    Args:
        rank: this one.
        folder: the generation's, on this host.
        transfers: the same list on every rank.
    """

    def __init__(self, rank: int, folder: Path, transfers: Iterable[Transfer]) -> None:
        self._folder = folder
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
        """Send and receive. Returns when this rank has received its files.

        The sends may not have ended: a wait for one whose receiver has died would not end (see
        `checkpoint.ranks`). Keep this object until all ranks have said that they have their files.

        Args:
            patience_s: for so long, send only while no collective of the training is under way, so
                that copies use the time in which the network is idle. After that, send at once.

        Raises:
            RuntimeError: another rank has died.
        """
        waits = []
        for transfer in self._received:
            for piece in self._pieces(transfer, shared=True):
                waits.append(dist.irecv(piece, group=group, tag=_TAG, group_src=transfer.sender))
        end = time.monotonic() + patience_s
        for transfer in self._sent:
            for piece in self._pieces(transfer, shared=False):
                _wait_while(waiting.is_network_busy, end)
                work = dist.isend(piece, group=group, tag=_TAG, group_dst=transfer.receiver)
                assert work is not None, "this rank is in the group"
                self._held.append((work, piece))
                _wait_while(lambda sent=work: not sent.is_completed(), end)  # type: ignore[misc]
        for wait in waits:
            assert wait is not None, "this rank is in the group"
            wait.wait()

    def _pieces(self, transfer: Transfer, *, shared: bool) -> Iterable[torch.Tensor]:
        path = str(self._folder / transfer.file)
        mapped: torch.Tensor = torch.from_file(
            path, shared=shared, size=transfer.num_bytes, dtype=torch.uint8
        )
        return list(mapped.split(max(_PIECE, transfer.num_bytes // _MOST_PIECES)))


def _wait_while(condition: Callable[[], bool], end: float) -> None:
    """Return when the condition is false, or at the time ``end``."""
    while condition() and time.monotonic() < end:
        time.sleep(_POLL_S)

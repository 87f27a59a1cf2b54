"""A replica that joins gets its state from the memory of another one, rank by rank.

The donor's ranks write what `elastic` keeps in a memory checkpoint, each its own file. Rank i sends
its file to rank i of those that join. There the files are a memory checkpoint that was found after
a restart: each host gets what its ranks need, and the loader of checkpoints reads it. So it works
with any optimizer, and with all that is saved.

Random numbers are not sent: two replicas with the same dropout masks would be of less use.
"""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vescale_fsdp.spi import (
    LocalPlan,
    Optimizers,
    Seal,
    Stateful,
    bytes_of,
    collect,
    data_name,
    divide,
    parts,
)
from vescale_fsdp_elastic import memory
from vescale_fsdp_elastic.choice import Age
from vescale_fsdp_elastic.hsdp.inside import Inside
from vescale_fsdp_elastic.hsdp.lanes import Lane
from vescale_fsdp_elastic.keeping import SMALL
from vescale_fsdp_elastic.restoring import Restoring, meet

_WHAT = "the transfer of the state to another replica"
_PIECE = 16 << 20  # bytes of a message
GivesUp = Callable[[], bool]


@dataclass(frozen=True)
class State:
    """What is sent, and where its files are meanwhile.

    Attributes:
        folder: in the memory of this host, for what is sent.
        directory: on a file system that all ranks of this replica share, for what is received.
        root: the memory folder of this host, for what is received.
    """

    model: nn.Module
    optimizer: Optimizers
    stateful: Mapping[str, Stateful]
    folder: Path
    directory: Path
    root: Path

    def write(self, inside: Inside, extra: Mapping[str, Any]) -> bytes:
        """Write this rank's file, and return the manifest of all. Collective in the replica.

        Cost: host memory for the shards of this rank, until `clear`.
        """
        contents = collect(self.model, self.optimizer, extra, self.stateful, with_rng=False)
        local = LocalPlan(contents, inside.ranks.is_first)
        task = inside.ranks.together(_WHAT, local.offer, lambda offers: divide(offers, SMALL))

        def write() -> Any:
            self.folder.mkdir(parents=True, exist_ok=True)
            self.clear(inside)  # what an earlier start has left that was killed here
            items = parts.items_of(contents, local, task)
            return parts.write_items(self.folder, inside.rank, items)

        def combine(written: list[Any]) -> list[Any]:
            now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
            seal = Seal(secrets.token_hex(16), 1, int(extra["step"]), now)
            return [parts.manifest_of(seal, written).render().decode()] * len(written)

        text: str = inside.ranks.together(_WHAT, write, combine)
        return text.encode()

    def file(self, inside: Inside) -> Path:
        """The file of this rank."""
        return self.folder / data_name(inside.rank)

    def clear(self, inside: Inside) -> None:
        """Delete the file of this rank."""
        self.file(inside).unlink(missing_ok=True)

    def load(
        self, inside: Inside, step: int, arrive: Callable[[Path, str], bytes | None]
    ) -> dict[str, Any] | None:
        """Receive the files of all ranks and load them. Collective in the replica.

        Args:
            step: that of the state.
            arrive: writes a file of this name in this folder, and returns the manifest; None if the
                donor was lost.

        Returns the extra values; None if the donor was lost for one of the ranks. Then nothing is
        changed.
        """
        hosts, place = meet(inside.ranks, self.directory, self.root)
        folder = place.path(Age(1, step))
        # What an interrupted transfer has left may be of a later step.
        inside.ranks.together(
            _WHAT, lambda: place.keep([]) if hosts.is_leader(inside.rank) else None
        )
        inside.ranks.together(_WHAT, lambda: folder.mkdir(exist_ok=True))
        text = arrive(folder, data_name(inside.rank))
        extra = None
        if inside.all(text is not None):
            assert text is not None, "it has arrived on all ranks"
            if hosts.is_leader(inside.rank):
                memory.write_manifest(folder, text)
            restoring = Restoring(inside.ranks, hosts, place, self.directory, 0)
            extra = restoring.load_received(self.model, self.optimizer, self.stateful)
        if inside.all(True) and hosts.is_leader(inside.rank):  # no rank reads any more
            place.delete()
        return extra


def send(lane: Lane, text: bytes, file: Path, gives_up: GivesUp) -> None:
    """Send a manifest and a file to the others of the lane. Returns when they have both.

    Raises:
        LaneError: one of them has died or given up.
    """
    num_bytes = file.stat().st_size if file.exists() else 0
    lane.broadcast(torch.tensor([len(text), num_bytes]), 0, gives_up)
    lane.broadcast(torch.frombuffer(bytearray(text), dtype=torch.uint8), 0, gives_up)
    if num_bytes:
        mapped = torch.from_file(str(file), shared=False, size=num_bytes, dtype=torch.uint8)
        for piece in mapped.split(_PIECE):
            lane.broadcast(piece, 0, gives_up)
    # Only when they have answered may the connections be closed.
    lane.sum(torch.zeros(1), gives_up)


def receive(lane: Lane, folder: Path, name: str, gives_up: GivesUp) -> bytes:
    """Receive what `send` sends. Writes the file, and returns the manifest."""
    sizes = torch.zeros(2, dtype=torch.int64)
    lane.broadcast(sizes, 0, gives_up)
    text = torch.empty(int(sizes[0]), dtype=torch.uint8)
    lane.broadcast(text, 0, gives_up)
    num_bytes = int(sizes[1])
    if num_bytes:
        memory.reserve(folder / name, num_bytes)
        path = str(folder / name)
        mapped = torch.from_file(path, shared=True, size=num_bytes, dtype=torch.uint8)
        for piece in mapped.split(_PIECE):
            lane.broadcast(piece, 0, gives_up)
    lane.sum(torch.zeros(1), gives_up)
    return bytes(bytes_of(text))

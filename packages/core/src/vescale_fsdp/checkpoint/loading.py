"""Reads a sealed checkpoint on all ranks, checks all of it, and applies all of it or nothing.

Each rank checks a share of the bytes, so that all bytes are checked. If as many ranks load as have
saved, the share of a rank is the file that it would write itself; else an even part of all bytes. A
rank also checks every chunk that it reads whole. Of the other chunks it reads only the bytes that
it needs; another rank checks these.

Data are read into separate memory. When all ranks have reported that their data are intact, each
rank exchanges the data with the elements of its tensors, so that it keeps the old elements. If a
rank fails, all ranks restore them: model, optimizers and counters are bitwise unchanged.
"""

from __future__ import annotations

import logging
import math
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)

from vescale_fsdp.checkpoint import encoding
from vescale_fsdp.checkpoint.contents import PER_RANK, Optimizers, Stateful, Weights, named
from vescale_fsdp.checkpoint.files import DataReader
from vescale_fsdp.checkpoint.manifest import DTYPES, Chunk, Manifest, Span
from vescale_fsdp.checkpoint.saving import begin_load
from vescale_fsdp.checkpoint.seal import data_name, read_manifest, read_text
from vescale_fsdp.checkpoint.targets import (
    FeedbackTarget,
    ModelTarget,
    OptimizerTarget,
    RngTarget,
    Saved,
    StatefulTarget,
    Target,
    ValueTarget,
    optimizer_targets,
)
from vescale_fsdp.checkpoint.unread import check_same
from vescale_fsdp.engine import mark_blank
from vescale_fsdp.errors import CheckpointCorruptError, RankMismatchError
from vescale_fsdp.ranks import Ranks, everyone


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    strict: bool = True,
    stateful: Mapping[str, Stateful] | None = None,
    rng: bool | None = None,
    weights: Weights = "all",
) -> dict[str, Any]:
    """Load a checkpoint into model and optimizers, in place. Collective.

    The number of ranks, the units, the granularity and the mesh may differ from those at the save.

    Args:
        path: of a directory that `save` has written.
        model: of the same architecture. Elements are cast to the model's dtypes.
        optimizer: one, or a mapping with the same names as in the save.
        strict: refuse a checkpoint that lacks entries for the arguments. Other entries of the
            checkpoint are ignored.
        stateful: as in the save. States that differed between ranks load only on as many ranks.
        rng: restore the random number generators of each rank; by default if an
            optimizer is loaded. On more ranks than have saved, those without a state get seeds.
        weights: of the model, as in the save. "trained" and "none" do not change the other
            parameters, even if all were saved. Or the state dict to load: `unread_state` of this
            checkpoint with changes, the same on all ranks. Of a whole tensor in it each rank takes
            its part; ``strict`` also refuses entries that were added and that the model lacks.

    Returns:
        The ``extra`` of the save, the same on every rank.

    Cost: all bytes are read once, those that several ranks need by each of them; host memory
    for this rank's part, or for one tensor if the model has no values yet (after
    ``to_empty``); two small messages per rank.

    Raises:
        CheckpointIncompleteError: there is no whole checkpoint at ``path``, or it lacks entries.
        CheckpointCorruptError: bytes differ from those that were saved; names the file and tensor.
        CheckpointMismatchError: an entry has another shape.
        RankMismatchError: ranks have another checkpoint, or other changes in ``weights``; or one
            has died, hangs, or does not load.

    After an error nothing has changed on any rank.
    """
    return load_from(Path(path), model, optimizer, strict, stateful, rng, weights)


def load_from(
    folder: Path,
    model: nn.Module,
    optimizer: Optimizers = None,
    strict: bool = True,
    stateful: Mapping[str, Stateful] | None = None,
    rng: bool | None = None,
    weights: Weights = "all",
    *,
    is_checked: bool = False,
) -> dict[str, Any]:
    """Load as `load` does.

    Args:
        is_checked: all bytes have been checked. A rank reads only what it needs, and files that no
            part of this rank is in need not be there.
    """
    begin_load()
    ranks = everyone()
    change = Change(ranks, f"the load of {folder}")
    with_rng = optimizer is not None if rng is None else rng
    returned: dict[str, Any] = {}

    def prepare() -> Any:
        manifest = read_manifest(folder)
        with DataReader(folder, manifest.files) as reader:
            texts = _read_texts(reader, manifest, ranks.rank)
            saved = Saved(str(folder), manifest, texts, ranks.rank, strict)
            change.targets.append(ModelTarget(model, saved, weights=weights))
            change.targets += optimizer_targets(named(optimizer), model, saved)
            for name, other in (stateful or {}).items():
                change.targets.append(StatefulTarget(name, other, saved))
            if optimizer is not None:
                change.targets.append(FeedbackTarget(model, saved, ranks.size))
            extra = ValueTarget("extra", saved)
            change.targets.append(extra)
            if with_rng:
                change.targets.append(RngTarget(saved))
            change.take(read(reader, manifest, change.wanted, ranks, is_checked=is_checked))
            change.take(change.changed)
        if not isinstance(extra.value, dict):
            raise CheckpointCorruptError(f"the extra of {folder} is not a mapping")
        returned.update(extra.value)
        return [manifest.seal.id, manifest.seal.body_crc32]

    change.carry_out(prepare)
    return returned


def _read_texts(
    reader: DataReader, manifest: Manifest, rank: int
) -> dict[str, list[tuple[tuple[int, ...], Any]]]:
    """Read the values as JSON. Of values that differ between ranks, only this rank's."""
    texts: dict[str, list[tuple[tuple[int, ...], Any]]] = {}
    for name, variants in manifest.values.items():
        texts[name] = []
        is_own = name.partition(".")[0] in PER_RANK
        for variant in variants:
            if is_own and len(variants) > 1 and rank not in variant.ranks:
                texts[name].append((variant.ranks, None))
                continue
            text = read_text(reader, name, variant.span)
            texts[name].append((variant.ranks, text))
    return texts


Boxes = Callable[[torch.Size, torch.Size], torch.Tensor]  # gets offsets and sizes in a chunk


@dataclass
class Arrival:
    """Elements that were read, and the tensor that they belong to."""

    name: str
    place: torch.Tensor
    value: torch.Tensor  # after `put` with ``keep``: the old elements
    is_kept: bool = False

    def put(self, *, keep: bool) -> None:
        """Write the elements to the tensor. With ``keep``, keep the old ones for `put_back`."""
        with torch.no_grad():
            if keep and encoding.exchange(self.place.detach(), self.value):
                self.is_kept = True
                return
            value = self.value
            if keep:
                self.value, self.is_kept = encoding.on_host(self.place, copy=True), True
            self.place.copy_(value)

    def put_back(self) -> None:
        """Undo `put`, even if it failed halfway. Does nothing if the old elements were not kept."""
        if self.is_kept:
            with torch.no_grad():
                self.place.copy_(self.value)


def shares(manifest: Manifest, rank: int, num_ranks: int) -> list[tuple[Span, str]]:
    """Return the spans that a rank checks, each with a label. Together the ranks check all."""
    if num_ranks == manifest.world_size:
        own = {data_name(rank)}
        if rank == 0:
            own |= manifest.files.keys() - set(map(data_name, range(num_ranks)))
        return [(span, label) for span, label in manifest.spans() if span.file in own]
    mine, done = [], 0
    total = max(1, manifest.num_bytes)
    for span, label in sorted(manifest.spans(), key=lambda entry: (entry[0].file, entry[0].offset)):
        middle = done + span.length // 2
        if min(num_ranks - 1, middle * num_ranks // total) == rank:
            mine.append((span, label))
        done += span.length
    return mine


def read(
    reader: DataReader,
    manifest: Manifest,
    wanted: Mapping[str, torch.Tensor],
    ranks: Ranks,
    *,
    is_checked: bool,
) -> Iterator[Arrival]:
    """Read this rank's part of the wanted tensors, and check its share of the bytes.

    Args:
        ranks: among which the check is divided. They hear that this one goes on with it.
        is_checked: all bytes have been checked.
    """
    own = [] if is_checked else shares(manifest, ranks.rank, ranks.size)
    mine = {span: label for span, label in own if span.length}

    def boxes(name: str, chunk: Chunk) -> Boxes:
        is_mine = mine.pop(chunk.span, None) is not None
        dtype = DTYPES[manifest.tensors[name].dtype]
        return _Source(reader, name, dtype, chunk, is_mine=is_mine).box

    yield from arrivals(manifest, wanted, boxes)
    for span in ranks.going_on(sorted(mine, key=lambda span: (span.file, span.offset))):
        reader.check(span, mine[span])


def arrivals(
    manifest: Manifest,
    wanted: Mapping[str, torch.Tensor],
    boxes: Callable[[str, Chunk], Boxes],
) -> Iterator[Arrival]:
    """Read this rank's part of the wanted tensors, chunk by chunk.

    Args:
        wanted: tensors by their names in the manifest, of the same shapes. They are not changed.
        boxes: opens a chunk. Returns a function that reads boxes of it into new memory.
    """
    parts = parts_of(manifest, wanted)
    for span in sorted(parts, key=lambda span: (span.file, span.offset)):
        box_of = boxes(parts[span][0].name, parts[span][0].chunk)
        for part in parts[span]:
            yield Arrival(part.name, part.place, box_of(part.offsets, part.lengths))
        del box_of  # free the chunk before the next one is read


@dataclass
class _Part:
    """A box of a chunk, and the part of a tensor that it fills."""

    name: str
    chunk: Chunk
    offsets: torch.Size
    lengths: torch.Size
    place: torch.Tensor


def parts_of(manifest: Manifest, wanted: Mapping[str, torch.Tensor]) -> dict[Span, list[_Part]]:
    """Return the boxes of each chunk that this rank needs for its part of the wanted tensors."""
    planner = DefaultLoadPlanner(flatten_state_dict=False)
    planner.set_up_planner(dict(wanted), _metadata(manifest, wanted))
    parts: dict[Span, list[_Part]] = defaultdict(list)
    for item in planner.create_local_plan().items:
        name, number = item.storage_index.fqn, item.storage_index.index
        assert number is not None, "the planner numbers chunks"
        if math.prod(item.lengths):
            chunk = manifest.tensors[name].chunks[number]
            place = planner.resolve_tensor(item)
            part = _Part(name, chunk, item.storage_offsets, item.lengths, place)
            parts[chunk.span].append(part)
    return parts


class _Source:
    """Reads boxes of one chunk."""

    def __init__(
        self, reader: DataReader, name: str, dtype: torch.dtype, chunk: Chunk, *, is_mine: bool
    ) -> None:
        self._reader, self._dtype, self._chunk = reader, dtype, chunk
        where = f" at {list(chunk.offsets)}" if any(chunk.offsets) else ""
        self._label = f"tensor {name!r}{where}"
        self._whole = self._read_whole() if is_mine else None

    def _read_whole(self) -> torch.Tensor:
        data = self._reader.read(self._chunk.span, self._label)
        return data.view(self._dtype).view(self._chunk.sizes)

    def box(self, offsets: torch.Size, lengths: torch.Size) -> torch.Tensor:
        """Read a box. Offsets are those in the chunk."""
        if tuple(lengths) == self._chunk.sizes and self._whole is None:
            self._whole = self._read_whole()
        if self._whole is not None:
            if tuple(lengths) == self._chunk.sizes:
                return self._whole
            return encoding.box_of(self._whole, offsets, lengths)
        strides = torch.empty(self._chunk.sizes, device="meta").stride()
        first = sum(o * stride for o, stride in zip(offsets, strides, strict=True))
        count = 1 + sum((n - 1) * stride for n, stride in zip(lengths, strides, strict=True))
        size = self._dtype.itemsize
        data = self._reader.read_part(self._chunk.span, first * size, count * size, self._label)
        # One read from the first to the last byte of the box; other bytes between are dropped here.
        return data.view(self._dtype).as_strided(lengths, strides).contiguous()


def _metadata(manifest: Manifest, wanted: Mapping[str, torch.Tensor]) -> Metadata:
    entries = {name: manifest.tensors[name] for name in wanted}
    return Metadata(
        {
            name: TensorStorageMetadata(
                properties=TensorProperties(dtype=DTYPES[entry.dtype]),
                size=torch.Size(entry.shape),
                chunks=[
                    ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.sizes))
                    for chunk in entry.chunks
                ],
            )
            for name, entry in entries.items()
        }
    )


_log = logging.getLogger(__name__)


class Change:
    """One load on one rank: all of it is applied, or nothing.

    Args:
        title: names the load in messages.

    Attributes:
        targets: the objects to load. ``prepare`` of `carry_out` sets them.
        arrived: the data that `take` has read for them.
    """

    def __init__(self, ranks: Ranks, title: str) -> None:
        self.ranks, self._title = ranks, title
        self.targets: list[Target] = []
        self.arrived: list[Arrival] = []
        self._num_applied = 0

    @property
    def wanted(self) -> dict[str, torch.Tensor]:
        """The tensors to fill, by name."""
        return {n: t for each in self.targets for n, t in {**each.live, **each.fresh}.items()}

    @property
    def changed(self) -> list[Arrival]:
        """The elements that do not come from the checkpoint."""
        pairs = [pair for each in self.targets for pair in each.changed.items()]
        return [Arrival(name, place, value) for name, (place, value) in pairs]

    def take(self, arrivals: Iterable[Arrival]) -> None:
        """Keep the data until `_apply`. Data for tensors without values are written at once.

        Such tensors have no old elements to restore. So a model that was on the meta device needs
        memory for its shards and for one more tensor.
        """
        blank = self._blank()
        for arrival in self.ranks.going_on(arrivals):
            if arrival.name in blank:
                arrival.put(keep=False)
            else:
                self.arrived.append(arrival)

    def _blank(self) -> dict[str, torch.Tensor]:
        targets = (each for each in self.targets if isinstance(each, ModelTarget))
        return {name: tensor for each in targets for name, tensor in each.blank.items()}

    def carry_out(self, prepare: Callable[[], Any]) -> None:
        """Call ``prepare`` on every rank, then apply. If a rank fails, all undo. Collective.

        Args:
            prepare: sets `targets` and reads their data. Returns JSON that identifies the
                checkpoint; it must be the same on every rank. So must be what was changed in a
                state dict to load.
        """
        try:
            self.ranks.together(self._title, lambda: [prepare(), self._changes()], self._same)
            self.ranks.together(self._title, self._apply)
        except BaseException:
            self._undo()
            raise

    def _changes(self) -> dict[str, str | None]:
        models = (each for each in self.targets if isinstance(each, ModelTarget))
        return {name: said for each in models for name, said in each.changes.items()}

    def _same(self, found: list[Any]) -> list[Any]:
        for rank, (identity, _) in enumerate(found):
            if identity != found[0][0]:
                raise RankMismatchError(
                    f"rank {rank} reads another checkpoint than rank 0 in {self._title}: the path "
                    "must be on a file system that all ranks share, and the same on every rank"
                )
        check_same([changes for _, changes in found])
        return [None] * len(found)

    def _apply(self) -> None:
        """Write the data to their tensors, then set the other values of each target."""
        live = {name for each in self.targets for name in (*each.live, *each.changed)}
        for arrival in self.arrived:
            arrival.put(keep=arrival.name in live)
        for target in self.targets:
            self._num_applied += 1
            target.apply()

    def _undo(self) -> None:
        """Restore everything that was changed."""
        mark_blank(self._blank().values())
        for arrival in reversed(self.arrived):
            arrival.put_back()
        applied = self.targets[: self._num_applied]
        made = [each for each in self.targets if isinstance(each, OptimizerTarget)]
        for target in reversed([*(each for each in made if each not in applied), *applied]):
            try:
                target.undo()
            except Exception:  # noqa: BLE001  the first error is the one to raise
                _log.exception("%s failed, and could not be undone", self._title)

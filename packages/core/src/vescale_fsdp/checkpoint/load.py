"""load: verify, agree, apply.

Every rank reads what it needs and checks its share of the bytes, into memory of its own. When all
ranks say that theirs is sound, all write it to their places. When one fails there, all put back
what was there. So after any failure model, optimizers and counters are bitwise what they were.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import nn

from vescale_fsdp.checkpoint import jsons
from vescale_fsdp.checkpoint.contents import Optimizers, Stateful, named
from vescale_fsdp.checkpoint.files import DataReader, bytes_of
from vescale_fsdp.checkpoint.latest import read_manifest
from vescale_fsdp.checkpoint.manifest import Manifest
from vescale_fsdp.checkpoint.ranks import Ranks, all_ranks
from vescale_fsdp.checkpoint.reading import Arrival, read
from vescale_fsdp.checkpoint.save import finish_saves
from vescale_fsdp.checkpoint.targets import (
    ModelTarget,
    OptimizerTarget,
    RngTarget,
    Saved,
    StatefulTarget,
    Target,
    ValueTarget,
)
from vescale_fsdp.errors import CheckpointCorruptError, RankMismatchError

__all__ = ["load"]

_log = logging.getLogger(__name__)


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    strict: bool = True,
    stateful: Mapping[str, Stateful] | None = None,
    rng: bool | None = None,
) -> dict[str, Any]:
    """Load a checkpoint into model and optimizers, in place. Collective.

    The number of ranks, the units, the granularity and the mesh may differ from those at the save.

    Args:
        path: of a directory that `save` has written.
        model: of the same architecture. Elements are cast to the dtypes that it has.
        optimizer: one, or a mapping with the names that were used to save.
        strict: refuse a checkpoint that lacks entries of what is loaded. Entries that are not
            asked for are left alone.
        stateful: as at the save. What differed between ranks loads on as many ranks only.
        rng: give the random number generators of each rank the states they had; by default if an
            optimizer is loaded. On more ranks than have saved, those without a state get seeds.

    Returns:
        The ``extra`` of the save, the same on every rank.

    Cost: all bytes are read once, those that several ranks need by each of them; memory in the
    host for this rank's part; two small messages per rank.

    Raises:
        CheckpointIncompleteError: there is no whole checkpoint at ``path``, it lacks entries, or
            another rank has died.
        CheckpointCorruptError: bytes are not those that were saved; names the file and the tensor.
        CheckpointMismatchError: an entry has another shape.
        Nothing has changed then, on any rank.
    """
    check_last = finish_saves()
    ranks = all_ranks()
    loading = _Load(ranks, Path(path), strict)
    with_rng = optimizer is not None if rng is None else rng

    def prepare() -> Any:
        check_last()
        loading.prepare(model, named(optimizer), stateful or {}, with_rng)
        return loading.identity

    try:
        ranks.exchange(f"the load of {path}", prepare, lambda found: _same(Path(path), found))
        ranks.agree(f"the load of {path}", loading.apply)
    except BaseException:
        loading.undo()
        raise
    return loading.extra


def _same(path: Path, identities: list[Any]) -> list[Any]:
    for rank, identity in enumerate(identities):
        if identity != identities[0]:
            raise RankMismatchError(
                f"rank {rank} reads another checkpoint at {path} than rank 0: the path must be on "
                "a file system that all ranks share, and the same on every rank"
            )
    return [None] * len(identities)


class _Load:
    """One load, on one rank."""

    def __init__(self, ranks: Ranks, path: Path, strict: bool) -> None:
        self._ranks, self._path, self._strict = ranks, path, strict
        self._targets: list[Target] = []
        self._arrived: list[Arrival] = []
        self._live: set[str] = set()
        self._num_put = 0
        self._num_applied = 0
        self.identity: Any = None
        self.extra: dict[str, Any] = {}

    def prepare(
        self,
        model: nn.Module,
        optimizers: Mapping[str, Any],
        stateful: Mapping[str, Stateful],
        with_rng: bool,
    ) -> None:
        """Read and check all that this rank reads and checks."""
        manifest = read_manifest(self._path)
        self.identity = [manifest.seal.id, manifest.seal.body_crc32]
        with DataReader(self._path, manifest.files) as reader:
            texts = _read_texts(reader, manifest, self._ranks.rank)
            saved = Saved(str(self._path), manifest, texts, self._ranks.rank, self._strict)
            self._targets.append(ModelTarget(model, saved))
            for name, each in optimizers.items():
                self._targets.append(OptimizerTarget(name, each, model, saved))
            for name, other in stateful.items():
                self._targets.append(StatefulTarget(name, other, saved))
            extra = ValueTarget("extra", saved)
            self._targets.append(extra)
            if with_rng:
                self._targets.append(RngTarget(saved))
            wanted = {
                n: t for each in self._targets for n, t in {**each.live, **each.fresh}.items()
            }
            self._live = {name for each in self._targets for name in each.live}
            size = self._ranks.size
            self._arrived = read(reader, manifest, wanted, self._ranks.rank, size)
        if not isinstance(extra.value, dict):
            raise CheckpointCorruptError(f"the extra of {self._path} is no mapping")
        self.extra = extra.value

    def apply(self) -> None:
        """Write to the places, then give each object its values."""
        for arrival in self._arrived:
            self._num_put += 1
            arrival.put(keep=arrival.name in self._live)
        for target in self._targets:
            self._num_applied += 1
            target.apply()

    def undo(self) -> None:
        """Put back what was there, as far as it was changed."""
        for arrival in reversed(self._arrived[: self._num_put]):
            if arrival.name in self._live:
                arrival.put(keep=False)
        applied = self._targets[: self._num_applied]
        made = [each for each in self._targets if isinstance(each, OptimizerTarget)]
        for target in reversed([*(each for each in made if each not in applied), *applied]):
            try:
                target.undo()
            except Exception:  # noqa: BLE001  the first error is the one to raise
                _log.exception("a load of %s failed, and could not be undone", self._path)


def _read_texts(
    reader: DataReader, manifest: Manifest, rank: int
) -> dict[str, list[tuple[tuple[int, ...], Any]]]:
    """The JSON of the values; of those that each rank has for itself, only this rank's."""
    texts: dict[str, list[tuple[tuple[int, ...], Any]]] = {}
    for name, variants in manifest.values.items():
        texts[name] = []
        is_own = name.partition(".")[0] in ("rng", "stateful")
        for variant in variants:
            if is_own and len(variants) > 1 and rank not in variant.ranks:
                texts[name].append((variant.ranks, None))
                continue
            data = reader.read(variant.span, f"value {name!r}")
            try:
                text = jsons.load(bytes(bytes_of(data)))
            except ValueError as error:
                raise CheckpointCorruptError(
                    f"{variant.span.file} in {reader.folder} has a value {name!r} that is refused: "
                    f"{error}"
                ) from error
            texts[name].append((variant.ranks, text))
    return texts

"""save: write all of a training state into a new directory, or nothing."""

from __future__ import annotations

import datetime
import os
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vescale_fsdp import devices
from vescale_fsdp.checkpoint.disk import seal
from vescale_fsdp.checkpoint.disk.files import DataWriter, bytes_of, write_errors
from vescale_fsdp.checkpoint.disk.manifest import Chunk, Manifest, Seal, Span, TensorEntry, Variant
from vescale_fsdp.checkpoint.sealed.latest import FEWEST, next_sequence, prune
from vescale_fsdp.checkpoint.state import tensors
from vescale_fsdp.checkpoint.state.contents import Contents, Optimizers, Stateful, Weights, collect
from vescale_fsdp.checkpoint.transfer.planning import LocalPlan, Task, divide
from vescale_fsdp.checkpoint.transfer.ranks import Ranks, all_ranks
from vescale_fsdp.errors import CheckpointWriteError


class SaveHandle:
    """A save that has been started.

    Attributes:
        path: where the checkpoint is, when it is whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    @property
    def is_done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return self._thread is None or not self._thread.is_alive()

    def wait(self) -> None:
        """Return when the checkpoint is whole on the disk of all ranks.

        Raises:
            Exception: what went wrong, here or on another rank, the first time it is asked.
        """
        error = self._taken()
        if error is not None:
            raise error

    def _taken(self) -> Exception | None:
        """What went wrong, after all is done; only the first time."""
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        return error

    def _run(self, work: Any) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  whoever waits gets it
            self._error = error

    def _start(self, work: Any) -> None:
        # Not a daemon: a process that ends waits for it.
        self._thread = threading.Thread(target=self._run, args=(work,), name="vescale-fsdp save")
        self._thread.start()


_last: SaveHandle | None = None


def finish_saves() -> Callable[[], None]:
    """Wait for the save that was started last. Returns what raises what went wrong in it.

    To be called where all ranks learn of it: the user may have waited on some of them.
    """
    global _last
    handle, _last = _last, None
    error = None if handle is None else handle._taken()

    def check() -> None:
        if error is not None:
            raise error

    return check


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    extra: Mapping[str, Any] | None = None,
    stateful: Mapping[str, Stateful] | None = None,
    rng: bool = True,
    keep_last: int | None = None,
    async_: bool = False,
    weights: Weights = "all",
) -> SaveHandle:
    """Save model, optimizers and all that training goes on with into a new directory. Collective.

    The directory appears under its name when all of it is on the disk; a save that fails or is
    killed leaves nothing there (see `seal`).

    Args:
        path: of the directory; must not exist. The same on every rank, on a file system that all
            of them share.
        model: sharded or not; its state dict is saved, names without the prefixes of wrappers.
        optimizer: one, or a mapping of names to several.
        extra: the first rank's is saved: None, bool, int, float, str, bytes, list, tuple, dict and
            tensors. ``extra["step"]`` is the checkpoint's step.
        stateful: schedulers, data loaders and the like by name: what has ``state_dict()`` and
            ``load_state_dict()``. Each rank's own state is saved.
        rng: save the states of the random number generators of each rank.
        keep_last: after it has succeeded, delete older checkpoints beside it until so many are
            left, this one included; at least 2.
        async_: return when all is copied to the host's memory, and write in the background. The
            next save or load waits for it, and raises what went wrong. Wait for the last one
            before you destroy the process group.
        weights: of the model: "all"; "trained", without what is frozen; or "none", for optimizers
            alone. The model gives their parameters names all the same.

    Returns:
        A handle; ``wait()`` returns when the checkpoint is whole.

    Cost: each rank writes what it holds, replicas once; three small messages per rank. With
    ``async_`` memory for this rank's part.

    Raises:
        CheckpointExistsError: there is something at ``path``. Nothing is ever overwritten.
        CheckpointValueError: a state holds what cannot be saved, by name.
        CheckpointMismatchError: ranks hold different models, or an optimizer is of another one.
        CheckpointWriteError: disk full, no permission, no folder that all ranks share.
        CheckpointIncompleteError: another rank has died.
    """
    global _last
    check_last = finish_saves()
    if keep_last is not None and keep_last < FEWEST:
        raise ValueError(f"keep_last is {keep_last}; at least {FEWEST} checkpoints are kept")
    ranks, target = all_ranks(), Path(path)
    writing = _Save(ranks, target, keep_last)

    def collected() -> Contents:
        check_last()
        return collect(model, optimizer, extra, stateful or {}, rng, weights)

    writing.plan(collected, copies=async_)
    handle = SaveHandle(target)
    if async_:
        handle._start(writing.write)
        _last = handle
    else:
        writing.write()
    return handle


@dataclass
class _Piece:
    """What this rank writes, in the order of the file."""

    name: str
    label: str
    data: torch.Tensor
    box: tuple[tuple[int, ...], tuple[int, ...]] = ((), ())
    shape: tuple[int, ...] = ()


@dataclass
class _Work:
    pieces: list[_Piece] = field(default_factory=list)
    texts: list[tuple[str, list[int], bytes]] = field(default_factory=list)


class _Save:
    """One save, from the plan to the seal."""

    def __init__(self, ranks: Ranks, target: Path, keep_last: int | None) -> None:
        self._ranks, self._target, self._keep_last = ranks, target, keep_last
        self._title = f"the save of {target}"
        self._stage: seal.Stage | None = None
        self._take: Callable[[], None] = lambda: None
        self._folder = target
        self._work = _Work()
        self._step: int | None = None

    def plan(self, collected: Callable[[], Contents], *, copies: bool) -> None:
        """Agree on who writes what and where; with ``copies`` hold on to the data."""
        local: list[tuple[Contents, LocalPlan]] = []

        def offer() -> Any:
            contents = collected()
            local.append((contents, LocalPlan(contents, self._ranks.is_first)))
            return {**local[0][1].offer(), "target": str(self._target.absolute())}

        try:
            task = self._ranks.exchange(self._title, offer, self._divide, self._abandon)
            self._folder = self._target.with_name(task["stage"])
            contents, plan = local[0]
            self._step = contents.step
            self._take = lambda: self._taken(task, contents, plan, copies)
            if copies:
                self._ranks.agree(self._title, self._take)
                self._take = lambda: None
        except BaseException:  # an interrupt, too
            self._abandon()
            raise

    def _divide(self, offers: list[Any]) -> list[Any]:
        targets = [offer["target"] for offer in offers]
        other = next((rank for rank, each in enumerate(targets) if each != targets[0]), None)
        if other is not None:
            raise CheckpointWriteError(
                f"rank 0 saves to {targets[0]}, rank {other} to {targets[other]}; the path must be "
                "the same on every rank"
            )
        tasks = divide(offers)
        seal.clean(self._target.parent)
        self._stage = seal.Stage(self._target)
        return [{**task, "stage": self._stage.path.name} for task in tasks]

    def _taken(self, task: Task, contents: Contents, plan: LocalPlan, copies: bool) -> None:
        staging = devices.Staging()
        for number in task["boxes"]:
            item = plan.items[number]
            assert item.tensor_data is not None, "bytes are not planned"
            chunk, name = item.tensor_data.chunk, item.index.fqn
            data = plan.data(item)
            data = tensors.staged(data, staging) if copies else data
            box = (tuple(chunk.offsets), tuple(chunk.sizes))
            shape = tuple(item.tensor_data.size)
            self._work.pieces.append(_Piece(name, f"tensor {name!r}", data, box, shape))
        for name, ranks in task["values"].items():
            own = contents.own.get(name)
            text = contents.texts[name] if own is None else own.text
            self._work.texts.append((name, ranks, text.encode()))
            suffix = f"@{ranks[0]}" if name in task["several"] else ""
            for key, tensor in own.tensors.items() if own is not None else ():
                data = tensors.staged(tensor, staging) if copies else tensors.on_host(tensor)
                shape = tuple(data.shape)
                box = ((0,) * data.dim(), shape)
                label = f"tensor {key + suffix!r}"
                self._work.pieces.append(_Piece(key + suffix, label, data, box, shape))
        staging.wait()

    def write(self) -> None:
        """Write, flush, and seal."""
        try:
            self._ranks.exchange(self._title, self._write, self._publish, self._abandon)
        except BaseException:
            self._abandon()
            raise

    def _write(self) -> Any:
        writer = DataWriter(self._folder, seal.data_name(self._ranks.rank))
        chunks, variants = [], []
        try:
            self._take()
            for piece in self._work.pieces:
                data = tensors.on_host(piece.data)
                span = writer.write(bytes_of(data), piece.label)
                dtype = tensors.dtype_name(data.dtype)
                chunks.append([piece.name, dtype, piece.shape, piece.box, _listed(span)])
            for name, ranks, text in self._work.texts:
                span = writer.write(memoryview(text), f"value {name!r}")
                variants.append([name, ranks, _listed(span)])
            writer.finish()
        finally:
            writer.abandon()
            self._work, self._take = _Work(), lambda: None  # free the copies
        return {"file": [writer.name, writer.num_bytes], "chunks": chunks, "values": variants}

    def _publish(self, written: list[Any]) -> list[Any]:
        assert self._stage is not None, "the first rank publishes"
        with write_errors(self._target):
            data = self._manifest(written).render()
            # What could not be loaded is not published.
            manifest = Manifest.parse(data, str(self._stage.path / "manifest.json"))
            _check_files(self._stage.path, manifest)
        self._stage.publish(data)
        if self._keep_last is not None:
            prune(self._target.parent, self._keep_last)
        return [None] * len(written)

    def _manifest(self, written: list[Any]) -> Manifest:
        assert self._stage is not None, "the first rank publishes"
        entries: dict[str, tuple[str, Any, list[Chunk]]] = {}
        values: dict[str, list[Variant]] = {}
        for part in written:
            for name, dtype, shape, (offsets, sizes), span in part["chunks"]:
                chunks = entries.setdefault(name, (dtype, shape, []))[2]
                chunks.append(Chunk(tuple(offsets), tuple(sizes), Span(*span)))
            for name, ranks, span in part["values"]:
                values.setdefault(name, []).append(Variant(tuple(ranks), Span(*span)))
        now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        sequence = next_sequence(self._target.parent)
        return Manifest(
            Seal(self._stage.id, sequence, self._step, now),
            world_size=len(written),
            software=software(),
            files=dict(
                sorted(part["file"] for part in written if part["chunks"] or part["values"])
            ),
            tensors={
                name: TensorEntry(dtype, tuple(shape), tuple(chunks))
                for name, (dtype, shape, chunks) in sorted(entries.items())
            },
            values={name: tuple(each) for name, each in sorted(values.items())},
        )

    def _abandon(self) -> None:
        if self._stage is not None:
            self._stage.abandon()


def _listed(span: Span) -> list[Any]:
    return [span.file, span.offset, span.length, span.crc32]


def software() -> dict[str, str]:
    """What writes: versions by name."""
    import vescale_fsdp

    return {"vescale-fsdp": vescale_fsdp.__version__, "torch": torch.__version__}


def _check_files(folder: Path, manifest: Manifest) -> None:
    """Raise unless the first rank sees what all ranks have written."""
    for file, num_bytes in manifest.files.items():
        path = folder / file
        found = path.stat().st_size if path.exists() else None
        if found != num_bytes:
            state = "is not there" if found is None else f"has {found} bytes"
            raise CheckpointWriteError(
                f"{path} {state} for rank 0, but a rank has written {num_bytes} bytes: the path "
                "must be on a file system that all ranks share"
            )

"""save, and `Writing`: ranks write a directory together, which appears when it is complete."""

from __future__ import annotations

import contextlib
import datetime
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import nn

from vescale_fsdp.checkpoint import parts, seal
from vescale_fsdp.checkpoint.contents import (
    Contents,
    LocalPlan,
    Optimizers,
    Stateful,
    Task,
    Weights,
    collect,
    divide,
)
from vescale_fsdp.checkpoint.files import write_errors
from vescale_fsdp.checkpoint.manifest import Manifest, Seal
from vescale_fsdp.checkpoint.seal import FEWEST, next_sequence, prune
from vescale_fsdp.engine import check_reduced as check_reduced  # also for the adapters
from vescale_fsdp.errors import CheckpointWriteError, RankMismatchError
from vescale_fsdp.ranks import everyone, limit_s


class SaveHandle:
    """A save that has been started.

    Attributes:
        path: the place of the complete checkpoint.
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
        """Return when all ranks have written the checkpoint completely.

        Raises:
            Exception: the error of this or another rank, at the first call.
        """
        error = self._taken()
        if error is not None:
            raise error

    def _taken(self) -> Exception | None:
        """Wait for the save, and return its error. Later calls return None."""
        if self._thread is not None:
            self._thread.join()
        error, self._error = self._error, None
        return error

    def _run(self, work: Any) -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  `wait` raises it
            self._error = error

    def _start(self, work: Any) -> None:
        # Not a daemon: Python waits for this thread before the process ends.
        self._thread = threading.Thread(target=self._run, args=(work,), name="vescale-fsdp save")
        self._thread.start()


_last: SaveHandle | None = None


def finish_saves() -> Callable[[], None]:
    """Wait for the save that was started last. Returns a function that raises its error.

    Call that function inside `Ranks.together`, so that all ranks raise: on some of them the user
    may already have called ``wait()``, which takes the error.
    """
    global _last
    handle, _last = _last, None
    error = None if handle is None else handle._taken()

    def check() -> None:
        if error is not None:
            raise error

    return check


def begin_save() -> None:
    """Return when all ranks have come to save a checkpoint. Collective.

    It waits for the save before, which may be under way in the background.

    Raises:
        RankMismatchError: a rank did not come in the time of a collective (`limit_s`), or it has
            come to something else, or has died.
        Exception: that of the last save, if it was in the background and has failed.
    """
    everyone().meet("the save of a checkpoint", finish_saves())


def begin_load() -> None:
    """As `begin_save`, for a load. Ranks may have prepared for long before it."""
    late = limit_s(may_be_late=True)
    everyone().meet("the load of a checkpoint", finish_saves(), timeout_s=late)


def leave_saves(seconds: float) -> None:
    """After other ranks were lost: wait so long for the save that was started last, and forget it.

    Its thread may wait for a message from a lost rank. Its connections are closed then, so that it
    ends with an error, and does not hold up the end of the process. The checkpoint is complete if
    all ranks have answered before, else absent.
    """
    global _last
    handle, _last = _last, None
    if handle is not None and handle._thread is not None:
        handle._thread.join(seconds)
        if not handle.is_done:
            everyone().disconnect("another rank was lost")


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Optimizers = None,
    *,
    extra: Mapping[str, Any] | None = None,
    stateful: Mapping[str, Stateful] | None = None,
    rng: bool = True,
    keep_last: int | None = None,
    keep_names: str = "*",
    async_: bool = False,
    weights: Weights = "all",
    reduced_by_hand: bool = False,
) -> SaveHandle:
    """Save model, optimizers and all other training state into a new directory. Collective.

    The directory appears under its name when all of it is on the disk. After a save that fails or
    is killed there is none (see `seal`).

    Args:
        path: of the directory; must not exist. The same on every rank, on a file system that all
            of them share.
        model: sharded or not; its state dict is saved, names without the prefixes of wrappers.
        optimizer: one, or a mapping of names to several.
        extra: values of the first rank: None, bool, int, float, str, bytes, list, tuple, dict and
            tensors. ``extra["step"]`` is the checkpoint's step.
        stateful: objects with ``state_dict()`` and ``load_state_dict()`` by name: schedulers, data
            loaders and others. Each rank's own state is saved.
        rng: save the states of the random number generators of each rank.
        keep_last: after success, delete older checkpoints in the same folder until this many
            remain, including this one; at least 2.
        keep_names: a pattern, as for `fnmatch`. ``keep_last`` counts and deletes only checkpoints
            whose names match it.
        async_: return when everything is copied to host memory, and write in the background. The
            next save or load waits for it, and raises its error. Wait for the last one
            before you destroy the process group.
        weights: of the model: "all"; "trained", without frozen parameters; or "none", for only
            optimizers. The model is still needed for the names of their parameters. Or the state
            dict to save instead, ``model.state_dict()`` with changes: the same names on all ranks,
            and of plain tensors the same values.
        reduced_by_hand: the caller reduces the gradients of trainable plain parameters in a model
            that contains units. Else these are an error: each rank would have its own.

    Returns:
        A handle; ``wait()`` returns when the checkpoint is whole.

    Cost: each rank writes its elements, replicas once; three small messages per rank. With
    ``async_``, host memory for this rank's part.

    Raises:
        CheckpointExistsError: there is something at ``path``. Nothing is ever overwritten.
        CheckpointValueError: a state holds a value that cannot be saved; names it.
        CheckpointMismatchError: ranks hold different models, or an optimizer has parameters of
            another model.
        CheckpointWriteError: disk full, no permission, no folder that all ranks share.
        RankMismatchError: another rank has died, hangs, or does not save.
        ValueError: the model contains units, and has trainable parameters that nothing reduces.
    """
    global _last
    if keep_last is not None and keep_last < FEWEST:
        raise ValueError(f"keep_last is {keep_last}; at least {FEWEST} checkpoints are kept")
    target = Path(path).absolute()  # the process may change its directory before all is written
    writing = Writing(target, f"the save of {target}")

    def collected() -> Contents:
        if not reduced_by_hand:
            check_reduced(model, "checkpoint.save")
        return collect(model, optimizer, extra, stateful or {}, rng, weights)

    writing.plan(collected)
    step = writing.contents.step
    items: list[parts.Item] = []

    def chosen(*, copies: bool) -> list[parts.Item]:
        return parts.items_of(writing.contents, writing.local, writing.task, copies=copies)

    if async_:
        writing.agree(lambda: items.extend(chosen(copies=True)))
        del writing.contents, writing.local  # only the copies are needed from here on

    def write() -> Any:
        try:
            found = items if async_ else chosen(copies=False)
            going_on = writing.ranks.going_on(found)
            return parts.write_items(writing.folder, writing.ranks.rank, going_on)
        finally:
            items.clear()  # free the copies

    def publish(stage: seal.Stage, written: list[Any]) -> None:
        with write_errors(target):
            data = manifest_text(stage, step, written)
        stage.publish(data)
        if keep_last is not None:
            prune(target.parent, keep_last, keep_names, writing.ranks.still)

    handle = SaveHandle(target)
    if async_:
        handle._start(lambda: writing.write(write, publish))
        _last = handle
    else:
        writing.write(write, publish)
    return handle


class Writing:
    """Lets all ranks write one directory: first `plan`, then `write`.

    Files are written into a temporary folder, the stage (see `seal`). It gets its final name when
    all of it is on the disk.

    Args:
        title: names the work in messages.
        into: the target may be a folder that exists.

    Attributes (set by `plan`):
        contents: what this rank holds.
        local: the same as boxes of tensors.
        task: the part that this rank writes. ``task["told"]`` is what rank 0 says to this rank.
        folder: where to write.
    """

    contents: Contents
    local: LocalPlan
    task: Task
    folder: Path

    def __init__(self, target: Path, title: str, *, into: bool = False) -> None:
        begin_save()
        self.ranks = everyone().thread()  # the last part may run in the background
        self._target, self._title, self._into = target, title, into
        self._stage: seal.Stage | None = None

    def plan(
        self,
        collect: Callable[[], Contents],
        begin: Callable[[Path, list[Any]], list[Any]] | None = None,
        options: Any = None,
    ) -> None:
        """Decide what each rank writes, and where. Collective.

        Args:
            collect: returns this rank's items.
            begin: gets the path of the stage and the offers of all ranks (see `contents`); returns
                ``told`` for each rank, as JSON. Called on rank 0 only.
            options: JSON that must be the same on every rank.
        """

        def offer() -> Any:
            self.contents = collect()
            self.local = LocalPlan(self.contents, self.ranks.is_first)
            target = str(self._target.absolute())
            return {**self.local.offer(), "target": target, "options": options}

        def combine(offers: list[Any]) -> list[Any]:
            self._check_same(offers)
            tasks = divide(offers)
            seal.clean(self._target.parent)
            self._stage = seal.Stage(self._target, into=self._into)
            told = [None] * len(tasks) if begin is None else begin(self._stage.path, offers)
            where = {"stage": self._stage.path.name}
            return [{**task, **where, "told": each} for task, each in zip(tasks, told, strict=True)]

        with self._abandoned_on_error():
            self.task = self.ranks.together(self._title, offer, combine, give_up=self._abandon)
            self.folder = self._target.with_name(self.task["stage"])

    @staticmethod
    def _check_same(offers: list[Any]) -> None:
        for rank, each in enumerate(offers):
            if each["target"] != offers[0]["target"]:
                raise CheckpointWriteError(
                    f"rank 0 saves to {offers[0]['target']}, rank {rank} to {each['target']}; the "
                    "path must be the same on every rank"
                )
            if each["options"] != offers[0]["options"]:
                raise RankMismatchError(
                    f"rank {rank} exports with {each['options']}, rank 0 with "
                    f"{offers[0]['options']}; options must be the same on every rank"
                )

    def agree(self, work: Callable[[], Any]) -> None:
        """Call ``work`` on every rank. On an error all ranks raise, and the stage is deleted.

        Collective.
        """
        with self._abandoned_on_error():
            self.ranks.together(self._title, work)

    def write(
        self, write: Callable[[], Any], publish: Callable[[seal.Stage, list[Any]], None]
    ) -> None:
        """Write on every rank, then publish on rank 0. Collective.

        Args:
            write: writes and flushes this rank's part; returns JSON.
            publish: gets the stage and the results of ``write`` on all ranks. Called on rank 0
                only.
        """

        def combine(written: list[Any]) -> list[Any]:
            assert self._stage is not None, "the first rank publishes"
            publish(self._stage, written)
            return [None] * len(written)

        with self._abandoned_on_error():
            self.ranks.together(self._title, write, combine, give_up=self._abandon)

    @contextlib.contextmanager
    def _abandoned_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:  # also KeyboardInterrupt
            self._abandon()
            raise

    def _abandon(self) -> None:
        if self._stage is not None:
            self._stage.abandon()


def publish_files(stage: seal.Stage, names: Sequence[str]) -> None:
    """Publish the stage, or move its files into the target if that exists.

    Args:
        names: all files; last the one without which readers find no checkpoint.
    """
    missing = [name for name in names if not (stage.path / name).is_file()]
    if missing:
        raise CheckpointWriteError(
            f"{stage.path / missing[0]} does not exist for rank 0, but a rank has written it: the "
            "path must be on a file system that all ranks share"
        )
    if stage.target.is_dir():
        stage.merge(names)
    else:
        stage.publish(None)


def manifest_text(stage: seal.Stage, step: int | None, written: Sequence[Any]) -> bytes:
    """Return the text of the manifest. Raises if `load` could not read the result.

    Args:
        written: what `parts.write_items` returned on each rank.
    """
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    sequence = next_sequence(stage.target.parent)
    text = parts.manifest_of(Seal(stage.id, sequence, step, now), written).render()
    for file, num_bytes in Manifest.parse(text, str(stage.path / "manifest.json")).files.items():
        path = stage.path / file
        size = path.stat().st_size if path.exists() else None
        if size != num_bytes:
            state = "does not exist" if size is None else f"has {size} bytes"
            raise CheckpointWriteError(
                f"{path} {state} for rank 0, but a rank has written {num_bytes} bytes: the path "
                "must be on a file system that all ranks share"
            )
    return text

"""Replaces an earlier save in a directory completely, or not at all.

``save_state`` writes into a directory that may have an earlier save and files of others. It does
so in three stages::

    state/.saving/    all files are written here; after a kill the next save deletes it
    state/.saved/     the same folder, renamed when it is complete
    state/            gets the entries one by one; after a kill the next save or load continues

A save in one format also deletes the same entry in the other format.

The functions that write are collective, and need a directory that all processes share.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from vescale_fsdp import CheckpointIncompleteError, RankMismatchError, checkpoint
from vescale_fsdp.ranks import everyone
from vescale_fsdp.spi import flush

__all__ = [
    "begin",
    "finish",
    "in_each",
    "in_first",
    "is_whole",
    "latest",
    "prune",
    "replace_directory",
    "replace_file",
]

_WHAT = "the save or load of a checkpoint"

_SAVING, _SAVED = ".saving", ".saved"


def begin(folder: Path) -> Path:
    """Make and return the folder to write to. Call `finish` afterwards."""
    finish(folder)
    stage = folder / _SAVING

    def make() -> None:
        if stage.exists():
            shutil.rmtree(stage)
        stage.mkdir(parents=True)

    in_first(make)
    return stage


def finish(folder: Path, *, is_written: bool = False) -> None:
    """Move a complete save into ``folder``.

    Args:
        is_written: all processes have written to the folder of `begin`. False: only continue an
            earlier save that was killed while entries were moved.
    """

    def put() -> None:
        stage, saved = folder / _SAVING, folder / _SAVED
        if is_written and stage.is_dir():
            for entry in stage.iterdir():
                if entry.is_file():  # files in directories are already flushed
                    flush(entry)
            flush(stage)
            stage.rename(saved)
        for entry in sorted(saved.iterdir()) if saved.is_dir() else ():
            _remove(folder / entry.name, unless_file=True)
            entry.replace(folder / entry.name)
            _remove_twin(folder / entry.name)
        if saved.is_dir():
            flush(folder)
            saved.rmdir()

    in_first(put)


def is_whole(folder: Path) -> bool:
    """Whether any save to a directory was completed."""
    return any(entry.name != _SAVING for entry in folder.iterdir())


def latest(folder: Path) -> Path:
    """Return the numbered directory with the highest number that has a completed save.

    Raises:
        CheckpointIncompleteError: there is none.
    """
    found = [each for each in _numbered(folder) if is_whole(each)]
    if not found:
        raise CheckpointIncompleteError(f"{folder} has no whole checkpoint")
    return found[-1]


def prune(folder: Path, keep: int) -> None:
    """Delete the directories with the lowest numbers until ``keep`` are left."""

    def delete() -> None:
        for each in _numbered(folder)[:-keep]:
            shutil.rmtree(each)

    in_first(delete)


def _numbered(folder: Path) -> list[Path]:
    """Return the directories ``checkpoint_0`` and so on, in order."""
    found = {
        int(number[1]): each
        for each in (folder.iterdir() if folder.is_dir() else ())
        if (number := re.fullmatch(r"checkpoint_(\d+)", each.name)) and each.is_dir()
    }
    return [found[number] for number in sorted(found)]


def _remove(path: Path, *, unless_file: bool = False) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif not unless_file:
        path.unlink(missing_ok=True)


def _remove_twin(path: Path) -> None:
    """Delete the same entry in the other format: ``optimizer.bin`` for ``optimizer_0/``."""
    found = re.fullmatch(r"(pytorch_model_fsdp|optimizer)(?:_(\d+))?(\.bin)?", path.name)
    if found is None or (found[2] is None and found[3] is None):
        return
    kind, number = found[1], found[2] or "0"
    as_file = f"{kind}.bin" if number == "0" else f"{kind}_{number}.bin"
    _remove(path.with_name(f"{kind}_{number}" if found[3] else as_file))


def replace_file(file: Path, state: Any) -> None:
    """Call ``torch.save`` in the first process. After a kill, the old or the new file is there."""

    def write() -> None:
        new = file.with_name(f"{file.name}.new")
        torch.save(state, new)
        flush(new)
        new.replace(file)
        flush(file.parent)
        _remove_twin(file)

    in_first(write)


def replace_directory(path: Path, write: Callable[[Path], Any]) -> None:
    """Write a new directory at ``path``. An old one is deleted when the new one is complete."""
    place = checkpoint.Place(path)
    new = place.beside(".new")
    in_first(place.mend)
    write(Path(new.path))

    def replace() -> None:
        place.replace_by(new)
        _remove_twin(path)

    in_first(replace)


def in_first(work: Callable[[], Any]) -> None:
    """Call a function in the first process. If it raises, all processes raise."""
    everyone().from_first(_WHAT, lambda: work() and None)


def in_each(work: Callable[[], Any], *, alike: str = "") -> None:
    """Call a function in each process, and wait for all. If it raises in one, all raise.

    Args:
        alike: what the function returns, in words, if that must be the same in all processes.

    Raises:
        RankMismatchError: it is not.
    """

    def compare(results: list[Any]) -> list[Any]:
        first = results[0]
        for rank, other in enumerate(results):
            if other != first:
                raise RankMismatchError(
                    f"{alike} differ: {_shown(first, other)} on rank 0, and "
                    f"{_shown(other, first)} on rank {rank}. Make the same changes in every "
                    "process, not in the main process alone"
                )
        return [None] * len(results)

    everyone().together(_WHAT, work, compare if alike else None)


def _shown(own: Any, other: Any) -> str:
    """The first of the entries that the other list has not."""
    return next((str(each) for each in own if each not in other), "others, or another order")

"""Store: writes checkpoints to their paths, on any file system, and fetches them for a load.

It does not know the format. To save, the caller passes a function that writes a local directory or
file.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist

from vescale_fsdp import CheckpointExistsError, CheckpointIncompleteError
from vescale_fsdp.checkpoint import SaveHandle
from vescale_fsdp_lightning import places
from vescale_fsdp_lightning.places import Place, from_first

__all__ = ["Store", "is_first"]

_log = logging.getLogger(__name__)

# Writes a directory at a path where nothing exists. If the second argument is true, it may write in
# the background and return a handle. Collective.
Write = Callable[[Path, bool], SaveHandle | None]


class Store:
    """Publishes, fetches and deletes checkpoints. All methods but `remove` are collective.

    Args:
        staging_dir: where checkpoints are written before they are copied to another file system.
    """

    def __init__(self, staging_dir: str | None) -> None:
        self._staging_dir = staging_dir
        self._saving: SaveHandle | None = None
        self._to_remove: list[str] = []

    def publish(self, path: str, write: Write) -> None:
        """Write a directory at ``path``. It appears when complete, and replaces an older one."""
        self.finish()
        place = Place(path)
        exists: bool = from_first(lambda: _prepared(place))
        target = place.beside(".new") if exists else place
        if place.is_local:
            self._saving = write(Path(target.path), not exists)
        else:
            folder = places.stage(self._staging_dir)
            try:
                write(folder / "checkpoint", False)
                places.upload(folder / "checkpoint", target)
            finally:
                places.clear(folder, is_mine=is_first())
        if exists:
            from_first(lambda: place.replace_by(target))

    def publish_file(self, path: str, write: Callable[[Any], None]) -> None:
        """Write a file at ``path`` in the same way. The first process writes it to a stream."""
        self.finish()
        place = Place(path)

        def put() -> None:
            _prepared(place)
            new, unfinished = place.beside(".new"), place.beside(".tmp")
            place.fs.makedirs(os.path.dirname(place.path), exist_ok=True)
            if place.is_local:
                with open(unfinished.path, "wb") as stream:
                    write(stream)
                    stream.flush()
                    os.fsync(stream.fileno())
            else:
                with place.fs.open(unfinished.path, "wb") as stream:
                    write(stream)
            unfinished.move_to(new)
            place.replace_by(new)

        from_first(put)

    def finish(self) -> None:
        """Wait for a save in the background, then delete the checkpoints that wait for it."""
        handle, self._saving = self._saving, None
        try:
            if handle is not None:
                handle.wait()
        except BaseException:
            self._to_remove.clear()  # the save has failed: keep the old checkpoints
            raise
        for path in self._to_remove:
            self._remove(path)
        self._to_remove.clear()

    def leave(self) -> None:
        """Forget a save in the background: ranks were lost. Old checkpoints are kept."""
        self._saving = None
        self._to_remove.clear()

    def remove(self, path: str) -> None:
        """Delete a checkpoint. If a save runs in the background, after it has ended."""
        if self._saving is not None:
            self._to_remove.append(path)
        else:
            self._remove(path)

    def _remove(self, path: str) -> None:
        if is_first():
            place = Place(path)
            for each in (place, place.beside(".new"), place.beside(".old")):
                each.remove()

    @contextmanager
    def fetch(self, path: str, local_rank: int) -> Iterator[Path]:
        """Yield a local path of a checkpoint. One on another file system is copied first.

        Raises:
            CheckpointIncompleteError: there is no complete one.
        """
        self.finish()
        place = Place(path)
        found, is_whole = from_first(lambda: (str(place.found()), place.found().is_whole))
        if not is_whole:
            raise CheckpointIncompleteError(f"there is no whole checkpoint at {path}")
        if found != str(place):
            if is_first():
                _log.warning(
                    "%s does not exist because its save was interrupted; loading %s", path, found
                )
            place = Place(found)
        if place.is_local:
            yield Path(place.path)
            return
        copy = places.download(place, local_rank)
        try:
            yield copy
        except GeneratorExit:  # dropped after an error, perhaps on this rank alone
            places.clear(copy.parent, is_mine=local_rank == 0, waits=False)
            raise
        except BaseException:
            places.clear(copy.parent, is_mine=local_rank == 0)
            raise
        places.clear(copy.parent, is_mine=local_rank == 0)


def _prepared(place: Place) -> bool:
    """Prepare a path for a save. Returns whether there is a checkpoint to replace.

    Call it in one process only.

    Raises:
        CheckpointExistsError: there is something that is not a checkpoint.
    """
    place.mend()
    exists = place.exists
    if exists and not place.is_whole and place.fs.ls(place.path, detail=False):
        raise CheckpointExistsError(
            f"{place} is a directory that is not a checkpoint, and is not replaced; save elsewhere"
        )
    return exists


def is_first() -> bool:
    """Whether this is the first process."""
    return not dist.is_initialized() or dist.get_rank() == 0

"""Writes checkpoints into temporary folders, publishes them when complete, finds and prunes them.

::

    runs/
      step-100/                       sealed: manifest.json and data files, never written again
      step-200.tmp-3f0c...(32)/       a stage: a save that is running, or one that was killed

1. Rank 0 makes the stage, a temporary folder, and locks it (``flock`` on the folder; the system
   releases the lock when the process ends for any reason).
2. All ranks write their files into it and flush them to disk.
3. Rank 0 writes the manifest, flushes it and the folder, renames the folder, and flushes the
   parent.

If two jobs save to one path, each has its own stage, and only one of them gets the name.

A stage without a lock is left from a crash. The next save in the same folder deletes it: first the
files that a save writes, then the folder if it is empty.

The order of checkpoints is that in which they were saved (`Seal.sequence`), not that of steps or
clocks. Example: a run has saved step 100, restarts from step 50 and saves step 60. Then step 60 is
the latest.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import fnmatch
import logging
import os
import re
import secrets
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from vescale_fsdp.checkpoint import manifest, seal
from vescale_fsdp.checkpoint.files import (
    DataReader,
    bytes_of,
    flush,
    open_regular,
    size_of,
    write_errors,
    write_file,
)
from vescale_fsdp.checkpoint.manifest import NAME, SEAL_BYTES, Manifest, Seal, Span, from_json
from vescale_fsdp.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointIncompleteError,
    CheckpointWriteError,
)

_STAGE = re.compile(r"(?s)(.+)\.tmp-[0-9a-f]{32}")
_UNLOCKED = re.compile(r"(?s)\..+\.new-[0-9a-f]{32}")
_DATA = re.compile(
    r"rank-[0-9]{5,}\.bin"  # ours
    r"|model(-[0-9]+-of-[0-9]+)?\.safetensors(\.index\.json)?"
    r"|__[0-9]+_0\.distcp|\.metadata"  # of torch.distributed.checkpoint
)
_log = logging.getLogger(__name__)


def data_name(rank: int) -> str:
    """Return the name of a rank's data file."""
    return f"rank-{rank:05d}.bin"


def is_stage(path: Path) -> bool:
    """Whether the path has the name of a stage."""
    return _STAGE.fullmatch(path.name) is not None


def stages_of(target: Path) -> list[Path]:
    """Return the existing stages of a checkpoint, of any job."""
    if not target.parent.is_dir():
        return []
    return sorted(
        path
        for path in target.parent.iterdir()
        if (found := _STAGE.fullmatch(path.name)) and found[1] == target.name
    )


class Stage:
    """A temporary folder beside the target. Rank 0 makes and locks it.

    Args:
        into: the target may be an existing folder, for `merge`.
    """

    def __init__(self, target: Path, *, into: bool = False) -> None:
        self.id = secrets.token_hex(16)
        self.target = target
        self.path = target.with_name(f"{target.name}.tmp-{self.id}")
        if is_stage(target) or _UNLOCKED.fullmatch(target.name):
            raise CheckpointWriteError(
                f"{target} has a name as of a save that is under way, which the next save would "
                "delete: save to another path"
            )
        if os.path.lexists(target) and not (into and target.is_dir()):
            raise CheckpointExistsError(
                f"{target} exists already, and a checkpoint is never overwritten; save to another "
                "path. Where elastic training repeats a step after a restart, put run.attempt into "
                "the name"
            )
        with write_errors(self.path):
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
                self._lock = self._make()
            except FileNotFoundError as error:  # in /proc, or the parent was deleted meanwhile
                raise CheckpointWriteError(
                    f"{target} cannot be made: no folder can be made in {target.parent}; save to "
                    "another path"
                ) from error

    def _make(self) -> int | None:
        """Make the folder. Until it is locked it has another name and is empty."""
        while True:
            unlocked = self.target.with_name(f".{self.target.name}.new-{secrets.token_hex(16)}")
            unlocked.mkdir()
            lock = None
            try:
                lock = _lock(unlocked)
                unlocked.rename(self.path)
                return lock
            except (FileNotFoundError, CheckpointWriteError):
                # `clean` of another job has locked or deleted it first: make a new one.
                if lock is not None:
                    os.close(lock)

    def publish(self, data: bytes | None) -> None:
        """Write the manifest, if there is one, and rename the folder to the target."""
        if data is not None:
            write_file(self.path / manifest.NAME, data)
        with write_errors(self.target):
            flush(self.path)
            try:
                os.rename(self.path, self.target)
            except OSError as error:
                if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                    raise CheckpointExistsError(
                        f"another job has written {self.target} meanwhile; its files were not "
                        "changed. Give each job its own folder"
                    ) from error
                raise
            flush(self.target.parent)
        self._release()

    def merge(self, names: Sequence[str]) -> None:
        """Move files into the target, an existing folder, in this order."""
        there = [name for name in names if os.path.lexists(self.target / name)]
        if there:
            raise CheckpointExistsError(
                f"{self.target / there[0]} exists already, and is never overwritten; write to "
                "another path, or delete it first"
            )
        moved: list[str] = []
        with write_errors(self.target):
            flush(self.path)
            try:
                for name in names:
                    (self.path / name).rename(self.target / name)
                    moved.append(name)
                flush(self.target)
            except OSError:
                for name in reversed(moved):
                    (self.target / name).rename(self.path / name)
                raise
        self.abandon()

    def abandon(self) -> None:
        """Delete the stage. If that fails, the next save deletes it."""
        with contextlib.suppress(OSError):
            remove(self.path)
        self._release()

    def _release(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def clean(folder: Path) -> None:
    """Delete the stages in a folder that have no lock."""
    if not folder.is_dir():
        return
    for path in folder.iterdir():
        if not (is_stage(path) or _UNLOCKED.fullmatch(path.name)):
            continue
        if path.is_symlink() or not path.is_dir():
            continue
        try:
            lock = _lock(path)
        except CheckpointWriteError:
            continue  # another process writes it
        except OSError:
            continue  # it has just been published or deleted
        if lock is None:
            _log.info(
                "%s may be left over from a crash; file locks do not work here, so it is "
                "not deleted",
                path,
            )
            continue
        try:
            remove(path)
            _log.info("deleted %s, left by a save that did not finish", path)
        except OSError as error:
            _log.warning(
                "%s, left by a save that did not finish, cannot be deleted: %s", path, error
            )
        finally:
            os.close(lock)


def remove(path: Path) -> None:
    """Delete a checkpoint or a stage: the manifest, then the data files, then the empty folder."""
    (path / manifest.NAME).unlink(missing_ok=True)
    for file in list(path.iterdir()):
        if _DATA.fullmatch(file.name):
            file.unlink(missing_ok=True)
    path.rmdir()


def _lock(path: Path) -> int | None:
    """Lock a folder. Returns None if the file system has no locks."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise CheckpointWriteError(f"{path} is being written by another process") from error
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


FEWEST = 2  # checkpoints that `prune` leaves


def latest(root: str | os.PathLike[str], names: str = "*") -> Path | None:
    """The newest complete checkpoint in a folder, or None.

    Args:
        root: the folder.
        names: a pattern, as for `fnmatch`. Checkpoints with other names are left out.

    Incomplete ones are skipped, and the log (``vescale_fsdp.checkpoint.seal``, as warnings)
    says which and why: saves that did not finish, folders with a damaged manifest or
    without a data file. The data are not read; `load` and `verify` check them.

    Not collective: each rank searches for itself. Call it before the ranks begin to save.

    Cost: one read of 64 kB for each checkpoint there, and the manifest of the last one.
    """
    for path, _ in sorted(sealed(Path(root), names, say=True), key=_age, reverse=True):
        try:
            manifest = read_manifest(path)
            _check_files(path, manifest)
        except (CheckpointCorruptError, CheckpointIncompleteError) as error:
            _log.warning("skipped %s: %s", path, error)
            continue
        return path
    return None


def sealed(root: Path, names: str = "*", *, say: bool = False) -> Iterator[tuple[Path, Seal]]:
    """Yield the complete checkpoints in a folder, in no order. With ``say``, log the others.

    Only those whose names match the pattern ``names``.
    """
    if not root.is_dir():
        return
    for path in sorted(root.iterdir()):
        if not path.is_dir() or not fnmatch.fnmatchcase(path.name, names):
            continue
        if seal.is_stage(path):
            if say:
                _log.warning("skipped %s: a save that did not finish, or is under way", path)
            continue
        try:
            with open_regular(path / NAME) as stream:
                found, _ = Manifest.parse_seal(stream.read(SEAL_BYTES), str(path / NAME))
        except FileNotFoundError:
            if say:
                _log.warning("skipped %s: it has no %s", path, NAME)
        except (CheckpointCorruptError, OSError) as error:
            if say:
                _log.warning("skipped %s: %s", path, error)
        else:
            yield path, found


def read_manifest(path: Path) -> Manifest:
    """Read and check the manifest of the checkpoint at ``path``."""
    file = path / NAME
    try:
        with open_regular(file) as stream:
            return Manifest.read(stream, size_of(file), str(file))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise CheckpointIncompleteError(
            f"there is no whole checkpoint at {path}{_hint(path)}"
        ) from error
    except OSError as error:
        raise CheckpointIncompleteError(f"{file} cannot be read: {error}") from error


def read_text(reader: DataReader, name: str, span: Span) -> Any:
    """Read and check the JSON of a value."""
    data = reader.read(span, f"value {name!r}")
    try:
        return from_json(bytes(bytes_of(data)))
    except ValueError as error:
        raise CheckpointCorruptError(
            f"{reader.folder / span.file} has a value {name!r} that is refused: {error}"
        ) from error


def _hint(path: Path) -> str:
    if path.is_file():
        return (
            "; it is a file, and a checkpoint is a directory. What torch.save has written: "
            "model.load_state_dict(torch.load(path, map_location='cpu', mmap=True)) on every rank, "
            "which takes whole tensors. Safetensors: checkpoint.load_safetensors(path, model)"
        )
    if (path / ".metadata").is_file():
        return (
            "; it has the format of torch.distributed.checkpoint, which is a pickle: read it with "
            "vescale_fsdp.checkpoint.import_dcp(path, model, optimizer)"
        )
    stages = seal.stages_of(path)
    if stages:
        return f"; {stages[-1]} is a save that was not finished"
    inside = [child.name for child, _ in sealed(path)]
    if inside:
        return f"; it holds {', '.join(inside[:3])}: load latest({str(path)!r})"
    return f"; it has no {NAME}" if path.is_dir() else ""


def _check_files(path: Path, manifest: Manifest) -> None:
    for file, num_bytes in manifest.files.items():
        try:
            found = size_of(path / file)
        except OSError as error:
            raise CheckpointIncompleteError(f"{path / file} is missing") from error
        if found != num_bytes:
            raise CheckpointCorruptError(f"{path / file} has {found} bytes, expected {num_bytes}")


def next_sequence(root: Path) -> int:
    """Return the sequence number for a new checkpoint in this folder."""
    return 1 + max((found.sequence for _, found in sealed(root)), default=0)


def prune(
    root: Path, keep: int, names: str = "*", still: Callable[[], None] = lambda: None
) -> None:
    """Delete the oldest checkpoints in a folder until ``keep`` are left, at least two.

    Only sealed directories of this folder whose names match ``names`` are counted and deleted. A
    link is not counted; neither it nor its target is deleted. A checkpoint is renamed before its
    files are deleted, so that no incomplete checkpoint has the name of a complete one.
    """
    targets = {each.resolve() for each in root.iterdir() if each.is_symlink()}
    found = sorted((each for each in sealed(root, names) if not each[0].is_symlink()), key=_age)
    for path, _ in found[: -max(keep, FEWEST)]:
        if path.resolve() in targets:
            continue
        gone = path.with_name(f"{path.name}.tmp-{secrets.token_hex(16)}")
        still()  # there may be many, and other ranks wait (`Ranks.still`)
        try:
            path.rename(gone)
            seal.remove(gone)
        except OSError as error:
            _log.warning("%s could not be deleted: %s", path, error)


def _age(entry: tuple[Path, Seal]) -> tuple[int, str, str]:
    path, found = entry
    return found.sequence, found.created, path.name


_MOST_SHOWN = 20


def verify(
    path: str | os.PathLike[str], *, progress: Callable[[int, int], None] | None = None
) -> Manifest:
    """Check every byte of a checkpoint against its manifest. Not collective.

    Args:
        path: of the checkpoint.
        progress: called with the bytes read so far, and the total of all files.

    Returns:
        The manifest, which describes the contents.

    Cost: reads all files once, with 4 MiB of memory.

    Raises:
        CheckpointIncompleteError: it does not exist, or a file is missing.
        CheckpointCorruptError: bytes differ from those that were saved. The message names up to 20
            damaged files and tensors.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    done = 0

    def report(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress(done, manifest.num_bytes)

    faults: list[CheckpointCorruptError | CheckpointIncompleteError] = []
    broken: set[str] = set()  # files that are missing or have a wrong size
    with DataReader(folder, manifest.files, report, advice="") as reader:
        for span, label in sorted(manifest.spans(), key=lambda entry: _place(entry[0])):
            if span.file in broken:
                continue
            try:
                broken.add(span.file)
                reader.check_size(span.file, label)
                broken.remove(span.file)
                reader.check(span, label)
            except (CheckpointCorruptError, CheckpointIncompleteError) as error:
                faults.append(error)
    if faults:
        more = [f"and {len(faults) - _MOST_SHOWN} more"] if len(faults) > _MOST_SHOWN else []
        is_corrupt = any(isinstance(each, CheckpointCorruptError) for each in faults)
        kind = CheckpointCorruptError if is_corrupt else CheckpointIncompleteError
        raise kind("\n".join([*map(str, faults[:_MOST_SHOWN]), *more]))
    return manifest


def _place(span: Span) -> tuple[str, int]:
    return span.file, span.offset

"""Finds the complete checkpoints in a folder, checks them, and deletes old ones.

The order is that in which they were saved (`Seal.sequence`), not that of steps or clocks. Example:
a run has saved step 100, restarts from step 50 and saves step 60. Then step 60 is the latest.
"""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from vescale_fsdp.checkpoint import seal
from vescale_fsdp.checkpoint.files import DataReader, bytes_of, open_regular, size_of
from vescale_fsdp.checkpoint.manifest import NAME, SEAL_BYTES, Manifest, Seal, Span, from_json
from vescale_fsdp.errors import CheckpointCorruptError, CheckpointIncompleteError

FEWEST = 2  # checkpoints that `prune` leaves
_log = logging.getLogger(__name__)


def latest(root: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint in a folder, or None.

    Incomplete ones are skipped, and the log (``vescale_fsdp.checkpoint.sealed``, as warnings)
    says which and why: saves that did not finish, folders with a damaged manifest or
    without a data file. The data are not read; `load` and `verify` check them.

    Not collective: each rank searches for itself. Call it before the ranks begin to save.

    Cost: one read of 64 kB for each checkpoint there, and the manifest of the last one.
    """
    for path, _ in sorted(sealed(Path(root), say=True), key=_age, reverse=True):
        try:
            manifest = read_manifest(path)
            _check_files(path, manifest)
        except (CheckpointCorruptError, CheckpointIncompleteError) as error:
            _log.warning("skipped %s: %s", path, error)
            continue
        return path
    return None


def sealed(root: Path, *, say: bool = False) -> Iterator[tuple[Path, Seal]]:
    """Yield the complete checkpoints in a folder, in no order. With ``say``, log the others."""
    if not root.is_dir():
        return
    for path in sorted(root.iterdir()):
        if not path.is_dir():
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
    except FileNotFoundError as error:
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
    return ""


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


def prune(root: Path, keep: int) -> None:
    """Delete the oldest checkpoints in a folder until ``keep`` are left, at least two.

    Only sealed directories of this folder are counted and deleted. A link is not counted; neither
    it nor its target is deleted. A checkpoint is renamed before its files are deleted, so that no
    incomplete checkpoint has the name of a complete one.
    """
    targets = {each.resolve() for each in root.iterdir() if each.is_symlink()}
    found = sorted((each for each in sealed(root) if not each[0].is_symlink()), key=_age)
    for path, _ in found[: -max(keep, FEWEST)]:
        if path.resolve() in targets:
            continue
        gone = path.with_name(f"{path.name}.tmp-{secrets.token_hex(16)}")
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

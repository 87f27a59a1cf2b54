"""verify: is a checkpoint whole? Reads every byte, changes nothing."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from vescale_fsdp.checkpoint.disk.files import DataReader
from vescale_fsdp.checkpoint.disk.manifest import Manifest, Span
from vescale_fsdp.checkpoint.sealed.latest import read_manifest
from vescale_fsdp.errors import CheckpointCorruptError, CheckpointIncompleteError

_MOST_SHOWN = 20


def verify(
    path: str | os.PathLike[str], *, progress: Callable[[int, int], None] | None = None
) -> Manifest:
    """Check every byte of a checkpoint against its manifest. Not collective.

    Args:
        path: of the checkpoint.
        progress: is told the bytes that were read so far, and those of all files.

    Returns:
        The manifest: what is in the checkpoint.

    Cost: reads all files once, with 4 MiB of memory.

    Raises:
        CheckpointIncompleteError: it is not there, or a file is missing.
        CheckpointCorruptError: bytes are not those that were saved. The message names each file
            and what is damaged in it, up to 20.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    done = 0

    def report(num_bytes: int) -> None:
        nonlocal done
        done += num_bytes
        if progress is not None:
            progress(done, manifest.num_bytes)

    faults: list[str] = []
    broken: set[str] = set()  # files that are missing, or have another size
    is_corrupt = False
    with DataReader(folder, manifest.files, report, advice="") as reader:
        for span, label in sorted(manifest.spans(), key=lambda entry: _place(entry[0])):
            if span.file in broken:
                continue
            try:
                reader.check_size(span.file, label)
            except (CheckpointCorruptError, CheckpointIncompleteError) as error:
                broken.add(span.file)
                faults.append(str(error))
                is_corrupt |= isinstance(error, CheckpointCorruptError)
                continue
            try:
                reader.check(span, label)
            except CheckpointCorruptError as error:
                faults.append(str(error))
                is_corrupt = True
    if faults:
        more = [f"and {len(faults) - _MOST_SHOWN} more"] if len(faults) > _MOST_SHOWN else []
        kind = CheckpointCorruptError if is_corrupt else CheckpointIncompleteError
        raise kind("\n".join(faults[:_MOST_SHOWN] + more))
    return manifest


def _place(span: Span) -> tuple[str, int]:
    return span.file, span.offset

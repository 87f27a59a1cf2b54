"""The folder in host memory: what a host keeps for its processes that are killed and restarted.

::

    /dev/shm/vescale-fsdp-1000/
      host                              a random name; ranks that read the same name share a host
      gpt-5f3a9c21/                     a run, by the path of its folder on disk
        8c1d...(32)/                    and by the name in that folder
          000002-000000000120/          a generation: a sealed checkpoint, some files of it
            manifest.json
            rank-00000.bin              of a rank of this host
            rank-00002.bin              a copy, of a rank of another host
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import secrets
import shutil
import tempfile
from collections.abc import Iterable
from pathlib import Path

from vescale_fsdp.errors import (
    CheckpointCorruptError,
    CheckpointIncompleteError,
    CheckpointWriteError,
)
from vescale_fsdp.spi import (
    MANIFEST,
    DataReader,
    Manifest,
    Span,
    read_manifest,
    read_regular,
    size_of,
    write_errors,
)
from vescale_fsdp_elastic.choice import Age, Found

VARIABLE = "VESCALE_FSDP_MEMORY_DIR"
_SHARED = Path("/dev/shm")
_GENERATION = re.compile(r"([0-9]{6,})-([0-9]{12,})")
_NAME = re.compile(rb"[0-9a-f]{32}")
_RUN = "run"  # in the folder on disk
_log = logging.getLogger(__name__)


def default_root() -> Path:
    """``VESCALE_FSDP_MEMORY_DIR``, or a folder of this user in ``/dev/shm``."""
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    base = _SHARED if _SHARED.is_dir() else Path(tempfile.gettempdir())
    return base / f"vescale-fsdp-{os.getuid()}"


def name_in(file: Path) -> str:
    """Return the random name in a file. The first caller of all processes makes it.

    Raises:
        CheckpointWriteError: the file cannot be made.
    """
    with write_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
        if not file.exists():
            made = file.with_name(f"{file.name}.new-{secrets.token_hex(8)}")
            made.write_text(secrets.token_hex(16))
            with contextlib.suppress(FileExistsError):
                os.link(made, file)  # atomic, and fails if another process was faster
            made.unlink()
    found = read_regular(file, 64)
    if not _NAME.fullmatch(found):
        raise CheckpointCorruptError(
            f"{file} holds {found[:64]!r}, expected 32 hexadecimal digits: delete it"
        )
    return found.decode()


def run_name(directory: Path) -> str:
    """Return the name of the run that this folder on disk holds; make it if there is none.

    With a new folder a run has a new name, so that it does not find the memory of the old one.
    """
    return name_in(directory / _RUN)


class Memory:
    """The generations of one run on this host.

    Args:
        root: of all runs.
        directory: the run's folder on disk.
        run: its name (`run_name`).
    """

    def __init__(self, root: Path, directory: Path, run: str) -> None:
        path = str(directory.absolute())
        digest = hashlib.sha256(path.encode()).hexdigest()[:8]
        self._runs = root / f"{directory.absolute().name}-{digest}"
        self.folder = self._runs / run

    def make(self) -> None:
        """Make the folder. Deletes what earlier runs left whose folder had the same path."""
        with write_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for other in self._runs.iterdir():
            if other != self.folder:
                shutil.rmtree(other, ignore_errors=True)

    def path(self, age: Age) -> Path:
        """The folder of a generation."""
        return self.folder / f"{age.attempt:06d}-{age.step:012d}"

    def found(self) -> list[Found]:
        """Return the generations here. Sizes of files are checked, and the manifests' bytes."""
        made = []
        for path in sorted(self.folder.iterdir()):
            numbers = _GENERATION.fullmatch(path.name)
            if numbers is None:
                continue
            try:
                manifest = read_manifest(path)
            except (CheckpointCorruptError, CheckpointIncompleteError) as error:
                _log.info("skipped %s: %s", path, error)
                continue
            age = Age(int(numbers[1]), int(numbers[2]))
            if age == age_of(manifest):
                here = [file for file, size in manifest.files.items() if _has(path / file, size)]
                made.append(Found(age, manifest.seal.id, manifest.files, here))
        return made

    def keep(self, ages: Iterable[Age]) -> None:
        """Delete all other generations."""
        kept = {self.path(age) for age in ages}
        for path in list(self.folder.iterdir()):
            if _GENERATION.fullmatch(path.name) and path not in kept:
                _delete(path)

    def make_room(self, age: Age, kept: Iterable[Age]) -> None:
        """Delete all generations but ``kept``, for a new one of ``age``, which gets files of one.

        `reserve` and `write_items` write over them: new memory costs ten times as much. Only files
        of the same attempt are used, because its ranks write the same files each time.
        """
        remaining, path = [*kept, age], self.path(age)
        theirs = {self.path(each) for each in remaining}
        for other in sorted(self.folder.glob(f"{age.attempt:06d}-*")):
            if _GENERATION.fullmatch(other.name) and other not in theirs and not path.exists():
                with contextlib.suppress(FileNotFoundError):
                    (other / MANIFEST).unlink()  # first: it is incomplete from then on
                other.rename(path)
        self.keep(remaining)

    def delete(self) -> None:
        """Delete all of this run's memory on this host."""
        self.keep([])
        shutil.rmtree(self.folder, ignore_errors=True)
        with contextlib.suppress(OSError):
            self._runs.rmdir()


def age_of(manifest: Manifest) -> Age:
    """Return the age of a generation. Its sequence number is that of the attempt."""
    return Age(manifest.seal.sequence, manifest.seal.step or 0)


def whole(folder: Path, manifest: Manifest, files: Iterable[str]) -> list[str]:
    """Return those of the files whose bytes are those that were saved. Others are logged.

    Cost: reads the files once, with 1 MiB of memory.
    """
    spans: dict[str, list[tuple[Span, str]]] = {file: [] for file in files}
    for span, label in manifest.spans():
        if span.file in spans:
            spans[span.file].append((span, label))
    good = []
    for file, entries in spans.items():
        with DataReader(folder, manifest.files, advice="") as reader:
            try:
                reader.check_size(file, "a rank's part")
                for span, label in sorted(entries, key=lambda entry: entry[0].offset):
                    reader.check(span, label)
            except (CheckpointCorruptError, CheckpointIncompleteError) as error:
                _log.warning("treated as absent: %s", error)
                continue
        good.append(file)
    return good


def write_manifest(folder: Path, text: bytes) -> None:
    """Write the manifest of a generation, after its files. There is all of it or nothing.

    One that is there already is not written again: the memory may be full.
    """
    with contextlib.suppress(FileNotFoundError):
        if (folder / MANIFEST).read_bytes() == text:
            return
    new = folder / f"{MANIFEST}.new"
    with write_errors(folder / MANIFEST):
        new.write_bytes(text)
        new.replace(folder / MANIFEST)


def has_room(folder: Path, num_bytes: int) -> bool:
    """Whether there are so many free bytes."""
    return shutil.disk_usage(folder).free >= num_bytes


def reserve(file: Path, num_bytes: int) -> None:
    """Make a file of this size, whose memory is allocated. One that is there is used again.

    Raises:
        CheckpointWriteError: there is not so much memory.
    """
    with write_errors(file):
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            os.ftruncate(descriptor, num_bytes)
            # Without this, a write to the mapped file would end the process when memory is full.
            os.posix_fallocate(descriptor, 0, num_bytes)
        finally:
            os.close(descriptor)


def _has(file: Path, num_bytes: int) -> bool:
    try:
        return size_of(file) == num_bytes
    except (OSError, CheckpointCorruptError):
        return False


def _delete(path: Path) -> None:
    """Delete a generation: its manifest first, so that it is incomplete from then on."""
    with contextlib.suppress(FileNotFoundError):
        (path / MANIFEST).unlink()
    shutil.rmtree(path, ignore_errors=True)


def no_memory(error: CheckpointWriteError, root: Path) -> str:
    """Say how much host memory there is, for a log line."""
    try:
        free = shutil.disk_usage(root).free
    except OSError:
        return str(error)
    return f"{error}. {root} has {free >> 20} MiB free"

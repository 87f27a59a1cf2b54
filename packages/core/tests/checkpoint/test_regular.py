"""Something else in the place of a file of a checkpoint: an error that says so, and no wait."""

from __future__ import annotations

import logging
import os
import shutil
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from vescale_fsdp import CheckpointCorruptError, VeScaleError, checkpoint
from vescale_fsdp.checkpoint.files import open_regular, read_regular, size_of
from vescale_fsdp.testing import run_ranks

from .helpers import make, train

pytestmark = pytest.mark.timeout(60)  # a FIFO that is opened to be read waits for ever

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
FILES = [
    ("sealed", "manifest.json"),
    ("sealed", "rank-00000.bin"),
    ("dcp", ".metadata"),
    ("dcp", "__0_0.distcp"),
    ("safetensors", WEIGHTS),
    ("parts", INDEX),
    ("parts", "model-00001-of-00002.safetensors"),
]


def save_all(root: Path) -> None:
    model, optimizer = make()
    train(model, optimizer, range(1))
    checkpoint.save(root / "sealed", model, optimizer, extra={"step": 1})
    checkpoint.export_dcp(root / "dcp", model, optimizer)
    checkpoint.save_safetensors(root / "safetensors", model)
    checkpoint.save_safetensors(root / "parts", model, max_file_bytes=200)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in each format."""
    root = tmp_path_factory.mktemp("saved")
    run_ranks(save_all, 1, root)
    return root


def replaced(saved: Path, root: Path, folder: str, file: str) -> Path:
    """A copy of a checkpoint with a FIFO in the place of a file."""
    shutil.copytree(saved / folder, root / folder)
    if "-of-" in file:
        file = min(path.name for path in (root / folder).glob("model-*"))
    (root / folder / file).unlink()
    os.mkfifo(root / folder / file)
    return root / folder


def load_all(root: Path) -> dict[tuple[str, str], str]:
    loads: dict[str, Callable[..., object]] = {
        "sealed": checkpoint.load,
        "dcp": checkpoint.import_dcp,
        "safetensors": checkpoint.load_safetensors,
        "parts": checkpoint.load_safetensors,
    }
    found = {}
    for number, (folder, file) in enumerate(FILES):
        with pytest.raises(VeScaleError) as error:
            loads[folder](root / str(number) / folder, make(seed=5)[0])
        found[folder, file] = f"{type(error.value).__name__}: {error.value}"
    return found


def test_no_load_waits_for_a_fifo(saved: Path, tmp_path: Path) -> None:
    for number, (folder, file) in enumerate(FILES):
        replaced(saved, tmp_path / str(number), folder, file)
    (found,) = run_ranks(load_all, 1, tmp_path, timeout_s=30)
    for place in FILES:
        assert found[place].startswith("CheckpointCorruptError"), place
        assert "is a FIFO, expected a regular file" in found[place], place


@pytest.mark.parametrize(("folder", "file"), FILES)
def test_no_reader_waits_for_a_fifo(folder: str, file: str, saved: Path, tmp_path: Path) -> None:
    place = replaced(saved, tmp_path, folder, file)
    with pytest.raises(CheckpointCorruptError, match="is a FIFO, expected a regular file"):
        checkpoint.read(place)
    with pytest.raises(CheckpointCorruptError, match="is a FIFO, expected a regular file"):
        checkpoint.convert(place, tmp_path / "target", to="safetensors")


@pytest.mark.parametrize("file", ["manifest.json", "rank-00000.bin"])
def test_verify_refuses_a_fifo_and_latest_passes_over_it(
    file: str, saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    place = replaced(saved, tmp_path, "sealed", file)
    with pytest.raises(CheckpointCorruptError, match=f"{file}.* is a FIFO, expected a regular"):
        checkpoint.verify(place)
    with caplog.at_level(logging.WARNING):
        assert checkpoint.latest(tmp_path) is None
    assert f"{place / file} is a FIFO" in caplog.text


def test_a_file_is_opened_only_if_it_is_regular(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(tmp_path / "socket"))
        os.mkfifo(tmp_path / "fifo")
        (tmp_path / "link").symlink_to("fifo")
        (tmp_path / "folder").mkdir()
        (tmp_path / "zero").symlink_to("/dev/zero")
        kinds = {
            "socket": "a socket",
            "fifo": "a FIFO",
            "link": "a FIFO",
            "folder": "a directory",
            "zero": "a device",
        }
        for name, kind in kinds.items():
            for use in (open_regular, size_of):
                with pytest.raises(CheckpointCorruptError, match=rf"{name} \(for x\) is {kind}"):
                    use(tmp_path / name, "x")


def test_a_file_that_is_too_long_or_begins_otherwise_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"abcdef")
    (tmp_path / "link").symlink_to("file")
    assert read_regular(tmp_path / "link", 6, b"ab") == b"abcdef"
    with pytest.raises(CheckpointCorruptError, match="has 6 bytes, expected 5 at most"):
        read_regular(path, 5)
    with pytest.raises(CheckpointCorruptError, match=r"begins with b'ab', expected b'bc'"):
        read_regular(path, 6, b"bc")
    with pytest.raises(FileNotFoundError):
        read_regular(tmp_path / "none", 6)


@pytest.mark.parametrize("file", [("dcp", ".metadata"), ("parts", INDEX), ("safetensors", WEIGHTS)])
def test_a_sparse_file_of_a_tebibyte_is_refused_at_once(
    file: tuple[str, str], saved: Path, tmp_path: Path
) -> None:
    shutil.copytree(saved / file[0], tmp_path / file[0])
    with open(tmp_path / file[0] / file[1], "wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(CheckpointCorruptError, match="refused"):
        checkpoint.read(tmp_path / file[0])

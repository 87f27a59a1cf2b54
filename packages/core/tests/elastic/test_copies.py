"""Copies from rank to rank, while the network is idle."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vescale_fsdp import CheckpointWriteError, VeScaleError, compat, waiting
from vescale_fsdp.checkpoint.ranks import all_ranks
from vescale_fsdp.elastic import copies, memory
from vescale_fsdp.elastic.choice import Transfer
from vescale_fsdp.elastic.copies import Copying
from vescale_fsdp.testing import run_ranks

SIZE = (1 << 20) + 5  # two reads, five pieces
NAMES = ("a", "b")


def made(root: Path, transfers: list[Transfer]) -> tuple[Path, Copying]:
    """The folder of this rank, with the files that it sends."""
    ranks = all_ranks()
    folder = root / str(ranks.rank)
    folder.mkdir()
    for each in transfers:
        if each.sender == ranks.rank:
            (folder / each.file).write_bytes(each.file.encode() * each.num_bytes)
    return folder, Copying(ranks, folder, transfers)


def check(folder: Path, files: list[str]) -> None:
    for file in files:
        assert (folder / file).read_bytes() == file.encode() * SIZE


def copied(root: Path, patience_s: float) -> tuple[float, list[str]]:
    """Rank 0 sends two files to rank 1, and has begun a collective that rank 1 joins later."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    folder, copying = made(root, [Transfer(name, SIZE, 0, 1) for name in NAMES])
    number = torch.ones(1)
    work = compat.all_reduce(number, group) if rank == 0 else None
    assert waiting.is_network_busy() == (rank == 0)
    began = time.monotonic()
    copying.carry_out("a test", lambda files: check(folder, files), patience_s)
    seconds = time.monotonic() - began
    if work is None:
        work = compat.all_reduce(number, group)
    work.wait()
    assert not waiting.is_network_busy()
    dist.barrier()
    return seconds, copying.files


@pytest.mark.parametrize("patience_s", [0.0, 0.7])
def test_files_arrive_and_let_collectives_go_first(tmp_path: Path, patience_s: float) -> None:
    """Rank 1 joins the collective after the copies, so that patience ends without an idle time."""
    results = run_ranks(copied, 2, tmp_path, patience_s)
    assert all(seconds >= patience_s for seconds, _ in results)
    assert [files for _, files in results] == [[], ["a", "b"]]


def copied_to_all(root: Path) -> tuple[list[str], tuple[int, int]]:
    """Each of three ranks sends a file to both others."""
    names = "abc"
    transfers = [Transfer(names[s], SIZE, s, r) for s in range(3) for r in range(3) if r != s]
    folder, copying = made(root, transfers)
    copying.carry_out("a test", lambda files: check(folder, files))
    return sorted(copying.files), copying.num_bytes


def test_each_rank_sends_to_several_and_receives_from_several(tmp_path: Path) -> None:
    results = run_ranks(copied_to_all, 3, tmp_path)
    assert [files for files, _ in results] == [["b", "c"], ["a", "c"], ["a", "b"]]
    assert all(sizes == (2 * SIZE, 2 * SIZE) for _, sizes in results)


def fails(root: Path, fault: str) -> str:
    """Rank 0 sends to rank 1. Something is wrong on one of them; both raise."""
    rank = dist.get_rank()
    folder, copying = made(root, [Transfer("a", SIZE, 0, 1)])

    def confirm(files: list[str]) -> None:
        if files and fault == "damaged":
            raise CheckpointWriteError("it is damaged")

    if rank == 0 and fault == "cut":  # the file has become shorter: nothing more is sent
        (folder / "a").write_bytes(b"a")
    if rank == 1 and fault == "memory":
        folder.rmdir()
    if rank == 1 and fault == "closed":
        receive = copies._receive

        def receives(*args: Any) -> None:
            copying.close()  # another thread has given up
            receive(*args)

        copies._receive = receives
    with pytest.raises(VeScaleError) as caught:
        copying.carry_out("a test", confirm)
    assert all(not stream._thread.is_alive() for stream in copying._streams)
    dist.barrier()
    return str(caught.value)


@pytest.mark.parametrize(
    ("fault", "text"),
    [
        ("damaged", "it is damaged"),
        ("cut", "was cut"),
        ("memory", "No such file"),
        ("closed", "was cut"),
    ],
)
def test_all_ranks_raise_if_one_fails(tmp_path: Path, fault: str, text: str) -> None:
    assert all(text in each for each in run_ranks(fails, 2, tmp_path, fault))


def test_memory_is_reserved_before_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    memory.reserve(file, 4096)
    assert file.stat().st_blocks * 512 >= 4096
    with pytest.raises(CheckpointWriteError):
        memory.reserve(tmp_path / "none" / "file", 1)

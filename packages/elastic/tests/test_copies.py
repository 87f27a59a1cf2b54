"""Copies from rank to rank, while the network is idle."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist

from vescale_fsdp import CheckpointWriteError, VeScaleError
from vescale_fsdp.ranks import everyone
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_elastic import idle, memory
from vescale_fsdp_elastic.choice import Transfer
from vescale_fsdp_elastic.copies import Copying

SIZE = (1 << 20) + 5  # two reads, five pieces
NAMES = ("a", "b")


def made(root: Path, transfers: list[Transfer]) -> tuple[Path, Copying]:
    """The folder of this rank, with the files that it sends."""
    ranks = everyone()
    folder = root / str(ranks.rank)
    folder.mkdir()
    for each in transfers:
        if each.sender == ranks.rank:
            (folder / each.file).write_bytes(each.file.encode() * each.num_bytes)
    return folder, Copying(ranks, folder, transfers)


@contextlib.contextmanager
def unreceived() -> Iterator[socket.socket]:
    """A connection of this process with bytes in its queue. Yields the other end."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        socket.create_connection(server.getsockname()) as sender,
        server.accept()[0] as receiver,
    ):
        sender.setblocking(False)
        with contextlib.suppress(BlockingIOError):
            while True:
                sender.send(bytes(1 << 20))
        yield receiver


def receive_all(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        while connection.recv(1 << 20):
            pass


def check(folder: Path, files: list[str]) -> None:
    for file in files:
        assert (folder / file).read_bytes() == file.encode() * SIZE


def copied(root: Path, patience_s: float) -> tuple[float, list[str]]:
    """Rank 0 sends two files to rank 1, and has sent something that nobody receives."""
    rank = dist.get_rank()
    folder, copying = made(root, [Transfer(name, SIZE, 0, 1) for name in NAMES])
    with unreceived() if rank == 0 else contextlib.nullcontext():
        began = time.monotonic()
        copying.carry_out("a test", lambda files: check(folder, files), patience_s)
        return time.monotonic() - began, copying.files


@pytest.mark.parametrize("patience_s", [0.0, 0.7])
def test_files_arrive_and_let_others_go_first(tmp_path: Path, patience_s: float) -> None:
    results = run_ranks(copied, 2, tmp_path, patience_s)
    assert all(seconds >= patience_s for seconds, _ in results)
    assert [files for _, files in results] == [[], ["a", "b"]]


def test_an_idle_network_is_used_at_once() -> None:
    with unreceived() as receiver:
        connections = idle.Connections()
        assert connections._is_sending()
        end = time.monotonic() + 30.0
        threading.Thread(target=receive_all, args=(receiver,), daemon=True).start()
        connections.wait_idle(end, threading.Event())
        assert time.monotonic() < end
        assert not connections._is_sending()
    assert not connections._is_sending(), "those that are closed send nothing"


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
        ("memory", "the folder is gone"),
    ],
)
def test_all_ranks_raise_if_one_fails(tmp_path: Path, fault: str, text: str) -> None:
    texts = run_ranks(fails, 2, tmp_path, fault)
    assert [text in each for each in texts] == [True, True], texts


def given_up(root: Path) -> str:
    """Rank 0 waits for an idle network, and another thread of each rank gives up."""
    _, copying = made(root, [Transfer("a", SIZE, 0, 1)])
    with unreceived():
        threading.Timer(0.3, copying.close).start()
        with pytest.raises(CheckpointWriteError) as caught:
            copying.carry_out("a test", lambda _: None, patience_s=300.0)
    return str(caught.value)


def test_copies_under_way_can_be_ended(tmp_path: Path) -> None:
    assert all("was cut" in each for each in run_ranks(given_up, 2, tmp_path))


def test_memory_is_reserved_before_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    memory.reserve(file, 4096)
    assert file.stat().st_blocks * 512 >= 4096
    with pytest.raises(CheckpointWriteError):
        memory.reserve(tmp_path / "none" / "file", 1)

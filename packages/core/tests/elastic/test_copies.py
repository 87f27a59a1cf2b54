"""Copies from rank to rank, while the network is idle."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from vescale_fsdp import CheckpointWriteError, compat, waiting
from vescale_fsdp.elastic import memory
from vescale_fsdp.elastic.choice import Transfer
from vescale_fsdp.elastic.copies import Copying
from vescale_fsdp.testing import run_ranks

SIZE = (2 << 20) + 5  # three messages


def copied(root: Path, patience_s: float) -> tuple[float, bytes]:
    """Rank 0 sends two files to rank 1, and has begun a collective that rank 1 joins later."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    copies = compat.new_gloo_group()
    assert copies is not None
    folder = root / str(rank)
    folder.mkdir()
    if rank == 0:
        for name in ("a", "b"):
            (folder / name).write_bytes(name.encode() * SIZE)
    transfers = [Transfer(name, SIZE, 0, 1) for name in ("a", "b")]
    copying = Copying(rank, folder, transfers)
    copying.reserve()
    number = torch.ones(1)
    work = compat.all_reduce(number, group) if rank == 0 else None
    assert waiting.is_network_busy() == (rank == 0)
    began = time.monotonic()
    copying.carry_out(copies, patience_s)
    seconds = time.monotonic() - began
    if work is None:
        work = compat.all_reduce(number, group)
    work.wait()
    assert not waiting.is_network_busy()
    dist.barrier()
    return seconds, (folder / "a").read_bytes() + (folder / "b").read_bytes()


@pytest.mark.parametrize("patience_s", [0.0, 0.7])
def test_files_arrive_and_let_collectives_go_first(tmp_path: Path, patience_s: float) -> None:
    """Rank 1 joins the collective after the copies, so that patience ends without an idle time."""
    results = run_ranks(copied, 2, tmp_path, patience_s)
    for seconds, data in results:
        assert data == b"a" * SIZE + b"b" * SIZE
        assert seconds >= patience_s


def test_memory_is_reserved_before_it_is_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    memory.reserve(file, 4096)
    assert file.stat().st_blocks * 512 >= 4096
    with pytest.raises(CheckpointWriteError):
        memory.reserve(tmp_path / "none" / "file", 1)

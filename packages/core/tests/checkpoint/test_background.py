"""A save in the background that fails is an error of its own: the training goes on."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale_fsdp import RankMismatchError, checkpoint, fully_shard
from vescale_fsdp.checkpoint import parts, seal
from vescale_fsdp.ranks import Ranks, everyone
from vescale_fsdp.testing import run_ranks


def hangs_in_the_background(folder: Path) -> tuple[float, str]:
    model = nn.Linear(4, 4)
    fully_shard(model)
    everyone().barrier("the beginning")
    os.environ["VESCALE_FSDP_TIMEOUT_S"] = "2"
    write, goes_on = parts.write_items, threading.Event()

    def hang(*args: Any) -> Any:
        assert goes_on.wait(60)
        return write(*args)

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(parts, "write_items", hang)
        handle, begun = checkpoint.save(folder / "first", model, async_=True), time.monotonic()
        while not everyone().from_first("the end", lambda: handle.is_done):
            model(torch.ones(2, 4)).sum().backward()
        seconds = time.monotonic() - begun
        goes_on.set()
        with pytest.raises(RankMismatchError) as caught:
            handle.wait()
    model(torch.ones(2, 4)).sum().backward()
    checkpoint.save(folder / "second", model)
    assert not (folder / "first").exists()
    assert checkpoint.latest(folder) == folder / "second"
    return seconds, str(caught.value)


def test_the_training_goes_on_if_a_rank_is_silent_in_a_background_save(tmp_path: Path) -> None:
    for seconds, text in run_ranks(hangs_in_the_background, 3, tmp_path, timeout_s=60):
        assert seconds < 15
        assert "rank 1 did not come to the save of" in text
        assert "first within 2 s" in text


def test_a_rank_that_deletes_old_checkpoints_says_that_it_still_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    remove = seal.remove
    monkeypatch.setattr(Ranks, "still", lambda _: calls.append("still"))
    monkeypatch.setattr(seal, "remove", lambda path: (calls.append("remove"), remove(path)))
    for number in range(5):
        checkpoint.save(tmp_path / str(number), nn.Linear(1, 1))
    calls.clear()
    checkpoint.save(tmp_path / "last", nn.Linear(1, 1), keep_last=2)
    assert calls[-8:] == ["still", "remove"] * 4

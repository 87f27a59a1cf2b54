"""States that are written, sent and loaded."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import torch
from torch import nn

from vescale_fsdp_elastic import memory
from vescale_fsdp_elastic.hsdp.catching_up import State
from vescale_fsdp_elastic.hsdp.inside import Inside


def test_what_an_interrupted_transfer_has_left_is_not_loaded(tmp_path: Path) -> None:
    """It may be of a later step: all replicas were lost, and an earlier state won."""
    model = nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    sent, inside = tmp_path / "sent", Inside()
    state = State(model, optimizer, {}, sent, tmp_path / "received", tmp_path / "memory")

    def arrive(folder: Path, name: str) -> bytes:
        (folder / name).write_bytes((sent / name).read_bytes())
        return text

    for step in (9, 5):
        nn.init.constant_(model.weight, step)
        text = state.write(inside, {"step": step})
        nn.init.zeros_(model.weight)
        with mock.patch.object(memory.Memory, "delete"):
            assert state.load(inside, step, arrive) == {"step": step}
        assert model.weight.unique().tolist() == [step]
    assert state.load(inside, 5, lambda folder, name: None) is None

"""Buffers that differ between ranks: all formats keep those of the first rank."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale_fsdp import checkpoint, fully_shard
from vescale_fsdp.testing import run_ranks

FORMATS = {
    "sealed": (checkpoint.save, checkpoint.load),
    "dcp": (checkpoint.export_dcp, checkpoint.import_dcp),
    "safetensors": (checkpoint.save_safetensors, checkpoint.load_safetensors),
}


def made() -> nn.Sequential:
    torch.manual_seed(0)
    norms = [module for _ in range(4) for module in (nn.Linear(8, 8), nn.BatchNorm1d(8))]
    model = nn.Sequential(*norms)
    fully_shard(model, broadcast_buffers=True)  # type: ignore[call-overload]
    return model


def saved_and_loaded(kind: str, path: str) -> dict[str, torch.Tensor]:
    save, load = FORMATS[kind]
    model, other = made(), made()
    torch.manual_seed(dist.get_rank())
    for _ in range(2):
        model(torch.randn(4, 8)).sum().backward()
    own = {name: buffer.clone() for name, buffer in model.named_buffers()}
    save(path, model)  # type: ignore[operator]
    load(path, other)  # type: ignore[operator]
    found = dict(other.named_buffers())
    if dist.get_rank() == 0:
        assert all(torch.equal(found[name], own[name]) for name in own)
    else:
        assert not torch.equal(found["1.running_mean"], own["1.running_mean"])
    return found


@pytest.mark.parametrize("kind", FORMATS)
def test_they_are_those_of_the_first_rank(kind: str, tmp_path: Path) -> None:
    first, second = run_ranks(saved_and_loaded, 2, kind, str(tmp_path / "saved"))
    assert all(torch.equal(first[name], second[name]) for name in first)

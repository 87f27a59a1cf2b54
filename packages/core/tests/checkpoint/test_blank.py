"""A model that was made on meta: what has no values is filled, or named."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from vescale_fsdp import (
    CheckpointCorruptError,
    CheckpointIncompleteError,
    checkpoint,
    fully_shard,
)
from vescale_fsdp.testing import run_ranks

from ..allocations import peak_of, through_the_allocator, traced

WIDTH, NUM_BLOCKS = 256, 8


class Rotary(nn.Module):
    """Frequencies that are not saved, as transformers and others have them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("inv_freq", torch.arange(1.0, 5.0).reciprocal(), persistent=False)

    def reset_parameters(self) -> None:
        self.inv_freq.copy_(torch.arange(1.0, 5.0).reciprocal())


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotary = Rotary()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS))
        self.tied = nn.Linear(WIDTH, WIDTH, bias=False)
        self.tied.weight = self.blocks[0].weight
        self.register_buffer("seen", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.rotary.inv_freq.sum() + self.seen.sum()
        for block in self.blocks:
            x = block(x)
        return self.tied(x)


def made() -> Model:
    torch.manual_seed(3)
    return Model()


def sharded_on_meta() -> nn.Module:
    with torch.device("meta"):
        model = Model()
    model.tied.weight = model.blocks[0].weight
    for block in model.blocks[1:]:
        fully_shard(block)
    fully_shard(model)
    model.to_empty(device="cpu")
    return model


def save(kind: str, root: Path, model: nn.Module) -> Callable[..., Any]:
    """Save whole; how to load it."""
    writers: dict[str, Any] = {
        "safetensors": (checkpoint.save_safetensors, checkpoint.load_safetensors),
        "sealed": (checkpoint.save, checkpoint.load),
        "dcp": (checkpoint.export_dcp, checkpoint.import_dcp),
    }
    write, read = writers[kind]
    write(root / kind, model)
    return lambda other, **options: read(root / kind, other, **options)


def fill(root: Path) -> None:
    x = torch.ones(2, WIDTH)
    for kind in ("safetensors", "sealed", "dcp"):
        model = fully_shard(made())
        load = save(kind, root, model)
        other = sharded_on_meta()
        with pytest.raises(CheckpointIncompleteError, match=r"1 tensors of .*: rotary\.inv_freq\."):
            load(other)
        with pytest.raises(CheckpointIncompleteError, match=r"rotary\.inv_freq"):
            load(other)  # nothing has changed
        load(other, strict=False)  # that is allowed by name
        other.rotary.reset_parameters()
        load(other)
        assert torch.equal(other(x), model(x)), kind
        load(other)  # now it has values to keep
        third = sharded_on_meta()
        third.rotary.inv_freq = other.rotary.inv_freq.clone()  # another tensor has values
        third.tied.weight.data.zero_()  # these are written over
        load(third)
        assert torch.equal(third(x), other(x))


def test_what_nothing_fills_is_named(tmp_path: Path) -> None:
    run_ranks(fill, 2, tmp_path)


def fail_and_try_again(root: Path) -> None:
    model = fully_shard(made())
    load = save("safetensors", root, model)
    other = sharded_on_meta()
    other.rotary.reset_parameters()
    file = root / "safetensors" / "model.safetensors"
    data = file.read_bytes()
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        file.write_bytes(data[: len(data) // 2])
    torch.distributed.barrier()
    with pytest.raises(CheckpointCorruptError):
        load(other)
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        file.write_bytes(data)
    torch.distributed.barrier()
    load(other)
    x = torch.ones(2, WIDTH)
    assert torch.equal(other(x), model(x))


def test_a_load_that_failed_may_be_tried_again(tmp_path: Path) -> None:
    run_ranks(fail_and_try_again, 2, tmp_path)


def peaks(root: Path) -> list[float]:
    """The most memory of a load beside the shards, in shards."""
    found = []
    shard = NUM_BLOCKS * (WIDTH * WIDTH + WIDTH) * 4 / 2
    with through_the_allocator():
        for kind in ("safetensors", "sealed"):
            load = save(kind, root, fully_shard(made()))
            other = sharded_on_meta()
            other.rotary.reset_parameters()
            peak, _ = peak_of(traced(lambda load=load, other=other: load(other)))
            found.append(peak / shard)
    return found


def test_a_load_into_a_model_of_meta_needs_one_tensor_beside_its_shards(tmp_path: Path) -> None:
    for rank in run_ranks(peaks, 2, tmp_path):
        assert max(rank) < 0.2 + 2 / NUM_BLOCKS, rank  # two ranks share a tensor

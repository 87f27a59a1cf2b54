"""HuggingFaceStorageWriter and HuggingFaceStorageReader of torch.distributed.checkpoint.

A rank's part of a parameter may be several boxes. Torch's safetensors files hold one per name, so
`SavePlanner` moves such a parameter to ``Shard(0)``, and without it the writer raises.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.checkpoint import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.api import CheckpointException

from vescale_fsdp import Granularity, fully_shard
from vescale_fsdp.checkpoint import SavePlanner
from vescale_fsdp.testing import run_ranks


class Net(nn.Module):
    """Parameters of 1 to 4 dimensions; no number of rows is divisible by 2 or 3."""

    def __init__(self, first: float = 1.0) -> None:
        super().__init__()
        self.linear = nn.Linear(13, 7)
        self.conv = nn.Conv2d(3, 5, 3)
        self.cube = nn.Parameter(torch.zeros(3, 5, 7, dtype=torch.bfloat16))
        self.register_buffer("mean", torch.zeros(3))
        for value in self.state_dict().values():  # different numbers, small enough for bfloat16
            value.copy_(torch.arange(first, first + value.numel()).view(value.shape))


def sharded(net: nn.Module, granularity: Granularity | None = None) -> nn.Module:
    fully_shard(net.linear, granularity=granularity)
    return fully_shard(net, granularity=granularity)


def whole(net: nn.Module) -> dict[str, Tensor]:
    state = net.state_dict()
    return {name: x if name == "mean" else x.full_tensor() for name, x in state.items()}


def assert_state(found: dict[str, Tensor]) -> None:
    expected = Net().state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


def save(path: Path, consolidate: bool, granularity: Granularity | None = None) -> None:
    net = sharded(Net(), granularity)
    files = {name: 1 + number % 2 for number, name in enumerate(net.state_dict())}
    writer = HuggingFaceStorageWriter(
        str(path), files, thread_count=2, save_distributed=True, enable_consolidation=consolidate
    )
    dcp.save(net.state_dict(), storage_writer=writer, planner=SavePlanner())


def load(*paths: Path) -> None:
    for path in paths:
        net = sharded(Net(first=-300.0))
        dcp.load(net.state_dict(), storage_reader=HuggingFaceStorageReader(str(path)))
        assert_state(whole(net))


def load_plain(path: Path) -> None:
    net = Net(first=-300.0)
    dcp.load(net.state_dict(), storage_reader=HuggingFaceStorageReader(str(path)), no_dist=True)
    assert_state(net.state_dict())


def weights(path: Path) -> dict[str, Tensor]:
    files = sorted(path.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_files_have_all_of_each_parameter(tmp_path: Path, world_size: int) -> None:
    run_ranks(save, world_size, tmp_path, True)
    assert_state(weights(tmp_path))
    shards = tmp_path / "sharded"
    load_plain(tmp_path)
    load_plain(shards)
    run_ranks(load, 5 - world_size, tmp_path, shards)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_without_consolidation(tmp_path: Path) -> None:
    run_ranks(save, 3, tmp_path, False)
    load_plain(tmp_path)
    run_ranks(load, 2, tmp_path)


class Number(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))


def what_is_lost(path: Path) -> None:
    """The writer raises, on all ranks and before it writes, where it would lose a part."""

    def refused(model: nn.Module, words: str, planner: bool = False, **options: bool) -> None:
        writer = HuggingFaceStorageWriter(str(path), **options)
        with pytest.raises(CheckpointException, match=words):
            dcp.save(
                model.state_dict(),
                storage_writer=writer,
                planner=SavePlanner() if planner else None,
            )
        assert not [*path.rglob("*.safetensors")]
        dist.barrier()

    net = sharded(Net())
    refused(
        net, r"several boxes.*planner=vescale_fsdp\.checkpoint\.SavePlanner", save_distributed=True
    )
    refused(sharded(Net(), Granularity.rows(1)), "several ranks|several boxes")
    refused(
        fully_shard(Number()),
        "no dimensions",
        planner=True,
        save_distributed=True,
        enable_consolidation=True,
    )


def test_what_would_be_lost_is_refused(tmp_path: Path) -> None:
    run_ranks(what_is_lost, 2, tmp_path)


def save_into_one_file(path: Path) -> None:
    net = sharded(Net())
    full = whole(net)
    if dist.get_rank() == 0:
        writer = HuggingFaceStorageWriter(str(path))
        with pytest.warns(match="a single process"):
            dcp.save(full, storage_writer=writer, no_dist=True)
        assert_state(weights(path))


def test_one_rank_writes_the_whole(tmp_path: Path) -> None:
    run_ranks(save_into_one_file, 2, tmp_path)


def test_files_of_others_are_loaded(tmp_path: Path) -> None:
    first = Net().state_dict()
    second = {name: first.pop(name) for name in ("cube", "linear.weight")}
    save_file(first, tmp_path / "model-00001-of-00002.safetensors")
    save_file(second, tmp_path / "model-00002-of-00002.safetensors")
    run_ranks(load, 3, tmp_path)

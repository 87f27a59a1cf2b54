"""Consolidated safetensors of sharded models, written and read by each rank's own part."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_fsdp import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointIncompleteError,
    CheckpointMismatchError,
    CheckpointValueError,
    CheckpointWriteError,
    Granularity,
    RankMismatchError,
    checkpoint,
    fully_shard,
)
from vescale_fsdp.checkpoint.files import DataReader
from vescale_fsdp.checkpoint.loading import Arrival
from vescale_fsdp.testing import run_ranks

from .helpers import State
from .test_meshes import LAYOUTS, Pair
from .test_meshes import make as make_pair

NAME = "model.safetensors"


class Tied(nn.Module):
    """A head that shares the embedding's weight, a buffer that is saved, and one that is not."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.up = nn.Linear(width, 5)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.tensor([3, 4]))
        self.register_buffer("scratch", torch.ones(2), persistent=False)


def make(seed: int, width: int = 6) -> Tied:
    torch.manual_seed(seed)
    model = Tied(width)
    if dist.is_initialized():
        fully_shard(model.up, granularity=Granularity.elements(1))
        fully_shard(model)
    return model


def whole(model: nn.Module) -> State:
    state = {name: param.full_tensor().detach() for name, param in model.named_parameters()}
    return state | {name: buffer.clone() for name, buffer in model.named_buffers()}


def read(path: Path) -> State:
    """What the safetensors package reads."""
    return pytest.importorskip("safetensors.torch").load_file(path)  # type: ignore[no-any-return]


def assert_equal(found: State, expected: State) -> None:
    for name, value in expected.items():
        assert found[name].dtype == value.dtype, name
        assert torch.equal(found[name], value), name


# Layouts


def save_pairs(root: Path) -> None:
    for layout in LAYOUTS:
        model, _ = make_pair(layout, seed=1)
        checkpoint.save_safetensors(root / layout.__name__, model)


def load_pairs(root: Path) -> None:
    torch.manual_seed(1)
    expected = dict(Pair().named_parameters())
    for layout in LAYOUTS:
        model, _ = make_pair(layout, seed=2)
        assert checkpoint.load_safetensors(root / "flat", model) == ([], [])
        assert_equal(whole(model), {name: value.detach() for name, value in expected.items()})


def test_every_layout_writes_the_same_file_and_loads_it(tmp_path: Path) -> None:
    run_ranks(save_pairs, 4, tmp_path)
    torch.manual_seed(1)
    files = {layout.__name__: (tmp_path / layout.__name__ / NAME) for layout in LAYOUTS}
    assert_equal(read(files["flat"]), Pair().state_dict())
    assert {name: file.read_bytes() for name, file in files.items()} == dict.fromkeys(
        files, files["flat"].read_bytes()
    )
    for world_size in (2, 4):
        run_ranks(load_pairs, world_size, tmp_path)


# Each rank its own


@contextmanager
def counted() -> Iterator[list[int]]:
    """The sizes of all writes into places, and of all reads of data."""
    sizes: list[int] = []
    pwrite, fill = os.pwrite, DataReader._fill

    def write(file: int, data: memoryview, offset: int) -> int:
        sizes.append(len(data))
        return pwrite(file, data, offset)

    def read(self: DataReader, stream: Any, into: memoryview, *rest: Any) -> None:
        sizes.append(len(into))
        fill(self, stream, into, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "pwrite", write)
        patch.setattr(DataReader, "_fill", read)
        yield sizes


def count(root: Path) -> dict[str, tuple[int, int, int]]:
    """For each layout the bytes of this rank's elements, those it writes, and those it reads."""
    found = {}
    for layout in LAYOUTS:
        model, _ = make_pair(layout, seed=1)
        held = sum(param.to_local().numel() * 4 for param in model.parameters())
        with counted() as written:
            checkpoint.save_safetensors(root / layout.__name__, model)
        with counted() as num_read:
            checkpoint.load_safetensors(root / layout.__name__, model)
        found[layout.__name__] = held, sum(written), sum(num_read)
    return found


def test_a_rank_reads_the_bytes_of_its_elements_and_writes_each_once(tmp_path: Path) -> None:
    """A pair has 6 * 7 + 7 + 7 * 6 + 6 = 97 elements of 4 bytes."""
    ranks = run_ranks(count, 4, tmp_path)
    for name in ("flat", "hybrid", "tensor_parallel", "even"):
        for held, written, num_read in (rank[name] for rank in ranks):
            assert num_read == held
            assert written <= held
        assert sum(rank[name][1] for rank in ranks) == 388
    assert sum(rank["flat"][2] for rank in ranks) == 388
    assert sum(rank["hybrid"][2] for rank in ranks) == 776  # there are two replicas


# Names and dtypes


def save_tied(root: Path) -> State:
    model = make(0)
    checkpoint.save_safetensors(root / "one", model)
    options: dict[str, Any] = {"dtype": torch.bfloat16, "metadata": {"who": "me"}}
    checkpoint.save_safetensors(root / "bf16", model, max_file_bytes=100, **options)
    return whole(model)


def load_tied(root: Path) -> tuple[State, State]:
    model = make(1)
    assert checkpoint.load_safetensors(root / "one" / NAME, model) == ([], [])
    first = whole(model)
    checkpoint.load_safetensors(root / "bf16", model)
    return first, whole(model)


def test_tied_names_are_written_once_and_buffers_as_the_model_saves_them(tmp_path: Path) -> None:
    state = run_ranks(save_tied, 2, tmp_path)[0]
    found = read(tmp_path / "one" / NAME)
    assert sorted(found) == ["embed.weight", "seen", "up.bias", "up.weight"]
    assert_equal(found, {name: state[name] for name in found})
    package = pytest.importorskip("safetensors.torch")
    model = make(1)
    missing, unexpected = package.load_model(model, tmp_path / "one" / NAME)
    assert (missing, unexpected) == (set(), [])
    assert torch.equal(model.head.weight, state["embed.weight"])


def test_floats_are_converted_when_asked_for_and_files_have_a_limit(tmp_path: Path) -> None:
    """132 + 16 + 60 + 10 bytes: a file each for what does not fit into 100."""
    state = run_ranks(save_tied, 2, tmp_path)[0]
    folder = tmp_path / "bf16"
    index = json.loads((folder / f"{NAME}.index.json").read_text())
    assert index["metadata"] == {"total_size": 132 + 16 + 60 + 10}
    files = sorted(set(index["weight_map"].values()))
    assert sorted(file.name for file in folder.iterdir()) == [*files, f"{NAME}.index.json"]
    found: State = {}
    for file in files:
        found |= read(folder / file)
    assert found["seen"].dtype == torch.int64
    assert_equal(found, {n: state[n].bfloat16() for n in ("embed.weight", "up.weight", "up.bias")})
    with pytest.importorskip("safetensors").safe_open(folder / files[0], "pt") as opened:
        assert opened.metadata() == {"format": "pt", "head.weight": "embed.weight", "who": "me"}
    first, second = run_ranks(load_tied, 3, tmp_path)[0]
    assert_equal(first, state)
    assert_equal(second, {name: state[name].bfloat16().float() for name in ("up.weight",)})
    assert_equal(second, {"seen": state["seen"]})


def load_renamed(path: Path) -> State:
    model = make(1)
    names = {"old": "up.bias", "junk": None}
    with pytest.raises(CheckpointIncompleteError) as caught:
        checkpoint.load_safetensors(path, model)
    assert "it lacks 1 names (up.bias), and it has 2 names (junk, old)" in str(caught.value)
    assert checkpoint.load_safetensors(path, model, strict=False) == (["up.bias"], ["junk", "old"])
    with pytest.raises(CheckpointMismatchError, match="gives the name 'seen' to both"):
        checkpoint.load_safetensors(path, model, rename=lambda name: "seen")
    checkpoint.load_safetensors(path, model, rename=names)
    first = whole(model)
    model = make(2)
    checkpoint.load_safetensors(path, model, rename=lambda name: names.get(name, name))
    assert_equal(whole(model), first)
    return first


def test_names_are_mapped_or_dropped(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.torch")
    state = {name: value.clone() for name, value in make(0).state_dict().items()}
    del state["embed.weight"]  # its other name is enough
    changed = {**state, "old": state["up.bias"], "junk": torch.ones(1)}
    del changed["up.bias"]
    package.save_file(changed, tmp_path / "x.safetensors")
    found = run_ranks(load_renamed, 2, tmp_path / "x.safetensors")[0]
    assert_equal(found, {"up.bias": state["up.bias"], "embed.weight": state["head.weight"]})


def load_on_meta(root: Path) -> State:
    with torch.device("meta"):
        model = Tied()
    fully_shard(model.up)
    fully_shard(model)
    with pytest.raises(CheckpointValueError, match="is on the meta device: call to_empty"):
        checkpoint.load_safetensors(root / "one", model)
    model.to_empty(device="cpu")
    model.scratch.zero_()  # is not saved
    checkpoint.load_safetensors(root / "one", model)
    assert model.head.weight is model.embed.weight
    return whole(model)


def test_a_model_that_was_made_on_the_meta_device_is_filled(tmp_path: Path) -> None:
    state = run_ranks(save_tied, 2, tmp_path)[0]
    found = run_ranks(load_on_meta, 2, tmp_path)[0]
    assert_equal(found, {name: value for name, value in state.items() if name != "scratch"})


# Faults


def bits(model: nn.Module) -> list[Tensor]:
    found = [getattr(param, "to_local", lambda p=param: p)() for param in model.parameters()]
    return [value.detach().clone() for value in [*found, *model.buffers()]]


def load_faulty(root: Path) -> None:
    model = make(1)
    before = bits(model)

    def unchanged() -> bool:
        return all(map(torch.equal, bits(model), before))

    with pytest.raises(
        CheckpointMismatchError, match=r"'model\.embed\.weight' has shape \[11, 6\]"
    ):
        checkpoint.load_safetensors(root / "one", make(1, width=7))
    with pytest.raises(CheckpointMismatchError, match="'seen' is float32 in"):
        checkpoint.load_safetensors(root / "float.safetensors", model)
    path = root / "one" if dist.get_rank() == 0 else root / "bf16"
    with pytest.raises(RankMismatchError, match="rank 1 reads another checkpoint"):
        checkpoint.load_safetensors(path, model)
    assert unchanged()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            patch.setattr(DataReader, "read_into", fail)
        with pytest.raises(CheckpointCorruptError, match="bad sector"):
            checkpoint.load_safetensors(root / "one", model)
    assert unchanged()
    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() == 1:
            put, done = Arrival.put, []

            def put_twice(self: Arrival, *, keep: bool) -> None:
                done.append(self.name)
                if len(done) == 3:
                    raise CheckpointCorruptError("no more")
                put(self, keep=keep)

            patch.setattr(Arrival, "put", put_twice)
        with pytest.raises(CheckpointCorruptError, match="no more"):
            checkpoint.load_safetensors(root / "one", model)
    assert unchanged()
    checkpoint.load_safetensors(root / "one", model)
    assert not unchanged()


def fail(*_: Any) -> None:
    raise CheckpointCorruptError("bad sector")


def test_after_any_failure_nothing_has_changed_on_any_rank(tmp_path: Path) -> None:
    package = pytest.importorskip("safetensors.torch")
    run_ranks(save_tied, 2, tmp_path)
    state = read(tmp_path / "one" / NAME)
    package.save_file({**state, "seen": state["seen"].float()}, tmp_path / "float.safetensors")
    run_ranks(load_faulty, 2, tmp_path)


def save_faulty(root: Path) -> None:
    model = make(0)
    rank = dist.get_rank()
    with pytest.raises(RankMismatchError, match="rank 1 exports with"):
        checkpoint.save_safetensors(root / "new", model, max_file_bytes=100 + rank)
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            patch.setattr(os, "pwrite", disk_full)
        with pytest.raises(CheckpointWriteError, match=r"tensor '.*' cannot .*the disk is full"):
            checkpoint.save_safetensors(root / "new", model, max_file_bytes=100)
    with pytest.raises(CheckpointExistsError, match=r"model\.safetensors exists already"):
        checkpoint.save_safetensors(root / "there", model)
    model.odd = Odd()
    with pytest.raises(CheckpointValueError, match=r"'odd\._extra_state' is a dict"):
        checkpoint.save_safetensors(root / "new", model)
    del model.odd
    if rank == 0:
        assert sorted(path.name for path in root.iterdir()) == ["configured", "there"]
        assert (root / "there" / NAME).read_text() == "old"
    checkpoint.save_safetensors(root / "configured", model, max_file_bytes=100)


class Odd(nn.Module):
    def get_extra_state(self) -> dict[str, int]:
        return {"a": 1}

    def set_extra_state(self, state: Any) -> None:
        raise AssertionError("it is left alone")


def disk_full(*_: Any) -> int:
    raise OSError(errno.ENOSPC, "full")


def test_nothing_is_overwritten_and_nothing_is_left_behind(tmp_path: Path) -> None:
    for name in ("there", "configured"):
        (tmp_path / name).mkdir()
    (tmp_path / "there" / NAME).write_text("old")
    (tmp_path / "configured" / "config.json").write_text("{}")
    run_ranks(save_faulty, 2, tmp_path)
    names = sorted(path.name for path in (tmp_path / "configured").iterdir())
    assert names[0] == "config.json"
    assert names[-1] == f"{NAME}.index.json"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["configured", "there"]


def test_one_process_without_ranks_saves_and_loads(tmp_path: Path) -> None:
    model = make(0)
    checkpoint.save_safetensors(tmp_path / "x", model)
    other = make(1)
    checkpoint.load_safetensors(tmp_path / "x", other)
    assert_equal(other.state_dict(), model.state_dict())


def test_what_a_crash_has_left_is_deleted_by_the_next_one(tmp_path: Path) -> None:
    for number, names in enumerate(
        [(NAME,), ("model-00001-of-00002.safetensors", f"{NAME}.index.json")]
    ):
        stage = tmp_path / f"x.tmp-{number:032x}"
        stage.mkdir()
        for name in (*names, "__0_0.distcp", ".metadata"):
            (stage / name).touch()
    checkpoint.save_safetensors(tmp_path / "y", make(0))
    assert [path.name for path in tmp_path.iterdir()] == ["y"]


def save_after_save(root: Path) -> None:
    model = make(0)
    handle = checkpoint.save(root / "sealed", model, async_=True)
    checkpoint.save_safetensors(root / "x", model)
    assert handle.is_done
    handle.wait()


def test_an_export_waits_for_a_save_in_the_background(tmp_path: Path) -> None:
    run_ranks(save_after_save, 2, tmp_path)


def test_what_readers_would_refuse_is_not_written(tmp_path: Path) -> None:
    metadata: Any = {"step": 5}
    with pytest.raises(CheckpointValueError, match="pass 'step': '5'"):
        checkpoint.save_safetensors(tmp_path / "numbers", make(0), metadata=metadata)
    model = nn.Module()
    model.register_buffer("__metadata__", torch.ones(2))
    with pytest.raises(CheckpointValueError, match="'__metadata__', which safetensors has for"):
        checkpoint.save_safetensors(tmp_path / "name", model)
    checkpoint.save(tmp_path / "sealed", model)
    with pytest.raises(CheckpointValueError, match="'__metadata__', which safetensors has for"):
        checkpoint.convert(tmp_path / "sealed", tmp_path / "name", to="safetensors")
    assert [path.name for path in tmp_path.iterdir()] == ["sealed"]

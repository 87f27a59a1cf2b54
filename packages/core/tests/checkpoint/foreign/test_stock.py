"""Directories of torch.distributed.checkpoint: to and from stock FSDP2, and hostile ones."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard as stock_fully_shard

from vescale_fsdp import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointIncompleteError,
    CheckpointMismatchError,
    CheckpointValueError,
    Granularity,
    checkpoint,
    fully_shard,
)
from vescale_fsdp.checkpoint.foreign.dcp_directory import StockDirectory
from vescale_fsdp.checkpoint.loading import Arrival
from vescale_fsdp.testing import run_ranks

from ..helpers import State, assert_same, everything, fingerprint
from ..test_meshes import Pair, step

Made = tuple[Pair, torch.optim.AdamW]


def sharded(shard: Callable[[nn.Module], Any] | None, seed: int) -> Made:
    """A pair with an optimizer of two groups."""
    torch.manual_seed(seed)
    model = Pair()
    if shard is not None:
        shard(model.up)
        shard(model)
    matrices = [param for param in model.parameters() if param.dim() == 2]
    rest = [param for param in model.parameters() if param.dim() == 1]
    groups = [{"params": matrices, "lr": 0.03 + seed}, {"params": rest, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=0.05)


def ragged(module: nn.Module) -> None:
    fully_shard(module, granularity=Granularity.elements(1))


def state_of(model: Pair, optimizer: torch.optim.AdamW) -> dict[str, Any]:
    states = get_optimizer_state_dict(model, optimizer)
    return {"model": get_model_state_dict(model), "optimizer": states}


# To stock, and back


def export(path: Path) -> State:
    model, optimizer = sharded(ragged, 0)
    for number in range(2):
        step(model, optimizer, number)
    checkpoint.export_dcp(path, model, optimizer, extra={"step": 2, "who": dist.get_rank()})
    return everything(model, optimizer)


def load_with_stock(path: Path, target: Path) -> State:
    model, optimizer = sharded(stock_fully_shard, 5)
    state = {**state_of(model, optimizer), "step": 0, "who": -1}
    dcp.load(state, checkpoint_id=path)
    assert (state["step"], state["who"]) == (2, 0)
    set_state_dict(
        model,
        optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
    )
    assert [group["lr"] for group in optimizer.param_groups] == [0.03, 0.05]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.01, 0.0]
    dcp.save({**state_of(model, optimizer), "step": 3, "odd": Odd()}, checkpoint_id=target)
    return everything(model, optimizer)


class Odd:
    """More than plain data."""


def import_from_stock(path: Path) -> State:
    model, optimizer = sharded(ragged, 7)
    if dist.get_world_size() == 2:  # into an optimizer that has states, and into one that has none
        step(model, optimizer, 5)
    assert checkpoint.import_dcp(path, model, optimizer) == {"step": 3}
    assert [group["lr"] for group in optimizer.param_groups] == [0.03, 0.05]
    return everything(model, optimizer)


def test_stock_fsdp2_loads_what_is_exported_and_what_it_saves_is_imported(tmp_path: Path) -> None:
    expected = run_ranks(export, 2, tmp_path / "ours")[0]
    found = run_ranks(load_with_stock, 3, tmp_path / "ours", tmp_path / "theirs")[0]
    assert_same(found, expected)
    for world_size in (1, 2):
        assert_same(run_ranks(import_from_stock, world_size, tmp_path / "theirs")[0], expected)


def save_with_other_keys(root: Path) -> State:
    model, optimizer = sharded(stock_fully_shard, 0)
    step(model, optimizer, 0)
    state = state_of(model, optimizer)
    tutorial = {"app": {"model": state["model"], "optim": state["optimizer"]}}
    dcp.save(tutorial, checkpoint_id=root / "tutorial")
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    flat = get_optimizer_state_dict(model, optimizer, options=options)
    dcp.save({**state["model"], "optimizer": flat, "step": 1}, checkpoint_id=root / "flat")
    custom = {"net": state["model"], "opts": {"adam": state["optimizer"]}}
    dcp.save(custom, checkpoint_id=root / "custom")
    return everything(model, optimizer)


def import_other_keys(root: Path) -> list[State]:
    found = []
    for name, keys in [
        ("tutorial", {}),
        ("tutorial", {"model_key": "app.model", "optimizer_key": "app.optim"}),
        ("flat", {}),
        ("custom", {"model_key": "net", "optimizer_key": "opts"}),
    ]:
        model, optimizer = sharded(ragged, 7)
        optimizers = {"adam": optimizer} if name == "custom" else optimizer
        checkpoint.import_dcp(root / name, model, optimizers, **keys)
        found.append(everything(model, optimizer))
    model, optimizer = sharded(ragged, 7)
    with pytest.raises(
        CheckpointIncompleteError, match=r"begin with \['net', 'opts'\]: pass model"
    ):
        checkpoint.import_dcp(root / "custom", model)
    with pytest.raises(CheckpointIncompleteError, match="lacks the optimizer '0'; pass optimizer_"):
        checkpoint.import_dcp(root / "custom", model, optimizer, model_key="net")
    return found


def test_the_keys_that_others_use_are_found_or_given(tmp_path: Path) -> None:
    expected = run_ranks(save_with_other_keys, 2, tmp_path)[0]
    for found in run_ranks(import_other_keys, 2, tmp_path)[0]:
        assert_same(found, expected)


def export_faulty(root: Path) -> None:
    model, optimizer = sharded(ragged, 0)
    step(model, optimizer, 0)
    (root / "there").mkdir(exist_ok=True)
    with pytest.raises(CheckpointExistsError, match="there exists already"):
        checkpoint.export_dcp(root / "there", model, optimizer)
    with pytest.raises(CheckpointValueError, match=r"odd is a .*Odd, which a checkpoint cannot"):
        checkpoint.export_dcp(root / "new", model, optimizer, extra={"odd": Odd()})
    with pytest.raises(CheckpointValueError, match="two optimizers have states of 'down"):
        checkpoint.export_dcp(root / "new", model, {"a": optimizer, "b": optimizer})
    assert [path.name for path in root.iterdir()] == ["there"]


def test_an_export_overwrites_nothing_and_leaves_nothing_behind(tmp_path: Path) -> None:
    run_ranks(export_faulty, 2, tmp_path)


# All or nothing


def save_stock(path: Path) -> None:
    model, optimizer = sharded(stock_fully_shard, 0)
    step(model, optimizer, 0)
    dcp.save(state_of(model, optimizer), checkpoint_id=path)


def import_faulty(root: Path) -> None:
    rank, path = dist.get_rank(), root / "whole"
    model, optimizer = sharded(ragged, 1)
    step(model, optimizer, 3)
    before = fingerprint(model, optimizer)
    for name, kind, message in [
        (
            "cut",
            CheckpointCorruptError,
            r"__1_0\.distcp has \d+ bytes, but '.*' should end at byte",
        ),
        ("lost", CheckpointIncompleteError, r"__1_0\.distcp is missing; it is needed for '"),
        ("spoilt", CheckpointCorruptError, r"__1_0\.distcp .* in tensor 'model\.|__1_0\.distcp .*"),
        ("nowhere", CheckpointIncompleteError, "there is no checkpoint of torch.distributed"),
    ]:
        with pytest.raises(kind, match=message):
            checkpoint.import_dcp(root / name, model, optimizer)
        assert fingerprint(model, optimizer) == before, name
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:
            put, done = Arrival.put, []

            def put_some(self: Arrival, *, keep: bool) -> None:
                done.append(self.name)
                if len(done) == 5:
                    raise OSError("enough")
                put(self, keep=keep)

            patch.setattr(Arrival, "put", put_some)
        with pytest.raises(OSError, match="enough"):
            checkpoint.import_dcp(path, model, optimizer)
    assert fingerprint(model, optimizer) == before
    wider = nn.Linear(6, 9)
    with pytest.raises(CheckpointIncompleteError, match=r"lacks 2 entries: model\.weight"):
        checkpoint.import_dcp(path, wider)
    model.up = wider
    with pytest.raises(CheckpointMismatchError, match=r"'model\.up\.weight' has shape \[7, 6\]"):
        checkpoint.import_dcp(path, model)


def test_after_a_failed_import_nothing_has_changed_on_any_rank(tmp_path: Path) -> None:
    run_ranks(save_stock, 2, tmp_path / "whole")
    for name in ("cut", "lost", "spoilt"):
        (tmp_path / name).mkdir()
        for file in (tmp_path / "whole").iterdir():
            (tmp_path / name / file.name).write_bytes(file.read_bytes())
    file = "__1_0.distcp"
    data = (tmp_path / "whole" / file).read_bytes()
    (tmp_path / "cut" / file).write_bytes(data[:-1])
    (tmp_path / "lost" / file).unlink()
    (tmp_path / "spoilt" / file).write_bytes(bytes(len(data)))
    run_ranks(import_faulty, 2, tmp_path)


# Hostile directories


class Evil:
    """Makes a folder when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.folder),)


def save_alone(state: dict[str, Any], path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are no ranks
        dcp.save(state, checkpoint_id=path, no_dist=True)


def small(folder: Path) -> Metadata:
    """A model of one tensor in two chunks, with its metadata, which are changed then."""
    path = folder / "small"
    save_alone({"model": {"weight": torch.ones(2, 3)}}, path)
    with open(path / ".metadata", "rb") as stream:
        return pickle.load(stream)


def rewrite(folder: Path, metadata: Any) -> StockDirectory:
    (folder / "small" / ".metadata").write_bytes(pickle.dumps(metadata))
    return StockDirectory(folder / "small")


def test_the_directory_of_these_tests_is_read_as_it_is(tmp_path: Path) -> None:
    directory = rewrite(tmp_path, small(tmp_path))
    assert directory.tensors["model.weight"].shape == (2, 3)


INDEX = MetadataIndex("model.weight", [0, 0])


def place(**changed: Any) -> Callable[[Metadata], None]:
    return lambda metadata: vars(metadata.storage_data[INDEX]).update(changed)


def chunks(*boxes: tuple[list[int], list[int]]) -> Callable[[Metadata], None]:
    def change(metadata: Metadata) -> None:
        entry = metadata.state_dict_metadata["model.weight"]
        assert isinstance(entry, TensorStorageMetadata)
        entry.chunks = [ChunkStorageMetadata(torch.Size(o), torch.Size(s)) for o, s in boxes]

    return change


def fields(**changed: Any) -> Callable[[Metadata], None]:
    return lambda metadata: vars(metadata).update(changed)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (place(relative_path="../small/__0_0.distcp"), "is not the name of a file"),
        (place(relative_path="/etc/passwd"), "is not the name of a file"),
        (place(relative_path=3), "is not the name of a file"),
        (place(offset=-1), "are not counts"),
        (place(offset=2**40), "should end at byte"),
        (place(length=True), "are not counts"),
        (place(transform_descriptors=["zstd"]), "is compressed or encrypted"),
        (chunks(([0, 0], [2, 2])), "boxes hold 4 elements, expected 6"),
        (chunks(([0, 0], [1, 3]), ([0, 0], [1, 3])), "overlap"),
        (chunks(([1, 0], [2, 3])), "does not have this format|exceeds"),
        (fields(state_dict_metadata=3), "does not have this format"),
        (fields(state_dict_metadata={3: BytesStorageMetadata()}), "the key 3 is not text"),
        (fields(state_dict_metadata={"x": BytesStorageMetadata()}), "does not have this format"),
        (fields(state_dict_metadata={"x": torch.float32}), "does not have this format"),
        (fields(storage_data=None), "does not have this format"),
        (fields(planner_data={"model.weight": 3}), "does not have this format"),
        (fields(planner_data={"model.weight": ("model", None)}), "has the path"),
    ],
)
def test_metadata_that_do_not_fit_are_refused(
    change: Callable[[Metadata], None], message: str, tmp_path: Path
) -> None:
    metadata = small(tmp_path)
    change(metadata)
    with pytest.raises(CheckpointCorruptError, match=message):
        rewrite(tmp_path, metadata)


def test_an_item_that_is_another_tensor_than_the_metadata_say_is_refused(tmp_path: Path) -> None:
    metadata = small(tmp_path)
    properties = TensorProperties(dtype=torch.int32)
    chunk = ChunkStorageMetadata(torch.Size([0, 0]), torch.Size([2, 3]))
    entry = TensorStorageMetadata(properties, torch.Size([2, 3]), [chunk])
    metadata.state_dict_metadata["model.weight"] = entry
    rewrite(tmp_path, metadata)
    model = nn.Linear(3, 2, bias=False)
    with pytest.raises(
        CheckpointCorruptError, match=r"torch\.float32 \(2, 3\) for .*expected int32"
    ):
        checkpoint.import_dcp(tmp_path / "small", model)


def test_items_that_could_run_code_are_refused_where_they_are_needed(tmp_path: Path) -> None:
    made = tmp_path / "made"
    model = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state: dict[str, Any] = {"model": dict(model.state_dict()), "other": Evil(made), "step": 3}
    state["optimizer"] = {
        "state": {},
        "param_groups": [{"lr": 0.1, "params": ["weight"], "odd": Evil(made)}],
    }
    save_alone(state, tmp_path / "evil")
    assert checkpoint.import_dcp(tmp_path / "evil", model) == {"step": 3}
    with pytest.raises(CheckpointCorruptError, match=r"param_groups\.0\.odd'.* could run code"):
        checkpoint.import_dcp(tmp_path / "evil", model, optimizer)
    assert not made.exists()


def test_an_export_keeps_all_of_extra_or_says_what_it_cannot(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(2, 2)
    clashes: list[tuple[str, dict[str, Any]]] = [
        ("model", {"model": {"name": "x"}}),
        ("app.model", {"app": 1}),
        ("app.model", {"app": {"model": {}}}),
        ("", {"weight": 1}),
    ]
    for key, clash in clashes:
        with pytest.raises(CheckpointValueError, match=f"where keys .* go .'{key}'"):
            checkpoint.export_dcp(tmp_path / "a", model, extra=clash, model_key=key)
    assert list(tmp_path.iterdir()) == []
    app = {"name": "x"}
    extra = {"step": 1, "empty": {}, "deep": {"empty": {}}, "list": [], "app": app}
    ema = {"ema": torch.ones(2)}
    checkpoint.export_dcp(tmp_path / "a", model, extra={**extra, **ema}, model_key="app.model")
    assert app == {"name": "x"}
    assert checkpoint.import_dcp(tmp_path / "a", model) == extra
    assert "left out 1 tensor of" in caplog.text
    assert "ema" in caplog.text
    caplog.clear()
    assert checkpoint.import_dcp(tmp_path / "a", model, weights="none") == extra
    assert "model.weight" not in caplog.text

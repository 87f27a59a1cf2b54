"""State dicts that are changed before they are loaded, and tensors that are read when needed."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale_fsdp import (
    CheckpointIncompleteError,
    CheckpointMismatchError,
    RankMismatchError,
    checkpoint,
    fully_shard,
)
from vescale_fsdp.checkpoint.files import DataReader
from vescale_fsdp.testing import run_ranks

SHAPES = {"a.weight": (3, 4), "a.bias": (3,), "b.weight": (3, 4), "b.bias": (3,), "steps": (1,)}


def made(seed: int, names: str = "ab") -> nn.Module:
    torch.manual_seed(seed)
    model = nn.Module()
    for name in names:
        setattr(model, name, nn.Linear(4, 3))
    model.register_buffer("steps", torch.tensor([float(seed)]))
    fully_shard(getattr(model, names[0]))
    return fully_shard(model)


def values(model: nn.Module) -> dict[str, torch.Tensor]:
    found = {}
    for name, tensor in model.state_dict().items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found[name] = whole.clone()
    return found


def saved(root: Path) -> tuple[Path, dict[str, torch.Tensor]]:
    path = root / "saved"
    model = made(1)
    checkpoint.save(path, model)
    return path, values(model)


def check_values(model: nn.Module, expected: dict[str, torch.Tensor]) -> None:
    found = values(model)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


def changes(root: Path) -> None:
    path, before = saved(root)
    state = checkpoint.unread_state(path)
    assert {name: tuple(each.shape) for name, each in state.items()} == SHAPES
    state["a.weight"] = zeros = torch.zeros(3, 4)
    state["a.bias"].add_(1)  # in place
    state["b.weight"] = state["b.weight"] * 2
    model = made(2)
    own = model.state_dict()
    state["b.bias"] = own["b.bias"]  # sharded: what many hooks do where shapes differ
    kept = values(model)["b.bias"]
    checkpoint.load(path, model, weights=state)
    changed = {
        "a.weight": zeros,
        "a.bias": before["a.bias"] + 1,
        "b.weight": before["b.weight"] * 2,
    }
    check_values(model, {**before, **changed, "b.bias": kept})
    assert torch.equal(zeros, torch.zeros(3, 4))  # the caller's tensor is not used as memory


def names(root: Path) -> None:
    path, before = saved(root)
    state = checkpoint.unread_state(path)
    state["c.weight"], state["c.bias"] = state.pop("a.weight"), state.pop("a.bias")
    state["b.bias"] = state["c.bias"]  # one entry for two
    model = made(2, "cb")
    checkpoint.load(path, model, weights=state)
    assert not state["c.weight"].is_read
    renamed = {name.replace("a.", "c."): each for name, each in before.items()}
    check_values(model, {**renamed, "b.bias": before["a.bias"]} | {"steps": before["steps"]})


def dropped(root: Path) -> None:
    path, before = saved(root)
    state = checkpoint.unread_state(path)
    del state["a.weight"]
    model = made(2)
    untouched = values(model)
    with pytest.raises(CheckpointIncompleteError, match=r"lacks 1 entries: model\.a\.weight"):
        checkpoint.load(path, model, weights=state)
    state["a.weight"], state["new"] = torch.zeros(3, 4), torch.zeros(1)
    with pytest.raises(CheckpointMismatchError, match=r"1 entries were added .*: new"):
        checkpoint.load(path, model, weights=state)
    state["a.weight"] = torch.zeros(4, 3)
    with pytest.raises(CheckpointMismatchError, match=r"'a\.weight' has the shape \(4, 3\)"):
        checkpoint.load(path, model, weights=state)
    check_values(model, untouched)
    del state["a.weight"]
    if dist.get_rank() == 1:  # it may look, and its buffers may differ
        assert state["b.weight"].sum() != 0
    state["steps"] = torch.tensor([float(dist.get_rank())])
    for change in (
        lambda each: each.update({"b.weight": torch.full((3, 4), 2.0)}),
        lambda each: each["b.weight"].add_(1),
        lambda each: each.pop("b.weight"),
    ):
        kept = dict(state)
        if dist.get_rank() == 1:
            change(state)
        with pytest.raises(
            RankMismatchError, match=r"'b\.weight' .* is unchanged on rank 0, and .* same changes"
        ):
            checkpoint.load(path, model, weights=state, strict=False)
        state = kept
    state = checkpoint.unread_state(path)
    del state["a.weight"]
    check_values(model, untouched)
    checkpoint.load(path, model, weights=state, strict=False)
    check_values(model, {**before, "a.weight": untouched["a.weight"]})


def only_parts_are_read(root: Path) -> None:
    """Rank 0 alone looks at an entry; of the others each rank reads its part."""
    path, before = saved(root)
    read: list[str] = []
    original = DataReader.read

    def noted(self: DataReader, span: Any, label: str) -> torch.Tensor:
        read.append(label)
        return original(self, span, label)

    DataReader.read = noted  # type: ignore[method-assign]
    try:
        state = checkpoint.unread_state(path)
        if dist.get_rank() == 0:
            assert torch.equal(state["a.weight"], before["a.weight"])
        looked_at = [label for label in read if label.startswith("tensor")]
        assert bool(looked_at) == (dist.get_rank() == 0)
        assert not state["b.weight"].is_read
    finally:
        DataReader.read = original  # type: ignore[method-assign]


def saves(root: Path) -> None:
    model = made(1)
    before = values(model)
    state = model.state_dict()
    del state["a.weight"]
    state["b.weight"] = state["b.weight"] * 2
    state["extra"] = torch.ones(2)
    checkpoint.save(root / "changed", model, weights=state)
    read = checkpoint.read(root / "changed")["model"]
    assert read.keys() == (before.keys() | {"extra"}) - {"a.weight"}
    assert torch.equal(read["b.weight"], before["b.weight"] * 2)
    assert torch.equal(read["extra"], torch.ones(2))


@pytest.mark.parametrize("check", [changes, names, dropped, only_parts_are_read, saves])
def test_state_dicts_that_are_changed(check: Any, tmp_path: Path) -> None:
    run_ranks(check, 2, tmp_path)


def test_an_unread_tensor_is_a_tensor(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    checkpoint.save(tmp_path / "one", model)
    state = checkpoint.unread_state(tmp_path / "one")
    weight = state["weight"]
    assert (weight.shape, weight.dtype, weight.dim(), len(weight)) == ((3, 2), torch.float32, 2, 3)
    assert weight.size(0) == 3
    assert repr(weight) == "UnreadTensor('model.weight', shape=(3, 2), dtype=torch.float32)"
    assert not weight.is_read
    assert type(copy.deepcopy(weight)) is torch.Tensor
    assert weight.numpy().tolist() == model.weight.tolist()
    stream = io.BytesIO()
    torch.save(state, stream)
    stream.seek(0)
    assert torch.equal(torch.load(stream, weights_only=True)["weight"], model.weight)
    nn.Linear(2, 3).load_state_dict(state)

"""Offline conversion: what one format holds, the other gives back, bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale_fsdp import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointIncompleteError,
    CheckpointMismatchError,
    CheckpointValueError,
    Granularity,
    checkpoint,
)
from vescale_fsdp.checkpoint.foreign import formats
from vescale_fsdp.testing import run_ranks

from ..helpers import State, assert_same, everything, flip_bit, make, manifest_of, train

EXTRA = {"step": 3, "note": ("a", [1.5])}


def save(root: Path) -> State:
    model, optimizer = make(Granularity.elements(1))
    train(model, optimizer, range(3))
    checkpoint.save(root / "sealed", model, optimizer, extra=EXTRA)
    return everything(model, optimizer)


def load(root: Path) -> list[State]:
    """What each conversion gives back to a sharded model and its optimizer."""
    found = []
    for name in ("dcp", "again"):
        model, optimizer = make(seed=1)
        loader = checkpoint.import_dcp if name == "dcp" else checkpoint.load
        assert loader(root / name, model, optimizer) == EXTRA
        found.append(everything(model, optimizer))
    fresh, optimizer = make(seed=1)
    assert checkpoint.load(root / "model", fresh) == {}
    model, optimizer = make(seed=2)
    checkpoint.load_safetensors(root / "safetensors", model)
    assert_same(everything(fresh, optimizer), everything(model, optimizer))
    return [*found, everything(model, optimizer)]


def test_every_way_round_gives_back_the_same_bits(tmp_path: Path) -> None:
    """A small model; pieces are made tiny, so that tensors have several."""
    expected = run_ranks(save, 2, tmp_path)[0]
    seen: list[tuple[int, int]] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(formats, "_PIECE", 40)
        for source, target, to in [
            ("sealed", "dcp", "dcp"),
            ("dcp", "again", "vescale"),
            ("sealed", "safetensors", "safetensors"),
            ("dcp", "safetensors too", "safetensors"),
            ("safetensors", "model", "vescale"),
            ("safetensors/model.safetensors", "model dcp", "dcp"),
        ]:
            checkpoint.convert(
                tmp_path / source,
                tmp_path / target,
                to=to,
                progress=lambda done, total: seen.append((done, total)),
            )
            assert seen[-1][0] == seen[-1][1] > 0
            assert seen == sorted(seen)
            seen.clear()
    assert len(manifest_of(tmp_path / "model").tensors["model.layers.0.weight"].chunks) > 1
    sealed = checkpoint.verify(tmp_path / "again")
    assert (sealed.seal.step, sealed.world_size) == (3, 1)
    both = [tmp_path / name / "model.safetensors" for name in ("safetensors", "safetensors too")]
    assert both[0].read_bytes() == both[1].read_bytes()
    for world_size in (1, 3):
        *whole, model = run_ranks(load, world_size, tmp_path)[0]
        for found in whole:
            assert_same(found, expected)
        assert_same(model, {name: value for name, value in expected.items() if "/" not in name})


def save_by_two(path: Path) -> None:
    """Two ranks with one layer each, as pipeline stages have them."""
    model = nn.Module()
    torch.manual_seed(dist.get_rank())
    model.add_module(f"layer{dist.get_rank()}", nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    checkpoint.save(path, model, optimizer)


def test_the_parts_of_pipeline_stages_come_together(tmp_path: Path) -> None:
    run_ranks(save_by_two, 2, tmp_path / "sealed")
    checkpoint.convert(tmp_path / "sealed", tmp_path / "whole", to="safetensors")
    model = nn.ModuleDict({"layer0": nn.Linear(2, 2), "layer1": nn.Linear(2, 2)})
    checkpoint.load_safetensors(tmp_path / "whole", model)
    for rank in range(2):
        torch.manual_seed(rank)
        assert torch.equal(model[f"layer{rank}"].weight, nn.Linear(2, 2).weight)


def test_a_damaged_source_is_found_and_nothing_is_left_behind(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    checkpoint.save(tmp_path / "sealed", model)
    span = manifest_of(tmp_path / "sealed").tensors["model.weight"].chunks[0].span
    flip_bit(tmp_path / "sealed" / span.file, span.offset * 8 + 5)
    for to in ("safetensors", "dcp"):
        with pytest.raises(CheckpointCorruptError, match=r"damaged in tensor 'model\.weight'"):
            checkpoint.convert(tmp_path / "sealed", tmp_path / "new", to=to)
    assert [path.name for path in tmp_path.iterdir()] == ["sealed"]


class Odd(nn.Linear):
    def get_extra_state(self) -> dict[str, int]:
        return {"a": 1}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"a": 1}


def test_what_cannot_be_converted_is_said(tmp_path: Path) -> None:
    model = nn.Linear(4, 3)
    checkpoint.save(tmp_path / "sealed", model, extra={"model": 3})
    checkpoint.save(tmp_path / "odd", Odd(2, 2))
    sealed, new = tmp_path / "sealed", tmp_path / "new"
    with pytest.raises(ValueError, match="to is 'zip', expected one of 'safetensors', 'dcp', 've"):
        checkpoint.convert(sealed, new, to="zip")
    with pytest.raises(CheckpointMismatchError, match="is in the format 'vescale' already"):
        checkpoint.convert(sealed, new, to="vescale")
    with pytest.raises(CheckpointIncompleteError, match="there is no checkpoint at"):
        checkpoint.convert(tmp_path / "nothing", new, to="dcp")
    with pytest.raises(CheckpointExistsError, match="odd exists already"):
        checkpoint.convert(sealed, tmp_path / "odd", to="dcp")
    with pytest.raises(CheckpointValueError, match=r"'_extra_state' of the model is not a tensor"):
        checkpoint.convert(tmp_path / "odd", new, to="safetensors")
    with pytest.raises(
        CheckpointValueError, match=r"extra\['model'\] has the name of the model in this format"
    ):
        checkpoint.convert(sealed, new, to="dcp")
    checkpoint.convert(sealed, new, to="safetensors")
    with pytest.raises(CheckpointExistsError, match=r"model\.safetensors exists already"):
        checkpoint.convert(sealed, new, to="safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "odd", "sealed"]
    checkpoint.convert(tmp_path / "odd", tmp_path / "odd dcp", to="dcp")
    checkpoint.import_dcp(tmp_path / "odd dcp", Odd(2, 2))


def test_safetensors_get_other_names(tmp_path: Path) -> None:
    """The prefix of the adapter, another one, none; renamed tensors and modules."""
    net = nn.ModuleDict({"a": nn.Linear(2, 3, bias=False), "ab": nn.Linear(2, 3, bias=False)})
    model = nn.ModuleDict({"net": net, "b": Odd(2, 2)})
    checkpoint.save(tmp_path / "sealed", model, extra={"safetensors_prefix": "net."})

    def names(**options: Any) -> tuple[list[str], list[str]]:
        target = tmp_path / str(len(list(tmp_path.iterdir())))
        left_out = checkpoint.convert(tmp_path / "sealed", target, to="safetensors", **options)
        found = checkpoint.read(target)["model"]
        assert all(tensor.shape == (3, 2) for tensor in found.values())
        return sorted(found), left_out

    others = ["b.weight", "b.bias", "b._extra_state"]
    assert names() == (["a.weight", "ab.weight"], others)
    assert names(rename={"a": "c.d"}) == (["ab.weight", "c.d.weight"], others)
    assert names(rename={"a": "", "ab.weight": "e"}) == (["e", "weight"], others)
    assert names(rename={"a": "c", "a.weight": "d"}) == (["ab.weight", "d"], others)
    assert names(prefix="net.a") == (["weight"], ["net.ab.weight", *others])
    with pytest.raises(
        CheckpointValueError, match=r"'b\._extra_state' of the model is not a tensor"
    ):
        names(prefix="")
    checkpoint.save(tmp_path / "hooked", net, extra={"safetensors_prefix": "net."})
    assert checkpoint.convert(tmp_path / "hooked", tmp_path / "y", to="safetensors") == []
    assert sorted(checkpoint.read(tmp_path / "y")["model"]) == ["a.weight", "ab.weight"]
    for options, message in (
        ({"prefix": "model"}, r"has the prefix 'model\.': the names begin with 'net', 'b'"),
        ({"rename": {"x": "y"}}, r"rename has 'x', .*: the names begin with 'a', 'ab'"),
        ({"rename": {"a": "ab"}}, r"'net\.ab\.weight' would both become 'ab\.weight'"),
    ):
        with pytest.raises(CheckpointMismatchError, match=message):
            names(**options)
    with pytest.raises(
        ValueError, match="prefix and rename are for to='safetensors', got to='dcp'"
    ):
        checkpoint.convert(tmp_path / "sealed", tmp_path / "x", to="dcp", prefix="net")

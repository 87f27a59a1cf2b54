"""Whatever is done to the files: an error that names file and tensor, and nothing has changed."""

from __future__ import annotations

import dataclasses
import random
import re
import shutil
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vescale_fsdp import (
    CheckpointCorruptError,
    CheckpointIncompleteError,
    CheckpointMismatchError,
    RankMismatchError,
    VeScaleError,
    checkpoint,
)
from vescale_fsdp.checkpoint import targets
from vescale_fsdp.checkpoint.manifest import NAME, Span, Variant, to_json
from vescale_fsdp.testing import run_ranks

from .helpers import fingerprint, flip_bit, make, manifest_of, train

Damage = Callable[[Path], None]


def save_two(root: Path) -> None:
    model, optimizer = make()
    for step in (1, 2):
        train(model, optimizer, range(step))
        checkpoint.save(root / f"step-{step}", model, optimizer, extra={"step": step})


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps that two ranks saved."""
    root = tmp_path_factory.mktemp("two")
    run_ranks(save_two, 2, root)
    return root


def copies(two: Path, folder: Path, changes: dict[str, Damage]) -> None:
    for name, change in changes.items():
        shutil.copytree(two / "step-1", folder / name)
        change(folder / name)


def truncate(path: Path) -> None:
    with open(path / "rank-00001.bin", "r+b") as stream:
        stream.truncate(stream.seek(0, 2) - 3)


def lengthen(path: Path) -> None:
    with open(path / "rank-00001.bin", "ab") as stream:
        stream.write(b"more")


def flip_in_tensor(path: Path) -> None:
    chunk = manifest_of(path).tensors["model.layers.2.weight"].chunks[-1]
    flip_bit(path / chunk.span.file, 8 * chunk.span.offset + 5)


def mix(path: Path) -> None:
    shutil.copy(path.parent / "from" / "step-2" / "rank-00001.bin", path / "rank-00001.bin")


def swap(path: Path) -> None:
    first, second, third = path / "rank-00000.bin", path / "rank-00001.bin", path / "x"
    first.rename(third)
    second.rename(first)
    third.rename(second)


DAMAGES: dict[str, tuple[Damage, type[VeScaleError], str]] = {
    "flip": (flip_in_tensor, CheckpointCorruptError, r"\.bin is damaged in tensor 'model.layers.2"),
    "truncated": (truncate, CheckpointCorruptError, r"rank-00001.bin \(for .*\) has \d+ byte"),
    "longer": (lengthen, CheckpointCorruptError, r"rank-00001.bin \(for .*\) has \d+ bytes"),
    "missing": (
        lambda path: (path / "rank-00001.bin").unlink(),
        CheckpointIncompleteError,
        r"rank-00001.bin is missing; it is needed for tensor '",
    ),
    "mixed": (mix, CheckpointCorruptError, r"rank-00001.bin is damaged in"),
    "swapped": (swap, CheckpointCorruptError, r"rank-0000\d.bin"),
    "seal": (
        lambda path: flip_bit(path / NAME, 200),
        CheckpointCorruptError,
        "manifest.json is damaged",
    ),
    "no manifest": (
        lambda path: (path / NAME).unlink(),
        CheckpointIncompleteError,
        "there is no whole checkpoint at",
    ),
}


def load_damaged(folder: Path, ready: bool) -> dict[str, tuple[str, str]]:
    model, optimizer = make(seed=5)
    if ready:
        train(model, optimizer, range(1))
    before, found = fingerprint(model, optimizer), {}
    for name in DAMAGES:
        with pytest.raises(VeScaleError) as error:
            checkpoint.load(folder / name, model, optimizer)
        found[name] = type(error.value).__name__, str(error.value)
        assert fingerprint(model, optimizer) == before, name
    return found


@pytest.mark.parametrize(("world_size", "ready"), [(2, True), (2, False), (3, True)])
def test_no_rank_changes_when_any_file_is_damaged(
    two: Path, tmp_path: Path, world_size: int, ready: bool
) -> None:
    (tmp_path / "from").symlink_to(two)
    copies(two, tmp_path, {name: damage for name, (damage, _, _) in DAMAGES.items()})
    for found in run_ranks(load_damaged, world_size, tmp_path, ready):
        for name, (_, kind, message) in DAMAGES.items():
            assert found[name][0] == kind.__name__, name
            assert re.search(message, found[name][1]), (name, found[name][1])


def load_model_only(path: Path) -> None:
    model, optimizer = make(seed=5)
    before = fingerprint(model, optimizer)
    message = r"is damaged in tensor 'optimizer.0.state.scale.exp_avg'"
    with pytest.raises(CheckpointCorruptError, match=message):
        checkpoint.load(path, model)
    assert fingerprint(model, optimizer) == before


def test_bytes_that_nobody_asks_for_are_checked_too(two: Path, tmp_path: Path) -> None:
    path = tmp_path / "step"
    shutil.copytree(two / "step-1", path)
    (chunk,) = manifest_of(path).tensors["optimizer.0.state.scale.exp_avg"].chunks
    flip_bit(path / chunk.span.file, 8 * chunk.span.offset)
    for world_size in (1, 2, 3):
        run_ranks(load_model_only, world_size, path)


def bits_of(path: Path) -> Iterator[tuple[Path, int]]:
    chance = random.Random(0)
    for file in sorted(path.iterdir()):
        for bit in sorted(chance.sample(range(8 * file.stat().st_size), 120)):
            yield file, bit


def test_no_flipped_bit_of_any_file_passes(two: Path, tmp_path: Path) -> None:
    path = tmp_path / "step"
    shutil.copytree(two / "step-1", path)
    manifest = checkpoint.verify(path)
    for file, bit in bits_of(path):
        flip_bit(file, bit)
        with pytest.raises(CheckpointCorruptError) as error:
            checkpoint.verify(path)
        assert str(file) in str(error.value)
        held = [
            label
            for span, label in manifest.spans()
            if span.file == file.name and span.offset <= bit // 8 < span.offset + span.length
        ]
        assert file.name == NAME or held[0] in str(error.value)
        flip_bit(file, bit)
    checkpoint.verify(path)


def test_verify_names_all_that_is_damaged_and_reports_progress(two: Path, tmp_path: Path) -> None:
    path = tmp_path / "step"
    shutil.copytree(two / "step-1", path)
    seen: list[tuple[int, int]] = []
    manifest = checkpoint.verify(path, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1] == (manifest.num_bytes, manifest.num_bytes)
    flip_in_tensor(path)
    (path / "rank-00000.bin").unlink()
    with pytest.raises(CheckpointCorruptError) as error:
        checkpoint.verify(path)
    assert "rank-00000.bin is missing" in str(error.value)
    assert "rank-00001.bin is damaged in tensor 'model.layers.2.weight'" in str(error.value)


def fail_in_apply(two: Path) -> None:
    """The last rank fails when all have begun to write."""
    model, optimizer = make(seed=5)
    train(model, optimizer, range(1))
    bare, no_states = make(seed=6)
    before = fingerprint(model, optimizer), fingerprint(bare, no_states)
    for target in (targets.RngTarget, targets.OptimizerTarget, targets.ModelTarget):
        original: Any = target.apply

        def broken(self: Any, original: Any = original) -> None:
            original(self)
            if dist.get_rank() == dist.get_world_size() - 1:
                raise RuntimeError("out of luck")

        target.apply = broken  # type: ignore[method-assign]
        try:
            for each in ((model, optimizer), (bare, no_states)):
                with pytest.raises(RuntimeError, match="out of luck"):
                    checkpoint.load(two / "step-2", *each)
        finally:
            target.apply = original  # type: ignore[method-assign]
        assert (fingerprint(model, optimizer), fingerprint(bare, no_states)) == before
    assert not no_states.state
    checkpoint.load(two / "step-2", model, optimizer)
    assert fingerprint(model, optimizer) != before[0]


def test_a_rank_that_fails_while_writing_leaves_all_as_they_were(two: Path) -> None:
    run_ranks(fail_in_apply, 2, two)


def load_misfits(two: Path) -> None:
    model, optimizer = make(seed=5)
    train(model, optimizer, range(1))
    wide, wide_optimizer = make(width=9)
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    split = torch.optim.AdamW(
        [{"params": [param], "lr": i} for i, param in enumerate(model.parameters())]
    )
    amsgrad = torch.optim.AdamW(model.parameters(), amsgrad=True)
    cases: list[tuple[Any, Any, type[Exception], str]] = [
        (
            wide,
            wide_optimizer,
            CheckpointMismatchError,
            r"'model.layers.0.weight' has shape \[7, 5",
        ),
        (model, sgd, CheckpointMismatchError, r"optimizer.0.state.*a state that this SGD does not"),
        (model, {"b": optimizer}, CheckpointIncompleteError, "lacks 1 entries: optimizer.b"),
        (
            wide.layers,
            optimizer,
            CheckpointIncompleteError,
            "lacks 4 entries: model.0.bias|model.0",
        ),
        (model, amsgrad, CheckpointIncompleteError, "max_exp_avg_sq"),
    ]
    before = fingerprint(model, optimizer)
    for net, each, kind, message in cases:
        with pytest.raises(kind, match=message):
            checkpoint.load(two / "step-1", net, each)
    assert fingerprint(model, optimizer) == before
    assert not sgd.state
    assert not amsgrad.state
    checkpoint.load(two / "step-1", model, split)  # options are those of each parameter's group
    assert {group["lr"] for group in split.param_groups} == {0.05}


def test_another_model_or_optimizer_is_refused_by_the_name_of_the_entry(two: Path) -> None:
    run_ranks(load_misfits, 2, two)


def load_different(two: Path) -> None:
    model, _ = make()
    before = [param.full_tensor() for param in model.parameters()]
    step = 1 + dist.get_rank()
    with pytest.raises(RankMismatchError, match="rank 1 reads another checkpoint"):
        checkpoint.load(two / f"step-{step}", model)
    after = [param.full_tensor() for param in model.parameters()]
    assert all(map(torch.equal, before, after))


def test_ranks_that_see_different_checkpoints_load_neither(two: Path) -> None:
    run_ranks(load_different, 2, two)


def load_forged(two: Path, folder: Path) -> None:
    """Sealed as it should be, with values that do not have the form that we write."""
    forgeries: list[tuple[str, Any, str]] = [
        ("optimizer.0", {"state": [], "param_groups": []}, "'optimizer.0' .* is refused"),
        ("optimizer.0", {"state": {"scale": 1}, "param_groups": []}, "'optimizer.0' .* is refused"),
        ("optimizer.0", {"state": {}, "param_groups": [{}]}, "'optimizer.0' .* is refused"),
        ("model", [], "'model' .* is refused"),
        ("rng", {"python": {"$tuple": [3, [], None]}}, "'rng' holds no states"),
        ("extra", [], "the extra of .* is not a mapping"),
        ("extra", {"x": {"$tensor": "nowhere"}}, "lacks 1 entries: nowhere"),
    ]
    model, optimizer = make(seed=5)
    before = fingerprint(model, optimizer)
    for number, (name, value, message) in enumerate(forgeries):
        path = folder / str(number)
        if dist.get_rank() == 0:
            forge(two / "step-1", path, name, value)
        dist.barrier()
        with pytest.raises(VeScaleError, match=message):
            checkpoint.load(path, model, optimizer)
        assert fingerprint(model, optimizer) == before


def forge(source: Path, path: Path, name: str, value: Any) -> None:
    shutil.copytree(source, path)
    manifest, text = manifest_of(path), to_json(value).encode()
    (path / "forged").write_bytes(text)
    (old,) = manifest.values[name]
    span = Span("forged", 0, len(text), zlib.crc32(text))
    values = {**manifest.values, name: (Variant((0, 1), span),), "old": (old,)}
    files = {**manifest.files, "forged": len(text)}
    (path / NAME).write_bytes(dataclasses.replace(manifest, files=files, values=values).render())
    checkpoint.verify(path)


def test_forged_values_are_refused_before_anything_changes(two: Path, tmp_path: Path) -> None:
    run_ranks(load_forged, 2, two, tmp_path)

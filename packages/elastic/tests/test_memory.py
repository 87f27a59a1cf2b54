"""Generations in the memory of a host: which remain, and what a new one takes over."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from vescale_fsdp import CheckpointWriteError
from vescale_fsdp.checkpoint import parts
from vescale_fsdp.checkpoint.manifest import NAME, Manifest, Seal
from vescale_fsdp_elastic import memory
from vescale_fsdp_elastic.choice import Age
from vescale_fsdp_elastic.memory import Memory

FILE = "rank-00000.bin"


def place_in(root: Path) -> Memory:
    place = Memory(root / "memory", root / "run", "0" * 32)
    place.make()
    return place


def keep(place: Memory, age: Age, value: float, text: str, newest: Age | None = None) -> Manifest:
    """Make a generation as `Keeper` does, with a copy of a file of another host."""
    place.make_room(age, [] if newest is None else [newest])
    folder = place.path(age)
    folder.mkdir(exist_ok=True)
    items = [
        parts.Item("w", torch.full((1000,), value), ((0,), (1000,)), (1000,)),
        parts.Item("text", text.encode(), ranks=(0,)),
    ]
    written = parts.write_items(folder, 0, items, overwrites=True)
    memory.reserve(folder / "rank-00001.bin", 5000)
    manifest = parts.manifest_of(Seal("1" * 32, age.attempt, age.step, "now"), [written])
    memory.write_manifest(folder, manifest.render())
    return manifest


def numbers(place: Memory, age: Age) -> dict[str, int]:
    """The files of a generation, and which memory they have."""
    return {path.name: path.stat().st_ino for path in place.path(age).iterdir()}


def test_a_new_generation_takes_the_memory_of_the_one_that_is_deleted(tmp_path: Path) -> None:
    place, ages = place_in(tmp_path), [Age(1, step) for step in range(0, 50, 10)]
    made: list[dict[str, int]] = []
    newest = None
    for number, age in enumerate(ages):
        # The text gets longer and shorter.
        manifest = keep(place, age, number / 3, "x" * 3000 * (number % 2), newest)
        assert memory.whole(place.path(age), manifest, [FILE]) == [FILE]
        assert (place.path(age) / "rank-00001.bin").stat().st_size == 5000
        made.append({n: i for n, i in numbers(place, age).items() if n != NAME})
        newest = age
        kept = ages[max(0, number - 1) : number + 1]
        assert [found.age for found in place.found()] == kept
        assert sorted(p.name for p in place.folder.iterdir()) == [place.path(a).name for a in kept]
    assert made[0] == made[2] == made[4]
    assert made[1] == made[3] != made[0]


def test_a_generation_that_is_being_made_is_not_found(tmp_path: Path) -> None:
    place, first, second, third = place_in(tmp_path), Age(1, 1), Age(1, 2), Age(1, 3)
    keep(place, first, 1.0, "")
    keep(place, second, 2.0, "", first)
    place.make_room(third, [second])
    assert [found.age for found in place.found()] == [second]
    assert FILE in numbers(place, third)


def test_what_another_attempt_has_left_is_deleted(tmp_path: Path) -> None:
    place, left, new = place_in(tmp_path), Age(1, 8), Age(2, 4)
    keep(place, left, 1.0, "")
    place.make_room(new, [])
    assert list(place.folder.iterdir()) == []


def test_a_generation_that_had_too_little_memory_is_used_again(tmp_path: Path) -> None:
    place, failed, new = place_in(tmp_path), Age(1, 1), Age(1, 2)
    place.make_room(failed, [])
    place.path(failed).mkdir()
    with pytest.raises(CheckpointWriteError):
        memory.reserve(place.path(failed) / FILE, 1 << 60)
    manifest = keep(place, new, 1.0, "")
    assert memory.whole(place.path(new), manifest, [FILE]) == [FILE]
    assert [found.age for found in place.found()] == [new]

"""What is done to the files of a checkpoint, and what a load on two ranks makes of it."""

from __future__ import annotations

import functools
import json
import os
import pickle
import random
import shutil
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vescale_fsdp import VeScaleError, checkpoint
from vescale_fsdp.checkpoint.manifest import NAME, Manifest

from .engines import OURS, load, local_digest, make, newest, save, state_of, train
from .harness import Scenario, Trial, observe

WIDTH = 101  # small, so that the manifest has its share of the bytes
RIGHT, WRONG = "loaded, right", "loaded, silently wrong"
NAMED = "named error, model unchanged"
UNNAMED = "error that names no file, model unchanged"
CHANGED = "error, model changed"
CODE, OUTSIDE = "code of the file was run", "a file outside was read"
RAN = "ran"  # a file that hostile code makes


@dataclass(frozen=True)
class Damage:
    """Something that is done to a copy of a checkpoint.

    Attributes:
        name: for people.
        change: is given the folder of the copy.
        files: of which the error should name one.
        label: what the error should name besides.
        if_loaded: the outcome if it loads, when that is known to be worse than its values.
    """

    name: str
    change: Callable[[Path], object]
    files: tuple[str, ...]
    label: str = ""
    if_loaded: str = ""


@dataclass(frozen=True)
class Answer:
    """What one rank made of one damaged checkpoint."""

    error: str
    is_ours: bool
    has_changed: bool
    is_right: bool
    passed: str = ""  # a check that should have seen it


def save_two(engine: str, root: Path) -> None:
    model, optimizer = make(engine, WIDTH)
    for step in (1, 2):
        train(model, optimizer, step)
        save(engine, root / str(step), step, model, optimizer)


def load_damaged(
    engine: str, path: Path, damages: list[Damage], place: Path
) -> list[tuple[list[str], Answer]]:
    """Load a damaged copy for each damage. Also returns which files differ from the original."""
    rank, copy = dist.get_rank(), place / path.name
    model, optimizer = make(engine, WIDTH, seed=1)
    train(model, optimizer, 1)
    before, digest_before = snapshot(model, optimizer), local_digest(model, optimizer)
    load(engine, path, model, optimizer)
    right = local_digest(model, optimizer)
    restore(before, model, optimizer)
    original = contents(path)
    found = []
    for damage in damages:
        if rank == 0:
            shutil.copytree(path, copy)
            damage.change(copy)
        dist.barrier()
        differing = [f for f, data in contents(copy).items() if original.get(f) != data]
        differing += [f for f in original if not (copy / f).exists()]
        try:
            load(engine, copy, model, optimizer)
            error, is_ours = "", False
        except BaseException as caught:  # noqa: BLE001  DCP's is no Exception
            error, is_ours = f"{type(caught).__name__}: {caught}", isinstance(caught, VeScaleError)
        after = local_digest(model, optimizer)
        passed = "" if rank else what_passes(engine, copy)
        found.append(
            (differing, Answer(error, is_ours, after != digest_before, after == right, passed))
        )
        restore(before, model, optimizer)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(copy)
    return found


def what_passes(engine: str, path: Path) -> str:
    """What has happened unseen."""
    if (path.parent / RAN).exists():
        (path.parent / RAN).unlink()
        return CODE
    try:
        if engine == OURS:
            checkpoint.verify(path)
            return "verify found nothing"
    except VeScaleError:
        pass
    return ""


def snapshot(model: Any, optimizer: Any) -> dict[str, torch.Tensor]:
    return {name: local(each).clone() for name, each in state_of(model, optimizer).items()}


def restore(before: dict[str, torch.Tensor], model: Any, optimizer: Any) -> None:
    with torch.no_grad():
        for name, each in state_of(model, optimizer).items():
            local(each).copy_(before[name])


def local(tensor: Any) -> torch.Tensor:
    found: torch.Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return found


def contents(path: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in path.iterdir()}


def judged(engine: str, damage: Damage, differing: list[str], answers: list[Answer]) -> Trial:
    first = answers[0].error
    if len({bool(each.error) for each in answers}) > 1:
        outcome = "an error on some ranks only"
    elif any(each.passed for each in answers):
        outcome = answers[0].passed
    elif not first:
        outcome = damage.if_loaded or (RIGHT if all(a.is_right for a in answers) else WRONG)
    elif any(each.has_changed for each in answers):
        outcome = CHANGED
    else:
        is_named = all(
            (each.is_ours or engine != OURS)
            and any(file in each.error for file in damage.files)
            and damage.label in each.error
            for each in answers
        )
        outcome = NAMED if is_named else UNNAMED
    evidence = f"{', '.join(differing)} differ" if differing else ""
    return Trial(outcome, evidence, detail=f"{damage.name}: {first[:300]}")


def try_all(
    engine: str, folder: Path, make_damages: Callable[[Path, Path], list[Damage]]
) -> Iterator[Trial]:
    """Save two steps, damage copies of the first, load each on two ranks.

    Ranks that crash are started again, with the next damage.
    """
    root = folder / "saved"
    ends = observe(save_two, 2, engine, root)
    assert all(end.how == "returned" for end in ends), ends
    path, other = newest(engine, root / "1"), newest(engine, root / "2")
    damages = make_damages(path, other)
    for start in range(0, len(damages), 100):
        part = damages[start : start + 100]
        ends = observe(load_damaged, 2, engine, path, part, folder, timeout_s=100)
        if all(end.how == "returned" for end in ends):
            for damage, *found in zip(part, *(end.value for end in ends), strict=True):
                yield judged(engine, damage, found[0][0], [answer for _, answer in found])
        else:
            for number, damage in enumerate(part):
                yield alone(engine, path, damage, folder / f"alone-{start + number}")


def alone(engine: str, path: Path, damage: Damage, place: Path) -> Trial:
    place.mkdir()
    ends = observe(load_damaged, 2, engine, path, [damage], place, timeout_s=20)
    bad = next((end for end in ends if end.how in ("died", "hung")), None)
    if bad is not None:
        detail = f"{damage.name}: {bad.message[-300:]}"
        return Trial(f"a rank {bad.how}", damage.name, detail=detail)
    found = [end.value[0] for end in ends]
    return judged(engine, damage, found[0][0], [answer for _, answer in found])


# Bits


def flip_bit(file: str, bit: int, path: Path) -> None:
    data = bytearray((path / file).read_bytes())
    data[bit // 8] ^= 1 << bit % 8
    (path / file).write_bytes(data)


def flips(engine: str, num_trials: int, folder: Path) -> Iterator[Trial]:
    def make_damages(path: Path, other: Path) -> list[Damage]:
        chance = random.Random(5)
        sizes = {file.name: file.stat().st_size for file in sorted(path.iterdir())}
        labels = labels_of(path) if engine == OURS else {}
        damages = []
        for _ in range(num_trials):
            (file,) = chance.choices(list(sizes), weights=list(sizes.values()))
            byte = chance.randrange(sizes[file])
            bit = 8 * byte + chance.randrange(8)
            found = (text for (f, a, b), text in labels.items() if f == file and a <= byte < b)
            change = functools.partial(flip_bit, file, bit)
            damages.append(Damage(f"bit {bit} of {file}", change, (file,), next(found, "")))
        return damages

    return try_all(engine, folder, make_damages)


def labels_of(path: Path) -> dict[tuple[str, int, int], str]:
    """The tensor or value that each byte of the data files belongs to."""
    manifest = Manifest.parse((path / NAME).read_bytes(), NAME)
    return {
        (span.file, span.offset, span.offset + span.length): label.partition(" at ")[0]
        for span, label in manifest.spans()
    }


# Files


def truncate(file: str, left: float, path: Path) -> None:
    size = (path / file).stat().st_size
    os.truncate(path / file, int(size * left) if left < 1 else size - 1)


def delete(file: str, path: Path) -> None:
    (path / file).unlink()


def lengthen(file: str, path: Path) -> None:
    with open(path / file, "ab") as stream:
        stream.write(b"more")


def swap(first: str, second: str, path: Path) -> None:
    (path / first).rename(path / "x")
    (path / second).rename(path / first)
    (path / "x").rename(path / second)


def mix(file: str, other: Path, path: Path) -> None:
    shutil.copy(other / file, path / file)


def broken_files(engine: str, num_trials: int, folder: Path) -> Iterator[Trial]:
    def make_damages(path: Path, other: Path) -> list[Damage]:
        names = sorted(file.name for file in path.iterdir())
        data = [name for name in names if name.startswith(("rank", "__"))]
        changes: list[tuple[str, Callable[[Path], object], tuple[str, ...]]] = []
        for file in names:
            for left in (0.0, 0.5, 1.0):
                change: Callable[[Path], object] = functools.partial(truncate, file, left)
                changes.append((f"{file} truncated", change, (file,)))
            missing = (file, "no whole checkpoint at") if file == NAME else (file,)
            changes.append((f"{file} deleted", functools.partial(delete, file), missing))
            changes.append((f"{file} longer", functools.partial(lengthen, file), (file,)))
            change = functools.partial(mix, file, other)
            changes.append((f"{file} of another step", change, tuple(names)))
        changes.append(("swapped", functools.partial(swap, *data), tuple(data)))
        changes.append(("all deleted", delete_all, (path.name,)))
        return [Damage(*change) for change in changes]

    return try_all(engine, folder, make_damages)


def delete_all(path: Path) -> None:
    for file in list(path.iterdir()):
        file.unlink()


# Manifests by somebody who means harm


def forge(change: Callable[[dict[str, Any]], object], path: Path) -> None:
    """Change a manifest and seal it as it should be."""
    body = json.loads((path / NAME).read_bytes())["body"]
    change(body)
    seal_again(json.dumps(body), path)


def forge_text(world: str, path: Path) -> None:
    body = json.dumps(json.loads((path / NAME).read_bytes())["body"])
    assert body.count(WORLD) == 1, "it is replaced"
    seal_again(body.replace(WORLD, world), path)


def seal_again(body: str, path: Path) -> None:
    seal = json.loads((path / NAME).read_bytes())["seal"]
    rest = f'"body": {body}}}\n'.encode()
    seal |= {"body_bytes": len(rest), "body_crc32": f"{zlib.crc32(rest):08x}"}
    first = f'{{"seal": {json.dumps(seal)},\n'.encode()
    (path / NAME).write_bytes(first + f'"seal_crc32": "{zlib.crc32(first):08x}",\n'.encode() + rest)


def chunk(body: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = body["tensors"]["model.bias"]["chunks"][0]
    return found


def set_chunk(key: str, value: Any, body: dict[str, Any]) -> None:
    assert key in chunk(body), f"a chunk has no {key}"
    chunk(body)[key] = value


def file_named(name: str, body: dict[str, Any]) -> None:
    """Move all of the first file's contents to another path."""
    body["files"][name] = body["files"].pop("rank-00000.bin")
    for entry in [*body["tensors"].values()]:
        for each in entry["chunks"]:
            each["file"] = name if each["file"] == "rank-00000.bin" else each["file"]
    for variants in body["values"].values():
        for each in variants:
            each["file"] = name if each["file"] == "rank-00000.bin" else each["file"]


def chunk_twice(body: dict[str, Any]) -> None:
    body["tensors"]["model.bias"]["chunks"].append(chunk(body))


def huge_shape(body: dict[str, Any]) -> None:
    body["tensors"]["model.bias"]["shape"] = [2**62]


def another_dtype(body: dict[str, Any]) -> None:
    body["tensors"]["model.bias"]["dtype"] = "os.system"


BODIES: dict[str, Callable[[dict[str, Any]], object]] = {
    "a path with ..": functools.partial(file_named, "../outside.bin"),
    "an absolute path": functools.partial(file_named, "/etc/hostname"),
    "a huge offset": functools.partial(set_chunk, "offset", 2**62),
    "an offset beyond 64 bits": functools.partial(set_chunk, "offset", 2**80),
    "a negative offset": functools.partial(set_chunk, "offset", -8),
    "a NaN for an offset": functools.partial(set_chunk, "offset", float("nan")),
    "a huge number of bytes": functools.partial(set_chunk, "bytes", 2**50),
    "a box twice": chunk_twice,
    "a huge shape": huge_shape,
    "a dtype that is no dtype": another_dtype,
}
WORLD = '"world_size": 2'
TEXTS = {
    "a key twice": f"{WORLD}, {WORLD}",
    "lists 100,000 deep": f'{WORLD}, "more": {"[" * 100_000 + "]" * 100_000}',
    "a number of 100,000 digits": '"world_size": ' + "9" * 100_000,
    "an infinite number": '"world_size": 1e999',
}


class Call:
    """Unpickled, it is a call."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self._path,)


def code_in_metadata(path: Path) -> None:
    (path / ".metadata").write_bytes(pickle.dumps(Call(path.parent / RAN)))


def edit_metadata(change: Callable[[Any], object], path: Path) -> None:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    shutil.copy(path / "__0_0.distcp", path.parent / "outside.distcp")


def relative(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        if info.relative_path == "__0_0.distcp":
            info.relative_path = "../outside.distcp"


def huge_offset(metadata: Any) -> None:
    for info in metadata.storage_data.values():
        info.offset = 2**62


def hostile(engine: str, num_trials: int, folder: Path) -> Iterator[Trial]:
    def of_ours(path: Path, other: Path) -> list[Damage]:
        changes = {name: functools.partial(forge, change) for name, change in BODIES.items()}
        changes |= {name: functools.partial(forge_text, text) for name, text in TEXTS.items()}
        return [Damage(name, change, (NAME,)) for name, change in changes.items()]

    def of_stock(path: Path, other: Path) -> list[Damage]:
        outside = functools.partial(edit_metadata, relative)
        offset = functools.partial(edit_metadata, huge_offset)
        return [
            Damage("a call in the pickle", code_in_metadata, (".metadata",)),
            Damage("a path with ..", outside, (".metadata",), if_loaded=OUTSIDE),
            Damage("a huge offset", offset, (".metadata",)),
        ]

    return try_all(engine, folder, of_ours if engine == OURS else of_stock)


GROUP = "damaged files"
SCENARIOS = [
    Scenario(GROUP, "a flipped bit, over all files", flips, frozenset({NAMED}), 100, 1000, 300),
    Scenario(
        GROUP,
        "a file truncated, deleted, longer, swapped, of another step",
        broken_files,
        frozenset({NAMED}),
        0,
        0,
    ),
    Scenario(GROUP, "a hostile manifest", hostile, frozenset({NAMED}), 0, 0),
]

"""Finds the checkpoints in DIR of the command line, and shows manifests as tables and as JSON.

Tables fit 80 columns.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from vescale_fsdp import spi
from vescale_fsdp.cli.text import InputError, binary, count, line, several, table
from vescale_fsdp.spi import MANIFEST, PER_RANK, Manifest, TensorEntry, Variant, is_stage, sealed

# With the manifest, or what is wrong with it.
Manifests = list[tuple[Path, Manifest | str]]

_MOST_FILES, _MOST_TENSORS = 4, 12
_DATA = re.compile(r"rank-[0-9]{5,}\.bin")


@dataclass(frozen=True)
class Found:
    """Checkpoints in the order of their saves. Those without a seal, which may be damaged, last."""

    checkpoints: list[Path]
    unfinished: list[Path]  # stages: saves that run or did not finish
    is_folder: bool  # whether they are in DIR; else DIR is a checkpoint itself


def find(directory: Path) -> Found:
    """Return the checkpoint at ``directory``, or those in it. Raises InputError if none."""
    children = _children(directory)
    if _is_ours(directory, children):
        return Found([directory], [], is_folder=False)
    if foreign := spi.format_of(directory, children):
        raise InputError(
            f"{directory} is {foreign}, which has no checksums and no seal; make a checkpoint of "
            f"it with: vescale-fsdp checkpoint convert {directory} TARGET --to vescale"
        )
    folders = [child for child in children if child.is_dir()]
    unfinished = [child for child in folders if is_stage(child)]
    order = {path: found.sequence for path, found in sealed(directory)}
    checkpoints = sorted(
        (
            child
            for child in folders
            if child not in unfinished and _is_ours(child, _children(child, can_fail=True))
        ),
        key=lambda path: (path not in order, order.get(path, 0), path.name),
    )
    if not checkpoints:
        raise InputError(f"{directory} is not a checkpoint, and contains none{_others(folders)}")
    return Found(checkpoints, unfinished, is_folder=True)


def check_source(source: Path) -> None:
    """Raise InputError if ``source`` cannot be converted."""
    if source.is_file():
        return
    children = _children(source)
    if _is_ours(source, children) or spi.format_of(source, children):
        return
    if inside := [path for path, _ in sealed(source)]:
        raise InputError(f"{source} is a folder with checkpoints; name one of them: {inside[-1]}")
    raise InputError(f"{source} is not a checkpoint in a known format")


def _children(directory: Path, *, can_fail: bool = False) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except NotADirectoryError as error:
        kind = ", but safetensors" if directory.suffix == ".safetensors" else ""
        raise InputError(f"{directory} is not a directory{kind}") from error
    except OSError as error:
        if can_fail:
            return []
        raise InputError(f"cannot read {directory}: {error.strerror}") from error


def _is_ours(directory: Path, children: list[Path]) -> bool:
    """Whether it is a checkpoint of ours. True also without a manifest, and for a stage."""
    names = {child.name for child in children}
    return MANIFEST in names or any(map(_DATA.fullmatch, names)) or is_stage(directory)


def _others(folders: list[Path]) -> str:
    """Return the end of an error message: a checkpoint in another format in the folder, if any."""
    for folder in folders:
        if os.access(folder, os.R_OK) and (kind := spi.format_of(folder, _children(folder))):
            return f"; {folder.name} is {kind}"
    return ""


def as_json(path: Path, manifest: Manifest) -> dict[str, Any]:
    """Return a manifest as JSON, without the spans."""
    return {
        **_summary(path, manifest),
        "id": manifest.seal.id,
        "software": manifest.software,
        "files": [{"name": name, "num_bytes": size} for name, size in manifest.files.items()],
        "tensors": [
            {
                "name": name,
                "part": _part_of(name, manifest),
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "num_bytes": tensor.num_bytes,
                "num_pieces": len(tensor.chunks),
            }
            for name, tensor in manifest.tensors.items()
        ],
        "values": [
            {
                "name": name,
                "ranks": [list(variant.ranks) for variant in variants],
                "num_bytes": sum(variant.span.length for variant in variants),
            }
            for name, variants in manifest.values.items()
        ],
    }


def list_as_json(manifests: Manifests, unfinished: Sequence[Path]) -> dict[str, Any]:
    """Return one entry for each checkpoint, in the order of their saves."""
    return {
        "checkpoints": [
            {"path": str(path), "fault": manifest}
            if isinstance(manifest, str)
            else _summary(path, manifest) | {"fault": None}
            for path, manifest in manifests
        ],
        "passed_over": [str(path) for path in unfinished],
    }


def _summary(path: Path, manifest: Manifest) -> dict[str, Any]:
    return {
        "path": str(path),
        "step": manifest.seal.step,
        "sequence": manifest.seal.sequence,
        "created": manifest.seal.created,
        "world_size": manifest.world_size,
        "num_files": len(manifest.files),
        "num_tensors": len(manifest.tensors),
        "num_bytes": manifest.num_bytes,
    }


def _part_of(tensor: str, manifest: Manifest) -> str:
    """Return the part that a tensor belongs to: the longest name of a value that begins its name.

    Examples: ``model``, ``optimizer.0``.
    """
    fitting = [name for name in manifest.values if tensor.startswith(f"{name}.")]
    return max(fitting, key=len, default="")


def show_list(manifests: Manifests, unfinished: Sequence[Path], console: Console) -> None:
    """Print a line for each checkpoint, in the order of their saves."""
    rows = [
        (path.name, "NOT WHOLE", "", "", "", "")
        if isinstance(manifest, str)
        else (
            path.name,
            _step(manifest),
            _saved(manifest),
            f"{manifest.world_size:,}",
            f"{len(manifest.tensors):,}",
            binary(manifest.num_bytes),
        )
        for path, manifest in manifests
    ]
    console.print(table(("checkpoint", "step", "saved", "ranks", "tensors", "size"), rows))
    for _, manifest in manifests:
        if isinstance(manifest, str):
            line(console, manifest)
    for path in unfinished:
        line(console, f"{path.name}: a save that is under way or did not finish")


def show(path: Path, manifest: Manifest, console: Console, *, everything: bool) -> None:
    """Print the time of the save, versions, parts, files and tensors."""
    software = ", ".join(f"{name} {version}" for name, version in manifest.software.items())
    step = "" if manifest.seal.step is None else f"step {manifest.seal.step}, "
    line(console, f"{path}: {step}{binary(manifest.num_bytes)}", "bold")
    by = several(manifest.world_size, "rank")
    line(console, f"saved {_saved(manifest)} UTC by {by} with {software}", "dim")
    console.print()
    columns = ("part", "tensors", "elements", "size", "kept")
    console.print(table(columns, _part_rows(manifest)))
    console.print()
    most = None if everything else _MOST_FILES
    files = [(name, binary(size)) for name, size in manifest.files.items()]
    _print_some(files, ("file", "size"), most, "files", console)
    console.print()
    most = None if everything else _MOST_TENSORS
    columns = ("tensor", "dtype", "shape", "pieces", "size")
    _print_some(_tensor_rows(manifest), columns, most, "tensors", console)


def _step(manifest: Manifest) -> str:
    return "" if manifest.seal.step is None else str(manifest.seal.step)


def _saved(manifest: Manifest) -> str:
    """Return the time of the save, such as ``2025-01-31 23:59:59``."""
    return manifest.seal.created[:19].replace("T", " ")


def _part_rows(manifest: Manifest) -> list[Sequence[str]]:
    """Return a row for each part: a value, and the tensors whose names begin with its name."""
    tensors: dict[str, list[TensorEntry]] = {name: [] for name in manifest.values}
    for name, tensor in manifest.tensors.items():
        tensors.setdefault(_part_of(name, manifest), []).append(tensor)
    rows: list[Sequence[str]] = []
    for name, inside in tensors.items():
        variants = manifest.values.get(name, ())
        size = sum(each.num_bytes for each in inside)
        size += sum(variant.span.length for variant in variants)
        elements = sum(math.prod(each.shape) for each in inside)
        kept = _kept(name, variants)
        rows.append((name, f"{len(inside):,}", count(elements), binary(size), kept))
    return rows


def _kept(name: str, variants: Sequence[Variant]) -> str:
    if name.partition(".")[0] not in PER_RANK:
        return "once"
    return f"per rank, {several(len(variants), 'kind') if len(variants) > 1 else 'all equal'}"


def _tensor_rows(manifest: Manifest) -> list[tuple[str, ...]]:
    return [
        (
            name,
            tensor.dtype,
            "x".join(map(str, tensor.shape)) or "scalar",
            f"{len(tensor.chunks):,}",
            binary(tensor.num_bytes),
        )
        for name, tensor in manifest.tensors.items()
    ]


def _print_some(
    rows: Sequence[Sequence[str]],
    columns: Sequence[str],
    most: int | None,
    noun: str,
    console: Console,
) -> None:
    """Print a table of the first rows, and the number of the others."""
    console.print(table(columns, rows[:most]))
    if most is not None and len(rows) > most:
        line(console, f"... and {len(rows) - most:,} more {noun}: --all shows them", "dim")

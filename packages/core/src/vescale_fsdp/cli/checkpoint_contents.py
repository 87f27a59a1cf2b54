"""What a manifest says, as tables that fit 80 columns and as JSON."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vescale_fsdp.checkpoint.contents import PER_RANK
from vescale_fsdp.checkpoint.manifest import Manifest, TensorEntry, Variant
from vescale_fsdp.cli.amounts import binary, count, plain, several

# With the manifest, or what is wrong with it.
Manifests = list[tuple[Path, Manifest | str]]

_MOST_FILES, _MOST_TENSORS = 4, 12

T = TypeVar("T")


def as_json(path: Path, manifest: Manifest) -> dict[str, Any]:
    """All but where the bytes lie."""
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
    """One entry for each checkpoint, in the order in which they were made."""
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
    """The longest name of a value that the tensor's begins with: ``model``, ``optimizer.0``."""
    fitting = [name for name in manifest.values if tensor.startswith(f"{name}.")]
    return max(fitting, key=len, default="")


def show_list(manifests: Manifests, unfinished: Sequence[Path], console: Console) -> None:
    """A line for each checkpoint, in the order in which they were made."""
    table = _table("checkpoint", "step", "saved", "ranks", "tensors", "size")
    for path, manifest in manifests:
        if isinstance(manifest, str):
            table.add_row(_text(path.name), Text("NOT WHOLE"), *[Text()] * 4)
        else:
            table.add_row(
                _text(path.name),
                _text(_step(manifest)),
                _text(_saved(manifest)),
                _text(f"{manifest.world_size:,}"),
                _text(f"{len(manifest.tensors):,}"),
                _text(binary(manifest.num_bytes)),
            )
    console.print(table)
    for _, manifest in manifests:
        if isinstance(manifest, str):
            _line(console, manifest)
    for path in unfinished:
        _line(console, f"{path.name}: a save that is under way or did not finish")


def show(path: Path, manifest: Manifest, console: Console, *, everything: bool) -> None:
    """Print when and by what it was saved, its parts, its files and its tensors."""
    software = ", ".join(f"{name} {version}" for name, version in manifest.software.items())
    step = "" if manifest.seal.step is None else f"step {manifest.seal.step}, "
    _line(console, f"{path}: {step}{binary(manifest.num_bytes)}", "bold")
    by = several(manifest.world_size, "rank")
    _line(console, f"saved {_saved(manifest)} UTC by {by} with {software}", "dim")
    console.print()
    console.print(_parts_table(manifest))
    console.print()
    most = math.inf if everything else _MOST_FILES
    _print_some(_file_rows(manifest), ("file", "size"), most, "files", console)
    console.print()
    most = math.inf if everything else _MOST_TENSORS
    columns = ("tensor", "dtype", "shape", "pieces", "size")
    _print_some(_tensor_rows(manifest), columns, most, "tensors", console)


def _step(manifest: Manifest) -> str:
    return "" if manifest.seal.step is None else str(manifest.seal.step)


def _saved(manifest: Manifest) -> str:
    """``2025-01-31T23:59:59.123+00:00`` is ``2025-01-31 23:59:59``."""
    return manifest.seal.created[:19].replace("T", " ")


def _parts_table(manifest: Manifest) -> Table:
    """Each value is the frame of a part, and the tensors that begin with its name are in it."""
    table = _table("part", "tensors", "elements", "size", "kept")
    tensors: dict[str, list[TensorEntry]] = {name: [] for name in manifest.values}
    for name, tensor in manifest.tensors.items():
        tensors.setdefault(_part_of(name, manifest), []).append(tensor)
    for name, inside in tensors.items():
        variants = manifest.values.get(name, ())
        size = sum(each.num_bytes for each in inside)
        size += sum(variant.span.length for variant in variants)
        elements = sum(math.prod(each.shape) for each in inside)
        table.add_row(
            _text(name),
            _text(f"{len(inside):,}"),
            _text(count(elements)),
            _text(binary(size)),
            _text(_kept(name, variants)),
        )
    return table


def _kept(name: str, variants: Sequence[Variant]) -> str:
    if name.partition(".")[0] not in PER_RANK:
        return "once"
    return f"per rank, {several(len(variants), 'kind') if len(variants) > 1 else 'all equal'}"


def _file_rows(manifest: Manifest) -> list[tuple[str, ...]]:
    return [(name, binary(size)) for name, size in manifest.files.items()]


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
    rows: list[tuple[str, ...]],
    columns: Sequence[str],
    most: float,
    noun: str,
    console: Console,
) -> None:
    """A table of the first rows, and how many more there are."""
    shown = rows if len(rows) <= most else rows[: int(most)]
    table = _table(*columns)
    for row in shown:
        table.add_row(*map(_text, row))
    console.print(table)
    if len(shown) < len(rows):
        _line(console, f"... and {len(rows) - len(shown):,} more {noun}: --all shows them", "dim")


def _text(words: str) -> Text:
    """Not markup: names come from a file."""
    return Text(plain(words))


def _line(console: Console, words: str, style: str | None = None) -> None:
    console.print(plain(words), style=style, highlight=False, markup=False)


def _table(*columns: str) -> Table:
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False, padding=(0, 1), collapse_padding=True
    )
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left", overflow="fold")
    return table

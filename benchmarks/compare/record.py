"""The results of a cell as a JSON file, with the machine, versions and command."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.compare.grid import Cell, place_of
from benchmarks.compare.measure import Result, Settings
from benchmarks.models import PRESETS
from benchmarks.optimizers.results import ROOT, circumstances, read, write

__all__ = ["FOLDER", "Record", "is_done", "keep", "load", "load_all", "source_digest"]

FOLDER = ROOT / "benchmarks" / "results" / "compare"


@dataclass(frozen=True)
class Record:
    """The stored results of one cell.

    Attributes:
        source: a digest of the core's code that was measured.
        tokens: of one rank in one step.
        link: measured rate at which each rank receives on a limited network, in bit/s.
    """

    cell: Cell
    settings: Settings
    source: str
    tokens: int
    link: list[float]
    engines: dict[str, Result]
    circumstances: dict[str, Any]

    def step_s(self, engine: str) -> list[float]:
        """By round; empty if it was not measured."""
        return self.engines[engine].step_s if engine in self.engines else []

    @property
    def bound_s(self) -> list[float]:
        """A lower bound for a step, by round: the longer of ``compute`` and ``wire``.

        ``wire`` is for vescale-tuned, which sends less than the defaults. Empty if one of the two
        was not measured.
        """
        pairs = zip(self.step_s("compute"), self.step_s("wire"), strict=False)
        return [max(pair) for pair in pairs]


def source_digest() -> str:
    """Return a digest of all files of the core. If it changes, results are out of date."""
    total = hashlib.sha256()
    folder = ROOT / "packages" / "core" / "src"
    for path in sorted(folder.rglob("*.py")):
        total.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    return total.hexdigest()[:12]


def is_done(path: Path, engines: list[str], settings: Settings) -> bool:
    """Whether this was measured with the same code and settings, and all these engines."""
    if not path.exists():
        return False
    record = load(path)
    is_same = record.settings == settings and record.source == source_digest()
    return is_same and all(
        name in record.engines and record.engines[name].left_out is None for name in engines
    )


def keep(
    path: Path, cell: Cell, settings: Settings, engines: dict[str, Result], link: list[float]
) -> Record:
    """Write a cell's file. Replaces an earlier one."""
    found = circumstances()
    if any(name.startswith("deepspeed") for name in engines):
        found["versions"] |= {"deepspeed": _version("deepspeed")}
    record = Record(
        cell, settings, source_digest(), PRESETS[cell.model].tokens, link, engines, found
    )
    write(path, asdict(record))
    return record


def load(path: Path) -> Record:
    """Read a cell's file."""
    content = read(path)
    engines = {name: Result(**each) for name, each in content["engines"].items()}
    nested = {"cell": Cell(**content["cell"]), "settings": Settings(**content["settings"])}
    known = {each.name: content[each.name] for each in fields(Record)}
    return Record(**known | nested | {"engines": engines})


def load_all(folder: Path) -> dict[Cell, Record]:
    """Read all files of a folder, in the order of the grid."""
    records = [load(path) for path in folder.glob("*.json")]
    return {each.cell: each for each in sorted(records, key=lambda each: place_of(each.cell))}


def _version(distribution: str) -> str | None:
    try:
        return version(distribution)
    except PackageNotFoundError:
        return None

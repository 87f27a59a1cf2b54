"""Reads and writes results: JSON with figures, machine, versions, commit and command."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

__all__ = ["FOLDER", "ROOT", "circumstances", "read", "write"]

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path(__file__).resolve().parent / "results"


def circumstances() -> dict[str, Any]:
    """Return machine, versions, commit and command."""
    module = getattr(sys.modules["__main__"], "__spec__", None)
    name = module.name if module is not None else Path(sys.argv[0]).name
    name = name.removesuffix(".__main__")
    return {
        "command": " ".join(["python -m", name, *sys.argv[1:]]),
        "commit": _git("rev-parse", "--short", "HEAD"),
        "is_modified": bool(_git("status", "--porcelain", "--", "packages/core/src")),
        "machine": {"cpu": _cpu(), "cores": os.cpu_count(), "system": platform.system()},
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def read(path: Path) -> dict[str, Any]:
    """Read a file; return {} if there is none."""
    return dict(json.loads(path.read_text())) if path.exists() else {}


def write(path: Path, values: dict[str, Any]) -> None:
    """Write a file atomically, so that an interrupted benchmark does not lose earlier results."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(_lines(values, depth=2) + "\n")
    part.replace(path)


def _lines(value: Any, depth: int, indent: str = "") -> str:
    """JSON with a line for each entry of the outer dicts, and the inner ones on one line."""
    if not isinstance(value, dict) or not depth:
        return json.dumps(value)
    inner = indent + " "
    lines = [f"{inner}{json.dumps(k)}: {_lines(v, depth - 1, inner)}" for k, v in value.items()]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def _git(*arguments: str) -> str:
    call = ["git", *arguments]
    done = subprocess.run(call, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip()


def _cpu() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    found = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(found, platform.machine())

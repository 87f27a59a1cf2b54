"""What ``plan`` and ``tune`` say of four published models, to the last digit.

``golden/MODEL.json`` has the shapes. The tables are beside it as text, and ``digests.json`` has
the SHA-256 of all figures (``--json``). A change of a figure needs a reason in its commit:
``python -m packages.tune.tests.test_golden`` writes the files again.
"""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import chdir, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest import mock

import pytest

from vescale_fsdp.cli import main

GOLDEN = Path(__file__).parent / "golden"
DIGESTS = GOLDEN / "digests.json"
EXPERTS = {
    "deepseek-v3-671b": ["--experts", "8/256"],
    "gpt-oss-120b-hf": ["--experts", "4/128"],
    "gpt-oss-120b-openai": ["--experts", "4/128"],
    "llama-3-70b": [],
}
CODES = ["--gather-codec", "int8", "--reduce-codec", "int8", "--optimizer", "adamw8bit"]
COMMANDS = {
    "plan": ["plan", "--ranks", "1024", "--replicas", "4"],
    "plan-8-bits": ["plan", "--ranks", "256", *CODES],
    "tune": ["tune", "--ranks", "1024", "--batch", "1x4096"],
}
CASES = [(model, command) for model in EXPERTS for command in COMMANDS]


def said(model: str, command: str) -> tuple[str, str]:
    """The tables, and the digest of all figures."""
    name, *options = COMMANDS[command]
    if name == "tune":
        options += EXPERTS[model]
    with TemporaryDirectory() as folder, chdir(GOLDEN), redirect_stdout(StringIO()) as out:
        file = Path(folder) / "figures.json"
        with mock.patch.dict(os.environ, {"COLUMNS": "100"}):
            assert main([name, f"{model}.json", *options, "--json", str(file)]) == 0
        return out.getvalue(), hashlib.sha256(file.read_bytes()).hexdigest()


@pytest.mark.parametrize(("model", "command"), CASES)
def test_figures_are_those_of_before(model: str, command: str) -> None:
    tables, digest = said(model, command)
    assert tables == (GOLDEN / f"{model}-{command}.txt").read_text()
    assert digest == json.loads(DIGESTS.read_text())[f"{model} {command}"]


def write() -> None:
    digests = {}
    for model, command in CASES:
        tables, digests[f"{model} {command}"] = said(model, command)
        (GOLDEN / f"{model}-{command}.txt").write_text(tables)
    DIGESTS.write_text(json.dumps(digests, indent=1) + "\n")


if __name__ == "__main__":
    write()

"""Each distribution names its licence, authors and pages, and carries the files of the root."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ["core", "elastic", "lightning_plugin", "accelerate_plugin"]


def project(folder: str) -> dict[str, Any]:
    """The ``[project]`` table of one member."""
    text = (ROOT / "packages" / folder / "pyproject.toml").read_text()
    table: dict[str, Any] = tomllib.loads(text)["project"]
    return table


@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("name", ["LICENSE", "NOTICE"])
def test_member_has_the_root_s_file(folder: str, name: str) -> None:
    assert (ROOT / "packages" / folder / name).read_bytes() == (ROOT / name).read_bytes()


@pytest.mark.parametrize("folder", FOLDERS)
def test_member_says_what_a_registry_shows(folder: str) -> None:
    table = project(folder)
    assert table["license"] == "Apache-2.0"
    assert table["license-files"] == ["LICENSE", "NOTICE"]
    assert table["authors"] == [{"name": "veScale-FSDP contributors"}]
    assert {"Documentation", "Source", "Issues", "Changelog", "Paper"} == set(table["urls"])
    assert table["urls"] == project("core")["urls"]
    assert len(table["keywords"]) >= 5


@pytest.mark.parametrize("name", ["README.md", "NOTICE", "CITATION.cff"])
def test_the_paper_is_cited_and_this_called_independent(name: str) -> None:
    text = (ROOT / name).read_text()
    assert "2602.22437" in text
    assert "independent implementation" in " ".join(text.split())

"""The distributions share one version, and the others pin the core to exactly that."""

from __future__ import annotations

import re
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import vescale_fsdp

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ["core", "elastic", "lightning_plugin", "accelerate_plugin"]


def project(folder: str) -> dict[str, Any]:
    """The ``[project]`` table of one member."""
    table: dict[str, Any] = tomllib.loads(
        (ROOT / "packages" / folder / "pyproject.toml").read_text()
    )
    return table["project"]


def test_members_have_one_version() -> None:
    assert len({project(folder)["version"] for folder in FOLDERS}) == 1


def test_import_package_states_the_version_of_its_distribution() -> None:
    assert vescale_fsdp.__version__ == project("core")["version"]


@pytest.mark.parametrize("folder", FOLDERS)
def test_installed_version_is_the_source_s(folder: str) -> None:
    assert metadata.version(project(folder)["name"]) == project(folder)["version"]


@pytest.mark.parametrize("folder", FOLDERS[1:])
def test_others_pin_the_core_exactly(folder: str) -> None:
    core = project("core")
    assert f"{core['name']}=={core['version']}" in project(folder)["dependencies"]


@pytest.mark.parametrize("folder", ["core", "lightning_plugin", "accelerate_plugin"])
def test_extra_pins_elastic_exactly(folder: str) -> None:
    elastic = project("elastic")
    pin = f"{elastic['name']}=={elastic['version']}"
    assert project(folder)["optional-dependencies"]["elastic"] == [pin]


@pytest.mark.parametrize("folder", FOLDERS)
def test_members_run_on_the_same_pythons(folder: str) -> None:
    assert project(folder)["requires-python"] == ">=3.11,<3.14"


def test_constraints_pin_every_line_and_none_of_our_packages() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if line and not line.startswith("#")]
    assert [pin for pin in pins if not re.fullmatch(r"[\w.-]+==[\w.]+", pin)] == []
    assert [pin for pin in pins if pin.lower().replace("_", "-").startswith("vescale")] == []


def test_root_has_tooling_only() -> None:
    assert "project" not in tomllib.loads((ROOT / "pyproject.toml").read_text())

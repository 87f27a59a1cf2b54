"""Python, our packages, what they need, and what they are used with: versions and ranges."""

from __future__ import annotations

import platform
import sys
from importlib import metadata

import vescale_fsdp
from vescale_fsdp.cli.checkup.findings import Section
from vescale_fsdp.cli.checkup.ranges import contains, parse_requirement

_CORE = "vescale-fsdp"
_PLUGINS = ("vescale-fsdp-lightning", "vescale-fsdp-accelerate")
# Shown if they are installed, next to what our packages need.
_PARTNERS = ("torch", "numpy", "lightning", "pytorch-lightning", "accelerate", "transformers")


def look_at_software(section: Section) -> None:
    """Versions, whether they are in the supported ranges, and whether ours match."""
    ours = {name: _version(name) for name in (_CORE, *_PLUGINS)}
    needs_python, ranges = _ranges([name for name, version in ours.items() if version])
    python = platform.python_version()
    section.add("python", _with_range(python, needs_python), python)
    if not contains(needs_python, python):
        section.better(
            f"Python {python} is not supported ({needs_python})",
            f"make an environment with a Python {needs_python}",
        )
    section.add("interpreter", sys.executable or "unknown")
    section.add("system", f"{platform.system()} {platform.release()}, {platform.machine()}")
    _look_at_ours(section, ours)
    for name in [*_PARTNERS, *(each for each in ranges if each not in _PARTNERS)]:
        version, needed = _version(name), ranges.get(name, "")
        if version is None:
            continue
        section.add(name, _with_range(version, needed), version)
        if not contains(needed, version):
            section.better(
                f"{name} {version} is not a supported version ({needed})",
                f"pip install '{name}{needed}'",
            )


def _look_at_ours(section: Section, ours: dict[str, str | None]) -> None:
    loaded = vescale_fsdp.__version__
    core = ours[_CORE]
    section.add(_CORE, loaded)
    if core is None:
        section.better(
            f"{_CORE} is imported from a folder, not installed: no plug-in finds it",
            "pip install -e packages/core, in a checkout",
        )
    elif core != loaded:
        section.broken(
            f"{_CORE} {core} is installed, but the code that is imported says {loaded}",
            f"pip install --force-reinstall --no-deps {_CORE}, or the checkout again with -e",
        )
    for name in _PLUGINS:
        version = ours[name]
        if version is None:
            continue
        section.add(name, version)
        if version != loaded:
            section.broken(
                f"{name} {version} does not match {_CORE} {loaded}",
                f"pip install {name}=={loaded}",
            )


def _ranges(distributions: list[str]) -> tuple[str, dict[str, str]]:
    """The range of Python, and the range of each package, that these distributions ask for."""
    python, ranges = "", {}
    for name in distributions:
        if not python:
            python = parse_requirement(f"python{metadata.metadata(name)['Requires-Python']}").range
        for line in metadata.requires(name) or []:
            requirement = parse_requirement(line)
            if requirement.name not in (_CORE, *_PLUGINS):
                ranges[requirement.name] = requirement.range
    return python, ranges


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _with_range(version: str, needed: str) -> str:
    return f"{version}  (supported: {needed})" if needed else version

"""Version ranges, as far as our own pyproject files use them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import zip_longest


@dataclass(frozen=True)
class Requirement:
    """A line of a distribution's dependencies."""

    name: str
    range: str  # such as ">=2.13,<2.15"; empty for any


def parse_requirement(line: str) -> Requirement:
    """``torch<2.15,>=2.13; extra == "x"`` is a name and a range. Markers are left out."""
    found = re.match(r"\s*(?P<name>[\w.-]+)\s*(\[[^]]*\])?\s*\(?(?P<range>[^;)]*)", line)
    if found is None:
        return Requirement(line.strip(), "")
    items = found["range"].replace(" ", "").split(",")
    # Metadata lists them in any order; people read the lower bound first.
    return Requirement(found["name"], ",".join(sorted(items, key=lambda each: each[:1] != ">")))


def contains(range_: str, version: str) -> bool:
    """Whether a version is in a range of ``>= > <= < == !=``, joined by commas.

    What follows the numbers (``+cpu``, ``rc1``, ``.dev0``) does not count, except for ``==``.
    """
    return all(_holds(item, version) for item in range_.split(",") if item)


def _holds(item: str, version: str) -> bool:
    found = re.match(r"(>=|<=|==|!=|>|<)(.+)", item)
    if found is None:  # a form that we do not use: nothing to complain of
        return True
    operator, bound = found.groups()
    if operator in ("==", "!="):
        same = version.split("+")[0] == bound.split("+")[0]
        return same == (operator == "==")
    difference = _compare(version, bound)
    return {
        ">=": difference >= 0,
        "<=": difference <= 0,
        ">": difference > 0,
        "<": difference < 0,
    }[operator]


def _compare(version: str, bound: str) -> int:
    """Below, at or above: -1, 0 or 1."""
    for one, other in zip_longest(_numbers(version), _numbers(bound), fillvalue=0):
        if one != other:
            return -1 if one < other else 1
    return 0


def _numbers(version: str) -> list[int]:
    found = re.match(r"\d+(\.\d+)*", version)
    return [int(part) for part in found[0].split(".")] if found else []

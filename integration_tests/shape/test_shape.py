"""The shape of the sources is that of `figures.toml`, and the counters count."""

from __future__ import annotations

import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import FunctionType, ModuleType

import pytest

from . import reach, walk
from .figures import FILE, TABLES, faults, in_file, lowered
from .lines import code_lines


@pytest.mark.parametrize("table", TABLES)
def test_no_figure_is_above_the_file_s_or_far_below(table: str) -> None:
    now, details = TABLES[table]()
    found = faults(now, in_file(FILE.read_text())[table])
    assert not found, f"{'; '.join(found)}. Counted: {details}"


def test_a_figure_may_be_a_little_lower_than_the_file_s() -> None:
    said = {"calls": 100, "functions": 10}
    assert faults({"calls": 98, "functions": 10}, said) == []
    assert faults({"calls": 97, "functions": 9}, said) == [
        "calls is 97, not 100: lower it",
        "functions is 9, not 10: lower it",
    ]
    (fault,) = faults({"calls": 101, "functions": 10}, said)
    assert fault.startswith("calls is 101, above 100.")


def test_each_figure_has_its_line() -> None:
    assert faults({"new": 1}, {"former": 2}) == [
        "new is 1, and has no figure",
        "former is there no more: remove it",
    ]


def test_the_file_is_lowered_only() -> None:
    text = "# Why.\n[walk] # calls\n# For streams.\ncalls = 100\nfiles = 20\nformer = 3\n"
    now = {"walk": {"calls": 120, "files": 18}}
    expected = "# Why.\n[walk] # calls\n# For streams.\ncalls = 100\nfiles = 18\n"
    assert lowered(text, now) == expected


def test_code_lines_are_those_with_code() -> None:
    text = '''"""A module,
in two lines."""

# A comment.
def f(x):  # 1
    """A function."""
    text = """2
    and 3"""

    return (x,  # 4
            text)  # 5
'''
    assert code_lines(text) == 5


def test_calls_are_counted_by_file(tmp_path: Path) -> None:
    """Three of ours: f, and g twice. Not that of a list in place, nor those of others."""
    names: dict[str, FunctionType] = {}
    text = "def g(x):\n    return x\n\ndef f():\n    return len([g(x) for x in range(2)])\n"
    exec(compile(text, str(tmp_path / "ours" / "code.py"), "exec"), names)

    def others() -> None:
        names["f"]()

    assert walk.calls_by_file(others, tmp_path / "ours") == Counter({"code.py": 3})


class Ours:
    """An object of a class of ours, which may stand in for a function."""


Ours.__module__ = "vescale_fsdp.engine"


def test_functions_of_ours_are_found_under_all_their_disguises(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ours, theirs = ModuleType("vescale_fsdp_test"), ModuleType("theirs")
    ours.__file__ = "/somewhere/vescale_fsdp_test/__init__.py"
    names: dict[str, FunctionType] = {}
    exec(compile("def f(): ...", "/somewhere/vescale_fsdp_test/code.py", "exec"), names)
    exec(compile("def g(): ...\ndef h(): ...", "/somewhere/theirs.py", "exec"), names)
    f, g, h = names["f"], names["g"], names["h"]
    h.__code__ = f.__code__

    class Kind:
        method = staticmethod(f)
        read = property(partial(f))
        plain = g

    Kind.__module__ = "theirs"
    vars(theirs).update(f=f, g=g, h=h, Kind=Kind, object=Ours(), kind=Ours)
    for module in (ours, theirs):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    found = reach.ours_in(("theirs",))
    places = {"f", "h", "Kind.method", "Kind.read", "object"}
    assert found.keys() == {f"theirs.{place}" for place in places}
    several = {"theirs.Kind.method": 1, "theirs.f": 1, "theirs.h": 2}
    assert reach.distinct(several) == ["theirs.Kind.method", "theirs.h"]
    assert reach.distinct(several, but={"torch.h": 2}) == ["theirs.Kind.method"]

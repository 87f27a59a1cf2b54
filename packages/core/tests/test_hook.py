"""Callbacks at the import of modules, also of those that are being imported."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

from vescale_fsdp_hook import when_imported

CALLED: list[str] = []


def note(module: ModuleType) -> None:
    CALLED.append(f"{module.__name__}, last = {vars(module).get('last')}")


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """``circular.user`` imports ``circular.used``, which asks to be told of ``circular.user``."""
    folder = tmp_path / "circular"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "user.py").write_text("import circular.used\nlast = 1\n")
    (folder / "used.py").write_text(
        f"from vescale_fsdp_hook import when_imported\nfrom {__name__} import note\n"
        "for _ in range(2):\n    when_imported('circular.user', note)\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(sys.modules, __name__, sys.modules[__name__])
    CALLED.clear()
    yield folder
    for name in [each for each in sys.modules if each.partition(".")[0] == "circular"]:
        del sys.modules[name]


def test_before_and_after_an_import(package: Path) -> None:
    when_imported("circular", note)
    assert not CALLED
    module = import_module("circular")
    assert CALLED == ["circular, last = None"]
    when_imported("circular", note)
    assert CALLED == ["circular, last = None"] * 2
    assert type(module.__spec__) is ModuleSpec


def test_who_only_looks_for_a_module_changes_nothing(package: Path) -> None:
    """``python -m`` and checks of what is installed ask for its spec, and do not import it."""
    when_imported("circular", note)
    for _ in range(2):
        assert find_spec("circular") is not None
    assert not CALLED
    import_module("circular")
    assert CALLED == ["circular, last = None"]
    del sys.modules["circular"]
    import_module("circular")
    assert CALLED == ["circular, last = None"], "only once"


def test_a_module_that_is_being_executed_is_waited_for(package: Path) -> None:
    module = import_module("circular.user")
    assert CALLED == ["circular.user, last = 1"]
    assert type(module.__spec__) is ModuleSpec


def test_a_module_that_raises_is_not_told_of(package: Path) -> None:
    user = package / "user.py"
    user.write_text(user.read_text().replace("last = 1", "raise OSError"))
    with pytest.raises(OSError):  # noqa: PT011
        import_module("circular.user")
    assert not CALLED

"""Pickle by reference across processes, also for modules that only a test runner can import.

``pickle`` writes a function or class as (module name, qualified name) and leaves it to the other
side to import the module. pytest's ``--import-mode=importlib`` puts test modules into
``sys.modules`` under names that no other process can import, such as
``packages.core.tests.engine.test_parity``. So the pickle is sent with the file of each module
that it names, and the other side loads that file under the same name. The packages above the
module come along: relative imports of siblings work.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import os
import pickle
import sys
from dataclasses import dataclass
from types import FunctionType, ModuleType
from typing import Any


@dataclass(frozen=True)
class ModuleSource:
    """Where a module, or a package above one, is."""

    name: str
    path: str | None  # None: a namespace package, which has no file
    search_paths: list[str] | None  # a package's directories; None: not a package


def dump(value: object) -> tuple[bytes, list[ModuleSource]]:
    """Pickle ``value``; also list the modules it names, each after the packages above it."""
    buffer = io.BytesIO()
    pickler = _Recorder(buffer)
    pickler.dump(value)
    names: dict[str, None] = {}  # an ordered set
    for module in pickler.modules:
        parts = module.split(".")
        names.update((".".join(parts[: end + 1]), None) for end in range(len(parts)))
    sources = [_source(name) for name in names]
    return buffer.getvalue(), [source for source in sources if source is not None]


def load(payload: bytes, sources: list[ModuleSource]) -> Any:
    """Undo ``dump`` in another process: make the modules importable, then unpickle."""
    for source in sources:
        _ensure(source)
    return pickle.loads(payload)


class _Recorder(pickle.Pickler):
    """A pickler that notes the modules of all functions and classes it writes by name."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.modules: dict[str, None] = {}

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, (type, FunctionType)) and obj.__module__:
            self.modules[obj.__module__] = None
        return NotImplemented  # pickle it as usual


def _source(name: str) -> ModuleSource | None:
    """Where this process has the module from; None if the other side has it anyway."""
    module = sys.modules.get(name)
    if module is None or name == "__main__":  # multiprocessing sends __main__ itself
        return None
    path = getattr(module, "__file__", None)
    search_paths = getattr(module, "__path__", None)
    if path is not None and not path.endswith(".py"):
        return None  # an extension module is never a test's
    if path is None and search_paths is None:
        return None  # built in
    return ModuleSource(
        name,
        None if path is None else os.path.abspath(path),
        None if search_paths is None else [os.path.abspath(entry) for entry in search_paths],
    )


_modified: dict[str, int] = {}  # module loaded from its file -> time of change, ns


def _ensure(source: ModuleSource) -> None:
    """Put the module into ``sys.modules``, unless it is there from the same, unchanged file."""
    module = sys.modules.get(source.name)
    if source.path is None:
        if module is None or list(getattr(module, "__path__", [])) != source.search_paths:
            namespace = ModuleType(source.name)
            namespace.__path__ = source.search_paths or []
            sys.modules[source.name] = namespace
        return
    if module is not None and getattr(module, "__file__", None) == source.path:
        if source.name not in _modified or _modified[source.name] == _mtime_ns(source.path):
            return
    elif _finder_agrees(source):
        importlib.import_module(source.name)
        return
    _load_file(source)


def _finder_agrees(source: ModuleSource) -> bool:
    """Whether a plain import of the name would find this file."""
    if source.name in sys.modules:
        return False  # from another file: a test module of the same name
    try:
        spec = importlib.util.find_spec(source.name)
    except (ImportError, AttributeError, ValueError):
        return False
    return spec is not None and spec.origin == source.path


def _load_file(source: ModuleSource) -> None:
    assert source.path is not None, f"{source.name} has no file"
    modified = _mtime_ns(source.path)
    spec = importlib.util.spec_from_file_location(
        source.name, source.path, submodule_search_locations=source.search_paths
    )
    if spec is None or spec.loader is None:
        raise ImportError(f"cannot load the module {source.name} from {source.path}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[source.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[source.name]
        raise
    _modified[source.name] = modified


def _mtime_ns(path: str) -> int:
    return os.stat(path).st_mtime_ns

"""Run a callback when a module is imported. Standard library only, nothing happens on import.

The plug-ins of veScale-FSDP use it to add their name to a registry of Lightning or Accelerate at
the moment that registry comes into being. Frameworks that offer no such hook of their own are
reached this way; a process that never imports the named module is left as it was.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

__all__ = ["when_imported"]

Callback = Callable[[ModuleType], None]


def when_imported(name: str, callback: Callback) -> None:
    """Call ``callback(module)`` right after module ``name`` has been executed.

    At once, if it is imported already. A module that is being executed now, because it imports what
    calls this, counts as not imported. Asking twice with the same callback is asking once. An
    exception in the callback is raised to whoever imports the module.
    """
    module = sys.modules.get(name)
    if module is not None:
        spec = getattr(module, "__spec__", None)
        if spec is not None and getattr(
            spec, "_initializing", False
        ):  # importlib's: it is being executed
            _Executing.of(spec).add(callback)
        else:
            callback(module)
        return
    finder = next((f for f in sys.meta_path if isinstance(f, _Finder)), None)
    if finder is None:
        finder = _Finder()
        sys.meta_path.insert(0, finder)
    callbacks = finder.waiting.setdefault(name, [])
    if callback not in callbacks:
        callbacks.append(callback)


class _Executing(ModuleSpec):
    """The spec of a module that is being executed. It calls back when importlib says it is done."""

    waiting: list[Callback]

    @classmethod
    def of(cls, spec: ModuleSpec) -> _Executing:
        """Change the class of a spec to this one."""
        if not isinstance(spec, cls):
            spec.__class__ = cls
            vars(spec)["waiting"] = []
        assert isinstance(spec, cls)
        return spec

    def add(self, callback: Callback) -> None:
        """Call this one too."""
        if callback not in self.waiting:
            self.waiting.append(callback)

    @property
    def _initializing(self) -> bool:
        is_executing: bool = vars(self)["_initializing"]
        return is_executing

    @_initializing.setter
    def _initializing(self, value: bool) -> None:
        vars(self)["_initializing"] = value
        if value:
            return
        callbacks = vars(self).pop("waiting")
        self.__class__ = ModuleSpec  # type: ignore[assignment]
        module = sys.modules.get(self.name)  # None: it has raised
        for callback in callbacks if module is not None else ():
            callback(module)


class _Finder(MetaPathFinder):
    """Finds nothing itself: it lets the others find a module and adds the callbacks to it."""

    def __init__(self) -> None:
        self.waiting: dict[str, list[Callback]] = {}
        self._asked: set[str] = set()  # names that the others are asked for now

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.waiting or fullname in self._asked:
            return None
        self._asked.add(fullname)
        try:
            spec = find_spec(fullname)
        finally:
            self._asked.discard(fullname)
        if spec is None or spec.loader is None:
            return None
        loader, execute = spec.loader, spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            # Only now: a spec may also be asked for by who does not import the module.
            for callback in self.waiting.pop(fullname, ()):
                callback(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]  # this instance only
        return spec

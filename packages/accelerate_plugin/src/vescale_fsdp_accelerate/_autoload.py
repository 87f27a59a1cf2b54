"""Makes a yaml enable veScale-FSDP in unchanged scripts.

Accelerate has no registry of engines, and does not pass unknown keys to its workers. But torch
calls the entry points of the group ``torch.backends`` at the end of ``import torch``. Ours is
`install`:

* In every process it waits for the import of ``accelerate launch``, which then reads our keys
  (see `launching`).
* In a worker whose yaml asks for veScale-FSDP, it replaces ``accelerate.Accelerator`` by
  ``VeScaleAccelerator``.

Such a worker never trains with another engine. The launcher sets two of Accelerate's variables to
values that Accelerate refuses; the error message says what to do. Only `take_over` restores the
real values.

``TORCH_DEVICE_BACKEND_AUTOLOAD=0`` disables it; ``-m vescale_fsdp_accelerate.run`` then does the
same. It uses only the standard library, because torch is still being imported when it runs.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from vescale_fsdp_accelerate import options

__all__ = ["install", "take_over"]

# accelerate/__init__.py imports these after Accelerator. Accelerate's own modules import torch, so
# accelerate.accelerator may be half imported when `install` runs.
_AFTER_ACCELERATOR = "accelerate.inference"
_LAUNCHER = "accelerate.commands.launch"


def install() -> None:
    """Arrange that Accelerate is changed when it is imported.

    Raises only in workers whose yaml asks for veScale-FSDP.
    """
    try:
        from vescale_fsdp_hook import when_imported

        when_imported("accelerate.commands.config.config_args", _read_guard)
        when_imported(_LAUNCHER, _read_keys)
        when_imported("accelerate.commands.utils", _launch_by_name)
        if options.asked_for():
            when_imported(_AFTER_ACCELERATOR, _replace)
    except Exception:
        if options.asked_for():
            raise


def _read_guard(module: ModuleType) -> None:
    """Make Accelerate accept our key in a yaml. Without this package it refuses the key.

    A yaml with the key and without our engine is refused: its processes would train alone.
    """
    process: Callable[[dict[str, Any]], dict[str, Any]] = module.BaseConfig.process_config

    def process_config(config_dict: dict[str, Any]) -> dict[str, Any]:
        fsdp_config = config_dict.get("fsdp_config") or {}
        if options.GUARD in config_dict and options.engine_of(fsdp_config) is None:
            raise ValueError(
                f"the yaml has the line '{options.GUARD}' and does not turn veScale-FSDP on: add "
                f"'{options.ENGINE_KEY}: vescale' under fsdp_config, or remove that line to train "
                "with Accelerate's own engines"
            )
        config_dict.pop(options.GUARD, None)
        return process(config_dict)

    module.BaseConfig.process_config = staticmethod(process_config)


def _read_keys(module: ModuleType) -> None:
    import_module("vescale_fsdp_accelerate.launching").add_to_launcher(module)


def _launch_by_name(_: ModuleType) -> None:
    """Run the launcher by its name for ``python -m accelerate.commands.launch``.

    Python runs that file as ``__main__``, whose functions are not changed. It would start processes
    that do not know of our keys. This is called by its import of its last dependency.
    """
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    if main is not None and main.name == _LAUNCHER:
        raise SystemExit(import_module(_LAUNCHER).main())


def _replace(_: ModuleType) -> None:
    take_over()


def take_over() -> None:
    """Replace ``accelerate.Accelerator`` and its functions for checkpoints by ours.

    It is for workers of a job that asks for veScale-FSDP. Idempotent.
    """
    package = import_module("accelerate")
    ours = import_module("vescale_fsdp_accelerate.accelerator").VeScaleAccelerator
    import_module("accelerate.accelerator").Accelerator = ours  # type: ignore[attr-defined]
    package.Accelerator = ours  # type: ignore[attr-defined]
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"):
        _join_on_cpu(import_module("accelerate.state").PartialState)
    os.environ.update(options.real_environment())


def _join_on_cpu(partial_state: Any) -> None:
    """Make ``PartialState()`` respect ``use_cpu: true``, as Accelerator does.

    Else the processes of a script that first makes a ``PartialState`` would not be connected.
    """
    make = partial_state.__init__
    if hasattr(make, "_vescale_fsdp"):
        return

    @functools.wraps(make)
    def make_on_cpu(self: Any, cpu: bool = True, **kwargs: Any) -> None:
        make(self, cpu=True, **kwargs)

    make_on_cpu._vescale_fsdp = True  # type: ignore[attr-defined]
    partial_state.__init__ = make_on_cpu

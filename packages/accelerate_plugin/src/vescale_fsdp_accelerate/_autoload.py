"""How a yaml turns veScale-FSDP on in scripts that do not know of it.

Accelerate has no registry of engines, and does not export keys that it does not know to its
workers. torch calls the entry points of the group ``torch.backends`` at the end of ``import
torch``. Ours is `install`:

* in every process it asks to be told when ``accelerate launch`` is imported, which then reads our
  keys (`launching`);
* in a worker whose yaml has asked for us, it puts ``VeScaleAccelerator`` in the place of
  ``accelerate.Accelerator``.

A worker that asked for us never trains on another engine: the launcher gives it values of two of
Accelerate's variables that Accelerate itself refuses, with what to do in the message. Only
`take_over` puts the real ones back.

Switch it off with ``TORCH_DEVICE_BACKEND_AUTOLOAD=0``; then ``-m vescale_fsdp_accelerate.run`` does
the same. Standard library only: torch is still being imported when this runs.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any

from vescale_fsdp_accelerate import options

__all__ = ["install", "take_over"]

# What accelerate/__init__.py imports after Accelerator itself. Accelerate's own modules import
# torch, so accelerate.accelerator may be half imported when `install` runs.
_AFTER_ACCELERATOR = "accelerate.inference"


def install() -> None:
    """Wait for Accelerate. Raises in workers that have asked for veScale-FSDP only."""
    try:
        from vescale_fsdp_hook import when_imported

        when_imported("accelerate.commands.config.config_args", _read_guard)
        when_imported("accelerate.commands.launch", _read_keys)
        if options.asked_for():
            when_imported(_AFTER_ACCELERATOR, _replace)
    except Exception:
        if options.asked_for():
            raise


def _read_guard(module: ModuleType) -> None:
    """Let a yaml have the key that Accelerate refuses where this package is not installed."""
    process: Callable[[dict[str, Any]], dict[str, Any]] = module.BaseConfig.process_config

    def process_config(config_dict: dict[str, Any]) -> dict[str, Any]:
        config_dict.pop(options.GUARD, None)
        return process(config_dict)

    module.BaseConfig.process_config = staticmethod(process_config)


def _read_keys(module: ModuleType) -> None:
    import_module("vescale_fsdp_accelerate.launching").add_to_launcher(module)


def _replace(_: ModuleType) -> None:
    take_over()


def take_over() -> None:
    """Have ``accelerate.Accelerator`` be ours, in this process, and the checkpoints' functions.

    For workers of a job that has asked for veScale-FSDP. Idempotent.
    """
    package = import_module("accelerate")
    ours = import_module("vescale_fsdp_accelerate.accelerator").VeScaleAccelerator
    import_module("accelerate.accelerator").Accelerator = ours  # type: ignore[attr-defined]
    package.Accelerator = ours  # type: ignore[attr-defined]
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"):
        _join_on_cpu(import_module("accelerate.state").PartialState)
    os.environ.update(options.real_environment())


def _join_on_cpu(partial_state: Any) -> None:
    """Have ``PartialState()`` look at ``use_cpu: true`` too, as Accelerator does.

    Without it, a script that makes one first has its processes train alone.
    """
    make = partial_state.__init__
    if hasattr(make, "_vescale_fsdp"):
        return

    @functools.wraps(make)
    def make_on_cpu(self: Any, cpu: bool = True, **kwargs: Any) -> None:
        make(self, cpu=True, **kwargs)

    make_on_cpu._vescale_fsdp = True  # type: ignore[attr-defined]
    partial_state.__init__ = make_on_cpu

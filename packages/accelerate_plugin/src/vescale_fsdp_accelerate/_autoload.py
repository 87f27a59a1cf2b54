"""Makes a yaml enable veScale-FSDP in unchanged scripts.

Accelerate has no registry of engines, and does not pass unknown keys to its workers. But torch
calls the entry points of the group ``torch.backends`` at the end of ``import torch``. Ours is
`install`:

* In every process it waits for the import of ``accelerate launch``, and then looks whether the yaml
  has a key of ours. If not, nothing changes (see `launching`).
* In a worker whose yaml asks for veScale-FSDP, three names stand for classes of ours, which derive
  from those that had them: ``accelerate.Accelerator``, ``transformers.Trainer`` and its
  ``Seq2SeqTrainer``.

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
from importlib import import_module
from types import ModuleType
from typing import Any

from vescale_fsdp_accelerate import options

__all__ = ["install", "replace_trainers", "take_over"]

# accelerate/__init__.py imports these after Accelerator. Accelerate's own modules import torch, so
# accelerate.accelerator may be half imported when `install` runs.
_AFTER_ACCELERATOR = "accelerate.inference"
_LAUNCHER = "accelerate.commands.launch"


def install() -> None:
    """Wait for Accelerate's launcher, and in a worker that asks for us for Accelerate itself.

    Raises only in workers whose yaml asks for veScale-FSDP.
    """
    try:
        from vescale_fsdp_hook import when_imported

        when_imported(_LAUNCHER, _look)
        when_imported("accelerate.commands.utils", _launch_by_name)
        if options.asked_for():
            when_imported(_AFTER_ACCELERATOR, _replace)
    except Exception:
        if options.asked_for():
            raise


def _look(module: ModuleType) -> None:
    import_module("vescale_fsdp_accelerate.launching").look(module)


def _launch_by_name(_: ModuleType) -> None:
    """Run the launcher by its name for ``python -m accelerate.commands.launch``, if its yaml asks.

    Python runs that file as ``__main__``, whose functions cannot be replaced. This is called by its
    import of its last dependency.
    """
    main = getattr(sys.modules.get("__main__"), "__spec__", None)
    if main is not None and main.name == _LAUNCHER:
        launcher = import_module(_LAUNCHER)
        if hasattr(launcher.launch_command, "__wrapped__"):
            raise SystemExit(launcher.main())


def _replace(_: ModuleType) -> None:
    take_over()


def take_over() -> None:
    """Give the names of Accelerate's and transformers' classes to ours.

    It is for workers of a job that asks for veScale-FSDP. Idempotent.
    """
    package = import_module("accelerate")
    ours = import_module("vescale_fsdp_accelerate.accelerator").VeScaleAccelerator
    import_module("accelerate.accelerator").Accelerator = ours  # type: ignore[attr-defined]
    package.Accelerator = ours  # type: ignore[attr-defined]
    replace_trainers()
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in ("1", "true", "yes"):
        _join_on_cpu(import_module("accelerate.state").PartialState)
    os.environ.update(options.real_environment())


def replace_trainers() -> None:
    """Give the names of the Trainers to ours when they are imported, and let ``trl`` use us.

    Trainers that derive from them, as those of ``trl``, then derive from ours.
    """
    from vescale_fsdp_hook import when_imported

    when_imported("transformers.trainer", _replace_trainer)
    when_imported("transformers.trainer_seq2seq", _replace_seq2seq)
    import_module("vescale_fsdp_accelerate.references").register()


def _replace_trainer(module: ModuleType) -> None:
    _give(module, "Trainer", "vescale_fsdp_accelerate.trainer", "VeScaleTrainer")


def _replace_seq2seq(module: ModuleType) -> None:
    _give(module, "Seq2SeqTrainer", "vescale_fsdp_accelerate.seq2seq", "VeScaleSeq2SeqTrainer")


def _give(module: ModuleType, name: str, home: str, own: str) -> None:
    """Give a name to our class, when ``home``, which may be what imports the module, has made it.

    Unpickling a Trainer in another process imports our file first.
    """
    from vescale_fsdp_hook import when_imported

    import_module(home)
    when_imported(home, lambda ours: setattr(module, name, getattr(ours, own)))


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

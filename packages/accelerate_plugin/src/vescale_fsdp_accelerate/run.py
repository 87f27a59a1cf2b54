"""``-m vescale_fsdp_accelerate.run train.py``: runs an unchanged script without the import hook.

::

    accelerate launch --config_file vescale.yaml -m vescale_fsdp_accelerate.run train.py --lr 1e-3

The launcher's hook passes the yaml's keys. If that hook is also disabled, they are read from the
yaml of the launcher's command line, or from the one that ``--vescale_config`` names.
"""

from __future__ import annotations

import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from vescale_fsdp_accelerate import options
from vescale_fsdp_accelerate._autoload import take_over
from vescale_fsdp_accelerate.launching import check_config

__all__ = ["main"]

_USAGE = "usage: -m vescale_fsdp_accelerate.run [--vescale_config FILE] [-m] SCRIPT [ARGUMENTS]"


def main(arguments: Sequence[str]) -> None:
    """Run a script, or a module with -m, as ``__main__``.

    Raises:
        SystemExit: no script is named.
        ValueError: the yaml does not ask for veScale-FSDP, or has a wrong key.
    """
    given, config = list(arguments), None
    if given[:1] == ["--vescale_config"]:
        if len(given) < 2:
            raise SystemExit(_USAGE)
        config, given = given[1], given[2:]
    is_module = given[:1] == ["-m"]
    if is_module:
        given = given[1:]
    if not given:
        raise SystemExit(_USAGE)
    if not options.asked_for():
        _read(config or _config_of_launcher())
    take_over()
    sys.argv = given
    if is_module:
        runpy.run_module(given[0], run_name="__main__", alter_sys=True)
        return
    sys.path[0] = str(Path(given[0]).resolve().parent)
    runpy.run_path(given[0], run_name="__main__")


def _read(file: str | None) -> None:
    if file is None:
        raise ValueError(
            "veScale-FSDP was asked for, but this process does not know the launcher's yaml: add "
            f"--vescale_config vescale.yaml. {_USAGE}"
        )
    import yaml  # type: ignore[import-untyped]

    config: dict[str, Any] = yaml.safe_load(Path(file).read_text()) or {}
    found = check_config(config)
    if found is None:
        raise ValueError(f"{file} does not ask for veScale-FSDP: set {options.ENGINE_KEY}: vescale")
    if config.get("use_cpu"):
        os.environ["ACCELERATE_USE_CPU"] = "true"
    os.environ |= options.to_environment(found, os.environ)


def _config_of_launcher() -> str | None:
    """Return the ``--config_file`` of the command that started this process, if any."""
    import psutil  # type: ignore[import-untyped]

    for process in psutil.Process().parents():
        command = process.cmdline()
        for index, word in enumerate(command):
            name, _, value = word.partition("=")
            if name in ("--config_file", "--config-file", "--config"):
                return str(value or command[index + 1])
    return None


if __name__ == "__main__":
    main(sys.argv[1:])

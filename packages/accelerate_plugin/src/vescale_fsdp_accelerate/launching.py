"""``accelerate launch`` for a yaml with our keys: ``--config``, CPUs, the workers' environment.

`look` gets Accelerate's module right after its import. If the yaml that the command line names has
none of our keys, nothing changes.
"""

from __future__ import annotations

import argparse
import functools
import os
import sys
from importlib import import_module
from types import ModuleType
from typing import Any

from vescale_fsdp_accelerate import options

__all__ = ["check_config", "look"]

_CONFIG_FILE = ("--config_file", "--config-file", "--config")
_OF_TRL = "--accelerate_config"  # trl sft --accelerate_config vescale.yaml: it calls the launcher
_OTHER_ENGINES = ("use_deepspeed", "use_megatron_lm", "tpu")


def look(module: ModuleType) -> None:
    """Make the launcher run our engine, if its yaml has a key of ours. The yaml is read once."""
    place, file = _named(module)
    config = _read(file)
    if config is None:
        return
    if place is not None:  # Accelerate knows --config_file only
        sys.argv[place] = "=".join([_CONFIG_FILE[0], *sys.argv[place].split("=", 1)[1:]])
    launch = module.launch_command

    @functools.wraps(launch)
    def launch_command(args: argparse.Namespace) -> None:
        if (args.config_file or module.default_config_file) == file:
            _launch(module, config, args)
        else:
            launch(args)

    module.launch_command = launch_command  # type: ignore[attr-defined]
    base = import_module("accelerate.commands.config.config_args").BaseConfig
    process = base.process_config

    # Accelerate refuses the guard line where this has not run.
    base.process_config = staticmethod(
        lambda found: process({key: found[key] for key in found if key != options.GUARD})
    )


def _named(module: ModuleType) -> tuple[int | None, str]:
    """Return where the launcher's command line names a yaml, and which; else the default one."""
    known = module.launch_command_parser()._option_string_actions
    place = 2 if sys.argv[1:2] == ["launch"] else 1
    while place < len(sys.argv) and sys.argv[place].startswith("-"):  # what follows is the script's
        name, is_whole, value = sys.argv[place].partition("=")
        if name in _CONFIG_FILE:
            return place, value if is_whole else "".join(sys.argv[place + 1 : place + 2])
        takes_none = name not in known or known[name].nargs == 0
        place += 1 if is_whole or takes_none else 2
    if os.path.basename(sys.argv[0]) == "trl" and _OF_TRL in sys.argv[2:-1]:
        return None, sys.argv[sys.argv.index(_OF_TRL) + 1]
    return None, module.default_config_file


def _read(file: str) -> dict[str, Any] | None:
    """Return what a yaml has, if a key of ours is in it. Whatever else it is, is not for us."""
    import yaml  # type: ignore[import-untyped]

    if not os.path.isfile(file):
        return None
    try:
        with open(file, encoding="utf-8") as stream:
            config = yaml.safe_load(stream)
    except (OSError, ValueError, yaml.YAMLError):
        return None
    if not isinstance(config, dict):
        return None
    inner = config.get("fsdp_config")
    keys = [str(key) for key in inner] if isinstance(inner, dict) else []
    is_ours = any(key == options.ENGINE_KEY or key.startswith(options.PREFIX) for key in keys)
    return config if is_ours or options.GUARD in config else None


def _launch(module: ModuleType, config: dict[str, Any], args: argparse.Namespace) -> None:
    """Start the processes of a job. In place of Accelerate's ``launch_command``.

    Raises:
        ValueError: an option is wrong, or asks for another engine. No process has been started.
    """
    found = check_config(config)
    if found is None:
        raise ValueError(
            f"the yaml has the line '{options.GUARD}' and does not turn veScale-FSDP on: add "
            f"'{options.ENGINE_KEY}: vescale' under fsdp_config, or remove that line to train "
            "with Accelerate's own engines"
        )
    for name in _OTHER_ENGINES:
        if getattr(args, name, False):
            raise ValueError(
                f"--{name} and '{options.ENGINE_KEY}: vescale' in the yaml ask for two engines; "
                "leave one of them out"
            )
    # With --cpu Accelerate starts one process, and none of the variables of FSDP are set.
    on_cpu, args.cpu = args.cpu, False
    args, *_ = module._validate_launch_command(args)
    args.use_fsdp = True
    offloads = str(args.fsdp_activation_checkpointing_offload).lower()
    environment = options.to_environment(found, {"FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": offloads})
    # These are variables that Accelerate sets from its arguments.
    args.fsdp_version = environment.pop("FSDP_VERSION")
    args.fsdp_activation_checkpointing_offload = environment.pop(
        "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"
    )
    if args.use_cpu or on_cpu:
        args.use_cpu = True
        environment["ACCELERATE_USE_CPU"] = "true"
    with module.patch_environment(**environment):
        module.multi_gpu_launcher(args)


def check_config(config: dict[str, Any]) -> options.Options | None:
    """Return the options in a yaml. None if it does not ask for veScale-FSDP.

    Raises:
        ValueError: a value is wrong. The message names its key.
    """
    fsdp_config = config.get("fsdp_config") or {}
    if not isinstance(fsdp_config, dict):
        raise ValueError(f"fsdp_config must have keys and values, found {fsdp_config!r}")
    if options.engine_of(fsdp_config) is None:
        return None
    kind = config.get("distributed_type")
    if getattr(kind, "value", kind) != "FSDP":
        raise ValueError(
            f"{options.ENGINE_KEY}: vescale needs 'distributed_type: FSDP', found "
            f"{getattr(kind, 'value', kind)!r}"
        )
    if str(fsdp_config.get("fsdp_version", 2)) != "2":
        raise ValueError(
            f"{options.ENGINE_KEY}: vescale needs 'fsdp_version: 2', found "
            f"{fsdp_config['fsdp_version']!r}"
        )
    strategy = fsdp_config.get("fsdp_sharding_strategy", "FULL_SHARD")
    if str(strategy).upper() not in ("FULL_SHARD", "1"):
        options.refuse_strategy("fsdp_sharding_strategy", strategy)
    return options.from_config(fsdp_config)

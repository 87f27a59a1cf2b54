"""Changes ``accelerate launch``: ``--config``, our keys in the yaml, CPUs, workers' environment.

`add_to_launcher` gets Accelerate's module right after its import.
"""

from __future__ import annotations

import argparse
import functools
import os
from types import ModuleType
from typing import Any

from vescale_fsdp_accelerate import options

__all__ = ["add_to_launcher", "check_config"]


def add_to_launcher(module: ModuleType) -> None:
    """Make ``accelerate launch`` accept ``--config`` and read our keys."""
    make_parser, validate = module.launch_command_parser, module._validate_launch_command
    make_environment = module.prepare_multi_gpu_env

    @functools.wraps(make_parser)
    def launch_command_parser(*args: Any, **kwargs: Any) -> Any:
        return _with_alias(make_parser(*args, **kwargs))

    @functools.wraps(validate)
    def _validate_launch_command(args: argparse.Namespace) -> Any:
        on_cpu, args.cpu = args.cpu, False
        config = _config_of(module, args)
        found = None if config is None else check_config(vars(config))
        if found is None:
            args.cpu = on_cpu
            return validate(args)
        result = validate(args)
        _adapt(args, found, on_cpu)
        return result

    @functools.wraps(make_environment)
    def prepare_multi_gpu_env(args: argparse.Namespace) -> dict[str, str]:
        environment: dict[str, str] = make_environment(args)
        found = getattr(args, "vescale_fsdp", None)
        if found is not None:
            if args.use_cpu:
                environment["ACCELERATE_USE_CPU"] = "true"
            environment |= options.to_environment(found, environment)
        return environment

    module.launch_command_parser = launch_command_parser  # type: ignore[attr-defined]
    module._validate_launch_command = _validate_launch_command  # type: ignore[attr-defined]
    module.prepare_multi_gpu_env = prepare_multi_gpu_env  # type: ignore[attr-defined]


def _with_alias(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    for action in parser._actions:
        if action.dest == "config_file" and "--config" not in parser._option_string_actions:
            action.option_strings = [*action.option_strings, "--config"]
            parser._option_string_actions["--config"] = action
    return parser


def _config_of(module: ModuleType, args: argparse.Namespace) -> Any:
    if args.config_file is None and not os.path.isfile(module.default_config_file):
        return None
    return module.load_config_from_file(args.config_file)


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


def _adapt(args: argparse.Namespace, found: options.Options, on_cpu: bool) -> None:
    """Change the launcher's arguments so that all processes start and connect, also on CPUs."""
    args.vescale_fsdp = found
    args.use_fsdp, args.fsdp_version = True, 2
    args.use_cpu = bool(args.use_cpu or on_cpu)

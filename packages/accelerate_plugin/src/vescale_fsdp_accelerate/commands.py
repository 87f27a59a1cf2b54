"""``vescale-fsdp accelerate-config``: writes a yaml with comments, or checks an existing one."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from vescale_fsdp_accelerate.options import ENGINE_KEY, GUARD, PREFIX, Options

__all__ = ["accelerate_config", "add_to"]


def add_to(app: typer.Typer) -> None:
    """Add the command; called by ``vescale-fsdp`` through its entry point."""
    app.command("accelerate-config")(accelerate_config)


def accelerate_config(
    file: Annotated[Path, typer.Argument(help="the yaml to write, or to check")] = Path(
        "vescale.yaml"
    ),
    check: Annotated[bool, typer.Option("--check", help="Check the file instead.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Overwrite an existing file.")] = False,
    num_processes: Annotated[int, typer.Option(min=1, help="Processes of all machines.")] = 2,
    mixed_precision: Annotated[
        Literal["no", "bf16", "fp16"], typer.Option(help="The compute dtype.")
    ] = "no",
    cpu: Annotated[bool, typer.Option("--cpu", help="Train on CPUs, with gloo.")] = False,
    state_dict_type: Annotated[
        Literal["SHARDED_STATE_DICT", "FULL_STATE_DICT"],
        typer.Option(help="The format of save_state and the Trainer."),
    ] = "SHARDED_STATE_DICT",
    granularity: Annotated[
        str | None, typer.Option(help="elements:256, rows:32, tile:32x32 or whole")
    ] = None,
    replicas: Annotated[int, typer.Option(help="Groups that hold the whole model (HSDP).")] = 1,
    optimizer: Annotated[
        str | None,
        typer.Option(help="muon, shampoo, soap or adamw8bit, instead of the script's optimizer"),
    ] = None,
    gather_codec: Annotated[
        str | None, typer.Option(help="Send weights in 8 bits: int8 or e4m3.")
    ] = None,
    sealed: Annotated[
        bool, typer.Option("--sealed", help="Checkpoints with a CRC32 of each byte.")
    ] = False,
) -> None:
    """Write a yaml for accelerate launch, with comments, or check one.

    accelerate launch --config vescale.yaml train.py then runs an unchanged script on veScale-FSDP.
    """
    from vescale_fsdp_accelerate.yaml_file import text_of  # for yaml, which the core has not

    try:
        if check:
            _check(file)
            return
        options = Options(
            granularity=granularity,
            replicas=replicas,
            optimizer=optimizer,
            gather_codec=gather_codec,
            sealed=sealed,
        )
        options.check_options()
        if cpu and mixed_precision == "fp16":
            raise ValueError("fp16 works on GPUs only; with --cpu use bf16 or no")
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    if file.exists() and not force:
        raise typer.BadParameter(f"{file} exists; --check checks it, --force overwrites it")
    settings = {
        "num_processes": num_processes,
        "mixed_precision": mixed_precision,
        "use_cpu": cpu,
        "state_dict_type": state_dict_type,
    }
    try:
        file.write_text(text_of(file.name, settings, options))
    except OSError as error:
        raise typer.BadParameter(f"{file} cannot be written: {error.strerror}") from error
    typer.echo(f"{file} is written: accelerate launch --config {file} train.py")


def _check(file: Path) -> None:
    from vescale_fsdp_accelerate.yaml_file import check_file

    options = check_file(file)
    for name, value in options.options().items():
        if value != getattr(Options(), name):
            typer.echo(f"{PREFIX}{name}: {json.dumps(value)}")
    typer.echo(f"{file} is valid and selects veScale-FSDP; other keys of ours have their defaults")
    strange = _strange_keys(file)
    if strange:
        typer.echo(f"advice: Accelerate ignores {', '.join(strange)} under fsdp_config")
    if GUARD not in file.read_text():
        typer.echo(
            f"advice: add '{GUARD}: true', so that the file is refused if veScale-FSDP is not "
            "installed"
        )


def _strange_keys(file: Path) -> list[str]:
    """Return keys under fsdp_config that are neither ours nor Accelerate's, which ignores them."""
    import yaml  # type: ignore[import-untyped]
    from accelerate.commands.launch import (  # type: ignore[import-untyped]
        launch_command_parser,
    )

    known = {action.dest for action in launch_command_parser()._actions} | {ENGINE_KEY}
    keys = yaml.safe_load(file.read_text())["fsdp_config"]
    return [key for key in keys if key not in known and not key.startswith(PREFIX)]

"""``vescale-fsdp accelerate-config``: writes a yaml with comments, or checks one that is there."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from vescale_fsdp_accelerate.options import GUARD, Options

__all__ = ["accelerate_config", "add_to"]


def add_to(app: typer.Typer) -> None:
    """Add the command; called by ``vescale-fsdp`` through its entry point."""
    app.command("accelerate-config")(accelerate_config)


def accelerate_config(
    file: Annotated[Path, typer.Argument(help="the yaml to write, or to check")] = Path(
        "vescale.yaml"
    ),
    check: Annotated[bool, typer.Option("--check", help="Check the file instead.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Write over a file.")] = False,
    num_processes: Annotated[int, typer.Option(min=1, help="Processes of all machines.")] = 2,
    mixed_precision: Annotated[
        Literal["no", "bf16", "fp16"], typer.Option(help="The dtype of compute.")
    ] = "no",
    cpu: Annotated[bool, typer.Option("--cpu", help="Train on CPUs, with gloo.")] = False,
    state_dict_type: Annotated[
        Literal["SHARDED_STATE_DICT", "FULL_STATE_DICT"],
        typer.Option(help="What save_state and the Trainer write."),
    ] = "SHARDED_STATE_DICT",
    granularity: Annotated[
        str | None, typer.Option(help="elements:256, rows:32, tile:32x32 or whole")
    ] = None,
    replicas: Annotated[int, typer.Option(help="Groups that hold the whole model (HSDP).")] = 1,
    optimizer: Annotated[
        str | None, typer.Option(help="muon, shampoo, soap or adamw8bit, in the script's place")
    ] = None,
) -> None:
    """Write a yaml for accelerate launch, with comments, or check one.

    accelerate launch --config vescale.yaml train.py then runs an unchanged script on veScale-FSDP.
    """
    from vescale_fsdp_accelerate.yaml_file import text_of  # for yaml, which the core has not

    try:
        if check:
            _check(file)
            return
        options = Options(granularity=granularity, replicas=replicas, optimizer=optimizer)
        options.check_options()
    except (ValueError, OSError) as error:
        raise typer.BadParameter(str(error)) from error
    if file.exists() and not force:
        raise typer.BadParameter(f"{file} exists; --check checks it, --force writes over it")
    settings = {
        "num_processes": num_processes,
        "mixed_precision": mixed_precision,
        "use_cpu": cpu,
        "state_dict_type": state_dict_type,
    }
    file.write_text(text_of(file.name, settings, options))
    typer.echo(f"{file} is written: accelerate launch --config {file} train.py")


def _check(file: Path) -> None:
    from vescale_fsdp_accelerate.yaml_file import check_file

    options = check_file(file)
    for name, value in options.options().items():
        typer.echo(f"fsdp_vescale_{name}: {value}")
    typer.echo(f"{file} asks for veScale-FSDP and is right")
    if GUARD not in file.read_text():
        typer.echo(
            f"advice: add '{GUARD}: true', so that the file is refused where veScale-FSDP is not "
            "there"
        )

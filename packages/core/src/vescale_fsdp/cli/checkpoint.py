"""``vescale-fsdp checkpoint``: verify, show and convert what `vescale_fsdp.checkpoint` writes."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from vescale_fsdp.cli.text import InputError, binary, console, plain, several, track_bytes

_SCHEMA_VERSION = 1  # raised if a key is removed or changes its meaning, not if one is added

_Dir = Annotated[
    Path,
    typer.Argument(
        metavar="DIR",
        show_default=False,
        help="A checkpoint, or a folder with several, such as that of a run.",
    ),
]
_Json = Annotated[bool, typer.Option("--json", help="Print it as JSON.")]
_All = Annotated[bool, typer.Option("--all", help="Every file and every tensor.")]
_Source = Annotated[
    Path,
    typer.Argument(
        metavar="SOURCE",
        show_default=False,
        help="A checkpoint, a directory of torch.distributed.checkpoint or of DeepSpeed's ZeRO, "
        "or safetensors.",
    ),
]
_Target = Annotated[
    Path,
    typer.Argument(metavar="TARGET", show_default=False, help="The target; must not exist."),
]
_To = Annotated[
    Literal["safetensors", "dcp", "vescale"],
    typer.Option(
        show_default=False,
        help="The model's weights, as transformers loads them; a directory of "
        "torch.distributed.checkpoint; or a checkpoint of ours.",
    ),
]
_Prefix = Annotated[
    str | None,
    typer.Option(
        show_default=False,
        help="With safetensors: write only names with this prefix, and remove it. By default that "
        "of the only transformers model in a LightningModule; '' keeps all names.",
    ),
]
_Rename = Annotated[
    list[str] | None,
    typer.Option(
        show_default=False,
        metavar="OLD=NEW",
        help="With safetensors: rename a tensor, or all tensors of a module, after the prefix was "
        "removed. Can be repeated.",
    ),
]

app = typer.Typer(help="Check, show and convert checkpoints.", rich_markup_mode=None)


@app.command("verify")
def verify(directory: _Dir, as_json: _Json = False) -> int:
    """Check every byte of a checkpoint, or of all in a folder.

    Names each damaged file and tensor. Changes nothing.

    The exit code is 0 if all are whole, 1 if one is not whole, and 2 if there is none.

    \b
    vescale-fsdp checkpoint verify runs/step-100 && rsync -a runs/step-100 backup:
    """
    _check_exists(directory)
    # Imported here and not above, so that --help and errors in the path are fast.
    from vescale_fsdp.cli.checkpoint_contents import find

    found = find(directory)
    reports = []
    for path in found.checkpoints:
        reports.append(_verified(path))
        if not as_json:
            _print_report(reports[-1])
    num_whole = sum(report["is_whole"] for report in reports)
    if as_json:
        passed_over = [str(path) for path in found.unfinished]
        _print_json({"checkpoints": reports, "passed_over": passed_over})
    else:
        for path in found.unfinished:
            print(f"{plain(str(path))}: skipped, a save that is under way or did not finish")
        if len(reports) > 1:
            print(f"{num_whole} of {several(len(reports), 'checkpoint')} whole")
    return 0 if num_whole == len(reports) else 1


def _verified(path: Path) -> dict[str, Any]:
    """Verify one checkpoint. Returns the result for JSON."""
    from vescale_fsdp import checkpoint
    from vescale_fsdp.errors import CheckpointCorruptError, CheckpointIncompleteError

    report: dict[str, Any] = {"path": str(path), "is_whole": False, "faults": []}
    try:
        with track_bytes(f"checking {plain(path.name)}") as progress:
            manifest = checkpoint.verify(path, progress=progress)
    except (CheckpointCorruptError, CheckpointIncompleteError) as error:
        return report | {"faults": str(error).splitlines()}
    return report | {
        "is_whole": True,
        "step": manifest.seal.step,
        "num_files": len(manifest.files),
        "num_tensors": len(manifest.tensors),
        "num_bytes": manifest.num_bytes,
    }


def _print_report(report: dict[str, Any]) -> None:
    name = plain(report["path"])
    if report["is_whole"]:
        print(
            f"{name}: whole, {binary(report['num_bytes'])} in "
            f"{several(report['num_files'], 'file')}, {several(report['num_tensors'], 'tensor')}"
        )
        return
    print(f"{name}: NOT WHOLE")
    for fault in report["faults"]:
        print(f"  {plain(fault)}")


@app.command("show")
def show(directory: _Dir, as_json: _Json = False, everything: _All = False) -> int:
    """Show what is in a checkpoint, or which checkpoints are in a folder.

    Only manifests are read: what they say of the data is not checked (see verify).

    The exit code is 0, 1 if there is a checkpoint whose manifest is missing or damaged, and 2 if
    there is none.
    """
    _check_exists(directory)
    from vescale_fsdp.cli import checkpoint_contents as contents
    from vescale_fsdp.cli.checkpoint_contents import find
    from vescale_fsdp.errors import CheckpointCorruptError, CheckpointIncompleteError
    from vescale_fsdp.spi import read_manifest

    found = find(directory)
    manifests: contents.Manifests = []
    for path in found.checkpoints:
        try:
            manifests.append((path, read_manifest(path)))
        except (CheckpointCorruptError, CheckpointIncompleteError) as error:
            manifests.append((path, str(error)))
    code = 1 if any(isinstance(manifest, str) for _, manifest in manifests) else 0
    if not found.is_folder:
        path, manifest = manifests[0]
        if isinstance(manifest, str):
            print(f"vescale-fsdp: {plain(manifest)}", file=sys.stderr)
        elif as_json:
            _print_json(contents.as_json(path, manifest))
        else:
            contents.show(path, manifest, console(), everything=everything)
    elif as_json:
        _print_json(contents.list_as_json(manifests, found.unfinished))
    else:
        contents.show_list(manifests, found.unfinished, console())
    return code


@app.command("convert")
def convert(
    source: _Source, target: _Target, to: _To, prefix: _Prefix = None, rename: _Rename = None
) -> int:
    """Write a checkpoint in another format, without the model and without ranks.

    A sealed source is checked.

    The exit code is 0 after success, 1 if the source is not whole, and 2 after other mistakes.
    After a mistake there is no target.

    \b
    vescale-fsdp checkpoint convert runs/step-100 exported --to safetensors
    """
    _check_exists(source)
    new_names = dict(_parsed(each) for each in rename or ())
    if to != "safetensors" and (prefix or new_names):
        raise InputError(f"--prefix and --rename are for --to safetensors, not for --to {to}")
    from vescale_fsdp import checkpoint
    from vescale_fsdp.cli.checkpoint_contents import check_source
    from vescale_fsdp.errors import CheckpointCorruptError, CheckpointIncompleteError

    check_source(source)
    try:
        with track_bytes(f"writing {plain(target.name)}") as progress:
            left_out = checkpoint.convert(
                source, target, to=to, prefix=prefix, rename=new_names, progress=progress
            )
    except (CheckpointCorruptError, CheckpointIncompleteError) as error:
        print(f"vescale-fsdp: {plain(str(error))}", file=sys.stderr)
        return 1
    num_bytes = _size_of(target)
    print(f"{plain(str(target))}: {binary(num_bytes)}, from {plain(str(source))}")
    if left_out:
        print(f"left out, without the prefix: {plain(', '.join(left_out))}")
    return 0


def _parsed(rename: str) -> tuple[str, str]:
    old, equals, new = rename.partition("=")
    if not old or not equals:
        raise InputError(f"--rename is {rename!r}, expected OLD=NEW, as in --rename decoder=model")
    return old, new


def _check_exists(path: Path) -> None:
    if not path.exists():
        raise InputError(f"there is nothing at {path}")


def _size_of(path: Path) -> int:
    try:
        files = path.rglob("*") if path.is_dir() else [path]
        return sum(file.stat().st_size for file in files if file.is_file())
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error


def _print_json(value: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps({"schema_version": _SCHEMA_VERSION, **value}, indent=1) + "\n")

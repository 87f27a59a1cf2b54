"""What DIR on the command line is: a checkpoint, a folder with several, or something foreign."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

from vescale_fsdp.checkpoint import seal
from vescale_fsdp.checkpoint.manifest import NAME
from vescale_fsdp.checkpoint.sealed import sealed
from vescale_fsdp.cli.errors import InputError

_DCP = "a directory of torch.distributed.checkpoint"
_SAFETENSORS = "safetensors"
_DATA = re.compile(r"rank-[0-9]{5,}\.bin")


@dataclass(frozen=True)
class Found:
    """Checkpoints, whole or not, in the order in which they were made; without a seal last."""

    checkpoints: list[Path]
    unfinished: list[Path]  # stages of saves
    is_folder: bool  # they are in DIR; else it is one itself


def find(directory: Path) -> Found:
    """The checkpoints that ``directory`` means.

    Raises:
        InputError: there is none; if it is in another format, the message says how to convert it.
    """
    children = _children(directory)
    if _is_ours(directory, children):
        return Found([directory], [], is_folder=False)
    foreign = _foreign(directory, children)
    if foreign:
        raise InputError(
            f"{directory} is {foreign}, which has no checksums and no seal; make a checkpoint of "
            f"it with: vescale-fsdp checkpoint convert {directory} TARGET --to vescale"
        )
    folders = [child for child in children if child.is_dir()]
    unfinished = [child for child in folders if seal.is_stage(child)]
    order = {path: found.sequence for path, found in sealed(directory)}
    checkpoints = sorted(
        (
            child
            for child in folders
            if child not in unfinished and _is_ours(child, _children(child, can_fail=True))
        ),
        key=lambda path: (path not in order, order.get(path, 0), path.name),
    )
    if not checkpoints:
        raise InputError(f"{directory} is no checkpoint, and there is none in it{_others(folders)}")
    return Found(checkpoints, unfinished, is_folder=True)


def check_source(source: Path) -> None:
    """Raise InputError unless ``source`` may be something to convert."""
    if source.is_file():
        return
    children = _children(source)
    if _is_ours(source, children) or _foreign(source, children):
        return
    inside = [path for path, _ in sealed(source)]
    if inside:
        raise InputError(f"{source} is a folder with checkpoints; name one of them: {inside[-1]}")
    raise InputError(f"{source} is no checkpoint in a format that is known")


def _children(directory: Path, *, can_fail: bool = False) -> list[Path]:
    try:
        return sorted(directory.iterdir())
    except NotADirectoryError as error:
        kind = ", but safetensors" if directory.suffix == ".safetensors" else ""
        raise InputError(f"{directory} is no directory{kind}") from error
    except OSError as error:
        if can_fail:
            return []
        raise InputError(f"cannot read {directory}: {error.strerror}") from error


def _is_ours(directory: Path, children: list[Path]) -> bool:
    """Also if the manifest is gone, or it is a stage that somebody names."""
    names = {child.name for child in children}
    return NAME in names or any(map(_DATA.fullmatch, names)) or seal.is_stage(directory)


def _foreign(directory: Path, children: list[Path]) -> str:
    """What it is, if it has another format that is known."""
    if any(child.name == ".metadata" for child in children):
        return _DCP
    if any(child.suffix == ".safetensors" for child in children):
        return _SAFETENSORS
    return ""


def _others(folders: list[Path]) -> str:
    """Words for what else is in a folder, if a user may have meant that."""
    for folder in folders:
        kind = "" if not os.access(folder, os.R_OK) else _foreign(folder, _children(folder))
        if kind:
            return f"; {folder.name} is {kind}"
    return ""

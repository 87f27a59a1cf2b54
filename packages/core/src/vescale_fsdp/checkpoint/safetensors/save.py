"""save_safetensors: a sharded model as the files that ``transformers`` and others load.

Nothing is gathered: the shapes say where each element lies in the files, and each rank writes those
that it holds into their places.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from vescale_fsdp.checkpoint.disk.files import write_file
from vescale_fsdp.checkpoint.disk.manifest import DTYPES
from vescale_fsdp.checkpoint.safetensors.format import INDEX, File, index_of, is_weights, lay_out
from vescale_fsdp.checkpoint.safetensors.placing import Place, PlacedWriter, make_files
from vescale_fsdp.checkpoint.sealed.staged import export
from vescale_fsdp.checkpoint.state import tensors
from vescale_fsdp.checkpoint.state.contents import Contents
from vescale_fsdp.checkpoint.transfer.planning import LocalPlan, Task
from vescale_fsdp.errors import CheckpointExistsError, CheckpointValueError, CheckpointWriteError

MAX_FILE_BYTES = 5 * 10**9


def save_safetensors(
    directory: str | os.PathLike[str],
    model: nn.Module,
    *,
    max_file_bytes: int = MAX_FILE_BYTES,
    dtype: torch.dtype | None = None,
    metadata: Mapping[str, str] | None = None,
) -> None:
    """Write a model as safetensors in the layout of ``transformers``. Collective.

    ``model.safetensors``, or parts of at most ``max_file_bytes`` with an index, by the names of the
    model's state dict. Of tied parameters the first name is written; each file's metadata say
    which others it stands for, as ``safetensors.torch.save_model`` does.

    Args:
        directory: where to; it may exist (with ``config.json``, a tokenizer), but must not hold
            weights. The same on every rank, on a file system that all of them share.
        model: sharded or not.
        max_file_bytes: of the tensors in one file; a larger tensor has a file of its own.
        dtype: convert tensors of floating point to it; as they are by default.
        metadata: texts for each file, beside ``{"format": "pt"}``.

    Cost: each rank writes what it holds, replicas once; three small messages per rank; 32 MiB of
    memory in the host. A new directory appears when all is on the disk; in one that exists the
    files appear one after the other, the index last.

    Raises:
        CheckpointExistsError: there are weights in the directory. Nothing is ever overwritten.
        CheckpointValueError: the model has a state that is no tensor, or of a dtype that the
            format has not, by name.
        CheckpointMismatchError: ranks hold different models.
        RankMismatchError: ranks were given different arguments.
        CheckpointWriteError: disk full, no permission, no folder that all ranks share.
        CheckpointIncompleteError: another rank has died.

    After an error nothing is left behind.
    """
    if max_file_bytes < 1:
        raise ValueError(f"max_file_bytes is {max_file_bytes}, expected at least 1")
    if dtype is not None and not dtype.is_floating_point:
        raise ValueError(f"dtype is {dtype}, expected one of floating point")
    target, ties = Path(directory), tensors.ties_of(model)
    texts = {"format": "pt", **ties, **(metadata or {})}
    files: list[File] = []  # on the first rank
    names: list[str] = []  # in the order of the state dict

    def collect() -> Contents:
        contents = _contents(model, ties)
        names.extend(contents.planned)
        return contents

    def begin(stage: Path, offers: list[Any]) -> list[Any]:
        check_no_weights(target)
        shapes = {
            name: (_dtype_in_file(DTYPES[held], dtype), shape)
            for offer in offers
            for name, _, _, held, shape, _ in offer["boxes"]
        }
        order = [*(name for name in names if name in shapes), *sorted(shapes.keys() - names)]
        files.extend(lay_out({n: shapes[n] for n in order}, max_file_bytes, texts))
        make_files(stage, files)
        places = {name: file for file in files for name in file.entries}
        return [
            {box[0]: [places[box[0]].name, places[box[0]].entries[box[0]].offset] for box in mine}
            for mine in (offer["boxes"] for offer in offers)
        ]

    def write(stage: Path, plan: LocalPlan, task: Task) -> None:
        with PlacedWriter(stage) as writer:
            for number in task["boxes"]:
                item = plan.items[number]
                assert item.tensor_data is not None, "bytes are not planned"
                name, data = item.index.fqn, plan.data(item)
                file, offset = task["told"][name]
                place = Place(file, offset, _dtype_in_file(data.dtype, dtype))
                offsets = item.tensor_data.chunk.offsets
                writer.write(name, place, item.tensor_data.size, offsets, data)
            writer.finish()

    options = [max_file_bytes, str(dtype), texts]
    export(
        target,
        collect,
        begin,
        write,
        lambda stage, _: finish_files(stage, files),
        options=options,
        into=True,
    )


def _contents(model: nn.Module, ties: Mapping[str, str]) -> Contents:
    """The model's tensors, tied ones once."""
    contents = Contents()
    state = get_model_state_dict(model)
    for name, value in state.items():
        if not isinstance(value, torch.Tensor):
            raise CheckpointValueError(
                f"{name!r} is a {type(value).__name__}, and safetensors holds tensors only. Take "
                "it out of the state dict, or use checkpoint.save"
            )
        if ties.get(name) in state:
            continue
        tensors.check(value, name)
        contents.planned[name] = value
    return contents


def _dtype_in_file(held: torch.dtype, wanted: torch.dtype | None) -> torch.dtype:
    """Ints, bools and 8 bit floats are never converted."""
    return wanted if wanted is not None and tensors.is_float(held) else held


def check_no_weights(directory: Path) -> None:
    """Raise if there are weights already.

    Raises:
        CheckpointExistsError: naming one of them.
    """
    if not directory.is_dir():
        return
    there = sorted(each.name for each in directory.iterdir() if is_weights(each.name))
    if there:
        raise CheckpointExistsError(
            f"{directory / there[0]} exists already, and is never overwritten; write to another "
            "directory, or delete it first"
        )


def finish_files(stage: Path, files: Sequence[File]) -> list[str]:
    """Check what has been written, and write the index. Returns the names, the index last.

    Raises:
        CheckpointWriteError: a file has another size for this rank.
    """
    for file in files:
        found = (stage / file.name).stat().st_size
        if found != file.num_bytes:
            raise CheckpointWriteError(
                f"{stage / file.name} has {found} bytes, expected {file.num_bytes}: does another "
                "process write there?"
            )
    names = [file.name for file in files]
    if len(files) == 1:
        return names
    write_file(stage / INDEX, index_of(files))
    return [*names, INDEX]

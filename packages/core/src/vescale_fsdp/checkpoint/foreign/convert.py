"""convert: writes a checkpoint in another format, in one process, without a model.

Chunks are read, checked and written one after the other, so that little memory is needed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any

import torch

from vescale_fsdp.checkpoint import encoding, seal
from vescale_fsdp.checkpoint.files import DataWriter, bytes_of
from vescale_fsdp.checkpoint.foreign.dcp import (
    data_file,
    flat_state,
    merged,
    write_item,
    write_metadata,
)
from vescale_fsdp.checkpoint.manifest import DTYPES, Chunk, TensorEntry, to_json
from vescale_fsdp.checkpoint.safetensors import MAX_FILE_BYTES, check_no_weights, finish_files
from vescale_fsdp.checkpoint.safetensors_files import PlacedWriter, lay_out, make_files
from vescale_fsdp.checkpoint.saving import manifest_text, publish_files
from vescale_fsdp.checkpoint.sources import Source, open_source
from vescale_fsdp.errors import (
    CheckpointIncompleteError,
    CheckpointMismatchError,
    CheckpointValueError,
)

Progress = Callable[[int, int], None]


def convert(
    source: str | Path,
    target: str | Path,
    *,
    to: str,
    prefix: str | None = None,
    rename: Mapping[str, str] | None = None,
    progress: Progress | None = None,
) -> list[str]:
    """Write a checkpoint in another format. Not collective.

    ==============  ===============================================================
    ``to``          what is written
    ==============  ===============================================================
    "safetensors"   the model, for ``transformers`` (see `save_safetensors`)
    "dcp"           model and optimizers, for stock FSDP2 (see `export_dcp`), and extra values
    "vescale"       a sealed directory for `load`: model, optimizers and extra values, if present
    ==============  ===============================================================

    States of random number generators and of data loaders are left out. Tied tensors of a sealed
    checkpoint are written under each name.

    Args:
        source: a directory of `save`, of ``torch.distributed.checkpoint`` or with safetensors, a
            safetensors file, or a directory of DeepSpeed (ZeRO stages 1 to 3, universal, or the
            folder with its file ``latest``). The format is detected. Of DeepSpeed's, weights and
            states are those in fp32, and ``extra`` is the plain part of its ``client_state``.
        target: the directory to write; must not exist. For safetensors it may exist, but must not
            contain weights.
        prefix: of the names to write, for safetensors: ``"net."`` of a module that has the model
            in its attribute ``net``. It is removed, and all other tensors are left out. Default:
            ``extra["safetensors_prefix"]``, which the Lightning adapter saves for a
            LightningModule with one model of ``transformers``, if a name has it. ``""`` writes all
            names as they are.
        rename: for safetensors: the new name of each tensor, or of all below a module, by the
            old one, without the prefix; the longest old one counts. ``""`` moves a module's tensors
            to the root.
        progress: called with the bytes of tensors written so far, and the total.

    Returns:
        The names of the model's tensors that were left out, because they have another prefix.

    Cost: each chunk is read and written once; memory for two of them.

    Raises:
        CheckpointIncompleteError: there is no checkpoint at ``source``, or a file is missing.
        CheckpointCorruptError: its bytes differ from those that were saved, or it is refused.
        CheckpointMismatchError: it already has that format; or no name has the prefix or is
            renamed, or two tensors get one name.
        CheckpointValueError: the other format cannot hold one of its values; names the value. Or
            states are by number, without ``param_names``: only `import_dcp` can name them.
        CheckpointExistsError, CheckpointWriteError: the target cannot be written.

    After an error there are no new files.
    """
    writers: dict[str, Callable[[_Job], list[str] | bytes]] = {
        "safetensors": _to_safetensors,
        "dcp": _to_dcp,
        "vescale": _to_vescale,
    }
    if to not in writers:
        raise ValueError(f"to is {to!r}, expected one of {', '.join(map(repr, writers))}")
    if to != "safetensors" and (prefix or rename):
        raise ValueError(f"prefix and rename are for to='safetensors', got to={to!r}")
    folder = Path(target)
    with open_source(Path(source)) as opened:
        if opened.format == to:
            raise CheckpointMismatchError(f"{source} is in the format {to!r} already")
        if to == "safetensors":
            check_no_weights(folder)
        seal.clean(folder.parent)
        stage = seal.Stage(folder, into=to == "safetensors")
        job = _Job(opened, stage, progress, prefix, rename or {})
        try:
            written = writers[to](job)
            if isinstance(written, bytes):
                stage.publish(written)
            else:
                publish_files(stage, written)
        except BaseException:  # also KeyboardInterrupt
            stage.abandon()
            raise
    return job.left_out


class _Job:
    """Reads the chunks to write, and reports progress."""

    def __init__(
        self,
        source: Source,
        stage: seal.Stage,
        progress: Progress | None,
        prefix: str | None,
        rename: Mapping[str, str],
    ) -> None:
        self.source, self.stage, self._progress = source, stage, progress
        self.prefix, self.rename = prefix, rename
        self.left_out: list[str] = []

    def chunks(self, names: list[str]) -> Iterator[tuple[str, TensorEntry, Chunk, torch.Tensor]]:
        """Read the chunks of these tensors, in their order in the files."""
        found = [(self.source.tensors[name], name) for name in names]
        total, done = sum(entry.num_bytes for entry, _ in found), 0
        each = [(chunk, name, entry) for entry, name in found for chunk in entry.chunks]
        for chunk, name, entry in sorted(each, key=lambda e: (e[0].span.file, e[0].span.offset)):
            data = self.source.read(name, chunk)
            yield name, entry, chunk, data
            done += data.numel() * data.element_size()
            if self._progress is not None:
                self._progress(done, total)


def _to_safetensors(job: _Job) -> list[str]:
    text = job.source.texts.get("model")
    if not isinstance(text, dict):
        raise CheckpointIncompleteError("the source holds no model")
    names = {new: _tensor_name(fqn, text[fqn]) for new, fqn in _new_names(job, text).items()}
    missing = [name for name in names.values() if name not in job.source.tensors]
    if missing:
        raise CheckpointIncompleteError(f"the source lacks the tensor {missing[0]!r}")
    held = {fqn: job.source.tensors[name] for fqn, name in names.items()}
    shapes = {fqn: (DTYPES[entry.dtype], entry.shape) for fqn, entry in held.items()}
    files = lay_out(shapes, MAX_FILE_BYTES, {"format": "pt"})
    make_files(job.stage.path, files)
    places = {names[fqn]: entry for file in files for fqn, entry in file.entries.items()}
    with PlacedWriter(job.stage.path) as writer:
        for name, _, chunk, data in job.chunks(list(places)):
            writer.write(name, places[name], chunk.offsets, data)
        writer.finish()
    return finish_files(job.stage.path, files)


def _new_names(job: _Job, own: Iterable[str]) -> dict[str, str]:
    """Return the names to write, and for each the model's own one. Keeps the order."""
    own, prefix = list(own), job.prefix
    if prefix is None:
        prefix = str(job.source.texts.get("extra", {}).get("safetensors_prefix", ""))
        if not any(name.startswith(prefix) for name in own):  # a hook has renamed what was saved
            prefix = ""
    if prefix and not prefix.endswith("."):
        prefix += "."
    kept = [name for name in own if name.startswith(prefix)]
    job.left_out = [name for name in own if not name.startswith(prefix)]
    if job.left_out and not kept:
        raise CheckpointMismatchError(
            f"no tensor of the model has the prefix {prefix!r}: {_beginnings(job.left_out)}"
        )
    found: dict[str, str] = {}
    unused = set(job.rename)
    for name in kept:
        new = name.removeprefix(prefix)
        fitting = {old for old in job.rename if new == old or new.startswith(f"{old}.")}
        unused -= fitting
        if fitting:
            old = max(fitting, key=len)  # of a module and a part of it, the part
            new = (job.rename[old] + new.removeprefix(old)).removeprefix(".")
        if new in found:
            raise CheckpointMismatchError(f"{found[new]!r} and {name!r} would both become {new!r}")
        found[new] = name
    if unused:
        raise CheckpointMismatchError(
            f"rename has {sorted(unused)[0]!r}, which is no tensor of the model and no module with "
            f"tensors: {_beginnings(name.removeprefix(prefix) for name in kept)}"
        )
    return found


def _beginnings(names: Iterable[str]) -> str:
    first = dict.fromkeys(name.partition(".")[0] for name in names)
    return f"the names begin with {', '.join(map(repr, list(first)[:8]))}"


def _tensor_name(fqn: str, value: encoding.Json) -> str:
    name = value.get("$tensor") if isinstance(value, dict) else None
    if not isinstance(name, str):
        raise CheckpointValueError(
            f"{fqn!r} of the model is not a tensor, and safetensors holds only tensors"
        )
    return name


def _to_dcp(job: _Job) -> list[str]:
    names: dict[int, str] = {}
    stand_ins: list[torch.Tensor] = []

    def tensor_of(name: str) -> torch.Tensor:
        entry = job.source.tensors.get(name)
        if entry is None:
            raise CheckpointIncompleteError(f"the source lacks the tensor {name!r}")
        stand_ins.append(torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta"))
        names[id(stand_ins[-1])] = name
        return stand_ins[-1]

    found = {
        name: encoding.decode(text, tensor_of, name) for name, text in job.source.texts.items()
    }
    flat, paths = flat_state(_stock_state(found))
    keys = {names[id(each)]: key for key, each in flat.items() if id(each) in names}
    boxes: dict[str, list[Any]] = {key: [] for key in keys.values()}  # keeps the state's order
    others: list[Any] = []
    with DataWriter(job.stage.path, data_file(0)) as writer:
        for key, each in flat.items():
            if id(each) not in names:
                others.append([paths[key], astuple(write_item(writer, each, f"value {key!r}"))])
        for name, entry, chunk, data in job.chunks(list(keys)):
            key = keys[name]
            span = astuple(write_item(writer, data, f"tensor {key!r}"))
            box = [paths[key], entry.dtype, entry.shape, chunk.offsets, chunk.sizes, span]
            boxes[key].append(box)
        writer.finish()
    part = {"boxes": [box for each in boxes.values() for box in each], "values": others}
    return write_metadata(job.stage.path, [part])


def _stock_state(found: dict[str, Any]) -> dict[str, Any]:
    """Return the state in the form that FSDP2's users save."""
    state = dict(found.get("extra") or {})
    trees = [tree for name, tree in found.items() if name.startswith("optimizer.")]
    parts = {"model": found.get("model", {})}
    if trees:
        parts["optimizer"] = merged(trees)
    for name in parts:
        if name in state:
            raise CheckpointValueError(f"extra[{name!r}] has the name of the {name} in this format")
    return {**state, **parts}


def _to_vescale(job: _Job) -> bytes:
    _check_names(job.source)
    chunks: list[Any] = []
    texts: list[Any] = []
    with DataWriter(job.stage.path, seal.data_name(0)) as writer:
        for name, entry, chunk, data in job.chunks(list(job.source.tensors)):
            span = writer.write(bytes_of(encoding.on_host(data)), f"tensor {name!r}")
            box = chunk.offsets, chunk.sizes
            chunks.append([name, entry.dtype, entry.shape, box, astuple(span)])
        for name, text in job.source.texts.items():
            span = writer.write(memoryview(to_json(text).encode()), f"value {name!r}")
            texts.append([name, [0], astuple(span)])
        writer.finish()
    part = {"file": [writer.name, writer.num_bytes], "chunks": chunks, "values": texts}
    return manifest_text(job.stage, job.source.step, [part])


def _check_names(source: Source) -> None:
    """Raise if an optimizer has its parameters by number, which no `load` can take."""
    for name, text in source.texts.items():
        groups = text["param_groups"] if name.startswith("optimizer.") else []
        listed = [group.get("params") for group in groups if isinstance(group, dict)]
        if any(type(each) is int for params in listed for each in params or ()):
            raise CheckpointValueError(
                f"the states of {name} are by number, as optimizer.state_dict() has them, and this "
                "format has them by name: load them with checkpoint.import_dcp(path, model, "
                "optimizer), then save. The model alone can be converted to safetensors"
            )

"""A rank's part of a checkpoint as one data file, and the manifest over the files of all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any, NamedTuple

import torch

from vescale_fsdp import transfers
from vescale_fsdp.checkpoint import encoding
from vescale_fsdp.checkpoint.contents import Contents, LocalPlan, Task
from vescale_fsdp.checkpoint.files import DataWriter, bytes_of
from vescale_fsdp.checkpoint.manifest import Chunk, Manifest, Seal, Span, TensorEntry, Variant
from vescale_fsdp.checkpoint.seal import data_name


class Item(NamedTuple):
    """A box of a tensor, or a text, that this rank writes."""

    name: str
    data: torch.Tensor | bytes
    box: tuple[Sequence[int], Sequence[int]] = ((), ())
    shape: Sequence[int] = ()
    ranks: Sequence[int] = ()  # the ranks that have the same text


def items_of(
    contents: Contents, local: LocalPlan, task: Task, *, copies: bool = False
) -> list[Item]:
    """Return what this rank writes, in the order of the file: tensors first, then texts.

    With ``copies`` the tensors are copied to host memory.
    """
    staging, found = transfers.Staging(), []
    for item in local.chosen(task):
        data = encoding.staged(item.data, staging) if copies else item.data
        found.append(Item(item.name, data, (item.offsets, item.sizes), item.shape))
    texts = []
    for name, ranks in task["values"].items():
        own = contents.own.get(name)
        text = contents.texts[name] if own is None else own.text
        texts.append(Item(name, text.encode(), ranks=ranks))
        suffix = f"@{ranks[0]}" if name in task["several"] else ""
        for key, tensor in own.tensors.items() if own is not None else ():
            data = encoding.staged(tensor, staging) if copies else encoding.on_host(tensor)
            box = ((0,) * data.dim(), tuple(data.shape))
            found.append(Item(key + suffix, data, box, data.shape))
    staging.wait()
    return [*found, *texts]


def write_items(folder: Path, rank: int, items: Iterable[Item], *, overwrites: bool = False) -> Any:
    """Write and flush the data file of a rank. Returns JSON for `manifest_of`.

    Args:
        overwrites: a file of this name may be there; its memory or disk blocks are used again.
    """
    chunks, variants = [], []
    with DataWriter(folder, data_name(rank), overwrites=overwrites) as writer:
        for item in items:
            if isinstance(item.data, bytes):
                span = writer.write(memoryview(item.data), f"value {item.name!r}")
                variants.append([item.name, item.ranks, astuple(span)])
            else:
                data = encoding.on_host(item.data)
                span = writer.write(bytes_of(data), f"tensor {item.name!r}")
                dtype = encoding.dtype_name(data.dtype)
                chunks.append([item.name, dtype, item.shape, item.box, astuple(span)])
        writer.finish()
    return {"file": [writer.name, writer.num_bytes], "chunks": chunks, "values": variants}


def manifest_of(seal: Seal, written: Sequence[Any]) -> Manifest:
    """Return the manifest of all files.

    Args:
        seal: identifies the checkpoint.
        written: for each rank its file and size, its chunks ``[name, dtype, shape, (offsets,
            sizes), span]`` and its values ``[name, ranks, span]``.
    """
    found: dict[str, tuple[str, Any, list[Chunk]]] = {}
    values: dict[str, list[Variant]] = {}
    for part in written:
        for name, dtype, shape, (offsets, sizes), span in part["chunks"]:
            chunks = found.setdefault(name, (dtype, shape, []))[2]
            chunks.append(Chunk(tuple(offsets), tuple(sizes), Span(*span)))
        for name, ranks, span in part["values"]:
            values.setdefault(name, []).append(Variant(tuple(ranks), Span(*span)))
    return Manifest(
        seal,
        world_size=len(written),
        software=_software(),
        files=dict(sorted(part["file"] for part in written if part["chunks"] or part["values"])),
        tensors={
            name: TensorEntry(dtype, tuple(shape), tuple(chunks))
            for name, (dtype, shape, chunks) in sorted(found.items())
        },
        values={name: tuple(each) for name, each in sorted(values.items())},
    )


def _software() -> dict[str, str]:
    import vescale_fsdp

    return {"vescale-fsdp": vescale_fsdp.__version__, "torch": torch.__version__}

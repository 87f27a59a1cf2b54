"""Converts Python values to JSON and back, exactly, without pickle; and tensors to bytes.

None, bool, int, finite float, str and list are themselves; a dict with string keys is an object.
Other values are an object with one key that begins with ``$``::

    (1, 2)              {"$tuple": [1, 2]}
    {3: "x"}            {"$dict": [[3, "x"]]}
    b"ab"               {"$bytes": "YWI="}
    float("nan")        {"$float": "7ff8000000000000"}      the bits, so that each NaN is exact
    a tensor            {"$tensor": "extra.table"}          the name of a tensor of the checkpoint

Types are exact. A subclass (``numpy.float64``, an enum) would be read as another type, so `encode`
raises and names it. Reading runs no code from the file.
"""

from __future__ import annotations

import base64
import struct
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from vescale_fsdp import compat, transfers
from vescale_fsdp.checkpoint.manifest import DTYPES
from vescale_fsdp.errors import CheckpointCorruptError, CheckpointValueError, VeScaleError

Json = Any  # None, bool, int, float, str, list or dict of these
Tensors = dict[str, torch.Tensor]
_DEEPEST = 100
_WORD = 2**63  # larger ints are hexadecimal, because Python limits the length of decimal ones
_SEQUENCES: dict[type, str] = {tuple: "$tuple", torch.Size: "$size", deque: "$deque"}
_MAPPINGS: dict[type, str] = {dict: "$dict", OrderedDict: "$ordered", Counter: "$counter"}


def encode(value: Any, name: str) -> tuple[Json, Tensors]:
    """Return a value as JSON, and its tensors by the names that the JSON has for them.

    Args:
        value: of the types in the table above, nested at most 100 deep.
        name: of the value. Tensors get names ``name.key.index...``.
    """
    tensors: Tensors = {}
    return _encode(value, (name,), tensors), tensors


def _encode(value: Any, path: tuple[Any, ...], tensors: Tensors) -> Json:
    kind = type(value)
    if value is None or kind in (bool, str):
        return value
    if kind is int:
        return value if -_WORD <= value < _WORD else {"$int": hex(value)}
    if kind is float:
        finite = value - value == 0
        return value if finite else {"$float": struct.pack(">d", value).hex()}
    if kind is bytes:
        return {"$bytes": base64.b64encode(value).decode()}
    if kind is torch.dtype and str(value).removeprefix("torch.") in DTYPES:
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.Tensor):
        tensor_name = _new_name(".".join(map(str, path)), tensors)
        if any("\ud800" <= each <= "\udfff" for each in tensor_name):
            raise CheckpointValueError(
                f"{_title(path)} is a tensor under a key that is not valid Unicode, which names of "
                "tensors must be: give it another key"
            )
        tensors[tensor_name] = value
        return {"$tensor": tensor_name}
    if len(path) > _DEEPEST:
        raise CheckpointValueError(
            f"{_title(path[:4])}... is nested more than {_DEEPEST} deep, or contains itself"
        )
    if kind is list:
        return [_encode(each, (*path, i), tensors) for i, each in enumerate(value)]
    if kind in _SEQUENCES and getattr(value, "maxlen", None) is None:
        items = [_encode(each, (*path, i), tensors) for i, each in enumerate(value)]
        return {_SEQUENCES[kind]: items}
    if kind in _MAPPINGS:
        if kind is dict and all(type(key) is str and not key.startswith("$") for key in value):
            return {key: _encode(each, (*path, key), tensors) for key, each in value.items()}
        pairs = [
            [_encode(key, (*path, "key"), tensors), _encode(each, (*path, key), tensors)]
            for key, each in value.items()
        ]
        return {_MAPPINGS[kind]: pairs}
    raise CheckpointValueError(
        f"{_title(path)} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint cannot "
        "keep without pickle. It keeps None, bool, int, float, str, bytes, list, tuple, dict and "
        "tensors: convert it (.item(), .tolist(), list(...)) or leave it out"
    )


def _new_name(name: str, tensors: Tensors) -> str:
    """Return ``name``, with a number if it is taken, as in ``{"a": {"b": t}, "a.b": t}``."""
    number, free = 1, name
    while free in tensors:
        number += 1
        free = f"{name}~{number}"
    return free


def _title(path: tuple[Any, ...]) -> str:
    return str(path[0]) + "".join(f"[{part!r}]" for part in path[1:])


def decode(value: Json, tensor_of: Callable[[str], torch.Tensor], where: str) -> Any:
    """Return the value of a JSON that `encode` made.

    Args:
        tensor_of: returns the tensor of a name.
        where: names the value in messages.
    """
    if isinstance(value, list):
        return [decode(each, tensor_of, where) for each in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value), "")
    if not tag.startswith("$"):
        return {key: decode(each, tensor_of, where) for key, each in value.items()}
    try:
        return _decode_tagged(tag, value[tag], tensor_of, where)
    except VeScaleError:
        raise
    except (ValueError, TypeError, KeyError, struct.error) as error:
        raise CheckpointCorruptError(f"{where} holds a {tag} that cannot be read") from error


def _decode_tagged(
    tag: str, value: Any, tensor_of: Callable[[str], torch.Tensor], where: str
) -> Any:
    if tag == "$int":
        return int(value, 16)
    if tag == "$float":
        return struct.unpack(">d", bytes.fromhex(value))[0]
    if tag == "$bytes":
        return base64.b64decode(value, validate=True)
    if tag == "$dtype":
        return DTYPES[value]
    if tag == "$tensor":
        return tensor_of(value)
    for kind, name in _SEQUENCES.items():
        if tag == name:
            return kind(decode(each, tensor_of, where) for each in value)
    for kind, name in _MAPPINGS.items():
        if tag == name:
            made = kind()
            for key, each in value:
                made[decode(key, tensor_of, where)] = decode(each, tensor_of, where)
            return made
    raise CheckpointCorruptError(f"{where} holds the unknown {tag!r}")


_PIECE = 1 << 16  # elements: at most 1 MiB, which fits the processor's cache


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype in a manifest."""
    return str(dtype).removeprefix("torch.")


def is_float(dtype: torch.dtype) -> bool:
    """Whether elements of this dtype may be cast. Floats of 8 bits may not: they need a scale."""
    return dtype.is_floating_point and dtype.itemsize > 1


def check(tensor: torch.Tensor, name: str) -> None:
    """Raise if this rank's part of a tensor cannot be saved."""
    local = plain(compat.local_tensor(tensor))
    if compat.is_wrapper(local):
        found = f"holds several tensors ({type(local).__name__})"
    elif tensor.device.type == "meta" or local.device.type == "meta":
        found = "is on the meta device: call to_empty(device=...) and initialize it first"
    elif local.layout is not torch.strided or local.is_nested:
        found = f"has the layout {local.layout}"
    elif dtype_name(local.dtype) not in DTYPES:
        found = f"has the dtype {local.dtype}"
    else:
        return
    raise CheckpointValueError(
        f"{name!r} {found}; a checkpoint keeps dense tensors only. Convert it, or leave it out"
    )


def plain(tensor: torch.Tensor) -> torch.Tensor:
    """Unwrap subclasses that hold one tensor with the same elements. Others are returned as is."""
    while compat.is_wrapper(tensor):
        names, _ = tensor.__tensor_flatten__()
        inner = getattr(tensor, names[0])
        if len(names) > 1 or inner.shape != tensor.shape or inner.dtype != tensor.dtype:
            break
        tensor = inner
    return tensor


def exchange(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Exchange the elements of two tensors in place, and return True.

    Returns False and does nothing if that needs a cast or a copy between devices. It needs no new
    memory, whose page faults would cost more than the copy.
    """
    if type(a) is not torch.Tensor or type(b) is not torch.Tensor:
        return False
    is_plain = a.is_contiguous() and b.is_contiguous() and a.shape == b.shape
    if not is_plain or a.dtype != b.dtype or a.device.type != "cpu" or b.device.type != "cpu":
        return False
    spare = torch.empty(min(_PIECE, a.numel()), dtype=a.dtype)
    for mine, others in zip(a.view(-1).split(_PIECE), b.view(-1).split(_PIECE), strict=True):
        kept = spare[: mine.numel()].copy_(mine)
        mine.copy_(others)
        others.copy_(kept)
    return True


def on_host(tensor: torch.Tensor, *, copy: bool = False) -> torch.Tensor:
    """Return the elements in row-major order in host memory. Copies only if needed, or ``copy``."""
    data = plain(tensor.detach()).resolve_conj().resolve_neg()
    if not copy:
        return transfers.on_host(data)
    staging = transfers.Staging()
    copied = staging.copy(data)
    staging.wait()
    return copied


def staged(tensor: torch.Tensor, staging: transfers.Staging) -> torch.Tensor:
    """Return a copy in host memory, in row-major order. Valid after ``staging.wait()``."""
    return staging.copy(plain(tensor.detach()).resolve_conj().resolve_neg())


def box_of(whole: torch.Tensor, offsets: Sequence[int], sizes: Sequence[int]) -> torch.Tensor:
    """Return a copy of the elements of a box."""
    index = tuple(slice(o, o + n) for o, n in zip(offsets, sizes, strict=True))
    return whole[index].clone(memory_format=torch.contiguous_format)


def ties_of(model: nn.Module) -> dict[str, str]:
    """Return the names of tied parameters and buffers, each with the first name of its tensor.

    Example: ``{"lm_head.weight": "embed.weight"}``.
    """
    first: dict[int, str] = {}
    ties: dict[str, str] = {}
    for path, tensor in [
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    ]:
        fqn = compat.fqn_of(model, path)
        kept = first.setdefault(id(tensor), fqn)
        if kept != fqn:
            ties[fqn] = kept
    return ties

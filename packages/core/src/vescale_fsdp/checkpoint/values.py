"""Converts Python values to JSON and back, exactly, without pickle.

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
from collections.abc import Callable
from typing import Any

import torch

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

"""The shapes file: a model as JSON, for models that nobody has built.

::

    {"model": "tiny", "groups": [
        {"name": "layer", "count": 2, "tensors": [["attn.weight", [64, 64]], ["norm", [64]]]},
        {"name": "root", "tensors": [["embed.weight", [1000, 64]]]}]}

Each group is a unit of its own, ``count`` times (default 1), in the order in which they run. The
one named ``root`` is the root. ``total_params``, if it is there, is checked; a ``note`` is for
people. Other keys are refused.
"""

from __future__ import annotations

import math
from typing import Any

from vescale_fsdp.cli.dtypes import Dtype
from vescale_fsdp.cli.errors import InputError
from vescale_fsdp.cli.model import Group, Model, Tensor, make_model

_KEYS = ("model", "note", "total_params", "groups")
_GROUP_KEYS = ("name", "count", "tensors")

# As in `engine.roles`, which loads torch.
HEADS = frozenset(("classifier", "head", "lm_head", "logits", "output", "score", "unembed"))
_OTHERS = ("emb", "position", "conv")  # what words of embeddings and convolutions begin with

_MOST_UNITS = 100_000  # of one kind: a step is followed unit by unit


def model_from_shapes(content: dict[str, Any], path: str, dtype: Dtype) -> Model:
    """The model that a shapes file describes; ``dtype`` is that of all tensors.

    Raises:
        InputError: the content is not of the format.
    """
    _refuse_others(content, _KEYS, path)
    entries = content["groups"]
    if not isinstance(entries, list) or not entries:
        raise InputError(f"{path}: groups is {_short(entries)}, expected a list of groups")
    root: tuple[Group, ...] | None = None
    others: list[tuple[str, tuple[Group, ...]]] = []
    for position, entry in enumerate(entries):
        where = f"{path}: group {position}"
        if not isinstance(entry, dict) or not isinstance(entry.get("tensors"), list):
            raise InputError(f"{where} is {_short(entry)}, expected a name, count and tensors")
        _refuse_others(entry, _GROUP_KEYS, where)
        name = str(entry.get("name", f"group {position}"))
        count = _integer(entry.get("count", 1), 1, f"{where} ({name}): count")
        if count > _MOST_UNITS:
            raise InputError(f"{where} ({name}): count is {count}, expected up to {_MOST_UNITS:,}")
        tensors = _tensors(entry["tensors"], f"{where} ({name})", name == "root")
        if name == "root":
            if root is not None or count != 1:
                raise InputError(f"{where}: there can be one group named root, with count 1")
            root = (Group(tensors, dtype),)
        else:
            others += [(name, (Group(tensors, dtype),))] * count
    model = make_model(str(content.get("model", path)), root or (), others)
    stated = content.get("total_params", model.num_parameters)
    if stated != model.num_parameters:
        raise InputError(
            f"{path}: total_params is {_short(stated)}, but the tensors have "
            f"{model.num_parameters} elements"
        )
    return model


def _refuse_others(entry: dict[str, Any], known: tuple[str, ...], where: str) -> None:
    others = [_short(key) for key in entry if key not in known]
    if others:
        raise InputError(f"{where}: unknown key {', '.join(others)}, expected {', '.join(known)}")


def _tensors(items: list[Any], where: str, is_root: bool) -> tuple[Tensor, ...]:
    tensors = tuple(_tensor(item, where, is_root) for item in items)
    seen: set[str] = set()
    for tensor in tensors:
        if tensor.name in seen:
            raise InputError(
                f"{where}: tensor {tensor.name!r} is given twice, expected each name once; "
                f"a tied parameter is one tensor"
            )
        seen.add(tensor.name)
    return tensors


def _tensor(item: Any, where: str, is_root: bool) -> Tensor:
    is_pair = isinstance(item, list) and len(item) == 2 and item[0]
    if not is_pair or not isinstance(item[0], str) or not isinstance(item[1], list):
        raise InputError(f"{where}: tensor {_short(item)}, expected [name, [dimension, ...]]")
    name, dims = item
    shape = tuple(_integer(dim, 0, f"{where}: a dimension of {name!r}") for dim in dims)
    if math.prod(shape) >= 1 << 62:
        raise InputError(f"{where}: tensor {name!r} of shape {shape} is larger than any memory")
    return Tensor(name, shape, _is_hidden(name, shape, is_root))


def _is_hidden(name: str, shape: tuple[int, ...], is_root: bool) -> bool:
    """As far as names tell; the engine sees modules too."""
    parts = name.lower().split(".")
    words = [word for part in parts for word in part.split("_")]
    is_head = is_root and not HEADS.isdisjoint(parts)
    is_other = any(word.startswith(_OTHERS) or word in ("wte", "wpe") for word in words)
    return sum(extent > 1 for extent in shape) > 1 and not (is_head or is_other)


def _integer(value: Any, least: int, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{what} is {_short(value)}, expected an integer of at least {least}")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

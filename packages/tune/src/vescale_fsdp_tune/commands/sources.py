"""Loads the MODEL of the command line: a file, a function that builds a model, or a name.

A shapes file describes a model in JSON, if there is no code for it::

    {"model": "tiny", "groups": [
        {"name": "layer", "count": 2, "tensors": [["attn.weight", [64, 64]], ["norm", [64]]]},
        {"name": "root", "tensors": [["embed.weight", [1000, 64]]]}]}

Each group is a separate unit that occurs ``count`` times (default 1). They are in forward order.
The one named ``root`` is the root. ``total_params`` is optional and checked. A ``note`` is ignored.
Other keys are refused.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

from vescale_fsdp.cli.text import InputError
from vescale_fsdp_tune.commands.settings import parse_dtype
from vescale_fsdp_tune.costs.model import Dtype, Group, Model, Tensor, make_model

_KINDS = (
    "a shapes file, a transformers config.json, its folder, an architecture, or module:function"
)
_KEYS = ("model", "note", "total_params", "groups")
_GROUP_KEYS = ("name", "count", "tensors")

# The same words as in `engine.roles`, which loads torch.
HEADS = frozenset(("classifier", "head", "lm_head", "logits", "output", "score", "unembed"))
_OTHERS = ("emb", "position", "conv")  # beginnings of words for embeddings and convolutions

_MOST_UNITS = 100_000  # limit for one kind, because each unit of a step is simulated


def load(text: str, param_dtype: Dtype | None) -> Model:
    """Return the model that ``text`` names. Nothing is downloaded, no weights are read or made.

    Args:
        text: the path of a shapes file, of a ``config.json`` of transformers or of its folder; or
            ``module:function``, called without arguments; or the name of an architecture of the
            installed transformers.
        param_dtype: dtype of the shards of floating-point parameters. None: their own dtype if a
            function built them, else fp32.

    Raises:
        InputError: it does not exist, or no model can be made of it.
    """
    dtype = param_dtype or parse_dtype("fp32", "--param-dtype")
    path = Path(text)
    if path.is_dir() and (path / "config.json").exists():
        path = path / "config.json"
    if path.is_file():
        return _from_file(path, dtype)
    module, colon, function = text.partition(":")
    if colon and module and function and "/" not in text:
        from vescale_fsdp_tune.commands.modules import build, model_of_module

        return model_of_module(build(module, function), text, param_dtype)
    if path.is_dir():
        raise InputError(f"there is no config.json in the folder {text!r}")
    if "/" in text or text.endswith(".json"):
        raise InputError(f"there is no file {text!r}; expected {_KINDS}")
    from vescale_fsdp_tune.commands.modules import model_of_architecture

    return model_of_architecture(text, dtype)


def _from_file(path: Path, dtype: Dtype) -> Model:
    content = _read(path)
    if "groups" in content:
        return _from_shapes(content, str(path), dtype)
    if "model_type" in content:
        from vescale_fsdp_tune.commands.modules import model_of_config

        return model_of_config(content, str(path), dtype)
    raise InputError(
        f"{path} has neither model_type (a config of transformers) nor groups (a shapes file)"
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, nested too deep
        raise InputError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} has a {type(content).__name__}, expected a JSON object")
    return content


def _from_shapes(content: dict[str, Any], path: str, dtype: Dtype) -> Model:
    """Return the model of a shapes file. ``dtype`` is the dtype of all tensors."""
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
    tensor = Tensor(name, shape)
    return replace(tensor, is_hidden=_is_hidden(tensor, is_root))


def _is_hidden(tensor: Tensor, is_root: bool) -> bool:
    """Whether it is a matrix of a hidden layer, by its name. (The engine also sees the module.)"""
    parts = tensor.name.lower().split(".")
    words = [word for part in parts for word in part.split("_")]
    is_head = is_root and not HEADS.isdisjoint(parts)
    is_other = any(word.startswith(_OTHERS) or word in ("wte", "wpe") for word in words)
    return tensor.is_matrix and not (is_head or is_other)


def _integer(value: Any, least: int, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{what} is {_short(value)}, expected an integer of at least {least}")
    return value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."

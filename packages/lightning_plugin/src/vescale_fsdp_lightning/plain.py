"""Converts Lightning's checkpoint dictionary to values that need no pickle, and back.

The sealed format stores None, bool, int, float, str, bytes, lists, tuples, dicts and tensors. Some
other values that Lightning and its users put into the dictionary become a dict with a kind::

    Path("data")                    {"!kind": "path", "value": "data"}
    Namespace(lr=0.1)               {"!kind": "namespace", "value": {"lr": 0.1}}
    an OmegaConf container          {"!kind": "omegaconf", "value": "lr: 0.1"}

Numbers of numpy become Python's, other mappings become dicts. All other values could only be
pickled. They are refused, and the error names their keys. Hyper-parameters are left out instead,
with a warning, because nothing is restored from them.
"""

from __future__ import annotations

import argparse
import datetime
import sys
import warnings
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path, PurePath
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from vescale_fsdp import CheckpointValueError

__all__ = ["from_plain", "to_plain"]

_KIND = "!kind"
_ATOMS = (type(None), bool, int, float, str, bytes, torch.dtype)
_HYPER_PARAMETERS = ("hyper_parameters", "datamodule_hyper_parameters")
_TYPE_OF_HYPER_PARAMETERS = "hparams_type"  # a class of OmegaConf; not needed, the kind implies it


class _NotPlain(Exception):
    def __init__(self, value: object, path: tuple[Any, ...]) -> None:
        self.found = f"{type(value).__module__}.{type(value).__qualname__}"
        self.path = "".join(f"[{part!r}]" for part in path)


def to_plain(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """Convert a checkpoint dictionary to values that the sealed format can store.

    Raises:
        CheckpointValueError: a value could only be pickled. Names it.
    """
    plain: dict[str, Any] = {}
    for key, value in checkpoint.items():
        if key == _TYPE_OF_HYPER_PARAMETERS:
            continue
        try:
            plain[key] = _out(value, (key,))
        except _NotPlain as error:
            if key in _HYPER_PARAMETERS and isinstance(value, Mapping):
                plain[key] = _hyper_parameters(key, value)
                continue
            raise CheckpointValueError(
                f"checkpoint{error.path} is a {error.found}, which a sealed checkpoint cannot keep "
                "without pickle. Put plain values or tensors there, or choose "
                'VeScaleFSDPStrategy(state_dict_type="full")'
            ) from None
    return plain


def _hyper_parameters(name: str, value: Mapping[Any, Any]) -> dict[Any, Any]:
    kept: dict[Any, Any] = {}
    for key, each in value.items():
        try:
            kept[key] = _out(each, (name, key))
        except _NotPlain as error:
            warnings.warn(
                f"checkpoint{error.path} is a {error.found}, which could only be pickled, so "
                f"sealed checkpoints leave it out. Pass it to load_from_checkpoint(path, {key}=...)"
                '. VeScaleFSDPStrategy(state_dict_type="full") keeps it; '
                f"self.save_hyperparameters(ignore=[{key!r}]) silences this warning",
                stacklevel=2,
            )
    return kept


def _out(value: Any, path: tuple[Any, ...]) -> Any:
    kind = type(value)
    if kind in _ATOMS:
        return value
    if isinstance(value, DTensor):
        raise _NotPlain(value, path)
    if isinstance(value, torch.Tensor):
        return value.detach()
    if kind in (list, tuple, torch.Size, deque):
        items = [_out(each, (*path, i)) for i, each in enumerate(value)]
        return items if kind is list else kind(items)
    if kind in (OrderedDict, Counter):
        return kind({key: _out(each, (*path, key)) for key, each in value.items()})
    container = _omegaconf_text(value)
    if container is not None:
        return {_KIND: "omegaconf", "value": container}
    if isinstance(value, Mapping):
        return {_out(key, path): _out(each, (*path, key)) for key, each in value.items()}
    return _special(value, path)


def _special(value: Any, path: tuple[Any, ...]) -> Any:
    if isinstance(value, PurePath):
        return {_KIND: "path", "value": str(value)}
    if type(value) is argparse.Namespace:
        return {_KIND: "namespace", "value": _out(vars(value), path)}
    if isinstance(value, set | frozenset):
        items = [_out(each, path) for each in value]
        return {_KIND: type(value).__name__, "value": items}
    if isinstance(value, datetime.timedelta):
        return {_KIND: "timedelta", "value": [value.days, value.seconds, value.microseconds]}
    if isinstance(value, torch.device):
        return {_KIND: "device", "value": str(value)}
    if type(value).__module__ == "numpy" and hasattr(value, "tolist"):
        if getattr(value, "ndim", 0) == 0:
            return _out(value.item(), path)
        if value.dtype.kind in "biuf":
            return {_KIND: "ndarray", "value": torch.from_numpy(value.copy())}
    raise _NotPlain(value, path)


def _omegaconf_text(value: Any) -> str | None:
    """Return the yaml of a container of OmegaConf. None if it is not one, or not imported."""
    omegaconf = sys.modules.get("omegaconf")
    if omegaconf is None or not isinstance(value, omegaconf.Container):
        return None
    return str(omegaconf.OmegaConf.to_yaml(value))


def from_plain(value: Any) -> Any:
    """Revert `to_plain`."""
    if isinstance(value, list | tuple | deque) and not isinstance(value, torch.Size):
        return type(value)(from_plain(each) for each in value)
    if not isinstance(value, dict):
        return value
    if _KIND not in value:
        made = type(value)()
        made.update({key: from_plain(each) for key, each in value.items()})
        return made
    kind, inner = value[_KIND], from_plain(value.get("value"))
    if kind == "path":
        return Path(inner)
    if kind == "namespace":
        return argparse.Namespace(**inner)
    if kind in ("set", "frozenset"):
        return set(inner) if kind == "set" else frozenset(inner)
    if kind == "timedelta":
        return datetime.timedelta(*inner)
    if kind == "device":
        return torch.device(inner)
    if kind == "ndarray":
        return inner.numpy()
    if kind == "omegaconf":
        return import_module("omegaconf").OmegaConf.create(inner)
    raise CheckpointValueError(f"the checkpoint has a value of the unknown kind {kind!r}")

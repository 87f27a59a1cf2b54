"""Reads torch's files (pickles) of classes that are not installed, and runs no code of theirs.

The unpickler builds only tensors and plain containers. An object of any other class becomes an
empty placeholder, and no code of its module runs. ``torch.load(weights_only=True)`` would refuse
such a file.
"""

from __future__ import annotations

import pickle
import types
from pathlib import Path
from typing import Any

import torch

from vescale_fsdp import compat
from vescale_fsdp.checkpoint.files import size_of
from vescale_fsdp.errors import CheckpointCorruptError, CheckpointIncompleteError


class _Foreign:
    """The placeholder for an object of a class that `_Unpickler` does not import."""

    def __init__(self, *args: Any, **_: Any) -> None:
        self.args = args

    def __setstate__(self, state: Any) -> None:
        if isinstance(state, dict):
            vars(self).update(state)

    def append(self, _: Any) -> None:
        """Called for a pickled list, and ignored."""

    def extend(self, _: Any) -> None:
        """Called for a pickled list, and ignored."""

    def __setitem__(self, *_: Any) -> None:
        """Called for a pickled dict, and ignored."""


class _Unpickler(pickle.Unpickler):
    """Builds tensors and plain containers. All else becomes `_Foreign`."""

    _known = frozenset({("collections", "OrderedDict"), ("torch", "Size"), ("torch", "device")})

    def find_class(self, module: str, name: str) -> Any:
        """The class or function for a name in the pickle. Imports only dtypes and `_known` ones."""
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) in self._known:
            return super().find_class(module, name)
        return _REBUILT.get((module, name), _Foreign)


class _Function:
    """A function that a file may call. The file cannot set attributes of it."""

    __slots__ = ("_call",)

    def __init__(self, call: Any) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __setstate__(self, _: Any) -> None:
        raise pickle.UnpicklingError("the file changes a function")


def _tensor_alone(data: Any, *_: Any) -> Any:
    """Replaces torch's functions that make a parameter of a tensor. Returns the tensor."""
    return data


def _tensor_of_type(make: Any, _kind: Any, args: Any, _attributes: Any) -> Any:
    return make(*args)


_REBUILT = {
    ("torch._utils", "_rebuild_tensor_v2"): _Function(compat.rebuild_tensor),
    ("torch._utils", "_rebuild_parameter"): _Function(_tensor_alone),
    ("torch._utils", "_rebuild_parameter_with_state"): _Function(_tensor_alone),
    ("torch._tensor", "_rebuild_from_type_v2"): _Function(_tensor_of_type),
    ("torch.serialization", "_get_layout"): _Function(compat.layout_of_name),
}
_MODULE: Any = types.ModuleType("vescale_fsdp_unpickler")  # torch.load takes its unpickler from it
_MODULE.Unpickler = _Unpickler


def loaded(path: Path) -> Any:
    """What a file of ``torch.save`` contains: tensors that are mapped from it, plain containers.

    Raises:
        CheckpointIncompleteError: the file is missing.
        CheckpointCorruptError: it cannot be read, or has code.
    """
    try:
        size_of(path)  # raises for a FIFO, on which torch would wait
        # By torch's reader: a file may be made so that `zipfile` finds other names in it.
        names = compat.archive_records(path)
        if any(name.endswith("constants.pkl") for name in names):
            raise ValueError("it is a TorchScript archive, which has code")
        # weights_only refuses files with DeepSpeed's classes. `_Unpickler` imports none of them.
        return torch.load(
            path, map_location="cpu", mmap=True, weights_only=False, pickle_module=_MODULE
        )
    except FileNotFoundError as error:
        raise CheckpointIncompleteError(f"{path} is missing") from error
    except CheckpointCorruptError:
        raise
    except Exception as error:  # damaged bytes can raise any exception
        raise CheckpointCorruptError(f"{path} cannot be read: {error!r}") from error

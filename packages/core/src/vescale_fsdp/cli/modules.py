"""From a module to units and groups, as ``fully_shard`` would make them."""

from __future__ import annotations

import importlib
import os
import sys
import sysconfig
import traceback
from collections.abc import Iterable
from contextlib import redirect_stdout
from pathlib import Path

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from vescale_fsdp import repeated_blocks
from vescale_fsdp.cli.dtypes import Dtype
from vescale_fsdp.cli.errors import InputError
from vescale_fsdp.cli.model import Group, Model, Tensor, make_model
from vescale_fsdp.engine import Roles

_ROOT = -1  # among the indices of blocks

_MOST_LETTERS = 320  # of another's message

# Code whose line numbers tell a user nothing: ours, libraries, and Python's own.
_NOT_THE_USERS = (
    str(Path(__file__).parents[1]),
    *{path for name, path in sysconfig.get_paths().items() if name.endswith(("lib", "stdlib"))},
)


def build(module_name: str, function_name: str) -> nn.Module:
    """Call a function of an importable module, on the meta device; here may be its module.

    Raises:
        InputError: it cannot be imported or found, it raises, or it returns no module.
    """
    name = f"{module_name}:{function_name}"
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        with redirect_stdout(sys.stderr):  # what it prints is not the plan
            function = importlib.import_module(module_name)
    except (Exception, SystemExit) as error:  # it is the user's code
        raise InputError(f"{name}: cannot import {module_name!r}: {reason(error)}") from error
    for part in function_name.split("."):
        if not hasattr(function, part):
            raise InputError(f"{name}: {module_name!r} has no {function_name!r}")
        function = getattr(function, part)
    if not callable(function):
        raise InputError(f"{name} is a {type(function).__name__}, expected a function")
    try:
        with torch.device("meta"), redirect_stdout(sys.stderr):
            model = function()
    except (Exception, SystemExit) as error:  # it is the user's code
        raise InputError(f"{name} raised {reason(error)}") from error
    if not isinstance(model, nn.Module):
        raise InputError(f"{name} returned a {type(model).__name__}, expected a torch.nn.Module")
    return model


def reason(error: BaseException) -> str:
    """Type and message of an exception in one line, and where in the user's code it came from."""
    message = " ".join(str(error).split())
    if len(message) > _MOST_LETTERS:  # the cause is at the beginning or at the end
        half = _MOST_LETTERS // 2
        message = f"{message[:half].rstrip()} ... {message[-half:].lstrip()}"
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith(("<", *_NOT_THE_USERS))
    ]
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}{': ' if message else ''}{message}{place}"


def model_of_module(module: nn.Module, name: str, param_dtype: Dtype | None) -> Model:
    """Units and groups of a module: its repeated blocks, and the root with what is left.

    A parameter that several units use is the root's. ``param_dtype`` replaces the dtype of
    floating-point parameters, as ``module.to(dtype)`` would.

    Raises:
        InputError: there are no parameters, or one has no shape yet.
    """
    blocks = repeated_blocks(module)
    owner = _owners(module, blocks)
    names = {id(child): child_name for child_name, child in module.named_modules()}

    def groups_of(unit: nn.Module, index: int) -> list[Group]:
        roles = Roles([unit], has_blocks=unit is module and bool(blocks))
        owners: dict[int, list[nn.Module]] = {}
        for child in unit.modules():
            for param in child._parameters.values():
                owners.setdefault(id(param), []).append(child)
        return _groups(
            (
                (name, param, roles.is_hidden(name, param, owners[id(param)]))
                for name, param in unit.named_parameters()
                if owner[id(param)] == index
            ),
            param_dtype,
        )

    others = [(names[id(block)], groups_of(block, i)) for i, block in enumerate(blocks)]
    model = make_model(name, groups_of(module, _ROOT), others)
    if not model.num_parameters:
        raise InputError(f"{name} has no parameters to shard")
    return model


def _owners(module: nn.Module, blocks: list[nn.Module]) -> dict[int, int]:
    """The index of the block that each parameter, by identity, is in; `_ROOT` if not in one."""
    homes: dict[int, set[int]] = {}  # of modules: a shared one is in several blocks
    for index, block in enumerate(blocks):
        for child in block.modules():
            homes.setdefault(id(child), set()).add(index)
    found: dict[int, set[int]] = {}
    for child_name, child in module.named_modules():
        for name, param in child._parameters.items():
            if param is None:
                continue
            if is_lazy(param):
                full = f"{child_name}.{name}".lstrip(".")
                raise InputError(f"parameter {full} is lazy, it has no shape yet")
            found.setdefault(id(param), set()).update(homes.get(id(child), {_ROOT}))
    return {
        key: next(iter(found_in)) if len(found_in) == 1 else _ROOT
        for key, found_in in found.items()
    }


def _groups(
    params: Iterable[tuple[str, nn.Parameter, bool]], param_dtype: Dtype | None
) -> list[Group]:
    """One group per dtype and trainability, in order of first appearance.

    Args:
        params: name, parameter, and whether it is a matrix of a hidden layer.
    """
    found: dict[tuple[Dtype, bool], list[Tensor]] = {}
    for name, param, is_hidden in params:
        own = param.dtype
        dtype = Dtype(str(own).removeprefix("torch."), own.itemsize, floating=own.is_floating_point)
        if param_dtype is not None and dtype.floating:
            dtype = param_dtype
        key = (dtype, param.requires_grad)
        found.setdefault(key, []).append(Tensor(name, tuple(param.shape), is_hidden))
    return [Group(tuple(tensors), *key) for key, tensors in found.items()]

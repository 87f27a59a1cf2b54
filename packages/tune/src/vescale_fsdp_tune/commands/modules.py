"""Builds a module on the meta device, and finds the units and groups that ``fully_shard`` makes.

The module comes from the user's function or from a config of ``transformers``. No weights are made,
and nothing is downloaded.
"""

from __future__ import annotations

import difflib
import importlib
import os
import sys
import sysconfig
import traceback
from contextlib import redirect_stdout
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

import vescale_fsdp
from vescale_fsdp import repeated_blocks
from vescale_fsdp.cli.text import InputError
from vescale_fsdp.errors import PlanError
from vescale_fsdp_tune.budget import describe
from vescale_fsdp_tune.costs.model import Dtype, Model

_MOST_LETTERS = 320  # of the message of an exception

# Folders whose code is not the user's: ours, libraries (also of another environment below this
# one), and Python's own.
_NOT_THE_USERS = (
    str(Path(__file__).parents[1]),
    str(Path(vescale_fsdp.__file__).parent),
    *{path for name, path in sysconfig.get_paths().items() if name.endswith(("lib", "stdlib"))},
    *{path for path in sys.path if path.endswith(("site-packages", "dist-packages"))},
)

# The first of these that accepts a config builds it, unless the config names a class.
_TASKS = (
    ("MODEL_FOR_CAUSAL_LM_MAPPING", "AutoModelForCausalLM"),  # not for those with an encoder
    ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "AutoModelForSeq2SeqLM"),
    ("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING", "AutoModelForSpeechSeq2Seq"),
    ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "AutoModelForImageTextToText"),
    ("MODEL_FOR_MASKED_LM_MAPPING", "AutoModelForMaskedLM"),
    ("MODEL_MAPPING", "AutoModel"),
)


def build(module_name: str, function_name: str) -> nn.Module:
    """Call a function of an importable module on the meta device.

    The module may be in the current directory.

    Raises:
        InputError: it cannot be imported or found, it raises, or it returns no module.
    """
    name = f"{module_name}:{function_name}"
    model = call(module_name, function_name)
    if not isinstance(model, nn.Module):
        raise InputError(f"{name} returned a {type(model).__name__}, expected a torch.nn.Module")
    return model


def call(module_name: str, function_name: str) -> Any:
    """Call a function of an importable module on the meta device, and return its result.

    Raises:
        InputError: it cannot be imported or found, or it raises.
    """
    name = f"{module_name}:{function_name}"
    if (here := os.getcwd()) not in sys.path:
        sys.path.insert(0, here)
    try:
        with redirect_stdout(sys.stderr):  # keep its output out of the plan's
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
            return function()
    except (Exception, SystemExit) as error:  # it is the user's code
        raise InputError(f"{name} raised {reason(error)}") from error


def reason(error: BaseException) -> str:
    """Return type and message of an exception in one line, with the line in the user's code."""
    message = " ".join(str(error).split())
    if len(message) > _MOST_LETTERS:  # keep beginning and end, where the cause is named
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
    """Find units and groups of a module: its repeated blocks are units, the rest is the root.

    A parameter that several units use belongs to the root. ``param_dtype`` replaces the dtype of
    floating-point parameters, as ``module.to(dtype)`` would.

    Raises:
        InputError: there are no parameters, or one has no shape yet.
    """
    try:
        return describe(module, repeated_blocks(module), name, param_dtype)
    except PlanError as error:
        raise InputError(str(error)) from error


def model_of_architecture(name: str, dtype: Dtype) -> Model:
    """Return the model of an architecture, such as ``llama``, with its default config."""
    transformers = _transformers(f"{name!r} is not a file or a module:function. To look it up")
    known = list(transformers.CONFIG_MAPPING.keys())
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        raise InputError(
            f"unknown model {name!r}: no such file, no module:function, and no architecture of "
            f"transformers {transformers.__version__}"
            + (f"; did you mean {' or '.join(near)}?" if near else "")
        )
    return _model_of_config(transformers, name, {}, name, dtype)


def model_of_config(content: dict[str, Any], path: str, dtype: Dtype) -> Model:
    """Return the model of a ``config.json``."""
    transformers = _transformers(f"to build the model of {path}")
    model_type = content["model_type"]
    if model_type not in transformers.CONFIG_MAPPING:
        raise InputError(
            f"{path}: model_type {model_type!r} is no architecture of transformers "
            f"{transformers.__version__}"
        )
    return _model_of_config(transformers, model_type, content, path, dtype)


def _transformers(why: str) -> ModuleType:
    if find_spec("transformers") is None:
        raise InputError(f"{why} transformers is needed: pip install transformers")
    transformers = importlib.import_module(
        "transformers"
    )  # by name, because mypy would need 20 s to read transformers
    transformers.logging.set_verbosity_error()
    return transformers


def _model_of_config(
    transformers: ModuleType, model_type: str, content: dict[str, Any], name: str, dtype: Dtype
) -> Model:
    try:
        config = transformers.CONFIG_MAPPING[model_type].from_dict(content)
        module = _build(transformers, config)
    except Exception as error:  # transformers may raise anything
        raise InputError(f"transformers cannot build {name}: {reason(error)}") from error
    return model_of_module(module, name, dtype)


def _build(transformers: ModuleType, config: Any) -> nn.Module:
    named = (getattr(transformers, each, None) for each in config.architectures or ())
    make = next((cls for cls in named if cls is not None), None)
    if make is None:
        tasks = _TASKS[1:] if getattr(config, "is_encoder_decoder", False) else _TASKS
        autos = (auto for known, auto in tasks if type(config) in getattr(transformers, known))
        auto = next(autos, None)
        if auto is None:
            raise LookupError("it is part of other architectures, and not a model by itself")
        make = getattr(transformers, auto).from_config
    with torch.device("meta"):
        module = make(config)
    assert isinstance(module, nn.Module), "transformers builds modules"
    return module

"""From a config of ``transformers`` to a model, on the meta device: no weights, no network."""

from __future__ import annotations

import difflib
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

import torch
from torch import nn

from vescale_fsdp.cli.dtypes import Dtype
from vescale_fsdp.cli.errors import InputError
from vescale_fsdp.cli.model import Model
from vescale_fsdp.cli.modules import model_of_module, reason

# The first of these that knows a config builds it, unless the config names a class itself.
_TASKS = (
    ("MODEL_FOR_CAUSAL_LM_MAPPING", "AutoModelForCausalLM"),  # not for those with an encoder
    ("MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING", "AutoModelForSeq2SeqLM"),
    ("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING", "AutoModelForSpeechSeq2Seq"),
    ("MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING", "AutoModelForImageTextToText"),
    ("MODEL_FOR_MASKED_LM_MAPPING", "AutoModelForMaskedLM"),
    ("MODEL_MAPPING", "AutoModel"),
)


def model_of_architecture(name: str, dtype: Dtype) -> Model:
    """The architecture ``name`` with its default config, such as ``llama``.

    Raises:
        InputError: transformers is missing or knows no such architecture.
    """
    transformers = _transformers(f"{name!r} is no file and no module:function, and to look it up")
    known = list(transformers.CONFIG_MAPPING.keys())
    if name not in known:
        near = difflib.get_close_matches(name, known, n=3)
        raise InputError(
            f"unknown model {name!r}: no such file, no module:function, and no architecture of "
            f"transformers {transformers.__version__}"
            + (f"; did you mean {' or '.join(near)}?" if near else "")
        )
    return _model(transformers, name, {}, name, dtype)


def model_of_config(content: dict[str, Any], path: str, dtype: Dtype) -> Model:
    """The model of a ``config.json``.

    Raises:
        InputError: transformers is missing, or cannot build it.
    """
    transformers = _transformers(f"to build the model of {path}")
    model_type = content["model_type"]
    if model_type not in transformers.CONFIG_MAPPING:
        raise InputError(
            f"{path}: model_type {model_type!r} is no architecture of transformers "
            f"{transformers.__version__}"
        )
    return _model(transformers, model_type, content, path, dtype)


def _transformers(why: str) -> ModuleType:
    if find_spec("transformers") is None:
        raise InputError(f"{why} transformers is needed: pip install transformers")
    transformers = import_module("transformers")  # by name: mypy would read it all, for 20 s
    transformers.logging.set_verbosity_error()
    return transformers


def _model(
    transformers: ModuleType, model_type: str, content: dict[str, Any], name: str, dtype: Dtype
) -> Model:
    try:
        config = transformers.CONFIG_MAPPING[model_type].from_dict(content)
        module = _build(transformers, config)
    except Exception as error:  # any error of a library with 800 architectures
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
            raise LookupError("it is part of other architectures, and no model by itself")
        make = getattr(transformers, auto).from_config
    with torch.device("meta"):
        module = make(config)
    assert isinstance(module, nn.Module), "transformers builds modules"
    return module

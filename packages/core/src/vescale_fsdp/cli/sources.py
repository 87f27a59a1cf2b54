"""What MODEL on the command line means: a file, a function that builds a model, or a name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from vescale_fsdp.cli.dtypes import Dtype, parse_dtype
from vescale_fsdp.cli.errors import InputError
from vescale_fsdp.cli.model import Model
from vescale_fsdp.cli.shapes import model_from_shapes

_KINDS = (
    "a shapes file, a transformers config.json, its folder, an architecture, or module:function"
)


def load(text: str, param_dtype: Dtype | None) -> Model:
    """The model that ``text`` names. Nothing is downloaded, no weights are read or made.

    Args:
        text: the path of a shapes file, of a ``config.json`` of transformers or of the folder
            that has one; or ``module:function``, called without arguments; or the name of an
            architecture of the installed transformers.
        param_dtype: of the shards, for parameters of a floating-point dtype. None: that of the
            parameters that a function has built, and fp32 for everything else.

    Raises:
        InputError: there is no such thing, or no model can be made of it.
    """
    dtype = param_dtype or parse_dtype("fp32", "--param-dtype")
    path = Path(text)
    if path.is_dir() and (path / "config.json").exists():
        path = path / "config.json"
    if path.is_file():
        return _from_file(path, dtype)
    module, colon, function = text.partition(":")
    if colon and module and function and "/" not in text:
        from vescale_fsdp.cli.modules import build, model_of_module

        return model_of_module(build(module, function), text, param_dtype)
    if path.is_dir():
        raise InputError(f"there is no config.json in the folder {text!r}")
    if "/" in text or text.endswith(".json"):
        raise InputError(f"there is no file {text!r}; expected {_KINDS}")
    from vescale_fsdp.cli.architectures import model_of_architecture

    return model_of_architecture(text, dtype)


def _from_file(path: Path, dtype: Dtype) -> Model:
    content = _read(path)
    if "groups" in content:
        return model_from_shapes(content, str(path), dtype)
    if "model_type" in content:
        from vescale_fsdp.cli.architectures import model_of_config

        return model_of_config(content, str(path), dtype)
    raise InputError(
        f"{path} has neither model_type (a config of transformers) nor groups (a shapes file)"
    )


def _read(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, nested without end
        raise InputError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise InputError(f"{path} has a {type(content).__name__}, expected a JSON object")
    return content

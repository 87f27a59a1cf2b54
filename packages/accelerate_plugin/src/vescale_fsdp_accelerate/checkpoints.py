"""What ``save_state`` and ``transformers.Trainer`` save, under Accelerate's own file names.

========================  =================================================================
SHARDED_STATE_DICT        ``pytorch_model_fsdp_0/``, ``optimizer_0/``: torch's distributed
                          format, each process its part; ``accelerate merge-weights`` and stock
                          FSDP2 read it
FULL_STATE_DICT           ``pytorch_model_fsdp.bin``, ``optimizer.bin``: whole tensors by names
========================  =================================================================

Both are loaded, whichever is there, on any number of processes. A directory that is saved again is
replaced when the new one is whole. Files and models are loaded without pickle's code; of an
optimizer's directory, torch unpickles what is no tensor: load those that you trust.

Accelerate and the Trainer take the four functions by name when they are imported; `register` puts
ours there, which leave other plug-ins to Accelerate's.
"""

from __future__ import annotations

import functools
import shutil
import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import fsdp_utils  # type: ignore[import-untyped]
from torch import nn
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import BytesStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import _IncompatibleKeys
from torch.optim import Optimizer

from vescale_fsdp import CheckpointIncompleteError, checkpoint
from vescale_fsdp_accelerate import states
from vescale_fsdp_accelerate.plugin import VeScaleFSDPPlugin
from vescale_fsdp_accelerate.replacing import Replacement

__all__ = ["load_model", "load_optimizer", "register", "save_model", "save_optimizer"]

_MODEL, _OPTIMIZER = "pytorch_model_fsdp", "optimizer"


def register() -> None:
    """Have Accelerate's functions hand our plug-in's checkpoints to us. Idempotent."""
    ours: dict[str, Callable[..., Any]] = {
        "save_fsdp_model": save_model,
        "load_fsdp_model": load_model,
        "save_fsdp_optimizer": save_optimizer,
        "load_fsdp_optimizer": load_optimizer,
    }
    for name, function in ours.items():
        stock = getattr(fsdp_utils, name)
        if hasattr(stock, "_vescale_fsdp"):
            return
        chosen = _chooser(stock, function)
        for module in ("accelerate.utils.fsdp_utils", "accelerate.utils", "accelerate.accelerator"):
            setattr(import_module(module), name, chosen)
        if "transformers.trainer" in sys.modules:
            setattr(sys.modules["transformers.trainer"], name, chosen)


def _chooser(stock: Callable[..., Any], ours: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)  # the Trainer looks at the signature
    def choose(fsdp_plugin: Any, *args: Any, **kwargs: Any) -> Any:
        function = ours if isinstance(fsdp_plugin, VeScaleFSDPPlugin) else stock
        return function(fsdp_plugin, *args, **kwargs)

    choose._vescale_fsdp = True  # type: ignore[attr-defined]
    return choose


# Models


def save_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: nn.Module,
    output_dir: str,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Save a model. Collective.

    Args:
        adapter_only: of a ``peft`` model, what is trained alone.
    """
    trained_only = adapter_only and _is_peft(model)
    folder = _made(output_dir)
    if _is_full(fsdp_plugin):
        state = states.whole(
            states.model_state(model, trained_only=trained_only), keep=accelerator.is_main_process
        )
        _save_file(folder / _numbered(_MODEL, model_index), state)
    elif trained_only:
        state = states.model_state(model, trained_only=True)
        _publish(
            folder / f"{_MODEL}_{model_index}",
            lambda path: dcp_save({"model": state}, checkpoint_id=path),
        )
    else:
        _publish(
            folder / f"{_MODEL}_{model_index}", lambda path: checkpoint.export_dcp(path, model)
        )


def load_model(
    fsdp_plugin: Any,
    accelerator: Any,
    model: nn.Module,
    input_dir: str,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Load a model, in place, in the format that is there. Collective.

    Raises:
        CheckpointIncompleteError: neither format is.
    """
    partial = adapter_only and _is_peft(model)
    folder = Path(input_dir)
    name = f"{_MODEL}_{model_index}"
    found = _found(folder, name, _numbered(_MODEL, model_index), fsdp_plugin)
    if found.is_file():
        state = torch.load(found, map_location="cpu", mmap=True, weights_only=True)
        result = states.load_model(model, state, strict=not partial)
    elif partial:
        own = states.model_state(model, trained_only=True)
        dcp_load({"model": own}, checkpoint_id=found)
        result = _IncompatibleKeys([], [])
    else:
        checkpoint.import_dcp(found, model, model_key="model")
        result = _IncompatibleKeys([], [])
    accelerator.wait_for_everyone()
    return result


# Optimizers


def save_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: nn.Module,
    output_dir: str,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Save an optimizer by the names of its parameters. Collective."""
    names = _names(accelerator, model, optimizer)
    state = states.optimizer_state(names, _plain(optimizer))
    folder = _made(output_dir)
    if _is_full(fsdp_plugin):
        _save_file(
            folder / _numbered(_OPTIMIZER, optimizer_index),
            states.whole(state, keep=accelerator.is_main_process),
        )
        return
    _publish(
        folder / f"{_OPTIMIZER}_{optimizer_index}",
        lambda path: dcp_save({"optimizer": state}, checkpoint_id=path),
    )


def load_optimizer(
    fsdp_plugin: Any,
    accelerator: Any,
    optimizer: Any,
    model: nn.Module,
    input_dir: str,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load an optimizer, in place, in the format that is there. Collective.

    Raises:
        CheckpointIncompleteError: neither format is.
        CheckpointMismatchError: it is of other parameters.
    """
    names = _names(accelerator, model, optimizer)
    file = _numbered(_OPTIMIZER, optimizer_index)
    found = _found(Path(input_dir), f"{_OPTIMIZER}_{optimizer_index}", file, fsdp_plugin)
    if found.is_file():
        saved = torch.load(found, map_location="cpu", mmap=True, weights_only=True)
    else:
        saved = _read_directory(found, names, _plain(optimizer))
    states.load_optimizer(names, _plain(optimizer), saved)
    replacement = getattr(optimizer, "optimizer", optimizer)
    if isinstance(replacement, Replacement):
        replacement.lead()
    accelerator.wait_for_everyone()


def _read_directory(folder: Path, names: list[str], optimizer: Optimizer) -> dict[str, Any]:
    """The states in a directory, cut as the parameters are: what was saved decides which."""
    reader = FileSystemReader(folder)
    entries = reader.read_metadata()
    params = [param for group in optimizer.param_groups for param in group["params"]]
    param_of = dict(zip(names, params, strict=True))
    targets: dict[str, Any] = {}
    paths: dict[str, tuple[Any, ...]] = {}
    for key, path in (entries.planner_data or {}).items():
        if path[0] != "optimizer":
            continue
        entry = entries.state_dict_metadata[key]
        paths[key] = path[1:]
        if isinstance(entry, BytesStorageMetadata):
            targets[key] = None
            continue
        param = param_of.get(str(path[2])) if path[1] == "state" else None
        dtype = entry.properties.dtype
        blank = torch.zeros(entry.size, dtype=dtype, device="meta")
        if isinstance(param, DTensor) and states.is_cut(str(path[-1]), blank, param):
            targets[key] = torch.zeros_like(param, dtype=dtype, requires_grad=False)
        else:
            targets[key] = torch.zeros(entry.size, dtype=dtype)
    dcp_load(targets, storage_reader=reader)
    tree = _nested({paths[key]: value for key, value in targets.items()})
    return {"state": tree.get("state", {}), "param_groups": _lists(tree["param_groups"])}


def _nested(flat: Mapping[tuple[Any, ...], Any]) -> dict[str, Any]:
    """The tree of values by paths; what was a list has numbers for keys."""
    tree: dict[Any, Any] = {}
    for path, value in flat.items():
        node = tree
        for part in path[:-1]:
            node = node.setdefault(part, {})
        node[path[-1]] = value
    return tree


def _lists(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    if value and all(isinstance(key, int) for key in value):
        return [_lists(value[index]) for index in sorted(value)]
    return {key: _lists(each) for key, each in value.items()}


def _names(accelerator: Any, model: Any, optimizer: Any) -> list[str]:
    """The names of an optimizer's parameters: in the model that has them, or in all models."""
    models = [model] if model is not None else []
    models += [each for each in accelerator._models if each is not model]
    return states.parameter_names(models, _plain(optimizer))


def _plain(optimizer: Any) -> Optimizer:
    found: Optimizer = getattr(optimizer, "optimizer", optimizer)
    if isinstance(found, Replacement):
        found.follow()
        return found.inner
    return found


# Files


def _is_full(plugin: Any) -> bool:
    return str(plugin.state_dict_type.name) == "FULL_STATE_DICT"


def _is_peft(model: nn.Module) -> bool:
    return "peft" in sys.modules and isinstance(model, sys.modules["peft"].PeftModel)


def _numbered(name: str, index: int) -> str:
    return f"{name}.bin" if index == 0 else f"{name}_{index}.bin"


def _made(folder: str) -> Path:
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder)


def _found(folder: Path, directory: str, file: str, plugin: Any) -> Path:
    """Where a checkpoint is: in the plug-in's format if that is there, or else in the other one."""
    inside = folder if folder.name == directory else folder / directory
    places = [folder / file, inside] if _is_full(plugin) else [inside, folder / file]
    for place in places:
        if place.is_file() or (place / ".metadata").is_file():
            return place
    raise CheckpointIncompleteError(f"{folder} has neither {directory}/ nor {file}")


def _save_file(file: Path, state: Any) -> None:
    def write() -> None:
        new = file.with_name(f"{file.name}.new")
        torch.save(state, new)
        new.replace(file)

    _first(write)


def _publish(path: Path, write: Callable[[Path], Any]) -> None:
    """Have a new directory at ``path``; one that is there goes when the new one is whole."""
    new, old = path.with_name(f"{path.name}.new"), path.with_name(f"{path.name}.old")

    def clean() -> None:
        for each in (new, old):
            if each.exists():
                shutil.rmtree(each)

    _first(clean)
    write(new)

    def replace() -> None:
        if path.exists():
            path.rename(old)
        new.rename(path)
        if old.exists():
            shutil.rmtree(old)

    _first(replace)


def _first(work: Callable[[], Any]) -> None:
    """Do something in the first process; all raise if it raises. Collective."""
    error: Exception | None = None
    if dist.get_rank() == 0:
        try:
            work()
        except Exception as caught:  # noqa: BLE001  every process must learn of it
            error = caught
    message = [None if error is None else f"{type(error).__name__}: {error}"]
    dist.broadcast_object_list(message)
    if message[0] is not None:
        raise error or OSError(f"rank 0: {message[0]}")

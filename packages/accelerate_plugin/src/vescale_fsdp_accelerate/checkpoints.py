"""Checkpoints of ``save_state`` and ``transformers.Trainer``, under Accelerate's file names.

========================  =================================================================
SHARDED_STATE_DICT        ``pytorch_model_fsdp_0/``, ``optimizer_0/``: torch's distributed
                          format, each process writes its part; ``accelerate merge-weights``
                          and FSDP2 read it
FULL_STATE_DICT           ``pytorch_model_fsdp.bin``, ``optimizer.bin``: full tensors by names
fsdp_vescale_sealed       the same directories, with a CRC32 of each byte
========================  =================================================================

The format is detected at a load. The number of processes may differ. A load runs no code from the
files.

`VeScaleAccelerator` and `VeScaleTrainer` call these functions where Accelerate and the Trainer call
Accelerate's own for torch's FSDP.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn
from torch.optim import Optimizer

from vescale_fsdp import CheckpointCorruptError, CheckpointIncompleteError, checkpoint
from vescale_fsdp.checkpoint import full
from vescale_fsdp.ranks import everyone
from vescale_fsdp.spi import Weights, begin_save
from vescale_fsdp_accelerate.replacing import Replacement
from vescale_fsdp_accelerate.saving import replace_directory, replace_file

__all__ = ["is_peft", "load_model", "load_optimizer", "save_model", "save_optimizer", "verify"]

_MODEL, _OPTIMIZER = "pytorch_model_fsdp", "optimizer"


# Models


def save_model(
    accelerator: Any, model: nn.Module, output_dir: str, index: int = 0, adapter_only: bool = False
) -> None:
    """Save a model. Collective.

    Args:
        adapter_only: save only the trained parameters of a ``peft`` model.
    """
    begin_save()
    plugin = accelerator.state.fsdp_plugin
    changed: dict[str, Any] | None = accelerator.states_of_hooks.get(id(model))
    weights: Weights = _weights(model, adapter_only) if changed is None else changed
    folder = _made(output_dir)
    path = folder / f"{_MODEL}_{index}"
    if plugin.sealed:
        replace_directory(path, lambda new: checkpoint.save(new, model, rng=False, weights=weights))
    elif _is_full(plugin):
        state = changed
        if state is None:
            state = full.model_state(model, trained_only=weights == "trained")
        replace_file(
            folder / _numbered(_MODEL, index),
            full.gathered(state, keep=accelerator.is_main_process),
        )
    else:
        replace_directory(path, lambda new: checkpoint.export_dcp(new, model, weights=weights))


def load_model(
    accelerator: Any, model: nn.Module, input_dir: str, index: int = 0, adapter_only: bool = False
) -> None:
    """Load a model in place. The format is detected. Collective.

    Raises:
        CheckpointIncompleteError: there is no checkpoint.
        CheckpointCorruptError: bytes of a sealed one differ from those that were saved.
    """
    if id(model) in accelerator.loaded_by_hooks:
        return
    weights = _weights(model, adapter_only)
    folder = Path(input_dir)
    name = f"{_MODEL}_{index}"
    found = _found(folder, name, _numbered(_MODEL, index), accelerator.state.fsdp_plugin)
    if found.is_file():
        state = torch.load(found, map_location="cpu", mmap=True, weights_only=True)
        full.load_model(model, state, strict=weights == "all")
    elif _is_sealed(found):
        checkpoint.load(found, model, rng=False, weights=weights)
    else:
        checkpoint.import_dcp(found, model, model_key="model", weights=weights)
    accelerator.wait_for_everyone()


# Optimizers


def save_optimizer(
    accelerator: Any, optimizer: Any, output_dir: str, index: int = 0, model: Any = None
) -> None:
    """Save an optimizer by the names of its parameters. Collective.

    Args:
        model: that it may be of, if not one of those that were prepared.
    """
    begin_save()
    plugin = accelerator.state.fsdp_plugin
    plain = _plain(optimizer)
    models = full.owner(_candidates(accelerator, model), plain)
    folder = _made(output_dir)
    path = folder / f"{_OPTIMIZER}_{index}"
    if plugin.sealed:
        replace_directory(
            path, lambda new: checkpoint.save(new, models, plain, rng=False, weights="none")
        )
    elif _is_full(plugin):
        state = full.optimizer_state(models, plain)
        replace_file(
            folder / _numbered(_OPTIMIZER, index),
            full.gathered(state, keep=accelerator.is_main_process),
        )
    else:
        replace_directory(
            path, lambda new: checkpoint.export_dcp(new, models, plain, weights="none")
        )


def load_optimizer(
    accelerator: Any, optimizer: Any, input_dir: str, index: int = 0, model: Any = None
) -> None:
    """Load an optimizer in place. The format is detected. Collective.

    Raises:
        CheckpointIncompleteError: there is no checkpoint.
        CheckpointCorruptError: bytes of a sealed one differ from those that were saved.
        CheckpointMismatchError: it is of other parameters.
    """
    plain = _plain(optimizer)
    models = full.owner(_candidates(accelerator, model), plain)
    file = _numbered(_OPTIMIZER, index)
    plugin = accelerator.state.fsdp_plugin
    found = _found(Path(input_dir), f"{_OPTIMIZER}_{index}", file, plugin)
    if found.is_file():
        saved = torch.load(found, map_location="cpu", mmap=True, weights_only=True)
        full.load_optimizer(models, plain, saved)
    elif _is_sealed(found):
        checkpoint.load(found, models, plain, rng=False, weights="none")
    else:
        checkpoint.import_dcp(found, models, plain, optimizer_key="optimizer", weights="none")
    replacement = getattr(optimizer, "optimizer", optimizer)
    if isinstance(replacement, Replacement):
        replacement.lead()
    accelerator.wait_for_everyone()


def verify(folder: Path) -> None:
    """Check every byte of the sealed checkpoints in a directory. Collective.

    Cost: one of the processes reads each sealed directory.

    Raises:
        CheckpointCorruptError: bytes differ from those that were saved. Raised on all processes.
    """
    sealed = [each for each in sorted(folder.iterdir()) if _is_sealed(each)]
    ranks = everyone()

    def check() -> list[str]:
        faults: list[str] = []
        for path in sealed[ranks.rank :: ranks.size]:
            try:
                checkpoint.verify(path, progress=lambda *_: ranks.still())
            except (CheckpointCorruptError, CheckpointIncompleteError) as error:
                faults.append(str(error))
        return faults

    def combine(found: list[list[str]]) -> list[None]:
        if any(found):
            faults = [fault for each in found for fault in each]
            raise CheckpointCorruptError("nothing was loaded: " + "\n".join(faults))
        return [None] * len(found)

    ranks.together(f"the check of {folder}", check, combine)


def _candidates(accelerator: Any, model: nn.Module | None) -> list[nn.Module]:
    models = [] if model is None else [model]
    return models + [each for each in accelerator._models if each is not model]


def _plain(optimizer: Any) -> Optimizer:
    found: Optimizer = getattr(optimizer, "optimizer", optimizer)
    if isinstance(found, Replacement):
        found.follow()
        return found.inner
    return found


# Files


def is_peft(model: nn.Module) -> bool:
    """Whether a model is one of ``peft``, without importing it."""
    return "peft" in sys.modules and isinstance(model, sys.modules["peft"].PeftModel)


def _is_full(plugin: Any) -> bool:
    return str(plugin.state_dict_type.name) == "FULL_STATE_DICT"


def _weights(model: nn.Module, adapter_only: bool) -> Literal["all", "trained"]:
    return "trained" if adapter_only and is_peft(model) else "all"


def _is_sealed(path: Path) -> bool:
    return (path / "manifest.json").exists()


def _numbered(name: str, index: int) -> str:
    return f"{name}.bin" if index == 0 else f"{name}_{index}.bin"


def _made(folder: str) -> Path:
    Path(folder).mkdir(parents=True, exist_ok=True)
    return Path(folder)


def _found(folder: Path, directory: str, file: str, plugin: Any) -> Path:
    """Return the path of a checkpoint: in the plug-in's format if it exists, else in the other.

    Without one there may be what a save has left that was killed as it replaced the directory.
    """
    inside = folder if folder.name == directory else folder / directory
    places = [folder / file, inside] if _is_full(plugin) else [inside, folder / file]
    for each in (*places, Path(checkpoint.Place(inside).found().path)):
        if checkpoint.Place(each).is_whole:
            return each
    raise CheckpointIncompleteError(f"{folder} has neither {directory}/ nor {file}")

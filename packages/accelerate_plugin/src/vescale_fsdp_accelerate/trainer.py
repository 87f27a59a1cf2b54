"""Two methods of ``transformers.Trainer``, for models that our plug-in has sharded.

``save_model`` writes what ``from_pretrained`` reads, always. Under ``SHARDED_STATE_DICT`` the
Trainer's own does nothing. Then nobody has made the directory of a checkpoint when the processes
look for it, and one may see what another one is just making: they disagree about which checkpoint
is the best.

============================  ==================================================================
called by the script          the model's files, or the adapters' of ``peft``
for ``checkpoint-N``          beside what `checkpoints` writes: the adapters' files, and the model's
                              under ``FULL_STATE_DICT``
============================  ==================================================================

``compute_loss`` finds the root's own parameters whole after its forward, also in evaluation.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from vescale_fsdp import FSDPModule, unsharded
from vescale_fsdp.checkpoint import full
from vescale_fsdp_accelerate.plugin import VeScaleFSDPPlugin
from vescale_fsdp_accelerate.saving import in_each, in_first
from vescale_fsdp_hook import when_imported

__all__ = ["is_peft", "register"]


def register() -> None:
    """Have the Trainer use ours for models that our plug-in has sharded. Idempotent."""
    when_imported("transformers.trainer", _replace)


def _replace(module: ModuleType) -> None:
    stock_save: Callable[..., None] = module.Trainer.save_model
    stock_context: Callable[..., ExitStack] = module.Trainer.compute_loss_context_manager
    if hasattr(stock_save, "_vescale_fsdp"):
        return

    @functools.wraps(stock_save)
    def save_model(self: Any, output_dir: str | None = None, _internal_call: bool = False) -> None:
        plugin = getattr(self.accelerator.state, "fsdp_plugin", None)
        if isinstance(plugin, VeScaleFSDPPlugin):
            _save(self, plugin, output_dir or self.args.output_dir, _internal_call)
        else:
            stock_save(self, output_dir, _internal_call)

    @functools.wraps(stock_context)
    def compute_loss_context_manager(self: Any) -> ExitStack:
        stack = stock_context(self)
        # A forward with gradients leaves the root gathered for the backward.
        if isinstance(self.model, FSDPModule) and not torch.is_grad_enabled():
            stack.enter_context(unsharded(self.model, recurse=False))  # type: ignore[arg-type]
        return stack

    save_model._vescale_fsdp = True  # type: ignore[attr-defined]
    module.Trainer.save_model = save_model
    module.Trainer.compute_loss_context_manager = compute_loss_context_manager


def _save(trainer: Any, plugin: VeScaleFSDPPlugin, folder: str, is_checkpoint: bool) -> None:
    """Save a model where ``from_pretrained`` reads it. Collective; all see the files afterwards."""
    in_first(lambda: Path(folder).mkdir(parents=True, exist_ok=True))
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    is_full = plugin.state_dict_type.name == "FULL_STATE_DICT"
    if is_checkpoint and not (is_full or is_peft(model)):
        return
    state = _state_of_adapters(model) if is_peft(model) else full.model_state(model)
    whole = full.gathered(state, keep=trainer.args.should_save)
    with _prompts_gathered(model):
        in_each(lambda: trainer._save(folder, state_dict=whole))
    if trainer.args.push_to_hub and not is_checkpoint:
        trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)


def is_peft(model: nn.Module) -> bool:
    """Whether a model is one of ``peft``, without importing it."""
    return "peft" in sys.modules and isinstance(model, sys.modules["peft"].PeftModel)


def _state_of_adapters(model: Any) -> dict[str, Any]:
    """Of the state of a ``peft`` model, what its ``save_pretrained`` reads: the base stays sharded.

    Raises:
        RuntimeError: ``peft`` does not find its adapters. On all processes.
    """
    if any(config.is_prompt_learning for config in model.peft_config.values()):
        return full.model_state(model, trained_only=True)
    state = full.model_state(model)
    names: list[Any] = [None]

    def choose() -> None:
        # Of each tensor one that takes no memory: peft says which of them it would write.
        stand_ins = {
            name: torch.empty((), dtype=value.dtype).expand(value.shape)
            for name, value in state.items()
            if isinstance(value, torch.Tensor)
        }
        chosen: dict[int, Any] = {}
        for adapter in model.peft_config:
            found = sys.modules["peft"].get_peft_model_state_dict(model, stand_ins, adapter)
            chosen |= {id(value): value for value in found.values()}
        if chosen.keys() <= {id(value) for value in stand_ins.values()}:
            names[0] = [name for name, value in stand_ins.items() if id(value) in chosen]

    in_first(choose)
    dist.broadcast_object_list(names)
    # Without names, peft computes what it writes.
    return state if names[0] is None else {name: state[name] for name in names[0]}


@contextmanager
def _prompts_gathered(model: Any) -> Iterator[None]:
    """Let ``peft`` run its encoder of prompts, as it does to save them. Collective."""
    encoder = getattr(model, "prompt_encoder", None) if is_peft(model) else None
    if encoder is None or not isinstance(model, FSDPModule):
        yield
        return
    with unsharded(model, recurse=False), unsharded(encoder):  # type: ignore[arg-type]
        yield

"""Replaces methods of ``transformers.Trainer`` for models that our plug-in has sharded.

``save_model`` writes files that ``from_pretrained`` reads. Under ``SHARDED_STATE_DICT`` the
Trainer's own method does nothing, and the directory of a checkpoint does not exist yet when the
processes look for it. One process may see it and another not, so that they disagree which
checkpoint is the best. Ours makes the directory and writes:

============================  ==================================================================
called by the script          the model's files, or the adapters' of ``peft``
for ``checkpoint-N``          in addition to `checkpoints`: the adapters' files, and the model's
                              under ``FULL_STATE_DICT``, or if a subclass saves in its own way
============================  ==================================================================

A subclass with a ``_save`` of its own, for models of its own (sentence-transformers), is called in
the first process of the save, while all parameters are unsharded.

``compute_loss_context_manager`` keeps the root's parameters unsharded after its forward in
evaluation, as they are in training, because ``compute_loss`` may use them. The training loop is
wrapped for `ElasticCallback`. A step of ``predict_with_generate`` runs in `generating`, because
``generate`` calls an encoder by itself, before the model has run.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from vescale_fsdp import FSDPModule, generating, unsharded
from vescale_fsdp.checkpoint import full
from vescale_fsdp.checkpoint.saving import begin_save
from vescale_fsdp.ranks import everyone
from vescale_fsdp_accelerate import elastic_loop
from vescale_fsdp_accelerate.plugin import VeScaleFSDPPlugin
from vescale_fsdp_accelerate.saving import in_each, in_first
from vescale_fsdp_hook import when_imported

__all__ = ["is_peft", "register"]


def register() -> None:
    """Replace the Trainer's methods by ours for models of our plug-in. Idempotent."""
    when_imported("transformers.trainer", _replace)
    when_imported("transformers.trainer_seq2seq", _replace_in_seq2seq)


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
        # After a forward with gradients the root stays unsharded for backward.
        if isinstance(self.model, FSDPModule) and not torch.is_grad_enabled():
            stack.enter_context(unsharded(self.model, recurse=False))  # type: ignore[arg-type]
        return stack

    save_model._vescale_fsdp = True  # type: ignore[attr-defined]
    module.Trainer.save_model = save_model
    module.Trainer.compute_loss_context_manager = compute_loss_context_manager
    elastic_loop.replace(module.Trainer)


def _replace_in_seq2seq(module: ModuleType) -> None:
    stock: Callable[..., Any] = module.Seq2SeqTrainer.prediction_step
    if hasattr(stock, "_vescale_fsdp"):
        return

    @functools.wraps(stock)
    def prediction_step(
        self: Any, model: nn.Module, inputs: Any, prediction_loss_only: bool, *args: Any, **how: Any
    ) -> Any:
        generates = self.args.predict_with_generate and not prediction_loss_only
        is_ours = generates and isinstance(self.model, FSDPModule)
        with generating(self.model) if is_ours else nullcontext():
            return stock(self, model, inputs, prediction_loss_only, *args, **how)

    prediction_step._vescale_fsdp = True  # type: ignore[attr-defined]
    module.Seq2SeqTrainer.prediction_step = prediction_step


def _save(trainer: Any, plugin: VeScaleFSDPPlugin, folder: str, is_checkpoint: bool) -> None:
    """Save a model for ``from_pretrained``. Collective: all processes see the files afterwards."""
    begin_save()
    in_first(lambda: Path(folder).mkdir(parents=True, exist_ok=True))
    model = trainer.accelerator.unwrap_model(trainer.model, keep_torch_compile=False)
    is_full = plugin.state_dict_type.name == "FULL_STATE_DICT"
    by_itself = _saves_by_itself(trainer, model)
    if is_checkpoint and not (is_full or is_peft(model) or by_itself):
        return
    if by_itself:
        with unsharded(model):
            in_each(lambda: trainer._save(folder) if trainer.args.should_save else None)
    else:
        state = _state_of_adapters(model) if is_peft(model) else full.model_state(model)
        whole = full.gathered(state, keep=trainer.args.should_save)
        with _prompts_gathered(model):
            in_each(lambda: trainer._save(folder, state_dict=whole))
    if trainer.args.push_to_hub and not is_checkpoint:
        trainer.push_to_hub(commit_message="Model save", revision=trainer.args.hub_revision)


def _saves_by_itself(trainer: Any, model: nn.Module) -> bool:
    """Whether ``_save`` of another library writes a model that is none of ``transformers``.

    It may take no notice of a state dict, and ask the modules for their parameters, as that of
    sentence-transformers does. So these have to be whole.
    """
    stock = sys.modules["transformers.trainer"].Trainer._save
    known = sys.modules["transformers.modeling_utils"].PreTrainedModel
    return type(trainer)._save is not stock and not (isinstance(model, known) or is_peft(model))


def is_peft(model: nn.Module) -> bool:
    """Whether a model is one of ``peft``, without importing it."""
    return "peft" in sys.modules and isinstance(model, sys.modules["peft"].PeftModel)


def _state_of_adapters(model: Any) -> dict[str, Any]:
    """Return the part of a ``peft`` model's state that its ``save_pretrained`` needs.

    So the base model is not gathered.

    Raises:
        RuntimeError: ``peft`` does not find its adapters. Raised on all processes.
    """
    if any(config.is_prompt_learning for config in model.peft_config.values()):
        return full.model_state(model, trained_only=True)
    state = full.model_state(model)

    def choose() -> list[str] | None:
        # peft gets tensors of the same shapes that need no memory, and selects those to write.
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
            return [name for name, value in stand_ins.items() if id(value) in chosen]
        return None

    names = everyone().from_first("the choice of adapters to save", choose)
    # If peft returns computed tensors instead, it needs the whole state.
    return state if names is None else {name: state[name] for name in names}


@contextmanager
def _prompts_gathered(model: Any) -> Iterator[None]:
    """Unshard the prompt encoder of a ``peft`` model, which it runs for a save. Collective."""
    encoder = getattr(model, "prompt_encoder", None) if is_peft(model) else None
    if encoder is None or not isinstance(model, FSDPModule):
        yield
        return
    with unsharded(model, recurse=False), unsharded(encoder):  # type: ignore[arg-type]
        yield

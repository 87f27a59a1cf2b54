"""``transformers.Trainer`` for models that our plug-in has sharded.

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
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers.trainer import Trainer

from vescale_fsdp import FSDPModule, unsharded
from vescale_fsdp.checkpoint import full
from vescale_fsdp.ranks import everyone
from vescale_fsdp.spi import begin_save
from vescale_fsdp_accelerate import checkpoints
from vescale_fsdp_accelerate.checkpoints import is_peft
from vescale_fsdp_accelerate.plugin import VeScaleFSDPPlugin
from vescale_fsdp_accelerate.saving import in_each, in_first

__all__ = ["VeScaleTrainer"]

_SCHEDULE = "scheduler.pt"


class VeScaleTrainer(Trainer):
    """``transformers.Trainer`` in the workers of a job that asks for us (see `_autoload`).

    With an accelerator that is not ours each method is that of the Trainer.
    """

    # Of the Trainer's class.
    args: Any
    lr_scheduler: Any
    model: Any
    state: Any

    def _inner_training_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Train; in the loop of an `ElasticCallback`, if there is one."""

        def train() -> Any:
            return super(VeScaleTrainer, self)._inner_training_loop(*args, **kwargs)

        for each in self.callback_handler.callbacks:
            if _is_elastic(each) and _plugin_of(self) is not None:
                return each.repeat(self, train)
        return train()

    def compute_loss_context_manager(self) -> ExitStack:
        """Keep the root unsharded after its forward also in evaluation: the loss may use it."""
        stack: ExitStack = super().compute_loss_context_manager()
        # After a forward with gradients the root stays unsharded for backward.
        if isinstance(self.model, FSDPModule) and not torch.is_grad_enabled():
            stack.enter_context(unsharded(self.model, recurse=False))  # type: ignore[arg-type]
        return stack

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save a model for ``from_pretrained``. Collective: all see the files afterwards."""
        plugin = _plugin_of(self)
        if plugin is None:
            super().save_model(output_dir, _internal_call)
            return
        begin_save()
        folder = output_dir or self.args.output_dir
        in_first(lambda: Path(folder).mkdir(parents=True, exist_ok=True))
        model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
        is_full = plugin.state_dict_type.name == "FULL_STATE_DICT"
        by_itself = _saves_by_itself(self, model)
        if _internal_call and not (is_full or is_peft(model) or by_itself):
            return
        if by_itself:
            with unsharded(model):
                in_each(lambda: self._save(folder) if self.args.should_save else None)
        else:
            state = _state_of_adapters(model) if is_peft(model) else full.model_state(model)
            whole = full.gathered(state, keep=self.args.should_save)
            with _prompts_gathered(model):
                in_each(lambda: self._save(folder, state_dict=whole))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    # The Trainer's own methods call functions of Accelerate for torch's FSDP.

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if _plugin_of(self) is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        checkpoints.save_model(self.accelerator, self.model, output_dir, adapter_only=True)
        checkpoints.save_optimizer(self.accelerator, self.optimizer, output_dir, model=self.model)
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, _SCHEDULE))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if _plugin_of(self) is None or checkpoint is None:
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        schedule = Path(checkpoint, _SCHEDULE)
        if schedule.is_file() and _has(checkpoint, "optimizer*"):
            optimizer, model = self.optimizer, self.model
            checkpoints.load_optimizer(self.accelerator, optimizer, checkpoint, model=model)
            self.lr_scheduler.load_state_dict(torch.load(schedule, weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        ours = ("pytorch_model_fsdp*", "pytorch_model.bin", "model.safetensors")
        if _plugin_of(self) is None or not _has(resume_from_checkpoint, *ours):
            # Files of adapters of a model, and shards of whole weights.
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        own = self.model if model is None else model
        checkpoints.load_model(self.accelerator, own, resume_from_checkpoint, adapter_only=True)

    def _load_best_model(self) -> None:
        if _plugin_of(self) is None:
            super()._load_best_model()
            return
        best = self.state.best_model_checkpoint
        checkpoints.load_model(self.accelerator, self.model, best, adapter_only=True)


def _plugin_of(trainer: Any) -> VeScaleFSDPPlugin | None:
    """Return our plug-in, if the Trainer has it. No attribute: scripts derive from the class."""
    plugin = getattr(trainer.accelerator.state, "fsdp_plugin", None)
    return plugin if isinstance(plugin, VeScaleFSDPPlugin) else None


def _is_elastic(callback: Any) -> bool:
    """Whether it is an `ElasticCallback`, which is loaded only if a script has asked for it."""
    home = sys.modules.get("vescale_fsdp_accelerate.elastic.callback")
    return home is not None and isinstance(callback, home.ElasticCallback)


def _has(folder: str, *patterns: str) -> bool:
    return any(True for pattern in patterns for _ in Path(folder).glob(pattern))


def _saves_by_itself(trainer: Any, model: nn.Module) -> bool:
    """Whether ``_save`` of another library writes a model that is none of ``transformers``.

    It may take no notice of a state dict, and ask the modules for their parameters, as that of
    sentence-transformers does. So these have to be whole.
    """
    known = sys.modules["transformers.modeling_utils"].PreTrainedModel
    is_own = type(trainer)._save is not Trainer._save
    return is_own and not (isinstance(model, known) or is_peft(model))


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

"""``transformers.Seq2SeqTrainer`` for models that our plug-in has sharded."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

from torch import nn
from transformers.trainer_seq2seq import Seq2SeqTrainer

from vescale_fsdp import FSDPModule, generating

__all__ = ["VeScaleSeq2SeqTrainer"]


class VeScaleSeq2SeqTrainer(Seq2SeqTrainer):
    """Generates in `vescale_fsdp.generating`; else as the Trainer that it derives from."""

    args: Any  # of the Trainer's class
    model: Any

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, *args: Any, **how: Any
    ) -> Any:
        """Run one step. ``generate`` calls an encoder by itself, before the model has run."""
        generates = self.args.predict_with_generate and not prediction_loss_only
        is_ours = generates and isinstance(self.model, FSDPModule)
        with generating(self.model) if is_ours else nullcontext():
            return super().prediction_step(model, inputs, prediction_loss_only, *args, **how)

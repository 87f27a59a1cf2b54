"""What a script of elastic training has: in plain PyTorch, with Lightning and with Accelerate."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from assumed.plain import DataLoader, data, inputs, loss_of, model, optimizer, targets

__all__ = [
    "DataLoader",
    "data",
    "inputs",
    "loss_of",
    "model",
    "optimizer",
    "targets",
]

if TYPE_CHECKING:
    from transformers import TrainingArguments

    from assumed.lit import LitModel as LitModel

# Of blocks that are checked and do not run.
schedule: Any
args: TrainingArguments

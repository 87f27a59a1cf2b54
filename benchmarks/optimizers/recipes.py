"""Makes the optimizers to compare, for a plain or a sharded model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from vescale_fsdp import fully_shard
from vescale_fsdp.engine import GranularityPolicy
from vescale_fsdp.optim import SOAP, AdamW8bit, Muon, OptimizerGroup, Shampoo, split_named_params

__all__ = ["RECIPES", "Recipe", "shard"]

# The same for all optimizers, so that curves differ only by the method. SOAP has its authors'
# default betas, because its averages are in another basis.
WEIGHT_DECAY = 0.1
BETAS = (0.9, 0.95)
BLOCK = 64  # rows and columns of Shampoo's blocks

Make = Callable[[nn.Module, float], Optimizer]


@dataclass(frozen=True)
class Recipe:
    """An optimizer for a GPT.

    Attributes:
        make: ours, from a model, plain or sharded, and a learning rate.
        reference: the optimizer of the single process: torch's own if there is one.
        reference_name: name of its class.
        granularity: for `fully_shard`.
    """

    make: Make
    reference: Make
    reference_name: str
    granularity: GranularityPolicy | None = None


def _adamw(model: nn.Module, lr: float) -> Optimizer:
    return AdamW(model.parameters(), lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY)


def _adamw8bit(model: nn.Module, lr: float) -> Optimizer:
    return AdamW8bit(model.named_parameters(), lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY)


def _muon_of(kind: type[Optimizer]) -> Make:
    def make(model: nn.Module, lr: float) -> Optimizer:
        hidden, rest = split_named_params(model)
        # Steps have the length of AdamW's, so one learning rate fits both.
        muon = kind(  # type: ignore[call-arg]
            hidden, lr=lr, weight_decay=WEIGHT_DECAY, adjust_lr_fn="match_rms_adamw"
        )
        adamw = AdamW(rest, lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY)
        return OptimizerGroup(muon=muon, adamw=adamw)

    return make


def _shampoo(model: nn.Module, lr: float) -> Optimizer:
    return Shampoo(
        model.named_parameters(), lr=lr, betas=BETAS, weight_decay=WEIGHT_DECAY, block_size=BLOCK
    )


def _soap(model: nn.Module, lr: float) -> Optimizer:
    return SOAP(model.named_parameters(), lr=lr, weight_decay=WEIGHT_DECAY)


RECIPES = {
    "AdamW": Recipe(_adamw, _adamw, "torch.optim.AdamW"),
    "AdamW8bit": Recipe(
        _adamw8bit, _adamw8bit, "AdamW8bit, plain parameters", AdamW8bit.granularity()
    ),
    "Muon": Recipe(_muon_of(Muon), _muon_of(torch.optim.Muon), "torch.optim.Muon and AdamW"),
    "Shampoo": Recipe(_shampoo, _shampoo, "Shampoo, plain parameters", Shampoo.granularity(BLOCK)),
    "SOAP": Recipe(_soap, _soap, "SOAP, plain parameters"),
}


def shard(model: nn.Module, granularity: GranularityPolicy | None) -> None:
    """Make units of a GPT: its blocks, and the rest."""
    for block in model.blocks:  # type: ignore[union-attr]
        fully_shard(block, granularity=granularity)
    fully_shard(model, granularity=granularity)

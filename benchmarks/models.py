"""The models that are measured: GPTs, and a mixture-of-experts with 3-D stacks of experts.

Sizes are chosen so that on two cores a step of ``gpt-7m`` computes about as long as its
bytes take at 1 Gbit/s.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from gpt import GPT, loss_of

__all__ = ["GPT", "PRESETS", "Batches", "Preset", "loss_of"]

VOCABULARY, CONTEXT = 2048, 64


class Experts(nn.Module):
    """Two layers for each of E experts, as two 3-D parameters; each token goes to one expert.

    An expert takes 1.25 times its even share of the tokens at most, and leaves the rest as it is.
    """

    def __init__(self, width: int, num_experts: int, hidden: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, width, hidden) * 0.02)
        self.down = nn.Parameter(torch.randn(num_experts, hidden, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width) -> the same
        tokens = x.flatten(0, 1)
        weight, expert = self.router(tokens).float().softmax(-1).max(-1)
        num_experts = self.up.size(0)
        capacity = len(tokens) * 5 // (4 * num_experts)
        chosen = F.one_hot(expert, num_experts)
        place = ((chosen.cumsum(0) - 1) * chosen).sum(-1)  # of each token in its expert's queue
        fits = place < capacity
        slot = (expert * capacity + place)[fits]
        queues = tokens.new_zeros(num_experts * capacity, tokens.size(-1))
        queues = queues.index_copy(0, slot, tokens[fits]).unflatten(0, (num_experts, capacity))
        results = torch.bmm(F.gelu(torch.bmm(queues, self.up)), self.down).flatten(0, 1)
        scaled = results[slot] * weight[fits, None].to(results.dtype)
        return torch.zeros_like(tokens).index_copy(0, fits.nonzero()[:, 0], scaled).view_as(x)


class MoE(GPT):
    """A GPT whose blocks have experts in place of the MLP."""

    def __init__(self, num_experts: int, hidden: int, layers: int, width: int, heads: int) -> None:
        super().__init__(VOCABULARY, CONTEXT, layers, width, heads)
        for block in self.blocks:
            block.up, block.down = Experts(width, num_experts, hidden), nn.Identity()


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, seconds: float, x: Tensor, *params: Tensor) -> Tensor:
        ctx.seconds = seconds
        ctx.save_for_backward(*params)
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        time.sleep(2 * ctx.seconds)
        return None, grad, *(torch.full_like(each, 1e-3) for each in ctx.saved_tensors)


class Asleep(nn.Module):
    """Has the parameters of another module, and sleeps where that one computes."""

    def __init__(self, module: nn.Module, forward_s: float) -> None:
        super().__init__()
        self.module, self.forward_s = module, forward_s

    def forward(self, x: Tensor) -> Tensor:
        params = self.module.parameters()
        result: Tensor = _Sleep.apply(self.forward_s, x, *params)  # type: ignore[no-untyped-call]
        return result


def _asleep_gpt() -> GPT:
    """A GPT that leaves the processor to the network: what is seen is the schedule."""
    model = GPT(VOCABULARY, CONTEXT, layers=8, width=256, heads=4)
    model.blocks = nn.ModuleList(Asleep(block, forward_s=0.010) for block in model.blocks)
    return model


@dataclass(frozen=True)
class Preset:
    """A model, and how many sequences of 64 tokens each rank gets in a step."""

    make: Callable[[], GPT]
    batch_size: int = 6

    @property
    def tokens(self) -> int:
        """Of one rank in one step."""
        return self.batch_size * CONTEXT


def _gpt(layers: int, width: int) -> Preset:
    return Preset(lambda: GPT(VOCABULARY, CONTEXT, layers, width, heads=width // 64))


PRESETS = {
    "gpt-7m": _gpt(layers=8, width=256),
    "gpt-27m": _gpt(layers=8, width=512),
    "gpt-50m": _gpt(layers=8, width=704),
    "asleep-7m": Preset(_asleep_gpt),
    "moe-20m": Preset(lambda: MoE(num_experts=8, hidden=512, layers=8, width=256, heads=4)),
}


class Batches:
    """The same random tokens for every engine; each rank has its own."""

    def __init__(self, preset: Preset, rank: int) -> None:
        self._shape = (preset.batch_size, CONTEXT + 1)
        self._random = torch.Generator().manual_seed(rank)

    def next(self) -> tuple[Tensor, Tensor]:
        """Tokens, and the tokens after them: (batch, time) each."""
        tokens = torch.randint(VOCABULARY, self._shape, generator=self._random)
        return tokens[:, :-1], tokens[:, 1:]

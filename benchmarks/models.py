"""The models of the benchmarks. Each has a stack of ``blocks``, with other layers around it.

gpt-*      dense GPTs; on two cores ``gpt-7m`` computes about as long as its bytes take at 1 Gbit/s
moe-*      mixtures of experts; the experts of a block are two 3-D parameters
vit-6m     a vision transformer with uneven shapes: rows of 588 and 1076, a class token, 1003
           classes, biases in all layers
norms-1500 1,500 parameters of 64 elements: little computation and communication, many tensors
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples"))

from gpt import GPT

__all__ = ["CONTEXT", "GPT", "PRESETS", "Batches", "Preset", "loss_of"]

VOCABULARY, CONTEXT = 2048, 64
NUM_BATCHES = 4


def loss_of(outputs: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy: (..., classes) and (...) -> ()."""
    return F.cross_entropy(outputs.flatten(0, -2).float(), targets.flatten())


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
    """Has the parameters of another module, and sleeps instead of computing."""

    def __init__(self, module: nn.Module, forward_s: float) -> None:
        super().__init__()
        self.module, self.forward_s = module, forward_s

    def forward(self, x: Tensor) -> Tensor:
        params = self.module.parameters()
        result: Tensor = _Sleep.apply(self.forward_s, x, *params)  # type: ignore[no-untyped-call]
        return result


def _asleep_gpt() -> GPT:
    """A GPT that sleeps instead of computing, to see the schedule of communication."""
    model = GPT(VOCABULARY, CONTEXT, layers=8, width=256, heads=4)
    model.blocks = nn.ModuleList(Asleep(block, forward_s=0.010) for block in model.blocks)
    return model


class ViTBlock(nn.Module):
    """Pre-norm attention and MLP, of any width and with a bias in each layer."""

    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:  # (batch, tokens, width) -> the same
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.transpose(1, 3).unbind(2)
        attended = F.scaled_dot_product_attention(q, k, v)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class ViT(nn.Module):
    """A vision transformer with patches of 14 by 14 pixels of three colours, and a class token."""

    def __init__(
        self, side: int, width: int, heads: int, hidden: int, layers: int, classes: int
    ) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, kernel_size=14, stride=14)
        self.token = nn.Parameter(torch.zeros(1, 1, width))
        self.position = nn.Parameter(torch.randn((side // 14) ** 2 + 1, width) * 0.02)
        self.blocks = nn.ModuleList(ViTBlock(width, heads, hidden) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:  # (batch, 3, side, side) -> (batch, classes)
        patches = self.patches(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(images), -1, -1), patches], dim=1) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[:, 0]))  # type: ignore[no-any-return]


class Norms(nn.Module):
    """Blocks of many tiny layers."""

    def __init__(self, width: int, layers: int, norms: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(*(nn.LayerNorm(width) for _ in range(norms))) for _ in range(layers)
        )

    def forward(self, x: Tensor) -> Tensor:  # (batch, width) -> the same
        for block in self.blocks:
            x = x + block(x) / len(self.blocks)
        return x


Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class Preset:
    """A model and its data.

    Attributes:
        make: makes the model, from the state of torch's random numbers.
        draw: makes inputs and targets of a batch, from a generator of random numbers.
        tokens: of one rank in one step.
    """

    make: Callable[[], nn.Module]
    draw: Callable[[torch.Generator], Batch]
    tokens: int


def _text(make: Callable[[], nn.Module], batch_size: int = 6) -> Preset:
    """Sequences of random tokens, and the tokens after them: (batch, time) each."""

    def draw(random: torch.Generator) -> Batch:
        tokens = torch.randint(VOCABULARY, (batch_size, CONTEXT + 1), generator=random)
        return tokens[:, :-1], tokens[:, 1:]

    return Preset(make, draw, batch_size * CONTEXT)


def _gpt(layers: int, width: int) -> Preset:
    return _text(lambda: GPT(VOCABULARY, CONTEXT, layers, width, heads=width // 64))


def _moe(layers: int) -> Preset:
    return _text(lambda: MoE(num_experts=8, hidden=512, layers=layers, width=256, heads=4))


def _vit(layers: int, batch_size: int = 4, side: int = 112, classes: int = 1003) -> Preset:
    def draw(random: torch.Generator) -> Batch:
        images = torch.randn(batch_size, 3, side, side, generator=random)
        return images, torch.randint(classes, (batch_size,), generator=random)

    make = partial(ViT, side, width=288, heads=4, hidden=1076, layers=layers, classes=classes)
    return Preset(make, draw, tokens=batch_size * ((side // 14) ** 2 + 1))


def _norms(layers: int, norms: int, width: int = 64, batch_size: int = 16) -> Preset:
    def draw(random: torch.Generator) -> Batch:
        x = torch.randn(batch_size, width, generator=random)
        return x, torch.randint(width, (batch_size,), generator=random)

    return Preset(partial(Norms, width, layers, norms), draw, batch_size)


PRESETS = {
    "gpt-tiny": _text(lambda: GPT(VOCABULARY, CONTEXT, layers=2, width=64, heads=1), batch_size=1),
    "gpt-7m": _gpt(layers=8, width=256),
    "gpt-27m": _gpt(layers=8, width=512),
    "gpt-50m": _gpt(layers=8, width=704),
    "asleep-7m": _text(_asleep_gpt),
    "moe-10m": _moe(layers=4),
    "moe-20m": _moe(layers=8),
    "vit-6m": _vit(layers=6),
    "norms-1500": _norms(layers=50, norms=15),
}


class Batches:
    """A few random batches, repeated. They are the same for every engine, and differ by rank."""

    def __init__(self, preset: Preset, rank: int) -> None:
        random = torch.Generator().manual_seed(rank)
        self._batches = cycle([preset.draw(random) for _ in range(NUM_BATCHES)])

    def next(self) -> Batch:
        """Inputs and targets."""
        return next(self._batches)

"""Models for one large GPU: a GPT, and one with experts, without host synchronization.

The experts of `models` select tokens by masks, for which the host waits for the device. Here each
expert has a fixed number of places for tokens, and all tokens above that go to one extra place.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from benchmarks.models import GPT
from torch import Tensor, nn

__all__ = ["PRESETS", "Preset"]


class Experts(nn.Module):
    """Two layers for each of E experts, as two 3-D parameters; each token goes to one expert.

    An expert takes 1.25 times its even share of the tokens at most; the others get zeros.
    """

    def __init__(self, width: int, num_experts: int, hidden: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, num_experts, bias=False)
        self.up = nn.Parameter(torch.randn(num_experts, width, hidden) * 0.02)
        self.down = nn.Parameter(torch.randn(num_experts, hidden, width) * 0.02)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width) -> the same
        tokens = x.flatten(0, 1)
        weight, expert = self.router(tokens).float().softmax(-1).max(-1)
        num_experts, width = self.up.size(0), tokens.size(-1)
        capacity = -(-len(tokens) * 5 // (4 * num_experts))
        nowhere = num_experts * capacity
        chosen = F.one_hot(expert, num_experts)
        place = ((chosen.cumsum(0) - 1) * chosen).sum(-1)  # of each token in its expert's queue
        slot = torch.where(place < capacity, expert * capacity + place, nowhere)
        queues = tokens.new_zeros(nowhere + 1, width).index_copy(0, slot, tokens)
        queues = queues[:nowhere].view(num_experts, capacity, width)
        results = torch.bmm(F.gelu(torch.bmm(queues, self.up)), self.down).view(nowhere, width)
        results = F.pad(results, (0, 0, 0, 1)).index_select(0, slot)
        return (results * weight[:, None].to(results.dtype)).view_as(x)


@dataclass(frozen=True)
class Preset:
    """A model and its batch.

    Attributes:
        make: builds it on the default device.
        speed_target: the target for our speed divided by FSDP2's.
    """

    make: Callable[[], GPT]
    vocabulary: int
    context: int
    batch_size: int
    speed_target: float

    def batch(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """Tokens, and the tokens after them: (batch, time) each. The same for every engine."""
        shape = (self.batch_size, self.context + 1)
        random = torch.Generator().manual_seed(0)
        tokens = torch.randint(self.vocabulary, shape, generator=random).to(device)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def _dense(vocabulary: int, context: int, layers: int, width: int, batch_size: int) -> Preset:
    def make() -> GPT:
        return GPT(vocabulary, context, layers, width, heads=max(width // 128, 1))

    return Preset(make, vocabulary, context, batch_size, speed_target=1.05)


def _moe(
    vocabulary: int, context: int, layers: int, width: int, num_experts: int, batch_size: int
) -> Preset:
    def make() -> GPT:
        model = GPT(vocabulary, context, layers, width, heads=max(width // 128, 1))
        for block in model.blocks:
            block.up, block.down = Experts(width, num_experts, 2 * width), nn.Identity()
        return model

    return Preset(make, vocabulary, context, batch_size, speed_target=1.11)


# Two engines hold their weights at the same time: about 30 GB each for the two large ones.
PRESETS = {
    "gpt-1.3b": _dense(32768, 2048, layers=24, width=2048, batch_size=2),
    "moe-1.3b": _moe(32768, 2048, layers=12, width=1024, num_experts=24, batch_size=2),
    "gpt-tiny": _dense(128, 16, layers=2, width=32, batch_size=2),
    "moe-tiny": _moe(128, 16, layers=2, width=32, num_experts=4, batch_size=2),
}

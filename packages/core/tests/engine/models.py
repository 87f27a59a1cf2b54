"""Small models that the engine's tests share. All are made from a fixed seed."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB = 23  # odd numbers, so that no shard is cut at a round place
WIDTH = 12
LENGTH = 7


class Block(nn.Module):
    """A pre-norm transformer block of width 12 with two heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(WIDTH)
        # No bias: that of the keys has no effect, and Adam would magnify its rounding errors.
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH, bias=False)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 4 * WIDTH)
        self.down = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # [batch, length, WIDTH], and so the result
        heads = self.qkv(self.norm_1(x)).unflatten(-1, (3, 2, WIDTH // 2)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class TinyGPT(nn.Module):
    """Embedding, two blocks, norm and a head that is tied to the embedding."""

    def __init__(self, num_blocks: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, WIDTH)
        nn.init.normal_(self.embedding.weight, std=0.1)
        self.position = nn.Parameter(torch.randn(LENGTH, WIDTH) * 0.02)
        self.blocks = nn.ModuleList([Block() for _ in range(num_blocks)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:  # [batch, LENGTH] -> [batch, LENGTH, VOCAB]
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class MLP(nn.Module):
    """``num_layers`` square linear layers with a tanh between; each layer is a unit."""

    def __init__(self, num_layers: int = 3, width: int = 5, bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=bias) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


class Branches(nn.Module):
    """Uses only the named ones of its branches; ``always`` is used every time."""

    def __init__(self) -> None:
        super().__init__()
        self.always = nn.Linear(4, 4)
        self.branches = nn.ModuleDict({name: nn.Linear(4, 4) for name in ("a", "b", "c")})

    def forward(self, x: Tensor, *names: str) -> Tensor:
        x = self.always(x)
        for name in names:
            x = torch.tanh(self.branches[name](x))
        return x


class OddParameters(nn.Module):
    """What FSDP2 refuses: a scalar, a transposed one, two dtypes; and one of one element."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.transposed = nn.Parameter(torch.randn(5, 3).t())
        self.wide = nn.Parameter(torch.randn(5, dtype=torch.float64))
        self.single = nn.Parameter(torch.randn(1))

    def forward(self, x: Tensor) -> Tensor:  # [batch, 3] -> [batch, 5]
        # Not a matrix product, whose sums depend on the strides.
        rows = [x[:, i, None] * self.transposed[i] for i in range(3)]
        return (sum(rows) * self.scale).double() * self.wide + self.single.double()


def make(model_class: type[nn.Module], *args: object, seed: int = 0) -> nn.Module:
    """A model whose parameters depend on the seed only."""
    torch.manual_seed(seed)
    return model_class(*args)


def tokens_of(step: int, rank: int) -> Tensor:
    """The batch of one rank at one step: two sequences of tokens."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(VOCAB, (2, LENGTH), generator=generator)


def inputs_of(step: int, rank: int, width: int = 5) -> Tensor:
    """The batch of one rank at one step: three rows of normal numbers."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randn(3, width, generator=generator)


def gpt_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Mean cross-entropy of the next token, in fp32."""
    logits = model(tokens).float()
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())

"""A small GPT, and its training text: the sources of Python's standard library.

This is plain PyTorch, used by the training scripts in this folder. It has no code for sharding.
"""

import hashlib
import re
import sysconfig
from collections import Counter
from pathlib import Path
from pydoc_data import topics

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset


class Block(nn.Module):
    """Pre-norm transformer block: causal attention, then an MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm2 = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width, bias=False)
        self.down = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:  # (batch, time, width) -> the same
        # (batch, time, 3 * width) -> three of (batch, heads, time, width / heads)
        qkv = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1))
        q, k, v = qkv.transpose(1, 3).unbind(2)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A GPT. With the defaults it has 6 blocks of width 384 and 12.2 million parameters."""

    def __init__(
        self,
        vocabulary_size: int = 2048,
        context: int = 64,
        layers: int = 6,
        width: int = 384,
        heads: int = 6,
    ) -> None:
        super().__init__()
        self.context = context
        self.token = nn.Embedding(vocabulary_size, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary_size, bias=False)
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
        # The blocks' norms scale x to about 1 anyway. With smaller embeddings, gradients through
        # these norms would be very large in the first steps.
        nn.init.normal_(self.token.weight, std=1.0)

    def forward(self, tokens: Tensor) -> Tensor:  # (batch, time) -> (batch, time, vocabulary)
        positions = torch.arange(tokens.size(1), device=tokens.device)
        x = self.token(tokens) + self.position(positions)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy per token, in nats. A uniform guess has ln 2048 = 7.62."""
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())


@torch.no_grad()
def generate(model: GPT, tokens: Tensor, num_tokens: int, temperature: float = 0.6) -> Tensor:
    """Continue one text: (time,) -> (time + num_tokens,). The model must be unsharded."""
    for _ in range(num_tokens):
        logits = model(tokens[None, -model.context :])[0, -1].float()
        choice = torch.multinomial((logits / temperature).softmax(0), 1)
        tokens = torch.cat([tokens, choice])
    return tokens


def digest_of(model: nn.Module) -> str:
    """Return a digest of all bits of the parameters. The model must be unsharded."""
    total = hashlib.sha256()
    for name, param in model.named_parameters():
        total.update(name.encode())
        total.update(param.detach().contiguous().view(-1).view(torch.uint8).numpy())
    return total.hexdigest()[:16]


def learning_rate_factor(step: int, max_steps: int, warmup: int = 20) -> float:
    """Linear warm-up to 1, then linear decay, to nearly 0 at the last step."""
    return min((step + 1) / warmup, (max_steps - step) / max(1, max_steps - warmup))


class Vocabulary:
    """The 256 bytes, and the most common words of a text. Other words are encoded as bytes."""

    # A line break with its indentation, a run of spaces or of underscores, a word, any byte.
    _pieces = re.compile(rb"\n *| +|_+|[A-Za-z]+|.", re.DOTALL)

    def __init__(self, text: bytes, size: int = 2048) -> None:
        words = Counter(piece for piece in self._pieces.findall(text) if len(piece) > 1)
        common = [word for word, _ in words.most_common(size - 256)]
        self.tokens = [bytes([byte]) for byte in range(256)] + common
        self._ids = {token: i for i, token in enumerate(self.tokens)}

    def encode(self, text: bytes) -> Tensor:
        """Return token numbers, int16 to save memory: (time,)."""
        ids: list[int] = []
        for piece in self._pieces.findall(text):
            if piece in self._ids:
                ids.append(self._ids[piece])
            else:
                ids.extend(piece)
        return torch.tensor(ids, dtype=torch.int16)

    def decode(self, ids: Tensor) -> str:
        """Return the text of some tokens."""
        return b"".join(self.tokens[i] for i in ids.tolist()).decode(errors="replace")


class Windows(Dataset[tuple[Tensor, Tensor]]):
    """A long text in windows. The target of each token is the next token."""

    def __init__(self, text: Tensor, context: int) -> None:
        self.text, self.context = text, context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        window = self.text[start : start + self.context + 1].long()
        return window[:-1], window[1:]


Data = Dataset[tuple[Tensor, Tensor]]


def load_text(context: int = 64, num_validation: int = 256) -> tuple[Vocabulary, Data, Data]:
    """Return the vocabulary, the training data, and the validation data.

    Every tenth file is used for validation.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = [path.read_bytes() for path in sorted(folder.glob("*.py"))]
    if len(files) < 20:  # a Python without sources: use its documentation
        files = [topic.encode() for _, topic in sorted(topics.topics.items())]
    held_out = b"\n".join(files[::10])
    del files[::10]
    text = b"\n".join(files)
    vocabulary = Vocabulary(text)
    validation = Windows(vocabulary.encode(held_out), context)
    step = max(1, len(validation) // num_validation)
    spread = Subset(validation, range(0, len(validation), step)[:num_validation])
    return vocabulary, Windows(vocabulary.encode(text), context), spread

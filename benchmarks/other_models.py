"""Models other than transformers: a residual convolutional network, and a recommender.

conv-3m    bottleneck blocks of 1x1 and 3x3 convolutions with group norms, in three stages
dlrm-3m    26 embedding tables with the row counts of Criteo's data of one week, divided by 500; an
           MLP for 13 counts; products of all pairs; an MLP on top
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from benchmarks.models import Batch, Preset
from torch import Tensor, nn

__all__ = ["OTHER_PRESETS"]

SIDE, CLASSES = 32, 100
ROWS = (
    1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27,
    14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
)  # fmt: skip
SCALED_ROWS = tuple(max(rows // 500, 2) for rows in ROWS)
NUM_COUNTS = 13


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with a shortcut."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.reduce = nn.Conv2d(inputs, width, 1, bias=False)
        self.mix = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.expand = nn.Conv2d(width, outputs, 1, bias=False)
        self.norms = nn.ModuleList(nn.GroupNorm(8, each) for each in (width, width, outputs))
        is_same = stride == 1 and inputs == outputs
        self.shortcut = nn.Identity() if is_same else nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:  # (batch, inputs, h, w) -> (batch, outputs, h', w')
        y = x
        layers = (self.reduce, self.mix, self.expand)
        for index, (layer, norm) in enumerate(zip(layers, self.norms, strict=True)):
            y = norm(layer(y))
            if index < len(layers) - 1:
                y = F.relu(y)
        return F.relu(y + self.shortcut(x))


class ConvNet(nn.Module):
    """A residual network for small images."""

    def __init__(self, width: int, blocks_per_stage: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        blocks, channels = [], width
        for stage, number in enumerate(blocks_per_stage):
            for index in range(number):
                stride = 2 if stage and not index else 1
                blocks.append(Bottleneck(channels, width << stage, stride))
                channels = 4 * (width << stage)
        self.blocks = nn.ModuleList(blocks)
        self.head = nn.Linear(channels, classes)

    def forward(self, images: Tensor) -> Tensor:  # (batch, 3, side, side) -> (batch, classes)
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))  # type: ignore[no-any-return]


class Tables(nn.Module):
    """An embedding for each category."""

    def __init__(self, rows: tuple[int, ...], width: int) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(each, width) for each in rows)

    def forward(self, ids: Tensor) -> Tensor:  # (batch, categories) -> (batch, categories, width)
        columns = zip(self.tables, ids.unbind(1), strict=True)
        return torch.stack([table(column) for table, column in columns], dim=1)


class Recommender(nn.Module):
    """DLRM (arXiv 1906.00091): tables, an MLP for counts, pairwise products, an MLP."""

    def __init__(self, rows: tuple[int, ...], width: int, hidden: int) -> None:
        super().__init__()
        pairs = (len(rows) + 1) * len(rows) // 2
        bottom = _mlp(NUM_COUNTS, hidden, width)
        self.blocks = nn.ModuleList([Tables(rows, width), bottom, _mlp(width + pairs, hidden, 64)])
        self.head = nn.Linear(64, 2)

    def forward(self, features: Tensor) -> Tensor:  # (batch, counts + categories) -> (batch, 2)
        tables, bottom, top = self.blocks
        counts, ids = features[:, :NUM_COUNTS], features[:, NUM_COUNTS:]
        dense = bottom(torch.log1p(counts.to(self.head.weight.dtype)))
        vectors = torch.cat([dense[:, None], tables(ids)], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        row, column = torch.tril_indices(vectors.size(1), vectors.size(1), offset=-1)
        crossed = torch.cat([dense, products[:, row, column]], dim=1)
        return self.head(F.relu(top(crossed)))  # type: ignore[no-any-return]


def _mlp(inputs: int, hidden: int, outputs: int) -> nn.Module:
    return nn.Sequential(
        nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(),
        nn.Linear(hidden, outputs),
    )  # fmt: skip


def _draw_images(random: torch.Generator) -> Batch:
    images = torch.randn(4, 3, SIDE, SIDE, generator=random)
    return images, torch.randint(CLASSES, (4,), generator=random)


def _draw_clicks(random: torch.Generator) -> Batch:
    counts = torch.randint(100, (256, NUM_COUNTS), generator=random)
    ids = [torch.randint(rows, (256, 1), generator=random) for rows in SCALED_ROWS]
    return torch.cat([counts, *ids], dim=1), torch.randint(2, (256,), generator=random)


OTHER_PRESETS = {
    "conv-3m": Preset(lambda: ConvNet(64, (2, 2, 2), CLASSES), _draw_images, tokens=4),
    "dlrm-3m": Preset(lambda: Recommender(SCALED_ROWS, 32, 512), _draw_clicks, tokens=256),
}

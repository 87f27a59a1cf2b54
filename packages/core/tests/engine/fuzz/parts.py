"""The leaves of the models. A program contains the source of those that it needs.

Each takes and gives a tensor of ``width`` columns, and computes in the dtype of its parameters.
``now`` says where we are: a module that looks at it can run in some steps or on some ranks only.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

now = SimpleNamespace(step=0, micro=0, rank=0, fault=None)
WIDE = torch.float64


class Linear(nn.Linear):
    def __init__(self, width: int, dtype: torch.dtype = WIDE) -> None:
        super().__init__(width, width, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weight, self.bias
        return F.linear(torch.tanh(x).to(weight.dtype), weight, bias).to(x.dtype)


class Narrow(Linear):
    """In float32, wherever it stands."""

    def __init__(self, width: int) -> None:
        super().__init__(width, torch.float32)


class Mixed(nn.Module):
    """Two dtypes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width, width, dtype=WIDE) / 2)
        self.bias = nn.Parameter(torch.randn(width, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(torch.tanh(x).to(self.weight.dtype), self.weight).to(
            x.dtype
        ) + self.bias.to(x.dtype)


class Scalar(nn.Module):
    """A parameter of no dimension."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(1.2, dtype=WIDE))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight.to(x.dtype)


class Odd(nn.Module):
    """Shapes that divide by nothing."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 3, dtype=WIDE) / 4)
        self.one = nn.Parameter(torch.randn(1, dtype=WIDE))
        self.seven = nn.Parameter(torch.randn(7, dtype=WIDE) / 4)

    def forward(self, x: Tensor) -> Tensor:
        factor = 1 + self.weight.prod(1).sum() + self.seven.square().mean()
        return x * factor.to(x.dtype) + self.one.to(x.dtype)


class Conv(nn.Conv1d):
    def __init__(self, width: int) -> None:
        super().__init__(1, 3, 3, padding=1, dtype=WIDE)

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x).to(self.weight.dtype)[:, None]
        return F.conv1d(y, self.weight, self.bias, padding=1).mean(1).to(x.dtype)


class Norm(nn.LayerNorm):
    def __init__(self, width: int) -> None:
        super().__init__(width, dtype=WIDE, eps=0.1)

    def forward(self, x: Tensor) -> Tensor:
        y = x.to(self.weight.dtype)
        return F.layer_norm(y, self.normalized_shape, self.weight, self.bias, 0.1).to(x.dtype)


class Rows(nn.Embedding):
    """A table of which one row is used; its input needs no gradient."""

    def __init__(self, width: int) -> None:
        super().__init__(7, width, dtype=WIDE)

    def forward(self, x: Tensor) -> Tensor:
        row = torch.tensor([(now.step + now.rank) % 7], device=x.device)
        return x + super().forward(row).to(x.dtype)


class Spare(Linear):
    """Has a parameter that nobody uses."""

    def __init__(self, width: int) -> None:
        super().__init__(width)
        self.spare = nn.Parameter(torch.randn(width, 3, dtype=WIDE))


class Recurrent(nn.GRU):
    """Has a list of its weights beside those that are registered."""

    def __init__(self, width: int) -> None:
        super().__init__(width, width, batch_first=True, dtype=WIDE)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        y, _ = super().forward(torch.tanh(x).to(self.weight_hh_l0.dtype)[:, None])
        return y[:, 0].to(x.dtype)  # type: ignore[no-any-return]


class Attention(nn.MultiheadAttention):
    """Takes a fused path without gradients, which reads weights of its child."""

    def __init__(self, width: int) -> None:
        super().__init__(width, 1, batch_first=True, dtype=WIDE)
        self.eval()

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        rows = torch.tanh(x).to(self.in_proj_weight.dtype)[None]
        y, _ = super().forward(rows, rows, rows, need_weights=False)
        # The sum does not depend on the bias of the keys: its gradient would be rounding errors,
        # and Adam makes steps of full size of them, in directions that differ between machines.
        _, of_keys, _ = self.in_proj_bias.chunk(3)
        return (y[0] + of_keys).to(x.dtype)  # type: ignore[no-any-return]


class Normed(nn.Module):
    """A weight that is computed from two parameters."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(width, width, dtype=WIDE))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(torch.tanh(x).to(self.linear.bias.dtype))
        return y.to(x.dtype)


class Listed(nn.Module):
    """Parameters in containers, a buffer, and a tensor that is a parameter seen otherwise."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.listed = nn.ParameterList(torch.full((width,), 0.8 + i, dtype=WIDE) for i in range(2))
        self.named = nn.ParameterDict({"b": nn.Parameter(torch.ones(1, width, dtype=WIDE))})
        self.register_buffer("shift", torch.full((width,), 0.1, dtype=WIDE))

    def forward(self, x: Tensor) -> Tensor:
        y = x * self.listed[0].to(x.dtype) + self.named["b"].view(-1).to(x.dtype)
        return y * self.listed[1].expand_as(y).to(x.dtype) + self.shift.to(x.dtype)  # type: ignore[operator]


class Heads(nn.Module):
    """Two outputs, each of a weight of its own."""

    def __init__(self, width: int, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.randn(width, width, dtype=WIDE) / 2)
        self.other = nn.Parameter(torch.randn(width, width, dtype=WIDE) / 2)

    def forward(self, x: Tensor) -> Any:
        y = torch.tanh(x).to(self.weight.dtype)
        both = (y @ self.weight).to(x.dtype), (y @ self.other).to(x.dtype)
        return both if self.kind == "tuple" else dict(zip(("y", "more"), both, strict=True))


class Boom(Exception):
    """What a case raises on purpose."""


class Broken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        raise Boom


def fault(name: str, x: Tensor) -> Tensor:
    """Raise here, or in the backward, if that is wanted of this place now."""
    if now.fault == ("forward", name):
        raise Boom
    return Broken.apply(x) if now.fault == ("backward", name) else x

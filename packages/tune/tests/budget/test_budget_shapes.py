"""Shapes of results on the meta device are the same when they are remembered."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from vescale_fsdp.compat import TorchDispatchMode
from vescale_fsdp_tune.budget.shapes import Shapes, tensors_in


class _Both(TorchDispatchMode):
    """Runs each operator with and without memory, and compares shapes and what is shared."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.shapes = Shapes()
        self.num_remembered = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        runs: list[Any] = []

        def counted(*args: Any, **kwargs: Any) -> Any:
            runs.append(func(*args, **kwargs))
            return runs[-1]

        result = self.shapes.run(_Same(func, counted), args, kwargs)
        if not runs:
            self.num_remembered += 1
            expected = func(*args, **kwargs)
            assert type(result) is type(expected), func
            assert _described(result, args) == _described(expected, args), func
        return result


class _Same:
    """An operator that counts its runs, equal to itself."""

    def __init__(self, func: Any, call: Callable[..., Any]) -> None:
        self._func, self._call = func, call

    def __getattr__(self, name: str) -> Any:
        return getattr(self._func, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other._func is self._func

    def __hash__(self) -> int:
        return hash(self._func)


def _described(result: Any, args: Any) -> list[Any]:
    given = {tensor.untyped_storage()._cdata for tensor in tensors_in(args)}
    return [
        (
            tensor.shape,
            tensor.stride(),
            tensor.dtype,
            tensor.untyped_storage().nbytes(),
            tensor.untyped_storage()._cdata in given,
        )
        for tensor in tensors_in(result)
    ]


class _Layer(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm, self.conv = nn.LayerNorm(width), nn.Conv1d(4, 4, 3, padding=1)
        self.linear, self.heads = nn.Linear(width, 2 * width), nn.MultiheadAttention(width, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(self.norm(x))
        gate, value = self.linear(x).chunk(2, -1)
        x = x + functional.silu(gate) * value.transpose(0, 1).contiguous().transpose(0, 1)
        x = x + self.heads(x, x, x)[0].flip(-1).sort(-1).values
        return x.masked_fill(torch.ones_like(x, dtype=torch.bool), 0.0).clamp_(min=-1)


def test_a_model_with_layers_that_are_alike() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(_Layer() for _ in range(5)))
        x = torch.empty(2, 4, 8, requires_grad=True)
    with _Both() as both:
        model(x).square().sum().backward()
    # Of five layers four are remembered; half of the operators are views.
    assert both.num_remembered > 100


@pytest.mark.parametrize(
    "call",
    [
        lambda x: x * 2,
        lambda x: x * 2.0,
        lambda x: x.half() * True,
        lambda x: torch.ops.aten._unsafe_view(x, [3, 2]),
        lambda x: x.t() + 1,
        lambda x: x[1:] + 1,
        lambda x: torch._foreach_mul([x, x], 2.0),
        lambda x: x.max(0),
        lambda x: x.new_empty(2, 0),
        lambda x: x.add_(1),
        lambda x: x.to(torch.complex64).conj() * 1j,
        lambda x: x.to_sparse() if not x.is_meta else x + torch.ones(2, 3, device="meta"),
    ],
)
def test_operators(call: Callable[[torch.Tensor], Any]) -> None:
    both = _Both()
    for dtype in (torch.float32, torch.int64, torch.float32, torch.int64):
        x = torch.empty(2, 3, dtype=dtype, device="meta")
        expected = call(x)
        with both:
            found = call(x)
        assert _described(found, [x])[0][:3] == _described(expected, [x])[0][:3]


def test_a_device_with_values_runs_each_time() -> None:
    x = torch.arange(3.0)
    with _Both() as both:
        assert (x * 2).tolist() == [0, 2, 4]
        assert (x * 2).tolist() == [0, 2, 4]
    assert both.num_remembered == 0

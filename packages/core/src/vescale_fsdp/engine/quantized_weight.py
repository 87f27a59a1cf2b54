"""QuantizedWeight: an unsharded parameter that is codes and scales, to compute with them.

``F.linear`` (and so ``nn.Linear``) multiplies by the codes themselves where the device can::

    weight in                               device                      the input is rounded in
    e4m3, tiles of 128 x 128                CUDA, capability 9.0        blocks of 1 x 128
    e4m3, a block for each row              CUDA, capability 8.9 on     rows

if the compute dtype is bf16, and the sides are multiples of 128 or 16. On other devices, for all
other functions, and in backward, the weight is decoded temporarily. The results are bitwise those
of a weight that is decoded after the all-gather.

A `CodedGroup` has such parameters. Its full buffer has codes, one byte per element, in the layout
of the elements. Scales are in another tensor. Gradients are the same as in other groups.

Source: `torch.nn.functional.scaled_mm` of torch 2.13, and the checks of its meta function.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable

from vescale_fsdp import compat, devices
from vescale_fsdp.dbuffer import Coding, KeptCodes, ParameterBuffer, decode_blocks, encode
from vescale_fsdp.engine.group import Group

_aten = torch.ops.aten


class QuantizedWeight(torch.Tensor):
    """A weight as codes and scales, in a forward with ``QuantizedGather(decode=False)``.

    It has the shape and dtype of the weight. Any function accepts it and computes with the result
    of `dequantize`; gradients are plain, and those of the rounded weight. It cannot be written to.

    Attributes:
        codes: uint8, of the weight's shape: int8 or e4m3 by their bits. Has memory while the
            parameter is unsharded.
        scales: float32, of the shape of the grid of blocks: [rows / r, columns / c] of tiles r x c.
        coding: the dtype of the codes, and the blocks.

    Cost: a byte for each element; temporarily the decoded weight in backward, and in functions that
    cannot multiply codes.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    coding: Coding

    @staticmethod
    def __new__(
        cls, codes: torch.Tensor, scales: torch.Tensor, coding: Coding, dtype: torch.dtype
    ) -> QuantizedWeight:
        """Make a weight of codes and scales, without copies."""
        made: QuantizedWeight = torch.Tensor._make_wrapper_subclass(
            cls, codes.shape, dtype=dtype, device=codes.device
        )
        made.codes, made.scales, made.coding = codes, scales, coding
        return made

    def dequantize(self) -> torch.Tensor:
        """The weight as a plain tensor, ``code * scale``; differentiable (straight-through)."""
        plain: torch.Tensor = _Dequantize.apply(self)  # type: ignore[no-untyped-call]
        return plain

    def __repr__(self) -> str:  # type: ignore[override]
        return f"QuantizedWeight({tuple(self.shape)}, {self.dtype}, {self.coding})"

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["codes", "scales"], (self.coding, self.dtype)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, torch.Tensor], context: Any, size: object, stride: object
    ) -> QuantizedWeight:
        return QuantizedWeight(inner["codes"], inner["scales"], *context)

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return _linear(*args, **kwargs)
        with compat.without_torch_function():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types only its stub
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (_aten.detach.default, _aten.alias.default):
            (own,) = args
            return QuantizedWeight(own.codes, own.scales, own.coding, own.dtype)
        for given, value in zip(func._schema.arguments, args, strict=False):
            is_written = given.alias_info is not None and given.alias_info.is_write
            if is_written and isinstance(value, QuantizedWeight):
                raise RuntimeError(
                    f"{func} would write to a gathered weight that is kept in {value.coding}; "
                    "change the sharded parameter, or gather with decode=True"
                )
        with compat.without_torch_function():
            return func(*_decoded(args), **_decoded(kwargs or {}))


def _decoded(value: Any) -> Any:
    """Return the same structure with decoded tensors."""
    if isinstance(value, QuantizedWeight):
        plain = torch.empty(value.shape, dtype=value.dtype, device=value.device)
        decode_blocks(value.coding, value.codes.view(-1), value.scales.view(-1), plain.view(-1))
        return plain
    if isinstance(value, tuple | list):
        return type(value)(_decoded(each) for each in value)
    if isinstance(value, dict):
        return {key: _decoded(each) for key, each in value.items()}
    return value


class _Dequantize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: QuantizedWeight) -> torch.Tensor:
        plain: torch.Tensor = _decoded(weight)
        return plain

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def _linear(
    input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    is_plain = isinstance(weight, QuantizedWeight) and not isinstance(input, QuantizedWeight)
    if not is_plain or input.dim() < 2 or torch.is_autocast_enabled(input.device.type):
        input, weight = (
            each.dequantize() if isinstance(each, QuantizedWeight) else each
            for each in (input, weight)
        )
        return F.linear(input, weight, bias)
    result: torch.Tensor = _Linear.apply(input, weight, bias)  # type: ignore[no-untyped-call]
    return result


class _Linear(torch.autograd.Function):
    """A linear layer that saves codes for backward, and not the decoded weight."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.save_for_backward(input, weight)
        if _multiplies_codes(weight, input):
            return scaled_linear(input, weight, bias)
        return F.linear(input, _decoded(weight), bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        input, weight = ctx.saved_tensors
        wants_input, wants_weight, wants_bias = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        of_input = rows.mm(_decoded(weight)).view(input.shape) if wants_input else None
        of_weight = rows.t().mm(input.reshape(-1, input.shape[-1])) if wants_weight else None
        return of_input, of_weight, rows.sum(0) if wants_bias else None


def _multiplies_codes(weight: QuantizedWeight, input: torch.Tensor) -> bool:
    """Whether this device can multiply these codes."""
    if weight.device.type != "cuda" or torch.version.hip or weight.coding.dtype != "e4m3":
        return False
    if weight.dtype != torch.bfloat16 or input.dtype != torch.bfloat16 or weight.dim() != 2:
        return False
    rows, columns = weight.shape
    capability = devices.capability(weight.device)
    if _has_scale_per_row(weight):
        return capability >= (8, 9) and rows % 16 == columns % 16 == 0
    is_128 = weight.coding.size == (128, 128)
    return is_128 and capability == (9, 0) and rows % 128 == columns % 128 == 0


def _has_scale_per_row(weight: QuantizedWeight) -> bool:
    columns = weight.shape[1]
    size = weight.coding.size
    return size == columns if isinstance(size, int) else size[0] == 1 and size[1] >= columns


def scaled_linear(
    input: torch.Tensor, weight: QuantizedWeight, bias: torch.Tensor | None
) -> torch.Tensor:
    """A linear layer that multiplies codes by codes. The input is rounded too.

    Args:
        input: [..., columns].
        weight: [rows, columns], e4m3, with a scale for each row, or in tiles of 128.

    Cost: the input is read twice and written in a byte for each element.
    """
    columns = weight.shape[1]
    x = input.reshape(-1, columns)
    codes = weight.codes.view(torch.float8_e4m3fn).t()  # [columns, rows], column-major
    if _has_scale_per_row(weight):
        own, scales = _encoded(x, columns)
        kind = F.ScalingType.RowWise
        args = own, codes, scales, kind, weight.scales.view(1, -1), kind
    else:
        # Scales of the input lie column by column, and begin at multiples of 16 bytes.
        own, scales = _encoded(F.pad(x, (0, 0, 0, -len(x) % 4)), 128)
        theirs = F.pad(weight.scales, (0, -weight.scales.shape[1] % 4)).t()
        of_input, of_weight = F.ScalingType.BlockWise1x128, F.ScalingType.BlockWise128x128
        args = own, codes, scales.t().contiguous().t(), of_input, theirs, of_weight
    product = F.scaled_mm(*args, output_dtype=weight.dtype).narrow(0, 0, len(x))
    if bias is not None:
        product = product + bias
    return product.view(*input.shape[:-1], weight.shape[0])


def _encoded(x: torch.Tensor, block: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Encode ``x`` in blocks of ``block`` elements of a row. Scales are [rows, blocks]."""
    rows, columns = x.shape
    codes = torch.empty(rows * columns, dtype=torch.uint8, device=x.device)
    scales = torch.empty(rows * columns // block, dtype=torch.float32, device=x.device)
    encode(x.reshape(-1), "e4m3", block, codes, scales)
    return codes.view(torch.float8_e4m3fn).view(rows, columns), scales.view(rows, -1)


class CodedGroup(Group):
    """A group whose parameters are all sent in 8 bits, and used as codes in compute.

    Memory: while unsharded, a byte for each element; always, 4 bytes for each block.
    """

    _has_views = False
    _narrowest = 1  # bytes: codes begin at multiples of 16, which products of codes need

    def _allocate(
        self, shapes: list[torch.Size], dtype: torch.dtype, device: torch.device
    ) -> ParameterBuffer:
        self._face_dtype = torch.uint8
        buffer = super()._allocate(shapes, dtype, device)
        self.codec = self._kept = KeptCodes(self.layout, self._codings(), self._compute_device)
        return buffer

    def _codings(self) -> Sequence[Coding]:
        return [coding for coding, _ in self.codings if coding is not None]

    def _make_gathered(self) -> None:
        if self.buffer.full_face is None:
            return
        for index, (coding, codes, scales) in enumerate(
            zip(self._codings(), self.buffer.full.views, self._kept.scales, strict=True)
        ):
            weight = QuantizedWeight(codes, scales, coding, self.buffer.full_dtype)
            self._set_gathered(index, weight)

    def write_back(self) -> None:
        """Do nothing, because a `QuantizedWeight` cannot be written to."""

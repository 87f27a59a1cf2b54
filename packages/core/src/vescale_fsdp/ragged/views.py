"""Views of ragged tensors: other shapes of the same storage, and parts along dimension 0.

They share memory with the tensor and need no communication: no element leaves its rank. What they
become is in file `recuts`. ``x[2:4]`` of rows (1, 2, 3) is held as rows (0, 1, 1): a rank whose
rows lie outside of the part holds nothing.

| view | result |
|---|---|
| all elements, in order | ragged, in the other shape; an error where a cut cannot be said of it |
| ``x[a:b]``, ``x[i]``, ``split``, ``unbind``, dimension 0 | ragged; an error beside ``Shard(0)`` |
| ``expand`` along dimensions that are not sharded | ragged, a copy |
| all else (``x.T``, ``x[:, 1]``, ``x[::2]``) | gathered when it is used (file `gathered`) |

Which elements an operator shows, torch says of a tensor without data (``meta``).
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from vescale_fsdp.compat import DTensorSpec
from vescale_fsdp.ragged.gathered import gathered_view, run_gathered
from vescale_fsdp.ragged.gradients import PARTING, layout_of_whole, remember_layout, running_node
from vescale_fsdp.ragged.operands import expanded_spec, local_expanded
from vescale_fsdp.ragged.recuts import (
    range_here,
    reshaped,
    respecified_as,
    same_layout,
    sizes_here,
    sliced,
)
from vescale_fsdp.ragged.tensor import WAYS_OUT, RaggedTensor, redistribute, wrap_local

aten = torch.ops.aten
# Operators that show parts along a dimension, and where that is among the arguments after ``x``.
_PARTS = {
    aten.select.int: 0,
    aten.slice.Tensor: 0,
    aten.split.Tensor: 1,
    aten.split_with_sizes.default: 1,
    aten.unbind.int: 0,
}

# Operators whose first argument after ``x`` is a shape.
_IN_SHAPE = (aten._unsafe_view.default, aten.view.default)


def alias(func: Any, x: RaggedTensor) -> RaggedTensor:
    """``x.detach()``, and so ``x.data``."""
    return wrap_local(x._local_tensor, x._spec, False)


def view(func: Any, x: RaggedTensor, *args: Any, **kwargs: Any) -> DTensor | list[DTensor]:
    """What ``func`` shows of ``x``: one view, or those of ``split`` and ``unbind``."""
    without_data = torch.empty(x.shape, dtype=x.dtype, device="meta")
    try:
        shown = func(without_data, *args, **kwargs)
    except (IndexError, RuntimeError) as error:
        raise type(error)(_impossible(func, x, args, error)) from None
    is_range = True
    if func in _PARTS:
        # A part along another dimension may be a range of the storage, too (``x[:, 0]`` of shape
        # (6, 1)). But its gradient comes in terms of that dimension.
        dim = args[_PARTS[func]] if _PARTS[func] < len(args) else 0
        is_range = dim % x.dim() == 0
        if func is aten.slice.Tensor:
            has_step = len(args) > 3 and args[3] != 1
            is_range = (is_range and not has_step) or shown.shape == x.shape
        remember_layout(x)
    if isinstance(shown, torch.Tensor):
        return _showing(func, x, shown, is_range, lambda whole: func(whole, *args, **kwargs))

    def part(number: int, whole: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = func(whole, *args, **kwargs)[number]
        return found

    return [_showing(func, x, each, is_range, partial(part, i)) for i, each in enumerate(shown)]


def _impossible(func: Any, x: RaggedTensor, args: tuple[Any, ...], error: Exception) -> str:
    """Say why torch raised ``error`` for a view of the shape of ``x``."""
    shape, size = tuple(x.shape), x.numel()
    if dims := re.search(r"range of \[(-?\d+), (-?\d+)\], but got (-?\d+)", str(error)):
        num_dims = x.dim() + (func is aten.unsqueeze.default)
        return (
            f"dimension {dims[3]} of a RaggedTensor of {num_dims} dimensions does not exist; "
            f"expected one in [{dims[1]}, {dims[2]}]"
        )
    if func is aten.select.int:
        if not shape:
            return f"{func}: a tensor without dimensions cannot be indexed by {args[1]}"
        dim, index = args
        return f"index {index} is out of range for dimension {dim} with size {shape[dim]}"
    if func is aten.split_with_sizes.default:
        dim = args[1] if len(args) > 1 else 0
        return (
            f"{func}: sizes {list(args[0])} do not sum to dimension {dim} of a RaggedTensor of "
            f"shape {shape}"
        )
    if func in _IN_SHAPE:
        return (
            f"{func}: shape {list(args[0])} is invalid for a RaggedTensor of shape {shape}, which "
            f"has {size} elements"
        )
    return f"{func} of a RaggedTensor of shape {shape}: {error}"


def _showing(
    func: Any,
    x: RaggedTensor,
    shown: torch.Tensor,
    is_range: bool,
    read: Callable[[torch.Tensor], torch.Tensor],
) -> DTensor:
    """The view of ``x`` that ``read`` gives of the whole. ``shown`` is it, without data."""
    row = math.prod(x.shape[1:])
    if is_range and shown.is_contiguous():
        if shown.numel() == x.numel():
            spec = reshaped(x._spec, shown.shape)
            if spec is not None:
                # The very same local tensor: with it they share the count of writes.
                return wrap_local(x._local_tensor, spec, False)
            if x.numel():
                raise NotImplementedError(
                    f"{func} would turn shape {tuple(x.shape)} into {tuple(shown.shape)}, but "
                    f"{x.placements} shards a dimension that would disappear: it must keep its "
                    f"size, and the product of the sizes before it. {WAYS_OUT}"
                )
        elif row and shown.storage_offset() % row == 0 and shown.numel() % row == 0:
            start = shown.storage_offset() // row
            return _part(func, x, start, start + shown.numel() // row, shown.shape)
    return gathered_view(func, x, read)


def expand(func: Any, x: RaggedTensor, shape: Sequence[int], *, implicit: bool = False) -> DTensor:
    """``x.expand``: a copy of the local part, or gathered along what is sharded."""
    missing = len(shape) - x.dim()
    sizes = [
        x.shape[d - missing] if size == -1 and d >= missing else size
        for d, size in enumerate(shape)
    ]
    spec = expanded_spec(x._spec, sizes)
    if spec is None:  # dimensions that are sharded, or those before them
        return gathered_view(func, x, lambda whole: func(whole, sizes))
    if spec is x._spec:
        return wrap_local(x._local_tensor, spec, False)
    return wrap_local(local_expanded(x._local_tensor, x._spec, spec), spec, False)


# --- parts along dimension 0 ----------------------------------------------------------------------


def _part(func: Any, x: RaggedTensor, start: int, stop: int, shape: Sequence[int]) -> RaggedTensor:
    """Indices [start, stop) of dimension 0, which lie in one run of the local part."""
    spec = _part_spec(func, x._spec, start, stop, shape)
    where = _local_slice(x._spec, start, stop)
    # Below autograd a view would count the writes to it apart (see `operands`).
    with torch.no_grad(), torch.overrides.enable_reentrant_dispatch():
        local = x._local_tensor[where]
    return wrap_local(local, spec, False)


def _part_spec(
    func: Any, spec: DTensorSpec, start: int, stop: int, shape: Sequence[int]
) -> DTensorSpec:
    rows = sliced(spec, start, stop)
    part = None if rows is None else reshaped(rows, shape)
    if part is None:
        raise NotImplementedError(
            f"{func} would split dimension 0 of {spec.placements}, which another axis of the mesh "
            f"shards, or of which it leaves ranks parts of different sizes. {WAYS_OUT}"
        )
    return part


def _local_slice(spec: DTensorSpec, start: int, stop: int) -> slice:
    """Where indices [start, stop) of dimension 0 lie in the local part."""
    lower, upper = range_here(spec)
    row = math.prod(sizes_here(spec)[1:])
    first, last = (min(max(index * row, lower), upper) - lower for index in (start, stop))
    return slice(first, last)


# --- gradients of parts ---------------------------------------------------------------------------


def _whole_of(
    func: Any, shape: Sequence[int], parts: Iterable[tuple[torch.Tensor, int, int]]
) -> RaggedTensor:
    """Zeros in the layout of the whole, with the gradients of parts of it in their places.

    Parts that are not ragged are the zeros that autograd has for what was not used.
    """
    given = [(x, lower, upper) for x, lower, upper in parts if isinstance(x, RaggedTensor)]
    spec = layout_of_whole()
    if spec is None or tuple(spec.shape) != tuple(shape):
        raise NotImplementedError(
            f"{func} is the gradient of a part of a RaggedTensor, outside of a backward pass that "
            f"knows how the whole was sharded. {WAYS_OUT}"
        )
    first = given[0][0]
    spec = respecified_as(spec, dtype=first.dtype)
    start, stop = range_here(spec)
    local = first._local_tensor.new_zeros(stop - start)
    for grad, lower, upper in given:
        expected = _part_spec(func, spec, lower, upper, grad.shape)
        moved: DTensor = grad
        if not same_layout(grad._spec, expected):
            moved = redistribute(grad, placements=expected.placements)
        local[_local_slice(spec, lower, upper)] = moved._local_tensor
    return wrap_local(local, spec, False)


def slice_backward(
    func: Any,
    grad: RaggedTensor,
    shape: Sequence[int],
    dim: int,
    start: int | None,
    stop: int | None,
    step: int,
) -> Any:
    """The gradient of ``x[start:stop]``."""
    if tuple(shape) == grad.shape:
        return wrap_local(grad._local_tensor, grad._spec, False)
    if dim % len(shape) or step != 1:
        return run_gathered(func, grad, shape, dim, start, stop, step)
    first, last, _ = slice(start, stop).indices(shape[dim])
    return _whole_of(func, shape, [(grad, first, max(first, last))])


def select_backward(
    func: Any, grad: RaggedTensor, shape: Sequence[int], dim: int, index: int
) -> Any:
    """The gradient of ``x[index]``."""
    if dim % len(shape):
        return run_gathered(func, grad, shape, dim, index)
    index %= shape[dim]
    return _whole_of(func, shape, [(grad, index, index + 1)])


def join(func: Any, parts: Sequence[torch.Tensor], dim: int = 0) -> Any:
    """``cat`` and ``stack``: of the whole, or the gradient of ``split`` and of ``unbind``."""
    stacks = func is aten.stack.default
    if running_node() not in PARTING or dim:
        return run_gathered(func, parts, dim)
    lengths = [1 if stacks else part.shape[0] for part in parts]
    ends = list(accumulate(lengths, initial=0))
    inner = parts[0].shape if stacks else parts[0].shape[1:]
    return _whole_of(func, (ends[-1], *inner), zip(parts, ends[:-1], ends[1:], strict=True))

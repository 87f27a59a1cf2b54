"""Views of ragged tensors: other shapes of the same storage, and parts along dimension 0.

They share memory with the tensor and need no communication: no element leaves its rank. What they
become is in file `recuts`. ``x[2:4]`` of rows (1, 2, 3) is held as rows (0, 1, 1): a rank whose
rows lie outside of the part holds nothing.

| operators | condition |
|---|---|
| ``view``, ``reshape``, ``flatten``, ``unflatten``, ``squeeze``, ``unsqueeze`` | as `reshaped` |
| ``x[a:b]``, ``x[i]``, ``narrow``, ``split``, ``chunk``, ``unbind`` | dimension 0, step 1 |
| ``expand`` | along unsharded dimensions; this one is a copy |
| ``t``, ``transpose``, ``permute``, and parts of other dimensions | else see `gathered` |
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from vescale_fsdp.compat import DTensorSpec
from vescale_fsdp.ragged.gathered import gathered_view, run_gathered
from vescale_fsdp.ragged.mixing import (
    PARTING,
    expanded_spec,
    layout_of_whole,
    local_expanded,
    remember_layout,
    running_node,
)
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


def dim_of(dim: int, num_dims: int) -> int:
    """``dim`` counted from the front.

    Raises:
        IndexError: there is no such dimension.
    """
    most = max(num_dims, 1)
    if not -most <= dim < most:
        raise IndexError(
            f"dimension {dim} of a RaggedTensor of {num_dims} dimensions does not exist; expected "
            f"one in [{-most}, {most - 1}]"
        )
    return dim % most


def bounds(start: int | None, stop: int | None, size: int) -> tuple[int, int]:
    """The half-open range of a slice of step 1, as Python counts."""
    first, last, _ = slice(start, stop).indices(size)
    return first, max(first, last)


# --- other shapes ---------------------------------------------------------------------------------


def _in_shape(func: Any, x: RaggedTensor, shape: Sequence[int]) -> RaggedTensor:
    spec = reshaped(x._spec, shape)
    if spec is None:
        raise NotImplementedError(
            f"{func} would turn shape {tuple(x.shape)} into {tuple(shape)}, but {x.placements} "
            "shards a dimension that would disappear: it must keep its size, and the "
            f"product of the sizes before it. {WAYS_OUT}"
        )
    # The very same local tensor: with it they share the count of writes (`elementwise`).
    return wrap_local(x._local_tensor, spec, False)


def _alias(func: Any, x: RaggedTensor) -> RaggedTensor:
    """``x.detach()``, and so ``x.data``."""
    return wrap_local(x._local_tensor, x._spec, False)


def _view(func: Any, x: RaggedTensor, shape: Sequence[int], *_: Any) -> RaggedTensor:
    sizes = list(shape)
    if sizes.count(-1) == 1:
        known = -math.prod(sizes)
        sizes[sizes.index(-1)] = x.numel() // known if known else 0
    if math.prod(sizes) != x.numel() or min(sizes, default=0) < 0:
        raise RuntimeError(
            f"{func}: shape {list(shape)} is invalid for a RaggedTensor of shape "
            f"{tuple(x.shape)}, which has {x.numel()} elements"
        )
    return _in_shape(func, x, sizes)


def _unsqueeze(func: Any, x: RaggedTensor, dim: int) -> RaggedTensor:
    at = dim_of(dim, x.dim() + 1)
    return _in_shape(func, x, (*x.shape[:at], 1, *x.shape[at:]))


def _squeeze(func: Any, x: RaggedTensor, dims: int | Sequence[int] | None = None) -> RaggedTensor:
    if dims is None:
        dims = range(x.dim())
    elif isinstance(dims, int):
        dims = (dims,)
    gone = {dim_of(dim, x.dim()) for dim in dims}
    kept = [size for dim, size in enumerate(x.shape) if size != 1 or dim not in gone]
    return _in_shape(func, x, kept)


def _permute(func: Any, x: RaggedTensor, dims: Sequence[int]) -> DTensor:
    order = [dim_of(dim, x.dim()) for dim in dims]
    moved = [dim for dim in order if x.shape[dim] != 1]
    if moved != sorted(moved):
        return gathered_view(aten.permute.default, x, order)
    return _in_shape(func, x, [x.shape[dim] for dim in order])


def _transpose(func: Any, x: RaggedTensor, first: int = 0, second: int = 1) -> DTensor:
    order = list(range(x.dim()))
    if order and (func is not aten.t.default or x.dim() == 2):
        a, b = dim_of(first, x.dim()), dim_of(second, x.dim())
        order[a], order[b] = order[b], order[a]
    return _permute(func, x, order)


def _expand(func: Any, x: RaggedTensor, shape: Sequence[int], *, implicit: bool = False) -> DTensor:
    missing = len(shape) - x.dim()
    sizes = [
        x.shape[d - missing] if size == -1 and d >= missing else size
        for d, size in enumerate(shape)
    ]
    spec = expanded_spec(x._spec, sizes)
    if spec is None:  # dimensions that are sharded, or those before them
        return gathered_view(func, x, sizes)
    if spec is x._spec:
        return wrap_local(x._local_tensor, spec, False)
    return wrap_local(local_expanded(x._local_tensor, x._spec, spec), spec, False)


# --- parts along dimension 0 ----------------------------------------------------------------------


def _part(func: Any, x: RaggedTensor, start: int, stop: int, drop: bool = False) -> RaggedTensor:
    """Indices [start, stop) of dimension 0, which lie in one run of the local part."""
    remember_layout(x)
    spec = _part_spec(func, x._spec, start, stop, drop)
    where = _local_slice(x._spec, start, stop)
    # Below autograd a view would count the writes to it apart (see `elementwise`).
    with torch.no_grad(), torch.overrides.enable_reentrant_dispatch():
        local = x._local_tensor[where]
    return wrap_local(local, spec, False)


def _part_spec(func: Any, spec: DTensorSpec, start: int, stop: int, drop: bool) -> DTensorSpec:
    part = sliced(spec, start, stop, drop=drop)
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


def _slice(
    func: Any,
    x: RaggedTensor,
    dim: int = 0,
    start: int | None = None,
    stop: int | None = None,
    step: int = 1,
) -> DTensor:
    dim = dim_of(dim, x.dim())
    first, last = bounds(start, stop, x.shape[dim])
    if step == 1 and (first, last) == (0, x.shape[dim]):
        return _in_shape(func, x, x.shape)
    if dim or step != 1:  # no whole runs of the storage
        return gathered_view(func, x, dim, start, stop, step)
    return _part(func, x, first, last)


def _select(func: Any, x: RaggedTensor, dim: int, index: int) -> DTensor:
    if not x.dim():
        raise IndexError(f"{func}: a tensor without dimensions cannot be indexed by {index}")
    if dim_of(dim, x.dim()):
        return gathered_view(func, x, dim, index)
    if not -len(x) <= index < len(x):
        raise IndexError(f"index {index} is out of range for dimension 0 with size {len(x)}")
    index %= len(x)
    return _part(func, x, index, index + 1, drop=True)


def _split(func: Any, x: RaggedTensor, size: int, dim: int = 0) -> list[DTensor]:
    length = x.shape[dim_of(dim, x.dim())]
    count = -(-length // size) if size else 1
    sizes = [min(size, length - i * size) for i in range(max(count, 1))]
    return _split_with_sizes(func, x, sizes, dim)


def _split_with_sizes(
    func: Any, x: RaggedTensor, sizes: Sequence[int], dim: int = 0
) -> list[DTensor]:
    dim = dim_of(dim, x.dim())
    if sum(sizes) != x.shape[dim]:
        raise RuntimeError(
            f"{func}: sizes {list(sizes)} do not sum to dimension {dim} of a RaggedTensor of shape "
            f"{tuple(x.shape)}"
        )
    ends = list(accumulate(sizes, initial=0))
    return [_slice(aten.slice.Tensor, x, dim, *range_) for range_ in pairwise(ends)]


def _unbind(func: Any, x: RaggedTensor, dim: int = 0) -> list[DTensor]:
    return [
        _select(aten.select.int, x, dim, index) for index in range(x.shape[dim_of(dim, x.dim())])
    ]


# --- gradients of parts ---------------------------------------------------------------------------


def _whole_of(
    func: Any, shape: Sequence[int], parts: Iterable[tuple[torch.Tensor, int, int]], drop: bool
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
        expected = _part_spec(func, spec, lower, upper, drop)
        moved: DTensor = grad
        if not same_layout(grad._spec, expected):
            moved = redistribute(grad, placements=expected.placements)
        local[_local_slice(spec, lower, upper)] = moved._local_tensor
    return wrap_local(local, spec, False)


def _slice_backward(
    func: Any,
    grad: RaggedTensor,
    shape: Sequence[int],
    dim: int,
    start: int | None,
    stop: int | None,
    step: int,
) -> RaggedTensor:
    first, last = bounds(start, stop, shape[dim])
    if (first, last) == (0, shape[dim]):
        return _in_shape(func, grad, shape)
    return _whole_of(func, shape, [(grad, first, last)], drop=False)


def _select_backward(
    func: Any, grad: RaggedTensor, shape: Sequence[int], dim: int, index: int
) -> RaggedTensor:
    index %= shape[dim]
    return _whole_of(func, shape, [(grad, index, index + 1)], drop=True)


def _joined(func: Any, parts: Sequence[torch.Tensor], dim: int = 0) -> DTensor:
    """``cat`` and ``stack``: of the whole, or the gradient of ``split`` and of ``unbind``."""
    stacks = func is aten.stack.default
    if running_node() not in PARTING or dim:
        joined: DTensor = run_gathered(func, (parts, dim), {})
        return joined
    lengths = [1 if stacks else part.shape[0] for part in parts]
    ends = list(accumulate(lengths, initial=0))
    inner = parts[0].shape if stacks else parts[0].shape[1:]
    places = zip(parts, ends[:-1], ends[1:], strict=True)
    return _whole_of(func, (ends[-1], *inner), places, drop=stacks)


VIEWS: dict[Any, Callable[..., Any]] = {
    aten._reshape_alias.default: _view,
    aten._unsafe_view.default: _view,
    aten.alias.default: _alias,
    aten.cat.default: _joined,
    aten.detach.default: _alias,
    aten.expand.default: _expand,
    aten.permute.default: _permute,
    aten.select.int: _select,
    aten.select_backward.default: _select_backward,
    aten.slice.Tensor: _slice,
    aten.slice_backward.default: _slice_backward,
    aten.split.Tensor: _split,
    aten.split_with_sizes.default: _split_with_sizes,
    aten.squeeze.default: _squeeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.stack.default: _joined,
    aten.t.default: _transpose,
    aten.transpose.int: _transpose,
    aten.unbind.int: _unbind,
    aten.unsqueeze.default: _unsqueeze,
    aten.view.default: _view,
}

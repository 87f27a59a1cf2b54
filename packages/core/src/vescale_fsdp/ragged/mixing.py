"""Operators with a ragged tensor and another operand, and the layout of the gradients of both.

An element-wise operator runs on the local parts, so every operand must become one:

| operand | what becomes of it |
|---|---|
| number, or plain tensor with one element | itself |
| DTensor, replicated on every axis, that broadcasts to the ragged shape | its local elements |
| DTensor, partial, smaller than the ragged tensor (a sum, a norm) | reduced first |
| ragged, broadcasts along unsharded dimensions, to the same shards | repeated locally |
| ragged, of the same shape and mesh, with other shards | redistributed, by one uneven all-to-all |
| all else | ``ValueError`` |

The memory needed is that of local elements, never of the whole tensor. Whether a tensor is
redistributed follows from the placements alone, so all ranks do the same.

Between a backward and its reduction over replicas, a gradient is ``Partial`` on the replica axis
and ragged on the other. It is not redistributed. It takes only operators that commute with a sum:

| operators | condition |
|---|---|
| copies, views, ``zeros_like``, ``zero_`` | none; a cast stays among floating-point types |
| ``mul``, ``div``, ``neg``, and their ``foreach`` forms | the factor is not partial itself |
| ``add``, ``sub``, and their ``foreach`` forms | both tensors are partial in the same way |

Gradients must have the layout of the tensor that they belong to, but autograd's formulas know no
layouts. For example, the gradient of ``x.sum()`` is an expanded number: a replicated DTensor, which
a ragged leaf would store as its ``.grad``. So where a ragged tensor enters a reduction, and where
another tensor enters an operator with a ragged one, a hook brings the gradient into the layout:

| tensor | gradient that arrives | what the hook does |
|---|---|---|
| ragged | replicated | keeps this rank's elements; no communication |
| ragged | any other layout | redistributes |
| replicated DTensor | ragged, or a partial sum | all-gathers, or reduces |
| plain, one element | DTensor | takes the value of all ranks |

Autograd computes the gradient of a mean by a division in the size of the whole tensor. The gradient
of a sum is an expanded number and needs no memory.

The gradient of a slice has no information about the shards of the whole tensor. The hook looks at
the autograd node that it runs in: the next node is the one that made the whole, and has its spec.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from vescale_fsdp import compat
from vescale_fsdp.compat import DTensorSpec
from vescale_fsdp.ragged.holdings import ragged_axis_of
from vescale_fsdp.ragged.moves import InFlight, done, move
from vescale_fsdp.ragged.recuts import (
    held_here,
    rescaled,
    reshaped,
    respecified_as,
    same_layout,
    sizes_here,
)
from vescale_fsdp.ragged.tensor import RaggedTensor, redistribute, wrap_local

aten = torch.ops.aten

_COPIES = {
    aten._to_copy.default,
    aten.alias.default,
    aten.clone.default,
    aten.copy_.default,
    aten.detach.default,
    aten.empty_like.default,
    aten.zero_.default,
    aten.zeros_like.default,
    aten._foreach_copy_.default,
    aten._foreach_zero_.default,
}
_SCALES = {"mul", "mul_", "_foreach_mul", "_foreach_mul_"}
_DIVIDES = {"div", "div_", "_foreach_div", "_foreach_div_", "neg", "neg_", "_foreach_neg"}
_DIVIDES |= {"_foreach_neg_"}
_ADDS = {"add", "add_", "sub", "sub_"}
_ADDS |= {"_foreach_add", "_foreach_add_", "_foreach_sub", "_foreach_sub_"}


def is_partial(spec: DTensorSpec) -> bool:
    """Whether the values of a ragged tensor are still to be combined along another axis."""
    return len(spec.placements) > 1 and any(p.is_partial() for p in spec.placements)


def refuse_partial(func: Any, spec: DTensorSpec) -> None:
    """Raises ``NotImplementedError`` if the tensor `is_partial`."""
    if is_partial(spec):
        raise NotImplementedError(
            f"{func} does not run on {spec.placements}: values along the Partial axis are not "
            "combined yet; redistribute the Partial axis first, for example to Replicate"
        )


def check_linear(
    func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], specs: Iterable[DTensorSpec]
) -> None:
    """Check an element-wise operator on ragged tensors, some of which are partial.

    Raises:
        NotImplementedError: it does not commute with the sum.
    """
    for spec in specs:
        if is_partial(spec) and not _commutes(func, args, kwargs, spec):
            refuse_partial(func, spec)


def _commutes(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], spec: DTensorSpec) -> bool:
    # The others are ragged in the same layout, or not ragged; the caller has checked that.
    ragged = [_is_ragged(arg) for arg in args]
    if func in _COPIES:
        dtype = kwargs.get("dtype")
        casts = dtype is not None and not (dtype.is_floating_point or dtype.is_complex)
        return not casts and all(ragged[:2])
    partials: list[Any] = [p for p in spec.placements if p.is_partial()]
    if any(type(p) is not Partial or p.reduce_op not in ("sum", "avg") for p in partials):
        return False
    name = func._schema.name.removeprefix("aten::")
    if name in _ADDS:
        return len(ragged) > 1 and all(ragged)
    if "rounding_mode" in kwargs:
        return False
    return (name in _SCALES or (name in _DIVIDES and ragged[0])) and sum(ragged) == 1


def _is_ragged(arg: Any) -> bool:
    if isinstance(arg, list | tuple):
        return bool(arg) and all(isinstance(item, RaggedTensor) for item in arg)
    return isinstance(arg, RaggedTensor)


def local_part(whole: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """This rank's elements, flat, of a tensor that every rank has.

    Args:
        whole: broadcasts to the shape of ``spec``.
        spec: the layout; its dtype does not matter.

    No communication. A view where the elements lie in one run of ``whole``; else a copy of them.
    """
    held = held_here(spec)
    parts = [box.of(whole.expand(spec.shape)) for box in held.boxes]
    if len(parts) == 1:
        return parts[0].reshape(-1)
    local = whole.new_empty(held.local_shape)
    for box, part in zip(held.boxes, parts, strict=True):
        box.in_local(local).copy_(part)
    return local


def broadcasts_to(shape: Sequence[int], target: Sequence[int]) -> bool:
    """Whether a tensor of ``shape`` broadcasts to ``target`` without enlarging that."""
    missing = len(target) - len(shape)
    return missing >= 0 and all(
        n in (1, want) for n, want in zip(shape, target[missing:], strict=True)
    )


def expanded_spec(spec: DTensorSpec, shape: Sequence[int]) -> DTensorSpec | None:
    """The layout of a ragged tensor expanded to ``shape``; None if that needs other ranks.

    Each slice over the dimensions from the first that grows must be on one rank.
    """
    if not broadcasts_to(spec.shape, shape):
        return None
    padded = reshaped(spec, (*(1,) * (len(shape) - len(spec.shape)), *spec.shape))
    if padded is None:
        return None
    grows = [d for d in range(len(shape)) if padded.shape[d] != shape[d]]
    if not grows:
        return padded
    if any(type(p) is Shard and p.dim in grows for p in spec.placements):
        return None
    return rescaled(padded, grows[0], shape, padded.placements)


def local_expanded(local: torch.Tensor, spec: DTensorSpec, target: DTensorSpec) -> torch.Tensor:
    """The local part, laid out as ``spec``, after expansion to ``target``: a copy."""
    missing = len(target.shape) - len(spec.shape)
    old, new = (*(1,) * missing, *sizes_here(spec)), sizes_here(target)
    kept = next((d for d in range(len(new)) if old[d] != new[d]), len(new))
    slices = local.numel() // (math.prod(old[kept:]) or 1)
    return local.view(slices, *old[kept:]).expand(slices, *new[kept:]).reshape(-1)


def local_of_ragged(tensor: RaggedTensor, spec: DTensorSpec) -> torch.Tensor:
    """The local part of a ragged operand of an operator whose result has the layout ``spec``."""
    local = tensor._local_tensor
    if tensor.shape == spec.shape:
        return local
    return local_expanded(local, tensor._spec, spec)


def wider(one: DTensorSpec, other: DTensorSpec) -> DTensorSpec | None:
    """The layout of both after broadcasting; None if they are cut differently."""
    if same_layout(one, other):
        return one
    for small, large in ((one, other), (other, one)):
        if small.shape != large.shape and small.mesh == large.mesh:
            expanded = expanded_spec(small, large.shape)
            if expanded is not None and same_layout(expanded, large):
                return large
    return None


def may_move(source: DTensorSpec, target: DTensorSpec) -> bool:
    """Whether a tensor laid out as ``source`` may be moved to where ``target`` lies."""
    same_tensor = source.shape == target.shape and source.mesh == target.mesh
    return same_tensor and not is_partial(source) and not is_partial(target)


def start_move(func: Any, tensor: RaggedTensor, spec: DTensorSpec) -> InFlight:
    """Start to move a ragged operand to where ``spec`` lies; nothing moves if it lies there.

    Raises:
        ValueError: it is another tensor, or partial.
    """
    if same_layout(tensor._spec, spec):
        return done(tensor._local_tensor)
    if not may_move(tensor._spec, spec):
        raise cut_differently(func, spec, tensor._spec)
    return move(tensor._arrived(), tensor._spec, respecified_as(spec, dtype=tensor.dtype))


class CutDifferentlyError(ValueError):
    """Operands do not go together, each on its shards."""


def cut_differently(func: Any, one: DTensorSpec, other: DTensorSpec) -> CutDifferentlyError:
    """What to raise for operands that do not go together."""
    return CutDifferentlyError(
        f"{func} got tensors that are sharded differently: shape {tuple(one.shape)} with "
        f"{one.placements} and shape {tuple(other.shape)} with {other.placements}. "
        "Redistribute one to the placements of the other, or use `.full_tensor()`"
    )


def local_beside(func: Any, tensor: torch.Tensor, spec: DTensorSpec, in_list: bool) -> torch.Tensor:
    """What stands for a tensor that is not ragged, beside ragged ones laid out as ``spec``.

    Raises:
        ValueError: it cannot stand there; the message names the way out.
    """
    local = _whole(func, tensor, spec)
    if local.numel() == 1:
        return _one_element(func, local, len(spec.shape), in_list)
    if not broadcasts_to(local.shape, spec.shape):
        raise ValueError(
            f"{func} got a replicated DTensor of shape {tuple(local.shape)}, which would enlarge "
            f"a RaggedTensor of shape {tuple(spec.shape)}; use `.full_tensor()` on the ragged one"
        )
    return local_part(local, spec)


def _whole(func: Any, tensor: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """The plain tensor that every rank has."""
    found = "a plain tensor"
    if isinstance(tensor, DTensor):
        found = str(tensor.placements)
        whole = tensor
        small = tensor.numel() < math.prod(spec.shape) or tensor.numel() == 1
        if small and any(p.is_partial() for p in tensor.placements):
            with torch.no_grad():
                whole = tensor.redistribute(
                    placements=[Replicate() if p.is_partial() else p for p in tensor.placements]
                )
        if all(p.is_replicate() for p in whole.placements):
            if tensor.numel() == 1 or tensor.device_mesh == spec.mesh:
                return whole._local_tensor
            found = f"a DTensor on another mesh, {tensor.device_mesh},"
    elif tensor.numel() == 1:
        return tensor
    raise ValueError(
        f"{func} got a ragged tensor together with {found} of shape {tuple(tensor.shape)}. Only "
        "numbers, tensors with one element and replicated DTensors of the same mesh can be "
        "combined with ragged tensors: use `DTensor.from_local(x, mesh, [Replicate()])` if every "
        "rank has the same, `vescale_fsdp.ragged.redistribute(x, placements=ragged.placements)` "
        "on a DTensor, or "
        "`.full_tensor()` on the ragged one. Copies of parameters (averages, references) match if "
        "they are made after the model was sharded"
    )


def _one_element(func: Any, tensor: torch.Tensor, num_dims: int, in_list: bool) -> torch.Tensor:
    """A one-element tensor in the shape that promotes and broadcasts as the whole would.

    The local part is 1-D whatever the global shape is: beside it, (1, 1) would add a
    dimension, and a number beside a ragged scalar would be the weaker type.
    """
    if in_list and tensor.dim() == 0:  # these want a number or a list
        return tensor
    if tensor.dim() > num_dims:
        raise ValueError(
            f"{func} got a tensor of shape {tuple(tensor.shape)}, which would add a "
            f"dimension to a RaggedTensor of {num_dims}; use `.full_tensor()`"
        )
    return tensor.view(1) if tensor.dim() or not num_dims else tensor


_SPEC = "vescale_fsdp spec of output"
_NOWHERE = object()  # None is the node of a leaf


def keep_layout(tensor: torch.Tensor) -> None:
    """Have the gradient of ``tensor`` brought into its layout, if autograd is recording it."""
    if not (torch.is_grad_enabled() and tensor.requires_grad):
        return
    # An in-place operator gives the tensor another node, and that one has no hook yet.
    if getattr(tensor, "_layout_is_kept_at", _NOWHERE) is tensor.grad_fn:
        return
    tensor._layout_is_kept_at = tensor.grad_fn  # type: ignore[attr-defined]
    tensor.register_hook(_hook_for(tensor._spec if isinstance(tensor, DTensor) else None))


def _hook_for(spec: DTensorSpec | None) -> Callable[[torch.Tensor], torch.Tensor | None]:
    """The hook holds the spec only: with the tensor itself it would keep that alive."""

    def in_layout(grad: torch.Tensor) -> torch.Tensor | None:
        if not isinstance(grad, DTensor):
            return None
        if spec is None:
            return grad.full_tensor()
        if ragged_axis_of(spec.placements) is None:
            if all(p.is_replicate() for p in grad.placements):
                return None
            return grad.redistribute(placements=[Replicate()] * spec.mesh.ndim)
        if isinstance(grad, RaggedTensor) and same_layout(grad._spec, spec):
            return None
        if all(p.is_replicate() for p in grad.placements) and not grad.requires_grad:
            own = respecified_as(spec, dtype=grad.dtype)
            # Contiguous: that of a sum is one number, expanded, which fused kernels misread.
            return wrap_local(local_part(grad._local_tensor, own).contiguous(), own, False)
        return redistribute(grad, placements=spec.placements)

    in_layout.keeps_layout = True  # type: ignore[attr-defined]
    return in_layout


def remember_layout(tensor: RaggedTensor) -> None:
    """Let the gradient of a slice of ``tensor`` find the layout of the whole."""
    if torch.is_grad_enabled() and tensor.requires_grad and tensor.grad_fn is not None:
        node: Any = tensor.grad_fn
        node.metadata[_SPEC, tensor.output_nr] = tensor._spec


# The nodes that join the gradients of parts, by ``cat`` and ``stack``. For parts that were not used
# autograd has plain zeros.
PARTING = {"SplitBackward0", "SplitWithSizesBackward0", "UnbindBackward0"}


def running_node() -> str:
    """The name of the autograd node that runs now; empty outside of a backward."""
    node = compat.current_node()
    return "" if node is None else node.name()


def layout_of_whole() -> DTensorSpec | None:
    """The layout of the input of the autograd node that runs now, if it is known."""
    node = compat.current_node()
    if node is None or not node.next_functions:
        return None
    source, number = node.next_functions[0]
    if source is None:
        return None
    leaf = getattr(source, "variable", None)
    if isinstance(leaf, RaggedTensor):
        return leaf._spec
    known: DTensorSpec | None = source.metadata.get((_SPEC, number))
    return known

"""The layout of gradients of ragged tensors, and of what stands beside them.

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

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from vescale_fsdp import compat
from vescale_fsdp.compat import DTensorSpec
from vescale_fsdp.ragged.holdings import ragged_axis_of
from vescale_fsdp.ragged.recuts import respecified_as, same_layout
from vescale_fsdp.ragged.tensor import RaggedTensor, local_part, redistribute, wrap_local

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

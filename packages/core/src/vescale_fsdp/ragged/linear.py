"""What may be done with a ragged tensor whose values are still to be summed along another axis.

A gradient between a backward pass and its reduction over replicas is such a tensor: ``Partial``
on the replica axis, ragged on the other. Only what commutes with the sum gives the right numbers:

| operators | condition |
|---|---|
| copies, views, ``zeros_like``, ``zero_`` | none; a cast stays among floating-point types |
| ``mul``, ``div``, ``neg``, and their ``foreach`` forms | by what is not partial itself |
| ``add``, ``sub``, and their ``foreach`` forms | of tensors that are partial in the same way |
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch.distributed.tensor import Partial

from vescale_fsdp.compat import DTensorSpec
from vescale_fsdp.ragged.tensor import RaggedTensor

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
    if any(type(p) is not Partial or p.reduce_op not in ("sum", "avg") for p in _partials(spec)):
        return False
    name = func._schema.name.removeprefix("aten::")
    if name in _ADDS:
        return len(ragged) > 1 and all(ragged)
    if "rounding_mode" in kwargs:
        return False
    return (name in _SCALES or (name in _DIVIDES and ragged[0])) and sum(ragged) == 1


def _partials(spec: DTensorSpec) -> list[Any]:
    return [p for p in spec.placements if p.is_partial()]


def _is_ragged(arg: Any) -> bool:
    if isinstance(arg, list | tuple):
        return bool(arg) and all(isinstance(item, RaggedTensor) for item in arg)
    return isinstance(arg, RaggedTensor)

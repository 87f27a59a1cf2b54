"""Which operators run on ragged shards, and how.

| kind | operators | result |
|---|---|---|
| element-wise | tag ``pointwise``, ``_foreach_*``, ``_fused_*``, copies, ``*_like`` | ragged |
| norm | ``linalg_vector_norm``, ``_foreach_norm`` | DTensor, partial along the ragged axis |
| all else | | error that names ``full_tensor()`` |

Element-wise means: element i of each result depends on element i of each argument only. So the
operator runs on the local parts, without communication. Arguments may be ragged tensors with
the same shape and placements, numbers, one-element plain tensors, and replicated one-element
DTensors (the clip coefficient of ``clip_grad_norm_``). Lists are matched position by position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from vescale_fsdp.compat import DTensorSpec, TensorMeta
from vescale_fsdp.ragged.norms import vector_norm
from vescale_fsdp.ragged.tensor import RaggedTensor, wrap_local

__all__ = ["dispatch"]

aten = torch.ops.aten

# Element-wise operators that torch does not tag as pointwise.
_ELEMENTWISE = {
    aten.alias.default,
    aten.clone.default,
    aten.copy_.default,
    aten.detach.default,
    aten.empty_like.default,
    aten.fill_.Scalar,
    aten.fill_.Tensor,
    aten.full_like.default,
    aten.lerp.Scalar,
    aten.lerp.Tensor,
    aten.lerp_.Scalar,
    aten.lerp_.Tensor,
    aten.ones_like.default,
    aten.zero_.default,
    aten.zeros_like.default,
    aten._to_copy.default,
}
_FOREACH_REDUCTIONS = ("aten::_foreach_norm", "aten::_foreach_max", "aten::_foreach_powsum")
# Arguments that describe the global tensor and mean nothing for a flat local part.
_GLOBAL_ONLY = ("memory_format",)


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run ``func`` on the local parts of its ragged arguments and wrap what comes out.

    Raises:
        NotImplementedError: the operator cannot run on shards, or not yet.
        ValueError: the arguments are not cut in the same way.
    """
    if func is aten.linalg_vector_norm.default:
        return _norm(args, kwargs)
    if func is aten._foreach_norm.Scalar:
        return _foreach_norm(args, kwargs)
    if not _is_elementwise(func):
        raise NotImplementedError(
            f"{func} does not run on a RaggedTensor yet. Use `tensor.full_tensor()` for the whole "
            "tensor on every rank, `tensor.redistribute(placements=...)` for another layout, or "
            "`tensor.to_local()` for the flat part of this rank. Inside a forward, call the "
            "module that owns the parameter, so that its parameters are gathered."
        )
    kwargs = {key: value for key, value in kwargs.items() if key not in _GLOBAL_ONLY}
    specs = _Specs(func, _num_dims((args, kwargs)))
    local_args = [specs.unwrap(arg) for arg in args]
    local_kwargs = {key: specs.unwrap(value) for key, value in kwargs.items()}
    result = func(*local_args, **local_kwargs)
    if func._schema.is_mutable:
        return _mutated(func, args, kwargs)
    return specs.wrap(result)


def _num_dims(arguments: Any) -> int:
    """How many dimensions the first ragged tensor among the arguments has."""
    leaves = torch.utils._pytree.tree_leaves(arguments)
    return next(leaf.dim() for leaf in leaves if isinstance(leaf, RaggedTensor))


def _is_elementwise(func: Any) -> bool:
    if func in _ELEMENTWISE or torch.Tag.pointwise in func.tags:
        return True
    name = func._schema.name
    if name.startswith("aten::_foreach_"):
        return name not in _FOREACH_REDUCTIONS
    return bool(name.startswith(("aten::_fused_adam", "aten::_fused_sgd")))


def _mutated(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What an in-place or out= operator returns: the very arguments that it wrote to."""
    schema = func._schema
    written = [
        args[i] if i < len(args) else kwargs[argument.name]
        for i, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    if not schema.returns:
        return None
    return written[0] if len(schema.returns) == 1 else tuple(written)


class _Specs:
    """The layout of each position of the arguments, gathered while they are unwrapped."""

    def __init__(self, func: Any, num_dims: int) -> None:
        self.func = func
        self.num_dims = num_dims  # of the ragged arguments
        self.is_foreach = func._schema.name.startswith(("aten::_foreach_", "aten::_fused_"))
        self.scalar: DTensorSpec | None = None  # of arguments that are not in a list
        self.lists: list[DTensorSpec | None] = []  # of position i of list arguments

    def unwrap(self, arg: Any) -> Any:
        if isinstance(arg, torch.Tensor):
            local, spec = self._local(arg)
            self.scalar = self._same(self.scalar, spec)
            return local if spec else self._one_element(local, self.num_dims)
        if isinstance(arg, list | tuple) and any(isinstance(x, torch.Tensor) for x in arg):
            return [self._unwrap_at(i, item) for i, item in enumerate(arg)]
        return arg

    def _unwrap_at(self, position: int, item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        while len(self.lists) <= position:
            self.lists.append(None)
        local, spec = self._local(item)
        self.lists[position] = self._same(self.lists[position], spec)
        known = self.lists[position]
        return local if spec or not known else self._one_element(local, len(known.shape))

    def _local(self, tensor: torch.Tensor) -> tuple[torch.Tensor, DTensorSpec | None]:
        if isinstance(tensor, RaggedTensor):
            return tensor._local_tensor, tensor._spec
        if tensor.numel() == 1:
            if not isinstance(tensor, DTensor):
                return tensor, None
            if all(p.is_replicate() for p in tensor.placements):
                return tensor._local_tensor, None
        found = getattr(tensor, "placements", "a plain tensor")
        raise ValueError(
            f"{self.func} got a ragged tensor together with {found} of shape "
            f"{tuple(tensor.shape)}. Only one-element tensors mix: use `.full_tensor()` on the "
            "ragged one, or RaggedTensor.distribute(...) on the other"
        )

    def _one_element(self, tensor: torch.Tensor, num_dims: int) -> torch.Tensor:
        """A one-element tensor in the shape that promotes and broadcasts as the whole would.

        The local part is 1-D whatever the global shape is: beside it, (1, 1) would add a
        dimension, and a number beside a ragged scalar would be the weaker type.
        """
        if self.is_foreach and tensor.dim() == 0:  # these want a number or a list
            return tensor
        if tensor.dim() > num_dims:
            raise ValueError(
                f"{self.func} got a tensor of shape {tuple(tensor.shape)}, which would add a "
                f"dimension to a RaggedTensor of {num_dims}; use `.full_tensor()`"
            )
        return tensor.view(1) if tensor.dim() or not num_dims else tensor

    def _same(self, known: DTensorSpec | None, new: DTensorSpec | None) -> DTensorSpec | None:
        if known is None or new is None:
            return known or new
        same_cut = known.placements is new.placements or known.placements == new.placements
        if known is new or (same_cut and known.shape == new.shape and known.mesh == new.mesh):
            return known
        raise ValueError(
            f"{self.func} got tensors that are cut differently: shape {tuple(known.shape)} with "
            f"{known.placements} and shape {tuple(new.shape)} with {new.placements}. Broadcasting "
            "between ragged tensors is not there yet: use `.full_tensor()`, or distribute both "
            "with the same placements"
        )

    def wrap(self, result: Any) -> Any:
        if isinstance(result, torch.Tensor):
            assert self.scalar is not None, "a ragged argument brought us here"
            return _rewrap(result, self.scalar)
        if isinstance(result, list | tuple) and result and isinstance(result[0], torch.Tensor):
            specs: Sequence[DTensorSpec | None] = self.lists or [self.scalar] * len(result)
            return type(result)(_rewrap(r, s) for r, s in zip(result, specs, strict=True))
        return result


def _rewrap(local: torch.Tensor, spec: DTensorSpec | None) -> torch.Tensor:
    if spec is None:  # a one-element plain tensor in a list of ragged ones
        return local
    meta = spec.tensor_meta
    assert meta is not None, "specs of ragged tensors are made with their meta"
    if meta.dtype != local.dtype:
        changed = TensorMeta(meta.shape, meta.stride, local.dtype)
        spec = DTensorSpec(spec.mesh, spec.placements, changed)
    return wrap_local(local, spec, False)


def _norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Tensor:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dim = args[2] if len(args) > 2 else kwargs.get("dim")
    keepdim = args[3] if len(args) > 3 else kwargs.get("keepdim", False)
    if dim or keepdim:
        raise NotImplementedError(
            f"a norm over some dimensions (dim={dim}, keepdim={keepdim}) of a RaggedTensor is not "
            "there yet; use `.full_tensor()`, or the norm over all elements"
        )
    return vector_norm(args[0], float(order), kwargs.get("dtype"))


def _foreach_norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    return [vector_norm(tensor, float(order), dtype) for tensor in args[0]]

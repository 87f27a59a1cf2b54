"""ReducedTensor: what a reduction of a sharded tensor gives, to write to and to read out.

A DTensor with ``Partial`` is reduced at its first use, so the norms of many tensors can share one
all-reduce. Torch raises an error if this use writes, or reads into a plain tensor. Optimizers of
other libraries (LAMB, AdamP, NovoGrad, Prodigy, StableAdamW) do both::

    norm = grad.norm()      each rank has that of its part
    norm.clamp_(max=1.0)    torch: "in-place operations that require placement changes"
    total.add_(norm)        torch: an AssertionError, if ``total`` is a plain tensor

Here the first reduces ``norm`` and then writes, and the second adds the value of all ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Replicate

from vescale_fsdp.backends import collective_device
from vescale_fsdp.compat import TENSOR_DATA, DTensorSpec, TensorMeta, TraceableDTensor, pytree
from vescale_fsdp.ragged.mixing import PARTING, running_node
from vescale_fsdp.ragged.whole import Wrap, access_of, run_locally, writes_to_plain
from vescale_fsdp.ranks import collectives

_JOINS = (torch.ops.aten.cat.default, torch.ops.aten.stack.default)
# In inference mode a tensor subclass gets ``item`` itself, not the operator inside of it.
NUMBERS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.item.default)


class ReducedTensor(TraceableDTensor):
    """A DTensor with ``Partial`` or ``Replicate`` on each axis of the mesh.

    It is pickled as a plain DTensor. Results of operators are reduced tensors too, unless they are
    sharded.

    Cost: one all-reduce of the tensor for each partial axis, at a write to it, a view of it, in a
    ``foreach`` operator, or when it is read into a plain tensor; else what a DTensor costs.
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types only its stub
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(each, DTensor) and each not in (cls, DTensor) for each in types):
            return NotImplemented  # a ragged or replicated one knows what to do with this one
        if func in NUMBERS:
            return number(args[0])
        kwargs, access = kwargs or {}, access_of(func)
        if func in _JOINS and running_node() in PARTING:
            args = (_with_zeros(args[0]), *args[1:])
        if writes_to_plain(access, args, kwargs):
            return read_out(func, args, kwargs)
        # What is written later has to be seen through a view.
        reduces_all = access.has_out or access.has_lists
        to_reduce = args if reduces_all else args[:1] if access.is_view else ()
        for each in pytree.tree_leaves((to_reduce, access.written(args, kwargs))):
            _reduce_in_place(each)
        if torch.Tag.inplace_view in func.tags and isinstance(args[0], cls):
            return reshape_in_place(func, reduced, *args)
        result = run_locally(func, args, kwargs, reduced)
        if result is not NotImplemented:
            return result
        result = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        return result if access.writes else as_reduced(result)

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = DTensor(self._local_tensor, self._spec, requires_grad=self.requires_grad)
        return plain.__reduce_ex__(protocol)


def reduced(local: torch.Tensor, spec: DTensorSpec) -> ReducedTensor:
    """A ReducedTensor around ``local``, unchecked: no placement may be a shard."""
    made = ReducedTensor.__new__(ReducedTensor, local, spec, requires_grad=False)
    return cast(ReducedTensor, made)


def as_reduced(result: Any) -> Any:
    """Make reduced tensors of the plain DTensors among the results that are not sharded."""
    if isinstance(result, list | tuple):
        return type(result)(map(as_reduced, result))
    if type(result) is not DTensor or not is_unsharded(result):
        return result
    return reduced(result._local_tensor, result._spec)


def is_unsharded(tensor: DTensor) -> bool:
    """Whether each placement is ``Partial`` or ``Replicate``."""
    return all(p.is_replicate() or p.is_partial() for p in tensor.placements)


def read_out(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator that writes to plain tensors, with the values of all ranks of the others.

    Cost: one all-reduce for each that is partial. Sharded DTensors are left to torch, which raises.
    """
    args, kwargs = pytree.tree_map(_value, (args, kwargs))
    return func(*args, **kwargs)


def _with_zeros(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of parts, with reduced tensors in place of plain zeros."""
    spec = next(part._spec for part in parts if isinstance(part, DTensor))
    whole = (Replicate(),) * spec.mesh.ndim
    found: list[torch.Tensor] = []
    for part in parts:
        meta = TensorMeta(part.shape, part.stride(), part.dtype)
        is_plain = not isinstance(part, DTensor)
        found.append(reduced(part, DTensorSpec(spec.mesh, whole, meta)) if is_plain else part)
    return found


def _reduce_in_place(tensor: Any) -> None:
    if isinstance(tensor, ReducedTensor) and any(p.is_partial() for p in tensor.placements):
        whole = _replicated(tensor)
        tensor._local_tensor, tensor._spec = whole._local_tensor, whole._spec


def reshape_in_place(func: Any, wrap: Wrap, tensor: DTensor, *args: Any) -> DTensor:
    """Run ``squeeze_``, ``t_`` and the like. Torch changes the shape of the local tensor only."""
    local, spec = tensor._local_tensor, tensor._spec
    func(local, *args)
    meta = TensorMeta(local.shape, local.stride(), local.dtype)
    tensor._spec = DTensorSpec(spec.mesh, spec.placements, meta)
    TENSOR_DATA.__set__(tensor, wrap(local, tensor._spec))
    return tensor


def _value(arg: Any) -> Any:
    is_number = isinstance(arg, DTensor) and is_unsharded(arg)
    return _replicated(arg)._local_tensor if is_number else arg


def _replicated(tensor: DTensor) -> DTensor:
    with torch.no_grad():
        return tensor.redistribute(placements=[Replicate()] * len(tensor.placements))


def number(tensor: DTensor) -> Any:
    """The global number of a tensor of one element: ``item()``, ``float()``, ``bool()``, ``int()``.

    Cost: none where it is replicated; else what `full_tensor` costs, so all ranks must call.
    """
    local = tensor._local_tensor
    if not all(p.is_replicate() for p in tensor.placements):
        group = collectives.mesh_group(tensor.device_mesh, 0)
        device = collective_device(group, local.device)
        if device != local.device:
            tensor = DTensor(local.to(device), tensor._spec, requires_grad=False)
        with torch.no_grad():
            local = tensor.full_tensor()
    return local.item()

"""Operators on tensors of which each rank has the whole, run on the local tensors.

For each operator torch's dispatch of DTensors derives the placements of the result. For an update
of 1,500 small parameters that takes four times as long as the update, and for some operators
(several of the ``foreach`` ones) torch has no rule. Of whole tensors nothing has to be derived: the
result of the local ones is that of the whole ones, on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from vescale_fsdp import compat
from vescale_fsdp.compat import TENSOR_DATA, DTensorSpec, TensorMeta, pytree
from vescale_fsdp.ragged.access import access_of, writes_to_plain
from vescale_fsdp.ragged.collectives import hint_beside_plain, is_collective, run_collective
from vescale_fsdp.ragged.gradients import PARTING, running_node
from vescale_fsdp.ragged.operands import NotWholeError, Operands
from vescale_fsdp.ragged.random import numbers_of_first_rank
from vescale_fsdp.ragged.replicated import (
    ReplicatedTensor,
    as_replicated,
    number,
    reduce_in_place,
    reduced,
    wrap_replicated,
)

aten = torch.ops.aten
_AS_THEY_ARE = nullcontext()
_JOINS = (aten.cat.default, aten.stack.default)
# In inference mode a tensor subclass gets ``item`` itself, not the operator inside of it.
_NUMBERS = (aten._local_scalar_dense.default, aten.item.default)
# One tensor of the same shape, from one tensor.
_LIKE = {
    aten.clone.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.ones_like.default,
    aten.zeros_like.default,
}


def run_on_whole(func: Any, types: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on replicated tensors, of which none beside is ragged.

    Cost: none, if all operands are whole; as `ReplicatedTensor` says, if some are partial; else
    what torch's dispatch of DTensors costs.
    """
    if any(issubclass(each, DTensor) and each not in _OURS for each in types):
        return NotImplemented  # of another library, which knows what to do with this one
    if args and type(args[0]) is ReplicatedTensor and not _is_partial(args[0]):
        local, spec = args[0]._local_tensor, args[0]._spec
        if func is aten.detach.default:
            return wrap_replicated(local, spec)
        if func in _LIKE:
            made = func(local, *args[1:], **kwargs)
            same = made.dtype == local.dtype and made.stride() == spec.stride
            return wrap_replicated(made, spec if same else _spec_of(made, spec))
    if is_collective(func):
        return run_collective(func, args, kwargs)
    if func in _NUMBERS:
        return number(args[0])
    if func is aten.is_same_size.default:
        return has_size_of(*args)
    access = access_of(func)
    if writes_to_plain(access, args, kwargs):
        # With the values of all ranks. Sharded DTensors are left to torch, which raises.
        args, kwargs = pytree.tree_map(_value, (args, kwargs))
        return func(*args, **kwargs)
    if func in _JOINS and running_node() in PARTING:
        args = (_with_zeros(args[0]), *args[1:])
    is_reshaped = torch.Tag.inplace_view in func.tags
    if is_reshaped and not isinstance(args[0], torch.nn.Parameter):
        _reduce_in_place(args[:1])
        return _reshape_in_place(func, *args)
    result = _run_locally(func, args, kwargs)
    if result is NotImplemented:
        # What is written later has to be seen through a view.
        reduces_all = access.has_out or access.has_lists
        to_reduce = (args, kwargs) if reduces_all else args[:1] if access.is_view else ()
        if _reduce_in_place((to_reduce, access.written(args, kwargs))):
            result = _run_locally(func, args, kwargs)
    if result is not NotImplemented:
        return result
    hint = hint_beside_plain(func)
    if hint and not all(isinstance(x, DTensor) for x in pytree.tree_leaves(args[0])):
        raise NotImplementedError(
            f"{func} got a parameter that fully_shard keeps whole on every rank, or a reduction of "
            f"a sharded one, and a plain tensor. {hint}To join both in a forward, call the module "
            "that owns the parameter"
        )
    result = DTensor.__torch_dispatch__(func, types, args, kwargs)
    if not access.writes:
        return as_replicated(result)
    # Torch counts a write to ``p.data`` on that alone; a forward asks the local tensor.
    for each in pytree.tree_leaves(access.written(args, kwargs)):
        torch.autograd.graph.increment_version(compat.local_tensor(each))
    return access.returned(args, kwargs)


_OURS = (DTensor, ReplicatedTensor)


def _run_locally(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on the local tensors, if all operands are whole or single numbers.

    Random numbers are those of the mesh's first rank (file `random`), so all ranks draw the same.
    Without gradients plain tensors count as whole, as with DistributedDataParallel: states of
    optimizers and averaged weights are. With gradients they are most often activations, of a
    forward that uses a parameter outside of its unit.

    Returns:
        Its result, or ``NotImplemented``. No communication, but for random numbers.
    """
    access = access_of(func)
    if not (access.is_local or access.is_random):
        return NotImplemented
    operands = Operands(func, access, args, kwargs, is_ragged=False)
    try:
        local_args = [operands.local(arg) for arg in args]
        local_kwargs = {key: operands.local(value) for key, value in kwargs.items()}
    except NotWholeError:
        return NotImplemented
    if operands.single is None:
        return NotImplemented
    numbers: AbstractContextManager[None] = _AS_THEY_ARE  # each operator of an optimizer comes here
    if access.is_random:
        numbers = numbers_of_first_rank(func, operands.single.mesh, local_args, local_kwargs)
    if access.writes:
        with numbers:
            write_locally(func, local_args, local_kwargs)
        for each in access.written(local_args, local_kwargs)[: access.num_counted]:
            torch.autograd.graph.increment_version(each)
        return access.returned(args, kwargs)
    if access.is_view:
        # Below autograd a view would count the writes to it apart.
        with torch.no_grad(), torch.overrides.enable_reentrant_dispatch():
            return operands.wrap(func(*local_args, **local_kwargs))
    with numbers:
        return operands.wrap(func(*local_args, **local_kwargs))


def write_locally(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Run an operator that writes. ``torch.mul(x, y, out=z)`` may not change the shape of ``z``.

    Torch would change it, of one side only.
    """
    if not access_of(func).has_out:
        func(*args, **kwargs)
        return
    names = [name for _, name in access_of(func).positions]
    made = {name: kwargs[name].new_empty(0) for name in names}
    func(*args, **{**kwargs, **made})
    for name, value in made.items():
        if value.shape != kwargs[name].shape:
            raise ValueError(
                f"{func} would change the shape of a DTensor from {tuple(kwargs[name].shape)} to "
                f"{tuple(value.shape)}: `{name}` has to have the shape of the result"
            )
        kwargs[name].copy_(value)


def has_size_of(x: torch.Tensor, other: torch.Tensor) -> bool:
    """``x.is_same_size(other)``, with which forward-mode differentiation begins: it is refused.

    Raises:
        NotImplementedError: ``other`` is to become the tangent of ``x``, or is one.
    """
    if compat.is_transforming():
        raise NotImplementedError(
            "forward-mode differentiation (torch.func.jvp, torch.autograd.forward_ad) by a "
            f"parameter of fully_shard, of shape {tuple(x.shape)}, is not supported: nothing was "
            "sent. Make dual tensors of the inputs, or call functional_call on a plain module: "
            "copy.deepcopy(model) inside of `with vescale_fsdp.unsharded(model):`"
        )
    return x.shape == other.shape


def _spec_of(local: torch.Tensor, beside: DTensorSpec) -> DTensorSpec:
    """That of a tensor which each rank has whole, on the mesh of another."""
    meta = TensorMeta(local.shape, local.stride(), local.dtype)
    return DTensorSpec(beside.mesh, (Replicate(),) * beside.mesh.ndim, meta)


def _is_partial(tensor: Any) -> bool:
    is_ours = isinstance(tensor, ReplicatedTensor)
    return is_ours and any(p.is_partial() for p in tensor.placements)


def _reduce_in_place(operands: Any) -> bool:
    """Reduce the partial ones among operands; whether there were any."""
    partial = [each for each in pytree.tree_leaves(operands) if _is_partial(each)]
    for tensor in partial:
        reduce_in_place(tensor)
    return bool(partial)


def _value(arg: Any) -> Any:
    found = reduced(arg)
    is_whole = isinstance(found, DTensor) and all(p.is_replicate() for p in found.placements)
    return found._local_tensor if is_whole else arg


def _reshape_in_place(func: Any, tensor: DTensor, *args: Any) -> DTensor:
    """Run ``squeeze_``, ``t_`` and the like. Torch changes the shape of the local tensor only."""
    local, spec = tensor._local_tensor, tensor._spec
    func(local, *args)
    meta = TensorMeta(local.shape, local.stride(), local.dtype)
    tensor._spec = DTensorSpec(spec.mesh, spec.placements, meta)
    TENSOR_DATA.__set__(tensor, wrap_replicated(local, tensor._spec))
    return tensor


def _with_zeros(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The gradients of parts, with replicated tensors in place of plain zeros."""
    spec = next(part._spec for part in parts if isinstance(part, DTensor))
    return [
        part if isinstance(part, DTensor) else wrap_replicated(part, _spec_of(part, spec))
        for part in parts
    ]

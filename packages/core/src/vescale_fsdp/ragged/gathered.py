"""Operators that mix elements of all ranks: the whole is gathered first.

As with DTensors, what cannot run on shards runs on the whole: matrix products (``lora_b @ lora_a``
of DoRA, ``p @ p.T`` of an orthogonality penalty), ``cat`` (LBFGS), ``softmax``, ``sort``,
``quantile``, decompositions. Cost of each call: an all-gather of each ragged operand, so all ranks
must call. The result is replicated. With plain tensors beside, it would differ from rank to rank,
and the operator is refused.

A view that is not a range of the storage (``x.T``, ``x[:, 1]``) is gathered by the operator that
reads it, or writes to it; of what was written each rank stores its part.

Each of these gathers is a range in profiles, ``vescale::gather(blocks.3.weight)``.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any, NoReturn, cast

import torch
from torch.distributed.tensor import DTensor, Replicate

from vescale_fsdp import compat
from vescale_fsdp.compat import TENSOR_DATA, DTensorSpec, TensorMeta, pytree
from vescale_fsdp.ragged.access import access_of
from vescale_fsdp.ragged.base import NAME, FSDPTensor, note_operands
from vescale_fsdp.ragged.collectives import hint_beside_plain, is_collective, refuse_collective
from vescale_fsdp.ragged.gradients import keep_layout
from vescale_fsdp.ragged.moves import scatter
from vescale_fsdp.ragged.operands import refuse_partial
from vescale_fsdp.ragged.random import RANDOM, numbers_of_first_rank
from vescale_fsdp.ragged.replicated import ReplicatedTensor, wrap_replicated
from vescale_fsdp.ragged.tensor import WAYS_OUT, RaggedTensor, wrap_local
from vescale_fsdp.ragged.whole import write_locally

_Read = Callable[[torch.Tensor], torch.Tensor]
# Views of strides that the caller has read.
_OF_STRIDES = (torch.ops.aten.as_strided.default, torch.ops.aten._reshape_alias.default)


class GatheredView(FSDPTensor):
    """A view of a ragged tensor: a replicated DTensor, gathered when it is used.

    Cost: one all-gather of the ragged tensor at each operator that reads it or writes to it.
    """

    _source: RaggedTensor
    _read: _Read  # what it shows of the whole
    _shares: bool  # whether ``_read`` returns a view of what it is given, and no copy

    def __deepcopy__(self, memo: dict[int, Any]) -> ReplicatedTensor:
        memo[id(self)] = copied = _gathered(self)
        return cast(ReplicatedTensor, copied)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _gathered(self).__reduce_ex__(protocol)

    def __tensor_flatten__(self) -> NoReturn:
        compat.leave_to_python("a view of a sharded tensor that is gathered when it is used")

    @property
    def _local_tensor(self) -> torch.Tensor:  # all-gathers when values are read
        return self._read(_whole_of(self._source)._local_tensor).contiguous()

    @_local_tensor.setter
    def _local_tensor(self, placeholder: torch.Tensor) -> None:
        """Values are those of the source."""


def gathered_view(func: Any, x: RaggedTensor, read: _Read) -> GatheredView:
    """What ``read`` shows of the whole, for an operator ``func``. Nothing is communicated yet."""
    compat.refuse_tracing(f"{func}, a view of a sharded tensor that is gathered when it is used,")
    refuse_partial(func, x._spec)
    keep_layout(x)
    source = cast(RaggedTensor, x.detach())
    setattr(source, NAME, getattr(x, NAME, None))
    return _view(source, read)


def _view(source: RaggedTensor, read: _Read) -> GatheredView:
    shape = torch.empty(source.shape, dtype=source.dtype, device="meta")
    found = read(shape)
    seen = found.contiguous()
    placeholder = source._local_tensor.new_zeros((), dtype=seen.dtype).expand(seen.shape)
    spec = DTensorSpec(
        source.device_mesh,
        (Replicate(),) * source.device_mesh.ndim,
        TensorMeta(seen.shape, seen.stride(), seen.dtype),
    )
    result = GatheredView(placeholder, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    result._source, result._read = source, read
    result._shares = found.untyped_storage()._cdata == shape.untyped_storage()._cdata
    return result


def run_on_views(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on gathered views: as a view of one, a write to its source, or a read."""
    access = access_of(func)
    if is_collective(func):
        views = (x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, GatheredView))
        refuse_collective(func, next(views)._source)
    if torch.Tag.inplace_view in func.tags:
        return turn_in_place(func, *args, **kwargs)
    written = pytree.tree_leaves(access.written(args, kwargs))
    if any(isinstance(each, GatheredView) for each in written):
        return run_in_place(func, *args, **kwargs)
    if access.is_view and isinstance(args[0], GatheredView):
        return _views_of(func, *args, **kwargs)
    leaves = pytree.tree_leaves((args, kwargs))
    is_ragged = any(isinstance(each, RaggedTensor) for each in leaves)
    if not (is_ragged and access.takes_numbers):  # then `operands` knows what may stand beside
        check_beside(func, leaves)
    for each in leaves:
        if isinstance(each, GatheredView):
            keep_layout(each)  # its gradient may be ragged, as the operand beside it
    return func(*pytree.tree_map(_gathered, args), **pytree.tree_map(_gathered, kwargs))


def _views_of(func: Any, view: GatheredView, *args: Any, **kwargs: Any) -> Any:
    """Run an operator that returns a view of a view, or several."""
    source, read = view._source, view._read

    def found(whole: torch.Tensor) -> Any:
        seen = read(whole)
        if func not in _OF_STRIDES:
            with suppress(RuntimeError):  # no view of this memory
                return func(seen, *args, **kwargs)
        return func(seen.contiguous(), *args, **kwargs)  # as was announced: of a copy

    shown = found(torch.empty(source.shape, device="meta"))
    if isinstance(shown, torch.Tensor):
        return _view(source, found)
    return [_view(source, lambda whole, i=i: found(whole)[i]) for i in range(len(shown))]  # type: ignore[misc]


def run_in_place(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operator that writes on the whole of what it writes to. Each rank stores its part.

    Plain tensors beside may differ between ranks. Where they are only copied, or say where to, all
    ranks store the values of the first one, as of ``distribute_tensor``.

    Cost: one all-gather of each ragged tensor among the arguments. With plain tensors also the
    all-to-all of `scatter`, for each that is written to.

    Raises:
        NotImplementedError: ranks could write different values, or the write would be lost.
    """
    access, operands = access_of(func), pytree.tree_leaves((args, kwargs))
    written = [
        each
        for each in pytree.tree_leaves(access.written(args, kwargs))
        if isinstance(each, GatheredView | RaggedTensor)
    ]
    if not (access.is_local or func in RANDOM) or not written:
        raise NotImplementedError(f"{func} does not run on a RaggedTensor yet. {WAYS_OUT}")
    if any(isinstance(each, GatheredView) and not each._shares for each in written):
        raise NotImplementedError(
            f"{func} would write to a copy of a sharded tensor, and the write would be lost. Write "
            "to the tensor itself"
        )
    if torch.is_grad_enabled() and any(
        each.requires_grad for each in operands if isinstance(each, torch.Tensor)
    ):
        raise NotImplementedError(
            f"{func} would write to the whole of a sharded tensor, which autograd cannot follow. "
            "Write under torch.no_grad(), or use an operator that returns a new tensor"
        )
    accumulates = func is torch.ops.aten.index_put_.default and args[3:4] == (True,)
    only_copies = func in _COPIES and not accumulates
    is_from_first = only_copies and any(map(may_differ, operands))
    if not is_from_first:
        check_beside(func, operands)
    wholes = {id(each): whole(func, getattr(each, "_source", each)) for each in written}

    def local(value: Any) -> Any:
        if id(value) not in wholes:
            return whole(func, _gathered(value))
        found = wholes[id(value)]._local_tensor
        return value._read(found) if isinstance(value, GatheredView) else found

    local_args, local_kwargs = pytree.tree_map(local, (args, kwargs))
    with numbers_of_first_rank(func, written[0].device_mesh, local_args, local_kwargs):
        write_locally(func, local_args, local_kwargs)
    for each in written:
        _store(each, wholes[id(each)], is_from_first)
    if access.has_lists:  # else autograd has done so
        torch.autograd.graph.increment_version(written)
    return access.returned(args, kwargs)


# What computes nothing with the tensors beside the one that it writes to.
_COPIES = {
    torch.ops.aten.copy_.default,
    torch.ops.aten.index_copy_.default,
    torch.ops.aten.index_fill_.int_Scalar,
    torch.ops.aten.index_fill_.int_Tensor,
    torch.ops.aten.index_put_.default,
    torch.ops.aten.masked_fill_.Scalar,
    torch.ops.aten.masked_fill_.Tensor,
}


def _store(tensor: GatheredView | RaggedTensor, written: DTensor, is_from_first: bool) -> None:
    """Copy what a view shows, or all of a tensor, to this rank's part.

    ``written`` is the whole, of which the first rank's values count, if ranks may differ.
    """
    source = cast(RaggedTensor, getattr(tensor, "_source", tensor).detach())
    values = written
    if is_from_first:
        moved = scatter(written._local_tensor, source._spec, source_rank=0)
        values = wrap_local(moved.wait(), source._spec, False)
    if isinstance(tensor, GatheredView) and tensor.numel() < source.numel():
        seen = torch.zeros_like(written._local_tensor, dtype=torch.bool)
        tensor._read(seen).fill_(True)
        meta = TensorMeta(seen.shape, seen.stride(), seen.dtype)
        is_seen = wrap_replicated(seen, DTensorSpec(written.device_mesh, written.placements, meta))
        # Another view of it may have been written, too.
        values = cast(DTensor, torch.where(is_seen, values, source))
    source.copy_(values)


def turn_in_place(func: Any, x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Run ``x.t_()``, ``x.squeeze_()`` and the like: ``x`` becomes the view that ``x.t()`` gives.

    Raises:
        NotImplementedError: ``x`` is a parameter, whose shape its module and optimizer know; or it
            would be no view (``resize_``).
    """
    packet = getattr(torch.ops.aten, func._schema.name.removeprefix("aten::").removesuffix("_"))
    find = getattr(packet, func._overloadname)
    if not access_of(find).is_view:
        return cast(torch.Tensor, run_in_place(func, x, *args, **kwargs))  # which raises
    if isinstance(x, torch.nn.Parameter):
        raise NotImplementedError(
            f"{func} would change the shape of a sharded parameter. Use an operator that returns a "
            f"view of it, on `p.detach()`. {WAYS_OUT}"
        )
    view = find(x, *args)
    TENSOR_DATA.__set__(x, view)
    x.__class__ = type(view)  # ragged in another shape, or gathered when it is used
    x._spec = view._spec  # type: ignore[attr-defined]
    vars(x).update(vars(view))
    return x


def run_gathered(func: Any, *args: Any, is_checked: bool = True, **kwargs: Any) -> Any:
    """Run an operator on the whole of each ragged operand.

    With ``is_checked=False`` plain tensors may stand beside: the result is written to one.

    Raises:
        NotImplementedError: a plain tensor stands beside, or an operand is partial.
    """
    if is_checked:
        check_beside(func, (args, kwargs))
    args, kwargs = pytree.tree_map(lambda arg: whole(func, arg), (args, kwargs))
    return func(*args, **kwargs)


def whole(func: Any, x: Any) -> Any:
    """Return a ragged operand of ``func`` replicated; all else as it is. Cost: one all-gather."""
    if not isinstance(x, RaggedTensor):
        return x
    refuse_partial(func, x._spec)
    keep_layout(x)
    gathered = _whole_of(x)
    return wrap_replicated(gathered._local_tensor, gathered._spec)


def _whole_of(x: RaggedTensor) -> DTensor:
    """Return it replicated, without autograd. Cost: one all-gather."""
    with compat.recorded("gather", [getattr(x, NAME, "") or f"shape {tuple(x.shape)}"]):
        detached = cast(RaggedTensor, x.detach())
        return detached.redistribute(placements=[Replicate()] * x.device_mesh.ndim)


def _gathered(value: Any) -> Any:
    if not isinstance(value, GatheredView):
        return value
    return wrap_replicated(value._local_tensor, value._spec)


def check_beside(func: Any, operands: Any) -> None:
    """Raise ``NotImplementedError`` if a plain tensor stands beside ragged ones."""
    leaves = pytree.tree_leaves(operands)
    for each in leaves:
        if may_differ(each):
            error = NotImplementedError(
                f"{func} does not run on a sharded tensor together with a plain tensor of shape "
                f"{tuple(each.shape)}, which may differ between ranks. "
                f"{hint_beside_plain(func)}{WAYS_OUT}"
            )
            note_operands(error, [getattr(each, "_source", each) for each in leaves])
            raise error


def may_differ(operand: Any) -> bool:
    """Whether it is a plain tensor with values. One token may be another on each rank, too."""
    is_plain = isinstance(operand, torch.Tensor) and not isinstance(operand, DTensor)
    return is_plain and bool(operand.dim() and operand.numel())

"""Operators that mix elements of all ranks: the whole is gathered first.

As with DTensors, what cannot run on shards runs on the whole: matrix products (``lora_b @ lora_a``
of DoRA, ``p @ p.T`` of an orthogonality penalty), ``cat`` (LBFGS), ``softmax``, ``sort``,
``quantile``, decompositions. Cost of each call: an all-gather of each ragged operand, so all ranks
must call. The result is replicated. With plain tensors beside, it would differ from rank to rank,
and the operator is refused.

A view that is not a range of the storage (``x.T``, ``x[:, 1]``) is gathered by the operator that
reads it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Replicate

from vescale_fsdp.compat import DTensorSpec, TensorMeta, pytree
from vescale_fsdp.ragged.mixing import keep_layout, refuse_partial
from vescale_fsdp.ragged.reduced import ReducedTensor, reduced
from vescale_fsdp.ragged.tensor import WAYS_OUT, RaggedTensor
from vescale_fsdp.ragged.whole import access_of


class GatheredView(DTensor):
    """A view of a ragged tensor: a replicated DTensor, gathered when it is used.

    In torch it shares memory. This one is a copy, so a write to it raises.
    """

    _source: RaggedTensor
    _read: Callable[[torch.Tensor], torch.Tensor]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types only its stub
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs, access = kwargs or {}, access_of(func)
        written = pytree.tree_leaves(access.written(args, kwargs))
        if any(isinstance(each, GatheredView) for each in written):
            raise NotImplementedError(
                f"{func} would write to a view of a sharded tensor, which is a copy: the write "
                "would be lost. Write to the tensor itself, with values of its shape"
            )
        if access.is_view and isinstance(args[0], GatheredView) and _returns_one(func):
            view = args[0]
            read = view._read
            # A contiguous one was announced, and torch chooses operators by that.
            return _view(
                view._source, lambda whole: func(read(whole).contiguous(), *args[1:], **kwargs)
            )
        _check_beside(func, (args, kwargs))
        return func(*pytree.tree_map(_gathered, args), **pytree.tree_map(_gathered, kwargs))

    def __deepcopy__(self, memo: dict[int, Any]) -> ReducedTensor:
        memo[id(self)] = copied = _gathered(self)
        return cast(ReducedTensor, copied)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return _gathered(self).__reduce_ex__(protocol)

    @property
    def _local_tensor(self) -> torch.Tensor:  # all-gathers when values are read
        whole = self._source.redistribute(placements=self.placements)
        return self._read(whole._local_tensor).contiguous()

    @_local_tensor.setter
    def _local_tensor(self, placeholder: torch.Tensor) -> None:
        """Values are those of the source."""


def gathered_view(func: Any, x: RaggedTensor, *args: Any, **kwargs: Any) -> GatheredView:
    """``func(x, ...)``, a view. Nothing is communicated yet."""
    refuse_partial(func, x._spec)
    keep_layout(x)
    return _view(cast(RaggedTensor, x.detach()), lambda whole: func(whole, *args, **kwargs))


def _view(source: RaggedTensor, read: Callable[[torch.Tensor], torch.Tensor]) -> GatheredView:
    seen = read(torch.empty(source.shape, dtype=source.dtype, device="meta")).contiguous()
    placeholder = source._local_tensor.new_zeros((), dtype=seen.dtype).expand(seen.shape)
    spec = DTensorSpec(
        source.device_mesh,
        (Replicate(),) * source.device_mesh.ndim,
        TensorMeta(seen.shape, seen.stride(), seen.dtype),
    )
    result = GatheredView(placeholder, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    result._source, result._read = source, read
    return result


@cache
def is_view(func: Any) -> bool:
    """Whether an operator returns one view, and writes to nothing."""
    access = access_of(func)
    return access.is_local and access.is_view and not access.writes and _returns_one(func)


@cache
def is_functional(func: Any) -> bool:
    """Whether the results of an operator are new tensors, which its operands alone determine."""
    access = access_of(func)
    return access.is_local and not (access.writes or access.is_view)


def run_gathered(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Run an operator on the whole of each ragged operand.

    Raises:
        NotImplementedError: a plain tensor stands beside, or an operand is partial.
    """
    _check_beside(func, (args, kwargs))
    args, kwargs = pytree.tree_map(lambda arg: whole(func, arg), (args, kwargs))
    return func(*args, **kwargs)


def whole(func: Any, x: Any) -> Any:
    """Return a ragged operand of ``func`` replicated; all else as it is. Cost: one all-gather."""
    if not isinstance(x, RaggedTensor):
        return x
    refuse_partial(func, x._spec)
    keep_layout(x)
    detached = cast(RaggedTensor, x.detach())
    gathered = detached.redistribute(placements=[Replicate()] * x.device_mesh.ndim)
    return reduced(gathered._local_tensor, gathered._spec)


def _gathered(value: Any) -> Any:
    if not isinstance(value, GatheredView):
        return value
    return reduced(value._local_tensor, value._spec)


def _check_beside(func: Any, operands: Any) -> None:
    for each in pytree.tree_leaves(operands):
        is_plain = isinstance(each, torch.Tensor) and not isinstance(each, DTensor)
        if is_plain and each.dim() and each.numel():  # one token may be another on each rank, too
            raise NotImplementedError(
                f"{func} does not run on a sharded tensor together with a plain tensor of shape "
                f"{tuple(each.shape)}, which may differ between ranks. {WAYS_OUT}"
            )


def _returns_one(func: Any) -> bool:
    returns = func._schema.returns
    return len(returns) == 1 and str(returns[0].type) == "Tensor"

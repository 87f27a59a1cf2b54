"""Matrix products and permutations, which mix elements of all ranks: the whole is gathered first.

Adapters and losses call them outside of a forward: ``lora_b @ lora_a`` of DoRA, ``p @ p.T`` of an
orthogonality penalty. Cost of each call: an all-gather of the ragged tensor, so all ranks must
call. The result is a replicated DTensor; with plain tensors beside, that would differ from rank to
rank, the operator is refused.

A permutation is gathered by the operator that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves, tree_map

from vescale_fsdp.compat import DTensorSpec, TensorMeta
from vescale_fsdp.ragged.gradients import keep_layout
from vescale_fsdp.ragged.linear import refuse_partial
from vescale_fsdp.ragged.regions import contiguous_strides
from vescale_fsdp.ragged.tensor import RaggedTensor

__all__ = ["PRODUCTS", "permuted"]

aten = torch.ops.aten


class Permuted(DTensor):
    """A permutation of a ragged tensor: a replicated DTensor, gathered when it is used.

    Torch has a view there. This is none, and refuses to be written to.
    """

    __slots__ = ["_order", "_source"]

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types only its stub
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        for argument, value in zip(func._schema.arguments, args, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            if is_written and isinstance(value, Permuted):
                raise NotImplementedError(
                    f"{func} would write to a permutation of a sharded tensor, which is a copy: "
                    "the write would be lost. Write to the tensor itself, with permuted values"
                )
        _check_beside(func, args)
        return func(*tree_map(_gathered, args), **tree_map(_gathered, kwargs or {}))

    def full_tensor(self, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        """The whole, permuted. Cost: an all-gather."""
        whole: torch.Tensor = self.clone().full_tensor(**kwargs)
        return whole

    def to_local(self, **kwargs: Any) -> torch.Tensor:  # type: ignore[override]
        """The same: it is replicated."""
        whole: torch.Tensor = self.clone().to_local(**kwargs)
        return whole

    def redistribute(self, *args: Any, **kwargs: Any) -> DTensor:
        """As of any replicated DTensor."""
        found: DTensor = self.clone().redistribute(*args, **kwargs)
        return found


def permuted(x: RaggedTensor, order: Sequence[int]) -> Permuted:
    """``x.permute(order)``. Nothing is communicated yet."""
    refuse_partial(aten.permute.default, x._spec)
    shape = torch.Size([x.shape[dim] for dim in order])
    placeholder = x._local_tensor.new_zeros(1).expand(shape)
    spec = DTensorSpec(
        x.device_mesh,
        (Replicate(),) * x.device_mesh.ndim,
        TensorMeta(shape, tuple(contiguous_strides(shape)), x.dtype),
    )
    result = Permuted(placeholder, spec, requires_grad=False)  # type: ignore[no-untyped-call]
    result._source, result._order = x.detach(), tuple(order)
    return result


def _product(func: Any, *args: Any, **kwargs: Any) -> Any:
    _check_beside(func, args)
    whole = [_whole(func, each) if isinstance(each, RaggedTensor) else each for each in args]
    return func(*whole, **kwargs)


def _whole(func: Any, x: RaggedTensor) -> DTensor:
    refuse_partial(func, x._spec)
    keep_layout(x)
    return x.detach().redistribute(placements=[Replicate()] * x.device_mesh.ndim)


def _gathered(value: Any) -> Any:
    if not isinstance(value, Permuted):
        return value
    whole = value._source.redistribute(placements=value.placements)
    return whole.permute(value._order).contiguous()


def _check_beside(func: Any, args: Any) -> None:
    for each in tree_leaves(args):
        if isinstance(each, torch.Tensor) and not isinstance(each, DTensor) and each.numel() > 1:
            raise NotImplementedError(
                f"{func} got a sharded tensor together with a plain tensor of shape "
                f"{tuple(each.shape)}, of which each rank may have another. Use "
                "`tensor.full_tensor()` for the whole tensor on every rank. Inside a forward, call "
                "the module that owns the parameter, so that its parameters are gathered"
            )


PRODUCTS: dict[Any, Callable[..., Any]] = dict.fromkeys(
    (
        aten.addbmm.default,
        aten.addmm.default,
        aten.addmv.default,
        aten.baddbmm.default,
        aten.bmm.default,
        aten.dot.default,
        aten.mm.default,
        aten.mv.default,
    ),
    _product,
)

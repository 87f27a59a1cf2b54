"""Matrix products, decompositions and permutations: of the whole, which is gathered first.

Adapters and losses call them outside of a forward: ``lora_b @ lora_a`` of DoRA, ``p @ p.T`` of an
orthogonality penalty. Cost of each call: an all-gather of the ragged tensor, so all ranks must
call. The result is a replicated DTensor; with plain tensors beside, that would differ from rank to
rank, the operator is refused.

A permutation is gathered by the operator that reads it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Replicate

from vescale_fsdp.compat import DTensorSpec, TensorMeta, pytree
from vescale_fsdp.ragged.holdings import contiguous_strides
from vescale_fsdp.ragged.mixing import keep_layout, refuse_partial
from vescale_fsdp.ragged.reduced import reduced
from vescale_fsdp.ragged.tensor import WAYS_OUT, RaggedTensor

aten = torch.ops.aten


class Permuted(DTensor):
    """A permutation of a ragged tensor: a replicated DTensor, gathered when it is used.

    In torch a permutation is a view. This one is a copy, so a write to it raises.
    """

    _source: RaggedTensor
    _order: tuple[int, ...]

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
        return func(*pytree.tree_map(_gathered, args), **pytree.tree_map(_gathered, kwargs or {}))

    @property
    def _local_tensor(self) -> torch.Tensor:  # all-gathers when values are read
        whole = self._source.redistribute(placements=self.placements)
        return whole._local_tensor.permute(self._order).contiguous()

    @_local_tensor.setter
    def _local_tensor(self, placeholder: torch.Tensor) -> None:
        """Values are those of the source."""


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
    result._source, result._order = cast(RaggedTensor, x.detach()), tuple(order)
    return result


def _product(func: Any, *args: Any, **kwargs: Any) -> Any:
    _check_beside(func, args)
    whole = [_whole(func, each) if isinstance(each, RaggedTensor) else each for each in args]
    return func(*whole, **kwargs)


def _whole(func: Any, x: RaggedTensor) -> DTensor:
    refuse_partial(func, x._spec)
    keep_layout(x)
    detached = cast(RaggedTensor, x.detach())
    whole = detached.redistribute(placements=[Replicate()] * x.device_mesh.ndim)
    return reduced(whole._local_tensor, whole._spec)


def _gathered(value: Any) -> Any:
    if not isinstance(value, Permuted):
        return value
    return reduced(value._local_tensor, value._spec)


def _check_beside(func: Any, args: Any) -> None:
    for each in pytree.tree_leaves(args):
        if isinstance(each, torch.Tensor) and not isinstance(each, DTensor) and each.numel() > 1:
            raise NotImplementedError(
                f"{func} does not run on a sharded tensor together with a plain tensor of shape "
                f"{tuple(each.shape)}, which may differ between ranks. {WAYS_OUT}"
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
        aten._linalg_svd.default,
        aten.linalg_qr.default,
        aten._linalg_eigh.default,
    ),
    _product,
)

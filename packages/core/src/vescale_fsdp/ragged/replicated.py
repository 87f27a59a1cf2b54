"""ReplicatedTensor: a parameter of which each rank has the whole, in a buffer of the engine.

Its operators run on the local tensors, as in file `whole`, and their results are reduced tensors.
Writes are counted on the local tensor, where a forward looks for them.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor

from vescale_fsdp import compat
from vescale_fsdp.compat import DTensorSpec, pytree
from vescale_fsdp.ragged import watching
from vescale_fsdp.ragged.assignment import AssignableData
from vescale_fsdp.ragged.collectives import hint_beside_plain
from vescale_fsdp.ragged.recuts import respecified_as
from vescale_fsdp.ragged.reduced import (
    ReducedTensor,
    as_reduced,
    read_out,
    reduced,
    reshape_in_place,
)
from vescale_fsdp.ragged.whole import (
    access_of,
    always_whole,
    run_locally,
    tell_of_writes,
    writes_to_plain,
)

aten = torch.ops.aten
# One tensor of the same shape, from one tensor.
_LIKE = {
    aten.clone.default,
    aten.empty_like.default,
    aten.full_like.default,
    aten.ones_like.default,
    aten.zeros_like.default,
}


class ReplicatedTensor(AssignableData):
    """A DTensor with ``Replicate`` on each axis of the mesh. It is pickled as a plain DTensor.

    Operators run on the local tensors, without communication, if all operands are replicated on
    one mesh or single numbers, without gradients also plain tensors (`whole`); else they are
    torch's. Views are replicated tensors too, so that writes to them are counted.
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types only its stub
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        known = (cls, DTensor, ReducedTensor)
        if any(issubclass(each, DTensor) and each not in known for each in types):
            return NotImplemented  # a ragged one, which torch's DTensor would take for replicated
        kwargs = kwargs or {}
        if func is aten.detach.default and type(args[0]) is ReplicatedTensor:
            return wrap_replicated(args[0]._local_tensor, args[0]._spec)
        if func in _LIKE and type(args[0]) is ReplicatedTensor:
            spec, made = args[0]._spec, func(args[0]._local_tensor, *args[1:], **kwargs)
            same = made.dtype == args[0].dtype and made.device == args[0].device
            return wrap_replicated(made, spec if same else respecified_as(spec, dtype=made.dtype))
        if torch.Tag.inplace_view in func.tags and not isinstance(args[0], torch.nn.Parameter):
            return reshape_in_place(func, wrap_replicated, *args)
        access = access_of(func)
        if writes_to_plain(access, args, kwargs):
            return read_out(func, args, kwargs)
        result = run_locally(func, args, kwargs, wrap_replicated if access.is_view else reduced)
        if result is not NotImplemented:
            if watching.hears is not None:
                tell_of_writes(func, args, kwargs)
            return result
        hint = hint_beside_plain(func)
        if hint and not all(isinstance(x, DTensor) for x in pytree.tree_leaves(args[0])):
            raise NotImplementedError(
                f"{func} got a parameter that fully_shard keeps whole on every rank, and a plain "
                f"tensor. {hint}To join both in a forward, call the module that owns the parameter"
            )
        result = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if not access.writes:
            return as_reduced(result)
        # Torch counts a write to ``p.data`` on that alone; a forward asks the local tensor.
        for each in pytree.tree_leaves(access.written(args, kwargs)):
            torch.autograd.graph.increment_version(compat.local_tensor(each))
        tell_of_writes(func, args, kwargs)
        return access.returned(args, kwargs)

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """A copy on every rank, as of sharded tensors: it stays as it is in later steps."""
        return super().full_tensor(grad_placements=grad_placements).clone()

    def _copied(self) -> ReplicatedTensor:
        return wrap_replicated(self._local_tensor.detach().clone(), self._spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The parts of one buffer share memory: without the copy each would be saved with all.
        local = self._local_tensor.detach().clone()
        plain = DTensor(local, self._spec, requires_grad=self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            plain._is_param = True  # how torch marks subclasses
        return plain.__reduce_ex__(protocol)


def wrap_replicated(local: torch.Tensor, spec: DTensorSpec) -> ReplicatedTensor:
    """A ReplicatedTensor around ``local``, unchecked: the placements must be ``Replicate``."""
    # DTensor's ``__init__`` does nothing, and takes as long as all else by telling Dynamo.
    made = ReplicatedTensor.__new__(ReplicatedTensor, local, spec, requires_grad=False)
    return cast(ReplicatedTensor, made)


# torch.optim goes by exact type; without this it would loop per tensor in silence.
compat.support_foreach(ReplicatedTensor)
always_whole(ReplicatedTensor)

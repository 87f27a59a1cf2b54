"""ReplicatedTensor: a parameter of which each rank has the whole, and what operators make of it.

What a reduction of a sharded tensor gives is one, too. It may be ``Partial`` and is reduced at its
first use, so the norms of many tensors can share one all-reduce. Torch raises an error if this use
writes, or reads into a plain tensor. Optimizers of other libraries (LAMB, AdamP, NovoGrad, Prodigy,
StableAdamW) do both::

    norm = grad.norm()      each rank has that of its part
    norm.clamp_(max=1.0)    torch: "in-place operations that require placement changes"
    total.add_(norm)        torch: an AssertionError, if ``total`` is a plain tensor

Here the first reduces ``norm`` and then writes, and the second adds the value of all ranks.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch.distributed.tensor import DTensor, Replicate

from vescale_fsdp import compat
from vescale_fsdp.backends import collective_device
from vescale_fsdp.compat import DTensorSpec
from vescale_fsdp.ragged.base import FSDPTensor
from vescale_fsdp.ranks import collectives


class ReplicatedTensor(FSDPTensor):
    """A DTensor with ``Replicate`` or ``Partial`` on each axis of the mesh.

    Operators run on the local tensors, without communication, if all operands are replicated on
    one mesh or single numbers, without gradients also plain tensors; else they are torch's
    (file `whole`). Results and views are replicated tensors, too, unless they are sharded. Writes
    are counted on the local tensor, where a forward looks for them. It is pickled as a plain
    DTensor.

    Cost: one all-reduce of the tensor for each partial axis, at a write to it, a view of it, in a
    ``foreach`` operator, or when it is read into a plain tensor; else what a DTensor costs.
    """

    def full_tensor(self, *, grad_placements: Any = None) -> torch.Tensor:
        """A copy on every rank, as of sharded tensors: it stays as it is in later steps."""
        return super().full_tensor(grad_placements=grad_placements).clone()

    def _placed_here(self, other: DTensor) -> DTensor:
        reduce_in_place(self)  # torch redistributes nothing to a ``Partial``
        return super()._placed_here(other)

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
    """A ReplicatedTensor around ``local``, unchecked: no placement may be a shard."""
    # DTensor's ``__init__`` does nothing, and takes as long as all else by telling Dynamo.
    made = ReplicatedTensor.__new__(ReplicatedTensor, local, spec, requires_grad=False)
    return cast(ReplicatedTensor, made)


def as_replicated(result: Any) -> Any:
    """Make replicated tensors of the plain DTensors among the results that are not sharded."""
    if isinstance(result, list | tuple):
        return type(result)(map(as_replicated, result))
    if type(result) is not DTensor or not is_unsharded(result):
        return result
    return wrap_replicated(result._local_tensor, result._spec)


def is_unsharded(tensor: DTensor) -> bool:
    """Whether each placement is ``Partial`` or ``Replicate``."""
    return all(p.is_replicate() or p.is_partial() for p in tensor.placements)


def reduced(tensor: Any) -> Any:
    """A DTensor that is not sharded, combined over ranks where it is partial; all else as it is.

    Cost: one all-reduce for each partial axis.
    """
    if not isinstance(tensor, DTensor) or not is_unsharded(tensor):
        return tensor
    with torch.no_grad():
        return tensor.redistribute(placements=[Replicate()] * len(tensor.placements))


def reduce_in_place(tensor: DTensor) -> None:
    """Let a tensor that may be partial be replicated from now on: before it is written to."""
    if any(p.is_partial() for p in tensor.placements):
        whole = reduced(tensor)
        tensor._local_tensor, tensor._spec = whole._local_tensor, whole._spec


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


# torch.optim goes by exact type; without this it would loop per tensor in silence.
compat.support_foreach(ReplicatedTensor)

"""ReplicatedTensor: a DTensor of which each rank has the whole, updated without torch's dispatch.

For each operator torch's dispatch of DTensors derives the placements of the result. For an update
of 1,500 small parameters that takes four times as long as the update. Here nothing has to be
derived, because updates of whole tensors are updates of the local ones. All other operators are
torch's, and give plain DTensors.
"""

from __future__ import annotations

from functools import cache
from typing import Any, cast

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale_fsdp import compat
from vescale_fsdp.compat import DTensorSpec, TensorMeta
from vescale_fsdp.ragged.assignment import AssignableData
from vescale_fsdp.ragged.recuts import respecified_as

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

    Operators that only write to lists of tensors (``_fused_adamw_``, ``_foreach_add_`` ...) run on
    the local tensors, if all operands are replicated on one mesh or are single numbers. No
    communication. Views are replicated tensors too, so that writes to them are counted.
    """

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types only its stub
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if any(issubclass(each, DTensor) and each not in (cls, DTensor) for each in types):
            return NotImplemented  # a ragged one, which torch's DTensor would take for replicated
        kwargs = kwargs or {}
        if func is aten.detach.default and type(args[0]) is ReplicatedTensor:
            return wrap_replicated(args[0]._local_tensor, args[0]._spec)
        if func in _LIKE and type(args[0]) is ReplicatedTensor:
            spec, made = args[0]._spec, func(args[0]._local_tensor, *args[1:], **kwargs)
            same = made.dtype == args[0].dtype and made.device == args[0].device
            return wrap_replicated(made, spec if same else respecified_as(spec, dtype=made.dtype))
        if _is_view(func) and type(args[0]) is ReplicatedTensor:
            # Below autograd a view would count the writes to it apart.
            with torch.no_grad(), torch.overrides.enable_reentrant_dispatch():
                part, spec = func(args[0]._local_tensor, *args[1:], **kwargs), args[0]._spec
            meta = TensorMeta(part.shape, part.stride(), part.dtype)
            return wrap_replicated(part, DTensorSpec(spec.mesh, spec.placements, meta))
        written = args[0] if _updates_lists(func) else ()
        first = next((each for each in written if isinstance(each, DTensor)), None)
        if first is not None:
            meshes = _Meshes(first)
            local_args = [_local(arg, meshes) for arg in args]
            local_kwargs = {key: _local(value, meshes) for key, value in kwargs.items()}
            if not any(each is _OTHER for each in (*local_args, *local_kwargs.values())):
                func(*local_args, **local_kwargs)
                torch.autograd.graph.increment_version(local_args[0])
                return None
        result = super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]
        if not _writes_to_first(func):
            return result
        # Torch counts a write to ``p.data`` on that alone; a forward asks the local tensor.
        torch.autograd.graph.increment_version(args[0]._local_tensor)
        return args[0]

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


class _Meshes:
    """The mesh of a DTensor. Many objects are equal to it: which are is found out once for each."""

    def __init__(self, tensor: DTensor) -> None:
        self._mesh = tensor.device_mesh
        self.ids = {id(self._mesh)}  # of those that are equal

    def has(self, mesh: DeviceMesh) -> bool:
        """Whether a mesh is equal to this one."""
        if id(mesh) not in self.ids and mesh == self._mesh:
            self.ids.add(id(mesh))
        return id(mesh) in self.ids


_OTHER = object()  # what is neither replicated nor a number


def _local(arg: Any, meshes: _Meshes) -> Any:
    """What an update gets on this rank for an argument; `_OTHER` if it cannot run on the parts."""
    if isinstance(arg, list | tuple):
        if not arg or not isinstance(arg[0], torch.Tensor):
            return arg
        ids = meshes.ids
        found = [
            each._local_tensor
            if type(each) is ReplicatedTensor and id(each._spec.mesh) in ids
            else _local(each, meshes)
            for each in arg
        ]
        return _OTHER if any(each is _OTHER for each in found) else found
    if not isinstance(arg, torch.Tensor):
        return arg
    if isinstance(arg, DTensor):
        is_whole = meshes.has(arg.device_mesh) and all(p.is_replicate() for p in arg.placements)
        is_plain = type(arg._local_tensor) is torch.Tensor
        return arg._local_tensor if is_whole and is_plain else _OTHER
    return arg if arg.numel() == 1 and not arg.dim() else _OTHER


@cache
def _updates_lists(func: Any) -> bool:
    """Whether the operator writes to its first argument, a list, and returns nothing."""
    schema = func._schema
    first = schema.arguments[0] if schema.arguments else None
    is_written = first is not None and first.alias_info is not None and first.alias_info.is_write
    is_list = schema.name.startswith(("aten::_foreach_", "aten::_fused_adam", "aten::_fused_sgd"))
    return is_list and is_written and not schema.returns


@cache
def _is_view(func: Any) -> bool:
    """Whether the operator returns one tensor, with the memory of its first argument."""
    returns = func._schema.returns
    alias = returns[0].alias_info if len(returns) == 1 else None
    return alias is not None and not alias.is_write and str(returns[0].type) == "Tensor"


@cache
def _writes_to_first(func: Any) -> bool:
    """Whether the operator returns its first argument, which it writes to."""
    schema = func._schema
    first = schema.arguments[0] if schema.arguments else None
    is_written = first is not None and first.alias_info is not None and first.alias_info.is_write
    return is_written and len(schema.returns) == 1 and not schema.name.startswith("aten::_f")


# torch.optim goes by exact type; without this it would loop per tensor in silence.
compat.support_foreach(ReplicatedTensor)

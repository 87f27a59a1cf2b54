"""FSDPTensor: what sharded, replicated and gathered tensors have in common.

Their operators run by one function (file `dispatch`), and their data can be assigned to.

With plain tensors an assignment lets ``x`` have the memory of ``new``, and what ``x.data`` gave
before keeps the former memory, with the former values::

    backup = x.data        # weights of training
    x.data = average       # to evaluate
    x.data = backup        # and back

Here the memory of ``x`` is a part of a buffer that is communicated, so ``x`` keeps its memory and
takes the values of ``new``. The former values move to other memory, where ``backup`` has them.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any, ClassVar, cast

import torch
from torch.distributed.tensor import DTensor

from vescale_fsdp.compat import TENSOR_DATA, TraceableDTensor, local_tensor, set_versions
from vescale_fsdp.ragged import access
from vescale_fsdp.ragged.access import access_of, tell_of_writes

NAME = "_vescale_fsdp_name"  # on a sharded parameter: what errors call it
# On an error of an operator: the ids of the local tensors of sharded parameters that it got.
OPERANDS = "_vescale_fsdp_operands"


def note_operands(error: Exception, operands: Iterable[Any]) -> None:
    """Note in an error of an operator the sharded parameters that it got.

    The engine knows the modules that they belong to, and explains the error.
    """
    ids = [id(local_tensor(each)) for each in operands if getattr(each, NAME, None)]
    setattr(error, OPERANDS, getattr(error, OPERANDS, None) or ids)


class FSDPTensor(TraceableDTensor):
    """A DTensor whose operators run by `dispatch`, and whose data can be assigned to.

    The local tensor is a view of a buffer. A copy has memory of its own. Results of ``detach()``
    share the local tensor.
    """

    # No ``__slots__``: torch copies the slots that `self.__slots__` names, DTensor's.
    run_operator: ClassVar[Callable[..., Any]]  # by `dispatch`, which knows all classes

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types only its stub
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.is_inference_mode_enabled() and access_of(func).is_view:
            # A view of a tensor that counts its writes counts them, too, as in torch.
            with torch.inference_mode(False), torch.no_grad():
                return FSDPTensor.run_operator(func, types, args, kwargs)
        result = FSDPTensor.run_operator(func, types, args, kwargs)
        if access.hears is not None:
            tell_of_writes(func, args, kwargs)
        return result

    def _copied(self) -> FSDPTensor:
        """Return a tensor with the same elements in other memory, without autograd."""
        raise NotImplementedError

    def _placed_here(self, other: DTensor) -> DTensor:
        """Return another DTensor of this mesh with the placements of this one. Collective."""
        return other.redistribute(placements=self.placements)

    def __deepcopy__(self, memo: dict[int, Any]) -> FSDPTensor:
        copied = self._copied()
        copied.requires_grad_(self.requires_grad)
        if isinstance(self, torch.nn.Parameter):
            copied._is_param = True  # how torch marks subclasses
        if self.grad is not None:
            copied.grad = copy.deepcopy(self.grad, memo)
        memo[id(self)] = copied
        return copied

    def register_hook(self, hook: Callable[[torch.Tensor], Any]) -> Any:
        """As of any tensor, but not called where a graph has no gradient for it.

        The gradients of a unit's parameters come after the reduction, and the engine calls hooks on
        them. Autograd calls those that are registered after the forward, too, without a gradient.
        """

        @functools.wraps(hook)
        def with_gradient(gradient: torch.Tensor | None) -> Any:
            return None if gradient is None else hook(gradient)

        return super().register_hook(with_gradient)  # type: ignore[no-untyped-call]

    def data_ptr(self) -> int:
        """0, as of all DTensors: only the local part has memory.

        Without this it would be the offset of the local part in its buffer, and torch takes
        another number than 0 for a tensor that has a storage.
        """
        return 0

    @property
    def data(self) -> torch.Tensor:
        """The same memory without autograd. An assignment copies the values.

        ``x.data = new`` copies the values of a DTensor of the same shape and mesh into the memory
        of this one. If its placements differ, it is redistributed first, which is collective. What
        ``x.data`` and ``x.detach()`` have returned before keeps the former values; slices of it,
        and what `to_local` has returned, do not. Only a change of the dtype or of the device
        replaces the memory of this one.

        Cost: a second copy of this rank's part, until the next forward or as long as the former
        values are in use.

        Raises:
            ValueError: on assignment of a plain tensor, or of another shape or mesh.
        """
        return cast(torch.Tensor, TENSOR_DATA.__get__(self))

    @data.setter
    def data(self, new: torch.Tensor) -> None:
        # Torch's own setter would change what autograd sees, and no element.
        mesh = self.device_mesh
        if not isinstance(new, DTensor) or (new.device_mesh, new.shape) != (mesh, self.shape):
            name = getattr(self, NAME, None)
            what = "the data of " + (f"parameter {name!r}" if name else "a sharded tensor")
            found = f"{type(new).__name__} of shape {tuple(new.shape)}"
            found += f" on {new.device_mesh}" if isinstance(new, DTensor) else ""
            raise ValueError(
                f"{what} cannot be replaced by a {found}; expected a DTensor of shape "
                f"{tuple(self.shape)} on {mesh}. Use `vescale_fsdp.ragged.distribute_tensor(new, "
                "p.device_mesh, p.placements)`, compute it from `p.full_tensor()`, or write to the "
                "full parameter inside of `with unsharded(module, writeback=True)`"
            )
        with torch.no_grad():
            moved = self._placed_here(cast(DTensor, new.detach()))
            own, local = self._local_tensor, moved._local_tensor
            if local is own:  # ``x.data += y`` assigns what it has written to
                return
            if (local.dtype, local.device) == (own.dtype, own.device):
                former = own.clone()
                # Not `detach()`: writes to what has the former values are no writes to this.
                fresh = own.new_empty(0).set_(own)  # type: ignore[call-overload]
                fresh.copy_(local)
                set_versions((fresh,), (own._version + 1,))
                TENSOR_DATA.__set__(own, former)
                self._local_tensor = fresh
            else:
                TENSOR_DATA.__set__(self, moved)
                self._local_tensor, self._spec = local, moved._spec
        if access.hears is not None:
            access.hears([self])

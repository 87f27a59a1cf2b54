"""What ``torch.compile`` asks of a subclass of DTensor.

It takes a tensor subclass apart into plain tensors, traces with fake ones, and puts it together.
DTensor's own functions put together a DTensor, and name compiled code without the local shape.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, ClassVar, NoReturn

import torch
from torch._guards import TracingContext
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from torch.utils._python_dispatch import is_traceable_wrapper_subclass


def leave_to_python(what: str) -> NoReturn:
    """Let Dynamo run the function that got ``what`` as it is. Call it where it takes that apart."""
    from torch._dynamo.exc import unimplemented

    advice = "compute it inside of the compiled function, or use the sharded tensor itself"
    unimplemented(gb_type=what, context="", explanation=what, hints=[advice])


def refuse_tracing(what: str) -> None:
    """Raise if ``torch.compile`` traces: what it does not see would not be in the compiled code.

    It then leaves the operator out of the compiled code and calls it in Python, unless
    ``fullgraph=True``, when it shows the message.

    Raises:
        NotImplementedError: the error that it takes for "not in compiled code".
    """
    if TracingContext.try_get() is not None:
        raise NotImplementedError(
            f"{what} cannot be in code that torch.compile compiles. Element-wise operators, "
            "foreach ones, sums and norms can. Do not pass fullgraph=True, or call what needs it "
            "outside of the compiled function"
        )


class RaggedSpec(DTensorSpec):
    """The spec of a tensor whose compiled code serves one shape.

    Torch's guard compares only the shape of the local tensor. Ours is flat, and often empty: that
    of a tensor of shape (5, 6) and of one of shape (6, 5) may be the same.
    """

    def _check_equals(self, other: object, skip_shapes: bool = False) -> bool:
        return super()._check_equals(other)


_has_traced = False


def has_traced() -> bool:
    """Whether ``torch.compile`` has taken one of our tensors apart in this process."""
    return _has_traced


@cache
def _prepare_dynamo() -> None:
    """Tell Dynamo, when it takes the first tensor apart, which files it is to leave to Python.

    Its import takes a second.
    """
    global _has_traced
    _has_traced = True
    from torch._dynamo import trace_rules

    # Where it has left the compiled code, it would compile each function that Python calls. Of
    # torch's own DTensor it compiles none.
    for name in ("ragged", "compat.tracing", "ranks", "backends"):
        trace_rules.add(f"vescale_fsdp.{name}")


class TraceableDTensor(DTensor):
    """A subclass of DTensor that compiled code takes and returns as what it is.

    Attributes:
        spec_type: of its spec.
    """

    spec_type: ClassVar[type[DTensorSpec]] = DTensorSpec

    @classmethod
    def __tensor_unflatten__(  # torch's is static; it allows both
        cls,
        inner_tensors: Mapping[str, Any],
        flatten_spec: Any,
        outer_size: Sequence[int],
        outer_stride: Sequence[int],
    ) -> DTensor:
        _prepare_dynamo()
        placements, meta, shard_order, requires_grad = flatten_spec
        local = inner_tensors["_local_tensor"]
        size, stride = tuple(outer_size), tuple(outer_stride)
        spec_type = cls.spec_type
        if spec_type is RaggedSpec:  # `int` of a symbolic number takes the one at hand
            size, stride = tuple(map(int, size)), tuple(map(int, stride))
            for each in local.shape:
                int(each)
        meta = TensorMeta(torch.Size(size), stride, meta.dtype)
        spec = spec_type(inner_tensors["device_mesh"], placements, meta, shard_order)
        return cls.__new__(cls, local, spec, requires_grad=requires_grad)

    def _stable_hash_for_caching(self) -> str:
        """The key of compiled code on disk, which ranks share.

        Theirs differ: a rank may hold 16 elements of a tensor, and another one 14 or none. And
        what gathers a tensor has the place of the rank in it.
        """
        here = self.device_mesh.get_coordinate()
        key = f"{super()._stable_hash_for_caching()}{here}{_described(self._local_tensor)}"
        return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


def _described(tensor: Any) -> str:
    """The type and layout of a tensor, and of those inside of it."""
    found = f"{type(tensor).__qualname__}{tuple(tensor.shape)}{tensor.stride()}{tensor.dtype}"
    if is_traceable_wrapper_subclass(tensor):
        names, context = tensor.__tensor_flatten__()
        inner = [_described(getattr(tensor, name)) for name in names]
        return f"{found}{context}{inner}"
    return f"{found}{tensor.device}{tensor.storage_offset()}{tensor.requires_grad}"

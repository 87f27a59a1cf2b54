"""Operators on tensors of which each rank has the whole, run on the local tensors.

For each operator torch's dispatch of DTensors derives the placements of the result. For an update
of 1,500 small parameters that takes four times as long as the update, and for some operators
(several of the ``foreach`` ones) torch has no rule. Of whole tensors nothing has to be derived: the
result of the local ones is that of the whole ones, on every rank.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale_fsdp import compat
from vescale_fsdp.compat import DTensorSpec, TensorMeta, pytree
from vescale_fsdp.ragged import watching
from vescale_fsdp.ragged.collectives import is_collective, run_collective
from vescale_fsdp.ragged.random import numbers_of_first_rank

_AS_THEY_ARE = nullcontext()
Wrap = Callable[[torch.Tensor, DTensorSpec], DTensor]


class Access(NamedTuple):
    """What the schema of an operator says about the memory of its arguments."""

    positions: tuple[tuple[int, str], ...]  # and names, of those that it writes to
    num_counted: int  # of how many of them the versions are raised
    num_returns: int
    is_view: bool  # results have the memory of an argument
    is_local: bool  # whether it may run on the local tensors at all
    is_random: bool  # ranks draw different numbers, unless their generators have the same state
    has_out: bool  # writes to ``out=``
    has_lists: bool  # a foreach or fused operator
    is_fused: bool  # a step of an optimizer
    takes_numbers: bool  # a plain tensor with one element is a number, of any shape

    @property
    def writes(self) -> bool:
        """Whether it writes to an argument."""
        return bool(self.positions)

    def written(self, args: Any, kwargs: dict[str, Any]) -> list[Any]:
        """The arguments that it writes to: tensors, or lists of them."""
        found = [args[i] if i < len(args) else kwargs.get(name) for i, name in self.positions]
        return [each for each in found if each is not None]

    def returned(self, args: Any, kwargs: dict[str, Any]) -> Any:
        """What an operator returns that writes: the very arguments."""
        if not self.num_returns:
            return None
        written = self.written(args, kwargs)
        return written[0] if self.num_returns == 1 else tuple(written)


@cache
def access_of(func: Any) -> Access:
    """Return the `Access` of an operator."""
    schema = func._schema
    positions = [
        (index, argument.name)
        for index, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    aliases = [each.alias_info for each in schema.returns if each.alias_info is not None]
    name = schema.name
    has_lists, is_fused = name.startswith(("aten::_foreach_", "aten::_fused_")), "::_fused_" in name
    # A fused optimizer's first list are the parameters; the versions of its states are not raised.
    num_counted = 1 if is_fused else len(positions)
    is_random = func.namespace == "aten" and torch.Tag.nondeterministic_seeded in func.tags
    # DTensors have a shape of their own.
    changes_shape = torch.Tag.inplace_view in func.tags
    changes_shape |= name in ("aten::set_", "aten::resize_", "aten::resize_as_")
    is_local = func.namespace == "aten" and not (is_random or changes_shape)
    is_view = any(not alias.is_write for alias in aliases)
    has_out = any(schema.arguments[index].kwarg_only for index, _ in positions)
    # Elsewhere it may be a batch of one, as for an embedding, which is another on each rank.
    takes_numbers = has_lists or torch.Tag.pointwise in func.tags
    takes_numbers |= name in (
        "aten::allclose",
        "aten::copy_",
        "aten::index_fill_",
        "aten::index_put_",
    )
    return Access(
        tuple(positions),
        num_counted,
        len(schema.returns),
        is_view,
        is_local,
        is_random,
        has_out,
        has_lists,
        is_fused,
        takes_numbers,
    )


def tell_of_writes(func: Any, args: Any, kwargs: dict[str, Any]) -> None:
    """Name the tensors that an operator has written to, to who wants to hear of it."""
    access = access_of(func)
    # The schemas of collectives do not say that they write.
    written = access.written(args, kwargs) if access.writes else args[:1]
    if watching.hears is not None and (access.writes or is_collective(func)):
        watching.hears(pytree.tree_leaves(written))


def writes_to_plain(access: Access, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operator writes, to plain tensors only."""
    tensors = pytree.tree_leaves(access.written(args, kwargs)) if access.writes else []
    return bool(tensors) and not any(isinstance(each, DTensor) for each in tensors)


def run_locally(func: Any, args: Any, kwargs: dict[str, Any], wrap: Wrap) -> Any:
    """Run an operator on the local tensors, if all operands are whole or single numbers.

    Random numbers are those of the mesh's first rank (file `random`), so all ranks draw the same.
    Without gradients plain tensors count as whole, as with DistributedDataParallel: states of
    optimizers and averaged weights are. With gradients they are most often activations, of a
    forward that uses a parameter outside of its unit.

    Returns:
        Its result, of which ``wrap`` makes DTensors; or ``NotImplemented``. No communication, but
        of collectives and for random numbers.
    """
    if is_collective(func):
        return run_collective(func, args, kwargs)
    if func is torch.ops.aten.is_same_size.default:
        return has_size_of(*args)
    access = access_of(func)
    if not (access.is_local or access.is_random):
        return NotImplemented
    operands = _Operands(takes_numbers=access.takes_numbers)
    local_args = [operands.local(arg) for arg in args]
    local_kwargs = {key: operands.local(value) for key, value in kwargs.items()}
    if operands.has_others or operands.spec is None:
        return NotImplemented
    numbers: AbstractContextManager[None] = _AS_THEY_ARE  # each operator of an optimizer comes here
    if access.is_random:
        numbers = numbers_of_first_rank(func, operands.spec.mesh, local_args, local_kwargs)
    if access.writes:
        with numbers:
            write_locally(func, local_args, local_kwargs)
        for each in access.written(local_args, local_kwargs)[: access.num_counted]:
            torch.autograd.graph.increment_version(each)
        return access.returned(args, kwargs)
    if access.is_view:
        # Below autograd a view would count the writes to it apart.
        with (
            torch.no_grad(),
            torch.inference_mode(False),
            torch.overrides.enable_reentrant_dispatch(),
        ):
            return _wrapped(func(*local_args, **local_kwargs), operands.spec, wrap)
    with numbers:
        return _wrapped(func(*local_args, **local_kwargs), operands.spec, wrap)


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


class _Operands:
    """The local tensors of operands on one mesh. Many objects are equal to a mesh."""

    def __init__(self, *, takes_numbers: bool) -> None:
        self._takes_numbers = takes_numbers
        self.spec: DTensorSpec | None = None  # of the first DTensor
        self.has_others = False  # what is neither whole nor a number
        self._ids: set[int] = set()  # of objects that are equal to the mesh of the first

    def local(self, arg: Any) -> Any:
        if isinstance(arg, list | tuple):
            ids = self._ids
            return [
                each._local_tensor
                if type(each) in _WHOLE and id(each._spec.mesh) in ids
                else self.local(each)
                for each in arg
            ]
        if not isinstance(arg, torch.Tensor):
            return arg
        if not isinstance(arg, DTensor):
            is_number = not arg.dim() or (self._takes_numbers and arg.numel() == 1)
            is_activation = bool(arg.numel()) and not is_number and torch.is_grad_enabled()
            self.has_others |= is_activation
            return arg
        if self.spec is None:
            self.spec = arg._spec
        is_whole = self._has(arg.device_mesh) and all(p.is_replicate() for p in arg.placements)
        self.has_others |= not is_whole or type(arg._local_tensor) is not torch.Tensor
        return arg._local_tensor

    def _has(self, mesh: DeviceMesh) -> bool:
        assert self.spec is not None, "set by the first DTensor"
        if id(mesh) not in self._ids and mesh == self.spec.mesh:
            self._ids.add(id(mesh))
        return id(mesh) in self._ids


_WHOLE: set[type] = set()  # the classes that have ``Replicate`` on each axis


def always_whole(kind: type[DTensor]) -> None:
    """Record that all tensors of a class are whole, so that lists of them are read faster."""
    _WHOLE.add(kind)


def _wrapped(result: Any, like: DTensorSpec, wrap: Wrap) -> Any:
    if isinstance(result, list | tuple):
        return type(result)(_wrapped(each, like, wrap) for each in result)
    if not isinstance(result, torch.Tensor):
        return result
    meta = TensorMeta(result.shape, result.stride(), result.dtype)
    return wrap(result, DTensorSpec(like.mesh, like.placements, meta))

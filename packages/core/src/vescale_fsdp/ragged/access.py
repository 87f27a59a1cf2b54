"""What the schema of an operator says about the memory of its arguments, and who hears of writes.

The engine does, while a forward runs. A forward computes with unsharded views. After a write to a
shard in it, by an optimizer's step or the update of a teacher, the next read has to see what was
written. Versions do not tell: fused kernels and ``.data`` do not raise those of the parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import DTensor

from vescale_fsdp.compat import pytree
from vescale_fsdp.ragged.collectives import is_collective

hears: Callable[[Iterable[Any]], None] | None = None  # of the tensors that were written to


def hear_of_writes(hear: Callable[[Iterable[Any]], None] | None) -> None:
    """Let ``hear`` be called after each write. None: nobody."""
    global hears
    hears = hear


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
    if hears is not None and (access.writes or is_collective(func)):
        found = pytree.tree_leaves(written)
        hears([getattr(each, "_source", each) for each in found])  # of a gathered view


def writes_to_plain(access: Access, args: Any, kwargs: dict[str, Any]) -> bool:
    """Whether an operator writes, to plain tensors only."""
    found = False
    for each in access.written(args, kwargs):
        for tensor in each if isinstance(each, list | tuple) else (each,):
            if isinstance(tensor, DTensor):
                return False  # the first parameter of an optimizer's thousands
            found |= isinstance(tensor, torch.Tensor)
    return found

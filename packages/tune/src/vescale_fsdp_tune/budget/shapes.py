"""Remembers the shapes that operators return on the meta device.

Torch derives many of them in Python, as in a decomposition: 0.3 ms for the backward of a layer
norm. The layers of a model are alike, so most operators of a trace have run before with the same
shapes.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import nn

from vescale_fsdp.spi import access_of

_PLAIN = (torch.Tensor, nn.Parameter)


class _Shape(NamedTuple):
    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Unknown(Exception):
    """Something that a shape says too little about."""


class Shapes:
    """Runs operators; on meta only the first time with the same shapes."""

    def __init__(self) -> None:
        self._known: dict[Hashable, _Shape | tuple[type, list[_Shape | None]]] = {}

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of an operator, as a new tensor or several.

        Views, operators that write to an argument, and those of other tensors than plain ones on
        meta run each time.
        """
        try:
            key = (func, *map(_key, args), *((name, _key(each)) for name, each in kwargs.items()))
            known = self._known.get(key)
        except (_Unknown, TypeError):  # TypeError: not hashable
            return func(*args, **kwargs)
        if known is not None:
            return _made(known)
        result = func(*args, **kwargs)
        if not access_of(func).writes and _is_new(result, (args, kwargs)):
            with suppress(_Unknown):
                self._known[key] = _remembered(result)
        return result


def _is_new(result: Any, arguments: Any) -> bool:
    """Whether the results have memory of their own. Schemas do not say so of each view."""
    given = {each.untyped_storage()._cdata for each in tensors_in(arguments)}
    made = [each.untyped_storage()._cdata for each in tensors_in(result)]
    return given.isdisjoint(made) and len(set(made)) == len(made)


def _key(value: Any) -> Hashable:
    """Return what the shape of a result can depend on."""
    if isinstance(value, torch.Tensor):
        return _shape_of(value), value.storage_offset()
    if isinstance(value, list | tuple):
        return (type(value), *map(_key, value))
    return type(value), value  # True is 1 elsewhere


def _shape_of(tensor: torch.Tensor) -> _Shape:
    is_plain = type(tensor) in _PLAIN and tensor.is_meta and tensor.layout is torch.strided
    if not is_plain or tensor.is_conj() or tensor.is_neg():
        raise _Unknown
    return _Shape(tuple(tensor.shape), tensor.stride(), tensor.dtype)


def _remembered(result: Any) -> _Shape | tuple[type, list[_Shape | None]]:
    if isinstance(result, torch.Tensor):
        return _of_new(result)
    if type(result) in (list, tuple):
        return type(result), [None if each is None else _of_new(each) for each in result]
    raise _Unknown


def _of_new(tensor: Any) -> _Shape:
    """Return the shape of a tensor with a storage that is no larger than that."""
    if not isinstance(tensor, torch.Tensor):
        raise _Unknown
    shape = _shape_of(tensor)
    if tensor.untyped_storage().nbytes() != _empty(shape).untyped_storage().nbytes():
        raise _Unknown
    return shape


def _made(known: _Shape | tuple[type, Sequence[_Shape | None]]) -> Any:
    if isinstance(known, _Shape):
        return _empty(known)
    kind, shapes = known
    return kind(None if each is None else _empty(each) for each in shapes)


def _empty(shape: _Shape) -> torch.Tensor:
    return torch.empty_strided(shape.size, shape.stride, dtype=shape.dtype, device="meta")


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in the arguments or the result of an operator."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for each in value:
            yield from tensors_in(each)

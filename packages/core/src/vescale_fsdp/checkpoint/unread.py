"""Tensors of a checkpoint whose elements are read when they are needed, for hooks that may change a
state dict before it is loaded.

::

    state = checkpoint.unread_state(path)
    state["head.weight"] = torch.zeros(10, 64)  # changed
    state["body.weight"] = state.pop("net.weight")  # renamed, and not read
    checkpoint.load(path, model, weights=state)

An entry that nobody has read is loaded as without hooks: each rank reads its part.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from vescale_fsdp import compat
from vescale_fsdp.checkpoint import encoding
from vescale_fsdp.checkpoint.files import bytes_of
from vescale_fsdp.compat import pytree
from vescale_fsdp.errors import RankMismatchError

# What is known without the elements.
_KNOWN: set[Any] = {
    getattr(torch.Tensor, name).__get__
    for name in ("device", "dtype", "grad", "is_leaf", "layout", "ndim", "requires_grad", "shape")
} | {
    getattr(torch.Tensor, name)
    for name in ("__len__", "dim", "element_size", "is_floating_point", "numel", "size")
}


class UnreadTensor(torch.Tensor):
    """A whole tensor of a checkpoint, on the CPU.

    The first operator or method that needs elements reads them from the files, without
    communication; then they stay in memory, so that writes in place count. Its results are plain
    tensors. Shape and dtype are known before.

    Args:
        place: of the checkpoint.
        key: of the tensor there.
        read: reads it.
    """

    place: str
    key: str

    @staticmethod
    def __new__(
        cls,
        place: str,
        key: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        read: Callable[[], torch.Tensor],
    ) -> UnreadTensor:
        """Make one of this shape."""
        made: UnreadTensor = torch.Tensor._make_wrapper_subclass(
            cls, torch.Size(shape), dtype=dtype
        )
        made.place, made.key, made._read, made._found = place, key, read, None
        return made

    _read: Callable[[], torch.Tensor]
    _found: torch.Tensor | None
    _version_read: int

    @property
    def is_read(self) -> bool:
        """Whether its elements are in memory, and may have been changed."""
        return self._found is not None

    @property
    def is_changed(self) -> bool:
        """Whether an operator has written to its elements."""
        return self._found is not None and self._found._version != self._version_read

    def read(self) -> torch.Tensor:
        """Return it as a plain tensor."""
        if self._found is None:
            with torch.inference_mode(False):  # else it has no version
                self._found = self._read()
            self._version_read = self._found._version
        return self._found

    def __repr__(self) -> str:  # type: ignore[override]
        return f"UnreadTensor({self.key!r}, shape={tuple(self.shape)}, dtype={self.dtype})"

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _KNOWN:
            with compat.without_torch_function():
                return func(*args, **kwargs or {})
        args, kwargs = read_all((args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch types only its stub
        cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        args, kwargs = read_all((args, kwargs or {}))
        return func(*args, **kwargs)


def read_all(tree: Any) -> Any:
    """Return the same tree with plain tensors in place of unread ones."""
    return pytree.tree_map(lambda x: x.read() if isinstance(x, UnreadTensor) else x, tree)


def key_of(entry: Any) -> str | None:
    """The key of an unread tensor whose elements are those of the checkpoint; else None."""
    return entry.key if isinstance(entry, UnreadTensor) and not entry.is_changed else None


def changes(
    state: Mapping[str, Any],
    own: Mapping[str, Any],
    saved: Mapping[str, str],
    key_of: Callable[[Any], str | None] = key_of,
) -> dict[str, str | None]:
    """Say what was changed in a state dict, so that ranks can compare it. No communication.

    Only of shards must all ranks have the same elements: buffers may differ between ranks.

    Args:
        state: as hooks have left it.
        own: the model's, with the same names.
        saved: the keys in the checkpoint, by names.
        key_of: returns the key of an entry that has not changed, and None for others.

    Returns:
        In words, by name, for entries that the checkpoint has under another name or not at all.
        None: the entry was dropped.
    """
    found: dict[str, str | None] = dict.fromkeys(saved.keys() - state.keys())
    for name, entry in state.items():
        key = key_of(entry)
        if key is not None:
            if saved.get(name) != key:
                found[name] = f"is {key!r} of the checkpoint"
            continue
        value = read_all(entry)
        is_plain = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
        if is_plain and isinstance(own.get(name), DTensor):
            crc = zlib.crc32(bytes_of(encoding.on_host(value)))
            found[name] = f"has the shape {tuple(value.shape)} and the CRC32 {crc:08x}"
        else:
            found[name] = f"is a {type(value).__name__}"
    return found


def check_same(changes_of: Sequence[Mapping[str, str | None]]) -> None:
    """Raise if ranks have changed a state dict in different ways.

    Args:
        changes_of: the result of `changes` on each rank.

    Raises:
        RankMismatchError: names the entry and the rank.
    """
    first = changes_of[0]
    for rank, other in enumerate(changes_of):
        for name in sorted(first.keys() | other.keys()):
            here, there = (each.get(name, "is unchanged") for each in (first, other))
            if here != there:
                raise RankMismatchError(
                    f"{name!r} of the state dict {here or 'was dropped'} on rank 0, and "
                    f"{there or 'was dropped'} on rank {rank}: make the same changes on every "
                    "rank, because each takes its part of the result"
                )

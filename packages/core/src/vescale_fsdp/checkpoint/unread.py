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

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vescale_fsdp import compat
from vescale_fsdp.compat import pytree

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

    @property
    def is_read(self) -> bool:
        """Whether its elements are in memory, and may have been changed."""
        return self._found is not None

    def read(self) -> torch.Tensor:
        """Return it as a plain tensor."""
        if self._found is None:
            self._found = self._read()
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

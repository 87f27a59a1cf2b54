"""PendingTensor: a local tensor that is still on its way, and arrives when somebody reads it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vescale_fsdp.compat import AsyncCollectiveTensor, pytree
from vescale_fsdp.ragged.exchange import InFlight


class PendingTensor(AsyncCollectiveTensor):
    """What ``redistribute(async_op=True)`` puts inside of its result.

    A subclass of what torch's functional collectives return, so that DTensor and users treat it
    alike: any operator on it, ``wait()`` and ``trigger_wait()`` finish the communication first.
    Unlike torch's, it may have something to do when the bytes have arrived (to put them in
    their places).
    """

    __slots__ = ["_moving"]

    _moving: InFlight | None

    @staticmethod
    def __new__(
        cls, moving: InFlight, shape: Sequence[int], dtype: torch.dtype, device: torch.device
    ) -> PendingTensor:
        pending = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        pending.completed = False
        pending._moving = moving
        return pending

    def __init__(self, *_: Any) -> None:
        """All is done by ``__new__``, as for every wrapper subclass."""

    def trigger_wait(self) -> torch.Tensor:
        """Finish the communication, once, and return the tensor."""
        if self._moving is not None:
            self.elem = self._moving.wait()
            self._moving = None
            self.completed = True
        return self.elem

    def wait(self) -> torch.Tensor:
        """As `trigger_wait`."""
        return self.trigger_wait()

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        def arrived(leaf: Any) -> Any:
            return leaf.trigger_wait() if isinstance(leaf, PendingTensor) else leaf

        args, kwargs = pytree.tree_map(arrived, (args, kwargs or {}))
        return func(*args, **kwargs)

"""GradientBuffer: a group's local gradients on their way to the reduction.

Gradients stay where autograd made them until the group is complete; then each is copied once, with
the cast to the buffer's dtype, into its place. So while a unit's backward runs there are its
gradients once, and no buffer beside them. What waits for other micro-batches is copied as it
appears, and later gradients are added. The product of two matrices may be written to its place
without a copy. Memory is lent by a pool until the reduction has been finished. Gaps and tensors
without a gradient are zero when it is sent.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from vescale_fsdp.dbuffer.memory import SlabPool
from vescale_fsdp.planner import ShardLayout

__all__ = ["GradientBuffer"]


class GradientBuffer:
    """Local, not yet reduced gradients of one group, from its first gradient to `release`.

    Args:
        layout: where each tensor lies.
        shapes: global shape of each tensor, in the order of the layout's specs.
        dtype: of the buffer, and so of what travels when the reduction does not cast.
        pool: lends ``layout.total_size`` elements.
        waits: whether more gradients come in later backwards.
    """

    def __init__(
        self,
        layout: ShardLayout,
        shapes: Sequence[torch.Size],
        dtype: torch.dtype,
        pool: SlabPool,
        *,
        waits: bool = False,
    ) -> None:
        self._layout, self._shapes, self._pool = layout, shapes, pool
        self.dtype, self._waits = dtype, waits
        self._apart: dict[int, torch.Tensor] = {}  # gradients as autograd made them
        self._written: set[int] = set()
        self._turns: dict[int, int] = {}  # in which products were written
        self._flat: torch.Tensor | None = None

    @property
    def flat(self) -> torch.Tensor:
        """The buffer, flat, ``layout.total_size`` elements."""
        if self._flat is None:
            self._flat = self._pool.take(self._layout.total_size, self.dtype)
        return self._flat

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Take the gradient of tensor ``index``. Nobody else may write to it any more.

        Cost: nothing yet; where one is there already, or more may come, one copy or addition.
        """
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if index not in self._written and index not in self._apart:
            self._apart[index] = gradient
            if self._waits:
                self._collect()
            return
        self._collect()  # not in place: its memory may be part of another gradient's
        self._place(index).add_(gradient)

    def _collect(self) -> None:
        """Copy what lies apart into the buffer."""
        if self._apart:
            torch._foreach_copy_([self._place(k) for k in self._apart], list(self._apart.values()))
            self._written |= self._apart.keys()
            self._apart.clear()

    def add_product(self, index: int, left: torch.Tensor, right: torch.Tensor, turn: int) -> bool:
        """Take the gradient ``left @ right`` without a copy, or return False.

        A second one is added, as autograd sums the gradients of one backward (``turn``) before
        anybody sees them. What was there before that comes last in such a sum: then, and where
        the dtype differs, nothing is taken.
        """
        if self.dtype != left.dtype or index in self._apart:
            return False
        view = self._place(index)
        if index not in self._written:
            torch.mm(left, right, out=view)
            self._written.add(index)
            self._turns[index] = turn
        elif self._turns.get(index) == turn:
            view.add_(left.mm(right))
        else:
            return False
        return True

    def seal(self) -> torch.Tensor:
        """Zero what no gradient was written to, and return the flat buffer, ready to send.

        Cost: one copy of each gradient.
        """
        self._collect()
        for index in range(len(self._shapes)):
            if index not in self._written:
                self._part(index).zero_()
        for gap in self._gaps():
            gap.zero_()
        return self.flat

    def release(self) -> None:
        """Give the memory back, and whatever is in it."""
        self._apart.clear()
        if self._flat is not None:
            self._pool.give(self._flat)
            self._flat = None

    def _place(self, index: int) -> torch.Tensor:
        return self._part(index).view(self._shapes[index])

    def _part(self, index: int) -> torch.Tensor:
        start = self._layout.offsets[index]
        return self.flat[start : start + self._shapes[index].numel()]

    def _gaps(self) -> Iterator[torch.Tensor]:
        """The parts of the buffer that belong to no tensor, in order."""
        position = 0
        intervals = zip(self._layout.offsets, self._shapes, strict=True)
        for start, shape in sorted((s, shape) for s, shape in intervals if shape.numel()):
            if start > position:
                yield self.flat[position:start]
            position = start + shape.numel()
        if position < self._layout.total_size:
            yield self.flat[position:]

"""GradientBuffer: collects the local gradients of a group for the reduction.

Autograd's gradients are kept until the group is complete. Then each is copied once into the buffer,
with a cast to its dtype. So while a unit's backward runs, there is one copy of its gradients and no
buffer. If gradients accumulate over micro-batches, they are copied at once, and later ones are
added. A pool provides the memory until the reduction has ended. Gaps and tensors without a gradient
are zero when the buffer is sent. A `Packing` is the buffer's layout.

If gradients are sent in 8 bits, `Residuals` are the rounding errors, which are added to the next
gradients (``QuantizedReduce(error_feedback=True)``). They have the layout of the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vescale_fsdp.dbuffer.memory import Lasting, SlabPool
from vescale_fsdp.dbuffer.packing import Packing, Stretch


class GradientBuffer:
    """Local gradients of one group before the reduction, from its first gradient to `release`.

    Args:
        packing: the layout.
        shapes: global shape of each tensor, in the order of the packing.
        dtype: of the buffer, and so of messages if the reduction does not cast.
        pool: provides memory for ``packing.layout.total_size`` elements.
        waits: whether more gradients come in later backwards.
        memory: if the buffer itself becomes ``.grad``: provides its memory in place of the pool.
    """

    def __init__(
        self,
        packing: Packing,
        shapes: Sequence[torch.Size],
        dtype: torch.dtype,
        pool: SlabPool,
        *,
        waits: bool = False,
        memory: Lasting | None = None,
    ) -> None:
        self._packing, self._shapes, self._pool = packing, shapes, pool
        self.dtype, self._waits, self._memory = dtype, waits, memory
        self._apart: dict[int, torch.Tensor] = {}  # gradients as autograd made them
        self._written: set[int] = set()
        self._flat: torch.Tensor | None = None

    @property
    def becomes_grad(self) -> bool:
        """Whether the buffer itself becomes ``.grad``, and no pool lends its memory."""
        return self._memory is not None

    @property
    def flat(self) -> torch.Tensor:
        """The buffer, flat, ``packing.layout.total_size`` elements."""
        if self._flat is None:
            size = self._packing.layout.total_size
            if self._memory is None:
                self._flat = self._pool.take(size, self.dtype)
            else:
                self._flat = self._memory.take(size, self.dtype, self._pool.device)
        return self._flat

    def held(self) -> list[torch.Tensor]:
        """The tensors that it has now."""
        return [*self._apart.values(), *([] if self._flat is None else [self._flat])]

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Add the gradient of tensor ``index``. Other code must not write to it any more.

        Cost: none; one copy or addition if there is already one, or if more may come.
        """
        if gradient.is_sparse:
            gradient = gradient.to_dense()
        if index not in self._written and index not in self._apart:
            self._apart[index] = gradient
            if self._waits:
                self._collect()
            return
        self._collect()  # not in place: its memory may be part of another gradient's
        for place, part in self._pairs(index, gradient):
            place.add_(part)

    def add_all(self, gradients: dict[int, torch.Tensor]) -> None:
        """Add gradients of several tensors, as `add` does."""
        known = self._apart.keys() | self._written
        for index, gradient in gradients.items():
            if self._waits or index in known or gradient.is_sparse:
                self.add(index, gradient)
            else:
                self._apart[index] = gradient

    def _collect(self) -> None:
        """Copy separate gradients into the buffer. Adjacent ones are copied in one call."""
        places, parts, stretches_of = [], [], self._packing.stretches
        run: list[torch.Tensor] = []
        begin = end = 0
        for index in sorted(self._apart, key=self._packing.first_places.__getitem__):
            gradient = self._apart[index]
            stretches = stretches_of[index]
            if len(stretches) > 1 or gradient.dtype != self.dtype or not gradient.is_contiguous():
                for place, part in self._pairs(index, gradient):
                    places.append(place)
                    parts.append(part)
                continue
            if stretches[0].place != end:
                self._join(run, begin, end)
                run, begin = [], stretches[0].place
            run.append(gradient if gradient.dim() == 1 else gradient.view(-1))
            end = stretches[0].place + stretches[0].stop
        self._join(run, begin, end)
        if places:
            torch._foreach_copy_(places, parts)
        self._written |= self._apart.keys()
        self._apart.clear()

    def _join(self, parts: list[torch.Tensor], begin: int, end: int) -> None:
        if parts:
            torch.cat(parts, out=self.flat[begin:end])

    def _pairs(self, index: int, tensor: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return views of the buffer for tensor ``index``, each with its part of ``tensor``."""
        stretches = self._packing.stretches[index]
        if len(stretches) == 1:
            return [(self._at(stretches[0]).view(self._shapes[index]), tensor)]
        flat = tensor.reshape(-1)
        return [(self._at(each), flat[each.start : each.stop]) for each in stretches]

    def drop(self, index: int) -> None:
        """Drop the gradient of tensor ``index``, if there is one. It is sent as zeros."""
        self._apart.pop(index, None)
        self._written.discard(index)

    @property
    def is_empty(self) -> bool:
        """Whether it has no gradient."""
        return not (self._apart or self._written)

    def repack(self, packing: Packing) -> None:
        """Change the layout to ``packing``. It must contain all tensors that have gradients.

        Cost: a copy of gradients that are already in the buffer.
        """
        for index in self._written:
            whole = torch.empty(self._shapes[index], dtype=self.dtype, device=self._pool.device)
            for place, part in self._pairs(index, whole):
                part.copy_(place)
            self._apart[index] = whole
        self._written.clear()
        if self._flat is not None:
            self._pool.give(self._flat)
            self._flat = None
        self._packing = packing
        if self._waits:
            self._collect()

    def move(self, dtype: torch.dtype, pool: SlabPool) -> None:
        """Change the dtype, and the pool, which may be of another device. Gradients are kept.

        Cost: a copy of gradients that are already in the buffer.
        """
        if (dtype, pool) == (self.dtype, self._pool):
            return
        former, lender = self._flat, self._pool
        self.dtype, self._pool = dtype, pool
        self._apart = {index: each.to(pool.device) for index, each in self._apart.items()}
        if former is not None:
            self._memory = self._flat = None
            self.flat.copy_(former)
            lender.give(former)

    def seal(self) -> torch.Tensor:
        """Copy all gradients, set the rest to zero, and return the flat buffer, ready to send.

        Cost: one copy of each gradient.
        """
        self._collect()
        missing: list[int] = []
        if len(self._written) < len(self._shapes):
            missing = [index for index in range(len(self._shapes)) if index not in self._written]
        nothing = [self._at(each) for index in missing for each in self._packing.stretches[index]]
        nothing += [self.flat[start:stop] for start, stop in self._packing.gaps]
        if nothing:
            torch._foreach_zero_(nothing)
        return self.flat

    def release(self) -> None:
        """Return the memory to the pool."""
        self._apart.clear()
        if self._flat is not None:
            self._pool.give(self._flat)
            self._flat = None

    def _at(self, stretch: Stretch) -> torch.Tensor:
        return self.flat[stretch.place : stretch.place + stretch.stop - stretch.start]


class Residuals:
    """The rounding errors of this rank's gradients, float32.

    Memory: as many elements as the buffer, from the first reduction on.
    """

    def __init__(self, flat: torch.Tensor | None = None) -> None:
        self.flat = flat

    def copied(self) -> Residuals:
        """Return a copy, for a copy of the group."""
        return Residuals(None if self.flat is None else self.flat.clone())

    def of_sending(self, full: torch.Tensor) -> torch.Tensor:
        """Return the errors for the buffer ``full``, zero at first. A reduction updates them."""
        if self.flat is None:
            self.flat = torch.zeros(full.shape, dtype=torch.float32, device=full.device)
        return self.flat

    def move(self, packing: Packing, former: Packing) -> None:
        """Change the layout from ``former`` to ``packing``."""
        if self.flat is not None:
            self.flat = packing.moved(self.flat, former, range(packing.layout.num_shards))

    def by_parameter(
        self, packing: Packing, shapes: Sequence[torch.Size]
    ) -> dict[int, torch.Tensor]:
        """Return the errors of each parameter in the buffer; {} before the first reduction.

        They are views, or copies if a gradient has several stretches in the buffer.
        """
        flat = self.flat
        if flat is None:
            return {}
        found = {}
        for index, shape in enumerate(shapes):
            if packing.wanted[index]:
                stretches = packing.stretches[index]
                parts = [flat.narrow(0, each.place, each.stop - each.start) for each in stretches]
                whole = parts[0] if len(parts) == 1 else torch.cat([flat[:0], *parts])
                found[index] = whole.view(shape)
        return found

    def put(
        self, packing: Packing, values: Sequence[torch.Tensor | None], device: torch.device
    ) -> None:
        """Set the errors, one for each parameter. None: zero."""
        self.flat = None
        if all(value is None for value in values):
            return
        flat = torch.zeros(packing.layout.total_size, dtype=torch.float32, device=device)
        for index, value in enumerate(values):
            if value is not None and packing.wanted[index]:
                for start, stop, place in packing.stretches[index]:
                    flat.narrow(0, place, stop - start).copy_(value.reshape(-1)[start:stop])
        self.flat = flat

"""GradientBuffer: a group's local gradients on their way to the reduction.

Gradients stay where autograd made them until the group is complete; then each is copied once, with
the cast to the buffer's dtype, into its place. So while a unit's backward runs there are its
gradients once, and no buffer beside them. What waits for other micro-batches is copied as it
appears, and later gradients are added. Memory is lent by a pool until the reduction has been
finished. Gaps and tensors without a gradient are zero when it is sent. Where tensors lie, and which
of them, says a `Packing`.

Where gradients are sent in 8 bits, `Residuals` are what rounding has taken from them, to be added
to the next (``QuantizedReduce(error_feedback=True)``). They lie as gradients do in the buffer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vescale_fsdp.dbuffer.memory import SlabPool
from vescale_fsdp.dbuffer.packing import Packing, Stretch


class GradientBuffer:
    """Local, not yet reduced gradients of one group, from its first gradient to `release`.

    Args:
        packing: the place of each tensor.
        shapes: global shape of each tensor, in the order of the packing.
        dtype: of the buffer, and so of messages when the reduction does not cast.
        pool: lends ``packing.layout.total_size`` elements.
        waits: whether more gradients come in later backwards.
    """

    def __init__(
        self,
        packing: Packing,
        shapes: Sequence[torch.Size],
        dtype: torch.dtype,
        pool: SlabPool,
        *,
        waits: bool = False,
    ) -> None:
        self._packing, self._shapes, self._pool = packing, shapes, pool
        self.dtype, self._waits = dtype, waits
        self._apart: dict[int, torch.Tensor] = {}  # gradients as autograd made them
        self._written: set[int] = set()
        self._flat: torch.Tensor | None = None

    @property
    def flat(self) -> torch.Tensor:
        """The buffer, flat, ``packing.layout.total_size`` elements."""
        if self._flat is None:
            self._flat = self._pool.take(self._packing.layout.total_size, self.dtype)
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
        for place, part in self._pairs(index, gradient):
            place.add_(part)

    def _collect(self) -> None:
        """Copy what lies apart into the buffer; in one call what lies side by side there."""
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
        """The places of tensor ``index``, each with its part of ``tensor``."""
        stretches = self._packing.stretches[index]
        if len(stretches) == 1:
            return [(self._at(stretches[0]).view(self._shapes[index]), tensor)]
        flat = tensor.reshape(-1)
        return [(self._at(each), flat[each.start : each.stop]) for each in stretches]

    def repack(self, packing: Packing) -> None:
        """Let tensors lie in another way, as `packing` says. It has a place for all that is there.

        Cost: none for what lies apart, else a copy.
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

    def seal(self) -> torch.Tensor:
        """Zero what no gradient was written to, and return the flat buffer, ready to send.

        Cost: one copy of each gradient.
        """
        self._collect()
        missing = [index for index in range(len(self._shapes)) if index not in self._written]
        nothing = [self._at(each) for index in missing for each in self._packing.stretches[index]]
        nothing += [self.flat[start:stop] for start, stop in self._packing.gaps]
        if nothing:
            torch._foreach_zero_(nothing)
        return self.flat

    def release(self) -> None:
        """Give the memory back, and whatever is in it."""
        self._apart.clear()
        if self._flat is not None:
            self._pool.give(self._flat)
            self._flat = None

    def _at(self, stretch: Stretch) -> torch.Tensor:
        return self.flat[stretch.place : stretch.place + stretch.stop - stretch.start]


class Residuals:
    """Of this rank's own gradients, float32.

    Memory: as many elements as the buffer that is sent, from the first reduction on.
    """

    def __init__(self, flat: torch.Tensor | None = None) -> None:
        self.flat = flat

    def copied(self) -> Residuals:
        """For a copy of the group."""
        return Residuals(None if self.flat is None else self.flat.clone())

    def of_sending(self, full: torch.Tensor) -> torch.Tensor:
        """Those of the buffer ``full``, zero at first. What sends it writes to them."""
        if self.flat is None:
            self.flat = torch.zeros(full.shape, dtype=torch.float32, device=full.device)
        return self.flat

    def move(self, packing: Packing, former: Packing) -> None:
        """Gradients lie in another way from now on."""
        if self.flat is not None:
            self.flat = packing.moved(self.flat, former, range(packing.layout.num_shards))

    def by_parameter(
        self, packing: Packing, shapes: Sequence[torch.Size]
    ) -> dict[int, torch.Tensor]:
        """Of each parameter that has a place; nothing before the first reduction.

        Views, or copies where gradients lie in several stretches.
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
        """Go on with these, one for each parameter; zero where there is None."""
        self.flat = None
        if all(value is None for value in values):
            return
        flat = torch.zeros(packing.layout.total_size, dtype=torch.float32, device=device)
        for index, value in enumerate(values):
            if value is not None and packing.wanted[index]:
                for start, stop, place in packing.stretches[index]:
                    flat.narrow(0, place, stop - start).copy_(value.reshape(-1)[start:stop])
        self.flat = flat

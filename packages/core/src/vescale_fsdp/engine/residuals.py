"""Residuals: what rounding has taken from a group's gradients, to be added to the next.

With ``QuantizedReduce(error_feedback=True)``. They lie as gradients do in the buffer that is sent.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vescale_fsdp.dbuffer import Packing


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

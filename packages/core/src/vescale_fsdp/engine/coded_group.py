"""CodedGroup: parameters that stay codes and scales while they are gathered.

The full buffer holds codes, one byte for each element, at the places that the layout gives to the
elements; scales lie beside it. Forward sees a `QuantizedWeight` of each parameter. Gradients are
those of any group.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vescale_fsdp.dbuffer import Coding, KeptCodes
from vescale_fsdp.engine.group import Group
from vescale_fsdp.engine.parameter_buffer import ParameterBuffer
from vescale_fsdp.engine.quantized_weight import QuantizedWeight


class CodedGroup(Group):
    """A group of which every parameter travels in 8 bits, and is computed with so.

    Memory: while gathered, a byte for each element; always, 4 bytes for each block.
    """

    _has_views = False
    _narrowest = 1  # bytes: codes begin at multiples of 16, which products of codes need

    def _allocate(
        self, shapes: list[torch.Size], dtype: torch.dtype, device: torch.device
    ) -> ParameterBuffer:
        self._face_dtype = torch.uint8
        buffer = super()._allocate(shapes, dtype, device)
        self.codec = self._kept = KeptCodes(self.layout, self._codings(), self._compute_device)
        return buffer

    def _codings(self) -> Sequence[Coding]:
        return [coding for coding, _ in self.codings if coding is not None]

    def _make_gathered(self) -> None:
        if self.buffer.full_face is None:
            return
        for index, (coding, codes, scales) in enumerate(
            zip(self._codings(), self.buffer.full.views, self._kept.scales, strict=True)
        ):
            weight = QuantizedWeight(codes, scales, coding, self.buffer.full_dtype)
            self._set_gathered(index, weight)

    def write_back(self) -> None:
        """Nothing: a `QuantizedWeight` cannot be written to."""

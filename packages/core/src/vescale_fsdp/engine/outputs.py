"""Outputs: the results of an all-gather of FSDP2's extension hooks, and their memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from vescale_fsdp import devices
from vescale_fsdp.dbuffer import Comm, SlabPool, ThenCopy
from vescale_fsdp.dbuffer.memory import Region, make_region
from vescale_fsdp.ragged import contiguous_strides

_MESSAGE_ALIGNMENT = 16  # bytes: NCCL falls back to scalar copies below that

Kind = tuple[torch.Size, torch.dtype]  # of an input


class Outputs:
    """The results of an all-gather: one tensor per input, with the rows of all ranks.

    They have memory only between `start_gather` and `release`.
    """

    def __init__(self, kinds: Sequence[Kind], num_ranks: int, device: torch.device) -> None:
        self.kinds, self._device = list(kinds), device
        self.tensors: list[torch.Tensor] = []
        self._regions: list[Region] = []
        self._bytes: list[torch.Tensor] = []  # the same memory, [ranks, bytes of one input]
        for shape, dtype in kinds:
            num_bytes = shape.numel() * dtype.itemsize
            region = make_region(num_ranks * num_bytes, device)
            region.materialize()  # ``set_`` checks bounds
            rows = (num_ranks * shape[0], *shape[1:]) if shape else (num_ranks,)
            # Each with a version counter of its own, see `dbuffer.FlatBuffer`.
            self.tensors.append(_view(region, dtype, rows, device))
            self._bytes.append(_view(region, torch.uint8, (num_ranks, num_bytes), device))
            self._regions.append(region)
        self.release()

    @property
    def storages(self) -> set[int]:
        """Return the ``_cdata`` of each storage."""
        return {region.storage._cdata for region in self._regions}

    def release(self) -> None:
        """Free the memory. No all-gather may be running."""
        for region in self._regions:
            region.release()

    def start_gather(
        self, inputs: Sequence[torch.Tensor], comm: Comm, custom: Any, pool: SlabPool
    ) -> ThenCopy:
        """Start one all-gather of all inputs, as bytes.

        Cost: a single input is gathered in place. Several inputs are sent in one message, and one
        copy per input is made when the all-gather is waited for.
        """
        with devices.private_memory(self._device):
            for region in self._regions:
                region.materialize()
        sizes = [part.shape[1] for part in self._bytes]
        num_bytes = -(-sum(sizes) // _MESSAGE_ALIGNMENT) * _MESSAGE_ALIGNMENT
        in_place = sizes == [num_bytes]
        lent = None if in_place else pool.take(comm.size * num_bytes, torch.uint8)
        messages = self._bytes[0] if lent is None else lent.view(comm.size, num_bytes)
        columns = messages[:, : sum(sizes)].split(sizes, dim=1)
        for column, tensor in zip(columns, inputs, strict=True):
            column[comm.rank].copy_(tensor.contiguous().view(-1).view(torch.uint8))
        work = comm.start_gather_of_messages(messages, custom)

        def arrive() -> None:
            if lent is not None:
                for place, column in zip(self._bytes, columns, strict=True):
                    place.copy_(column)
                pool.give(lent)

        return ThenCopy(work, arrive)


def _view(
    region: Region, dtype: torch.dtype, shape: Sequence[int], device: torch.device
) -> torch.Tensor:
    view = torch.empty(0, dtype=dtype, device=device)
    return view.set_(region.storage, 0, tuple(shape), contiguous_strides(shape))

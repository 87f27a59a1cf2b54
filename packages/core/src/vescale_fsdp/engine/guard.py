"""The memory of unsharded parameters: outputs of all-gathers, and a guard against late reads.

`Outputs` has the results of an all-gather of FSDP2's extension hooks.

`Guard` makes reads of freed unsharded parameters an error, and detects writes to unsharded ones.
Autograd saves unsharded parameters, and compares their versions when a backward reads them. While
they have no memory, their versions are increased. So a read raises torch's error about a tensor
that was "modified by an inplace operation" (version 1073741824 or more), and never returns the
zeros that freed pages may have. When they are unsharded again, their versions are restored.

A write to them also increases their version, or, in the case of ``p.data = ...``, gives them other
memory.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch

from vescale_fsdp import compat
from vescale_fsdp.dbuffer import Comm, Region, SlabPool, ThenCopy, make_region
from vescale_fsdp.ragged import contiguous_strides

_MESSAGE_ALIGNMENT = 16  # bytes: NCCL falls back to scalar copies below that

Kind = tuple[torch.Size, torch.dtype]  # of an input


class Outputs:
    """The results of an all-gather: one tensor per input, with the rows of all ranks.

    They have memory only between `start_gather` and `release`.
    """

    def __init__(self, kinds: Sequence[Kind], num_ranks: int, device: torch.device) -> None:
        self.kinds = list(kinds)
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

    def release(self, *, keeps: bool = False) -> None:
        """Free the memory, or count as freed and ``keeps`` it. No all-gather may be running."""
        for region in self._regions:
            region.release(keeps=keeps)

    def start_gather(
        self, inputs: Sequence[torch.Tensor], comm: Comm, custom: Any, pool: SlabPool
    ) -> ThenCopy:
        """Start one all-gather of all inputs, as bytes.

        Cost: a single input is gathered in place. Several inputs are sent in one message, and one
        copy per input is made when the all-gather is waited for.
        """
        for region in self._regions:
            region.materialize()
        sizes = [part.shape[1] for part in self._bytes]
        num_bytes = -(-sum(sizes) // _MESSAGE_ALIGNMENT) * _MESSAGE_ALIGNMENT
        in_place = sizes == [num_bytes]
        taken = None if in_place else pool.take(comm.size * num_bytes, torch.uint8)
        messages = self._bytes[0] if taken is None else taken.view(comm.size, num_bytes)
        columns = messages[:, : sum(sizes)].split(sizes, dim=1)
        for column, tensor in zip(columns, inputs, strict=True):
            column[comm.rank].copy_(tensor.contiguous().view(-1).view(torch.uint8))
        work = comm.start_gather_of_messages(messages, custom)

        def arrive() -> None:
            if taken is not None:
                for place, column in zip(self._bytes, columns, strict=True):
                    place.copy_(column)
                pool.give(taken)

        return ThenCopy(work, arrive)


def _view(
    region: Region, dtype: torch.dtype, shape: Sequence[int], device: torch.device
) -> torch.Tensor:
    view = torch.empty(0, dtype=dtype, device=device)
    return view.set_(region.storage, 0, tuple(shape), contiguous_strides(shape))


FREED = 1 << 30  # added to the versions of parameters that have no memory


class Guard:
    """Watches parameters that get memory (`open`) and lose it (`close`)."""

    def __init__(self) -> None:
        self._opened: Sequence[torch.Tensor] = ()
        self._params: tuple[torch.Tensor, ...] = ()
        self._versions: tuple[int, ...] = ()
        self._raised: tuple[int, ...] = ()  # what those are while the memory is gone
        self._plain: list[torch.Tensor] = []  # those that have memory of their own
        self._places: list[int] = []  # where it is
        self._closed = False

    def open(self, params: Sequence[torch.Tensor]) -> None:
        """Call when these parameters have memory again. Restores their versions.

        Args:
            params: the same list object as long as they are the same.
        """
        same = params is self._opened
        if self._closed and same:
            compat.set_versions(self._params, self._versions)
        else:
            if not same:
                self._opened, self._params = params, tuple(params)
                self._plain = [param for param in params if not compat.is_wrapper(param)]
            self._versions = _versions_of(self._params)
        if not (same and self._is_in_place):  # all have moved together, or none
            self._places = self._places_now()
        self._closed = False

    def close(self, *, is_known: bool = False) -> None:
        """Call before the memory is freed. Increases the versions.

        Args:
            is_known: `saw_write` has just said that nobody has written to them.
        """
        if self._closed:
            return
        versions = self._versions if is_known else _versions_of(self._params)
        if versions != self._versions or len(self._raised) != len(versions):
            self._versions = versions
            self._raised = tuple([each + FREED for each in versions])
        compat.set_versions(self._params, self._raised)
        self._closed = True

    def outdate(self, indices: Collection[int]) -> None:
        """Raise versions: what a forward has saved of these is not what it would read now."""
        if not self._closed:
            now = enumerate(_versions_of(self._params))
            self._versions = tuple([each + (index in indices) for index, each in now])
            self._raised = ()
            compat.set_versions(self._params, self._versions)

    @property
    def saw_move(self) -> bool:
        """Whether one of them got other memory since `open`."""
        return not self._closed and self._places_now() != self._places

    @property
    def _is_in_place(self) -> bool:
        return not self._plain or self._plain[0].data_ptr() == self._places[0]

    def _places_now(self) -> list[int]:
        return [param.data_ptr() for param in self._plain]

    @property
    def saw_write(self) -> bool:
        """Whether an operator has written to them since `open`."""
        return not self._closed and _versions_of(self._params) != self._versions


def _versions_of(params: Sequence[torch.Tensor]) -> tuple[int, ...]:
    return tuple([param._version for param in params])

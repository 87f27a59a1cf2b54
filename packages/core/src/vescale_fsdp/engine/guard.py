"""The memory of unsharded parameters: outputs of all-gathers, and a guard against late reads.

`Outputs` has the results of an all-gather of FSDP2's extension hooks.

`Guard` makes reads of freed unsharded parameters an error, and detects writes to unsharded ones.
Autograd saves unsharded parameters, and compares their versions when a backward reads them. While
they have no memory, their versions are increased. So a read raises torch's error about a tensor
that was "modified by an inplace operation" (version 1073741824 or more), and never returns the
zeros that freed pages may have. When they are unsharded again, their versions are restored.

A write to them also increases their version, or, in the case of ``p.data = ...``, gives them other
memory.

Versions of sharded parameters do not show every write: fused and foreach kernels write without an
increase (torch 2.13). Parameters that stay unsharded are out of date after an optimizer's step. So
the steps on sharded parameters in this process are counted.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_post_hook

from vescale_fsdp import compat, devices
from vescale_fsdp.dbuffer import Comm, Region, SlabPool, ThenCopy, make_region
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


FREED = 1 << 30  # added to the versions of parameters that have no memory


class Guard:
    """Watches parameters that get memory (`open`) and lose it (`close`)."""

    def __init__(self) -> None:
        self._params: tuple[torch.Tensor, ...] = ()
        self._versions: tuple[int, ...] = ()
        self._raised: tuple[int, ...] = ()  # what those are while the memory is gone
        self._plain: list[torch.Tensor] = []  # those that have memory of their own
        self._places: list[int] = []  # where it is
        self._closed = False

    def open(self, params: Sequence[torch.Tensor]) -> None:
        """Call when these parameters have memory again. Restores their versions."""
        same = len(params) == len(self._params) and all(map(operator.is_, params, self._params))
        if self._closed and same:
            compat.set_versions(self._params, self._versions)
        else:
            if not same:
                self._params = tuple(params)
                self._plain = [param for param in params if not compat.is_wrapper(param)]
            self._versions = _versions_of(self._params)
        if not (same and self._is_in_place):  # all have moved together, or none
            self._places = self._places_now()
        self._closed = False

    def close(self) -> None:
        """Call before the memory is freed. Increases the versions."""
        if self._closed:
            return
        versions = _versions_of(self._params)
        if versions != self._versions or len(self._raised) != len(versions):
            self._versions = versions
            self._raised = tuple([each + FREED for each in versions])
        compat.set_versions(self._params, self._raised)
        self._closed = True

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


_num_steps = 0


def num_steps() -> int:
    """Return the number of steps so far of optimizers with at least one sharded parameter."""
    return _num_steps


def _count(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    # Others may be on one rank only, where the ranks would then disagree.
    global _num_steps
    params = (param for group in optimizer.param_groups for param in group["params"])
    _num_steps += any(isinstance(param, DTensor) for param in params)


register_optimizer_step_post_hook(_count)

"""NCCL connects before the first pass of a model, by the messages of a pass.

NCCL makes the connections of an algorithm (ring, tree, PAT, NVLS) when a communicator first uses
it, and keeps the host until all ranks have come to that collective. CUDA loads a kernel at its
first use, and may keep the host until kernels that run have ended. Within a pass the two are a
deadlock. Where ranks leave out units, one may issue a reduction before the next all-gather, and
another after it::

    rank 0    gather 1   reduction 1: its host waits for rank 1 to come
    rank 1    gather 1   gather 2, which rank 0 has still to issue   a new kernel: its host waits

Which algorithm NCCL takes depends on the collective, the dtype, the size and the machine. So a
message of one element connects what no real one uses. What a pass sends is sent once before it,
with its own sizes: rounded ones might take another algorithm.

Two things are not connected here: the all-gathers of parameters that gather themselves, whose sizes
are known in the first one only, and collectives that a user supplies.

``NCCL_RUNTIME_CONNECT=0`` connects all algorithms when a communicator is made. NCCL reads it once
in a process, perhaps before us, and for all communicators of the process; each then has memory
for algorithms that nobody uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack

import torch

from vescale_fsdp.backends import backend_name
from vescale_fsdp.dbuffer import Comm, Flags
from vescale_fsdp.devices import Waitable
from vescale_fsdp.engine.fsdp_param import flags_of
from vescale_fsdp.engine.group import Group
from vescale_fsdp.engine.unit import Unit


def connect(units: Iterable[Unit], comm_of: Callable[[Group], Comm], *, asks: bool) -> None:
    """Send zeros of the sizes of what a pass sends. Collective.

    Args:
        units: of a model, in an order that is the same on all ranks.
        comm_of: returns the communicators of a group.
        asks: whether ranks exchange which parameters were used.

    Cost: on NCCL one all-gather and one reduction for each unit that sends something else than
    those before it, also of other models. Memory as for one unit in a pass, which gets it
    afterwards. None with other backends.
    """
    by_comm: dict[int, list[Group]] = {}
    for unit in units:
        groups = [group for group in unit.groups if not group.is_on_meta]
        groups = [group for group in groups if connects_late(comm_of(group), group.pool.device)]
        comms = [comm_of(group) for group in groups]
        kinds = []
        for group, comm in zip(groups, comms, strict=True):
            gradients, trains = group.gradients, tuple(flags_of(group.fsdp_params))
            reduced = gradients.sum_dtype, gradients.divide_factor, gradients.only_sums
            sent = group.message(comm), group.layout.offsets, group.layout.total_size
            kinds.append((id(comm), sent, trains, reduced, repr(group.codings)))
            if any(trains):
                by_comm.setdefault(id(comm), []).append(group)
        kind = unit.num_parts, *kinds
        if groups and kind not in comms[0].connected:
            comms[0].connected.add(kind)
            _send(groups, comms, unit.num_parts)
    for groups in by_comm.values() if asks else ():
        comm, num_flags = comm_of(groups[0]), sum(len(group.fsdp_params) for group in groups)
        if num_flags not in comm.connected:
            comm.connected.add(num_flags)
            device = groups[0].pool.device
            Flags(torch.zeros(num_flags, dtype=torch.uint8, device=device), comm).finish()


def connects_late(comm: Comm, device: torch.device) -> bool:
    """Whether the backend connects ranks in their collectives, and not with the communicator."""
    return backend_name(comm.gather_group, device) == "nccl"


def _send(groups: list[Group], comms: list[Comm], num_parts: int) -> None:
    """Send as much as a unit of these groups, in operations as those of a pass.

    All is queued on the current stream, also what waits: so the memory can be dropped at once.
    """
    started: list[tuple[torch.Tensor, Waitable | None]] = []

    def gather(comm: Comm, dtype: torch.dtype, num_elements: int) -> None:
        full = torch.zeros(comm.size * num_elements, dtype=dtype, device=groups[0].pool.device)
        sends = comm.size > 1 and num_elements
        work = comm.all_gather(full, full.view(comm.size, -1)[comm.rank]) if sends else None
        started.append((full, work))

    with _together(groups, comms):
        for group, comm in zip(groups, comms, strict=True):
            message = group.message(comm)
            if message is not None:
                if group.axes.cuts_outside:  # over the replicas first
                    gather(comm.among_replicas, message[0], message[1] // comm.num_replicas)
                gather(comm, *message)
    for group, comm in zip(groups, comms, strict=True):
        if num_parts > 1 and group.message(comm) is not None:
            size = group.layout.total_size // num_parts
            gather(comm.neighbours(num_parts), group.buffer.full_dtype, size)
    for _, work in started:
        if work is not None:
            work.wait()
    started.clear()
    with _together(groups, comms):
        pairs = zip(groups, comms, strict=True)
        reductions = [group.gradients.rehearse(comm) for group, comm in pairs]
    for finish in reductions:
        finish()


def _together(groups: list[Group], comms: list[Comm]) -> ExitStack:
    """As `group.together`, on the current stream."""
    stack = ExitStack()
    if len(groups) > 1:
        for comm in {id(each): each for each in comms}.values():
            stack.enter_context(comm.together(groups[0].pool.device))
    return stack

"""The communication of a model that units share: small all-gathers, and reductions of gradients.

`SmallGathers` sends the small all-gathers of a pass, several in one message (see `program.order`).
`Reducing` decides which groups a backward reduces, and sets ``.grad`` of their parameters.

If no rank has a gradient for a parameter, its ``.grad`` stays None (`Usage`). With zeros instead,
momentum and weight decay would change the parameter. A rank knows only which parameters it has used
itself. So at the end of each backward that synchronizes, the ranks exchange one byte per parameter,
in parallel to the last reductions. A rank that has used all of its parameters ignores the result
(on an accelerator its host does not wait for it). Alternatives: docs/design/engine.md.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import torch

from vescale_fsdp import compat, transfers
from vescale_fsdp.dbuffer import (
    Comm,
    Flags,
    GatherMessage,
    hand_back,
    start_reduce_together,
)
from vescale_fsdp.engine.agreement import agree_on_frozen
from vescale_fsdp.engine.axes import Axes
from vescale_fsdp.engine.group import Fetched, Group, together
from vescale_fsdp.engine.reduce import Gradients
from vescale_fsdp.engine.unit import Unit
from vescale_fsdp.program import Bundles, Program, Reduction, Sendable, sendable_if_small


class _Part(NamedTuple):
    """The part of one unit in a message."""

    message: GatherMessage
    first: int  # of its buffers in the message
    version: list[list[int]]  # of what was sent


class SmallGathers:
    """The small all-gathers of a pass of a confirmed program, several in one message.

    Args:
        units: the model's units, by index.
        comm: the communicators of all units.
        small_bytes: units with at most this many bytes per rank are sent together.
        when_stale: called before a unit is gathered again, alone, because its parameters were
            written to since the message was sent.
    """

    def __init__(
        self,
        program: Program,
        units: Sequence[weakref.ref[Unit]],
        comm: Comm,
        when_stale: Callable[[Unit], object],
        *,
        small_bytes: float,
        in_backward: bool,
    ) -> None:
        self._units, self._comm, self._when_stale = units, comm, when_stale
        self._small_bytes, self._in_backward = small_bytes, in_backward
        self._parts: dict[int, _Part] = {}  # by unit
        self._bundles = Bundles(program, self._sendable_of)

    def _sendable_of(self, index: int) -> Sendable | None:
        unit = self._units[index]()
        if unit is None or (self._in_backward and unit.num_parts > 1):
            return None
        if not all(group.travels_plainly for group in unit.groups):
            return None
        buffers = [group.buffer for group in unit.groups]
        sizes = [each.layout.shard_size * each.full_dtype.itemsize for each in buffers]
        return sendable_if_small(sum(sizes), self._comm.size, None, self._small_bytes)

    def fetch(self, unit: Unit) -> list[Fetched] | None:
        """Start the all-gather of ``unit``. Returns a handle to wait for, for each group.

        None: the unit must be gathered alone.
        """
        together = self._bundles.send_with(unit.index)
        if together is None:
            return None
        if together:
            self._send(together)
        part, version = self._parts.pop(unit.index), unit.version
        if part.version == version:
            groups = enumerate(zip(unit.groups, version, strict=True), part.first)
            take = part.message.take
            return [Fetched(take(index, group.buffer), sent) for index, (group, sent) in groups]
        self._return(part, len(unit.groups))
        self._when_stale(unit)
        return None

    def _send(self, indices: list[int]) -> None:
        units = [unit for index in indices if (unit := self._units[index]()) is not None]
        groups = [group for unit in units for group in unit.groups]
        for group in groups:
            group.follow_conversions()
        self._comm.issued.subject = units[0].tag
        with compat.recorded("unshard", [group.unit_name for group in groups]):
            message = GatherMessage([group.buffer for group in groups], self._comm, groups[0].pool)
        first = 0
        for unit in units:
            self._parts[unit.index] = _Part(message, first, unit.version)
            first += len(unit.groups)

    def _return(self, part: _Part, num_buffers: int) -> None:
        part.message.wait()
        for _ in range(num_buffers):
            part.message.drop()

    def close(self) -> None:
        """End the pass. Waits also for messages that were not used."""
        while self._parts:
            index, part = self._parts.popitem()
            unit = self._units[index]()
            self._return(part, 0 if unit is None else len(unit.groups))


class Usage:
    """Exchanges between the ranks of one mesh which parameters were used in a backward.

    Args:
        groups: the groups that are reduced, in the same order on all ranks.
        comm: the communicators of these ranks.
        asks: whether parameters that no rank used get no gradient. If not, every trainable
            parameter gets one, and nothing is communicated.

    Cost: one `Flags` of one byte per parameter. Make it after all reductions of the backward were
    started, because the communicator keeps the order.
    """

    def __init__(self, groups: list[Group], comm: Comm, *, asks: bool) -> None:
        self._groups, self._asks = groups, asks
        self._used = [[fsdp_param.used for fsdp_param in group.fsdp_params] for group in groups]
        self._flags: Flags | None = None
        if asks and comm.size * comm.num_replicas > 1:
            flat = [flag for flags in self._used for flag in flags]
            device = groups[0].pool.device
            self._flags = Flags(transfers.from_host(flat, torch.uint8, device), comm)

    def finish(self) -> list[list[bool]]:
        """Return for each parameter of each group whether to set its gradient."""
        if not self._asks:
            return [[True] * len(flags) for flags in self._used]
        if self._flags is None:
            return self._used
        anywhere = self._flags.finish()
        if self._knows:
            return self._used
        flags = iter(anywhere.tolist())
        return [[bool(next(flags)) for _ in group] for group in self._used]

    @property
    def _knows(self) -> bool:
        """Whether this rank has used all parameters that may get a gradient."""
        return all(
            was_used or not is_wanted
            for group, flags in zip(self._groups, self._used, strict=True)
            for is_wanted, was_used in zip(group.gradients.wanted, flags, strict=True)
        )


class Reducing:
    """The reductions of one model, for each backward.

    Args:
        groups: the model's groups, in the same order on all ranks.
        axes: the axes of their meshes, in the same order on all ranks.
        comm: returns the communicators of a group's mesh.
        is_stalled: whether a rank has fallen behind in the current backward.
        asks: whether parameters that no rank used get no gradient (see `Usage`).
    """

    def __init__(
        self,
        groups: Sequence[Group],
        axes: Sequence[Axes],
        comm: Callable[[Group], Comm],
        is_stalled: Callable[[], bool],
        *,
        asks: bool,
    ) -> None:
        self._numbers = {id(group): number for number, group in enumerate(groups)}
        self._axes, self._comm, self._is_stalled, self._asks = axes, comm, is_stalled, asks
        self._frozen: dict[int, list[str]] = {}  # by group: what its last reduction left out
        self._usages: list[tuple[list[Group], Usage]] = []

    def due(
        self, units: Iterable[Unit], small_bytes: float, *, only_waiting: bool = False
    ) -> list[Reduction]:
        """Return the groups that this backward reduces, the last defined first.

        Args:
            only_waiting: those alone that may have gradients of earlier backwards, on any rank.

        Cost: none if the same parameters are frozen as in the backward before; else a round through
        the store, because the layout of buffers changes.
        """
        due: list[_Due] = []
        for unit in units:
            reduces = unit.requires_gradient_sync or unit.row.cuts_gradients
            for group in unit.groups:
                if only_waiting and not (unit.requires_gradient_sync and group.gradients.may_wait):
                    continue
                group.gradients.sums_replicas = unit.requires_all_reduce
                if group.gradients.settle(not reduces) and reduces:
                    item = _Due(self._numbers[id(group)], unit, group, self._is_stalled)
                    if small_bytes:
                        item.sendable = group.gradients.sendable(self._comm(group), small_bytes)
                    due.append(item)
        self._agree_on_frozen(due)
        return [*reversed(due)]

    def _agree_on_frozen(self, due: Iterable[_Due]) -> None:
        changed: list[str] = []
        for item in due:
            gradients = item.group.gradients
            names = [] if all(gradients.wanted) else gradients.left_out
            if names != self._frozen.get(item.number, []):
                self._frozen[item.number] = names
                changed.append(f"unit {item.unit.fqn!r} without {names}")
        if changed:
            for axes in self._axes:
                for each in axes.groups:
                    agree_on_frozen(changed, each)

    def start(self, batch: Sequence[Reduction]) -> None:
        """Start these reductions: of one unit, or of several in one message."""
        groups = _groups_of(batch)
        with compat.recorded("reduce", [group.unit_name for group in groups]):
            self._start(groups)

    def _start(self, groups: list[Group]) -> None:
        comms = [self._comm(group) for group in groups]
        if len(groups) > 1 and not groups[0].has_streams:
            _start_together([group.gradients for group in groups], comms[0])
            return
        with together(groups, comms):
            for group, comm in zip(groups, comms, strict=True):
                group.gradients.start_reduce(comm)

    def ask(self, due: Iterable[Reduction], *, gives_zeros: bool) -> None:
        """Start to exchange which parameters were used, for the groups on each mesh."""
        by_mesh: dict[object, list[Group]] = {_key(axes): [] for axes in self._axes}
        for group in _groups_of(due):
            if group.gradients.sums_replicas or group.axes.num_replicas == 1:
                by_mesh[_key(group.axes)].append(group)
        asks = self._asks and not gives_zeros
        self._usages = [
            (groups, Usage(groups, self._comm(groups[0]), asks=asks))
            for groups in by_mesh.values()
            if groups
        ]

    def forget(self) -> None:
        """End the exchanges of a backward whose gradients nobody wants any more."""
        usages, self._usages = self._usages, []
        for _, usage in usages:
            usage.finish()

    def publish(self, due: Iterable[Reduction], units: Iterable[Unit]) -> None:
        """Set the gradients of the sharded parameters."""
        reduced = _groups_of(due)
        for group in reduced:
            group.gradients.finish_sum()
        for unit in units:
            if unit.sets_gradients:  # an optimizer comes next
                unit.drop_copies()
        for pool in {id(group.pool): group.pool for group in reduced}.values():
            pool.trim()
        usages, self._usages = self._usages, []
        for groups, usage in usages:
            for group, flags in zip(groups, usage.finish(), strict=True):
                group.gradients.publish(flags)
                group.gradients.lane.join()
                if not group.fsdp_params[0].counts_writes:  # an optimizer may come next, unnoticed
                    group.num_writes += 1
        hand_back()


class _Due(Reduction):
    """A group that a backward reduces."""

    def __init__(
        self, number: int, unit: Unit, group: Group, is_stalled: Callable[[], bool]
    ) -> None:
        self.number, self.group, self._is_stalled = number, group, is_stalled
        self.unit: Unit = unit

    @property
    def has_gradients(self) -> bool:
        return self.group.gradients.are_waiting

    def finish(self) -> None:
        self.group.gradients.finish_reduce()

    def has_arrived(self) -> bool:
        return self.group.gradients.has_arrived(self._is_stalled)


def _groups_of(due: Iterable[Reduction]) -> list[Group]:
    return [item.group for item in due if isinstance(item, _Due)]


def _key(axes: Axes) -> tuple[object, object]:
    return axes.shard_ranks, axes.replica_ranks


def _start_together(several: Sequence[Gradients], comm: Comm) -> None:
    """Start the reductions of several groups in one message (`Gradients.sendable`)."""
    buffers = [each.sealed() for each in several]
    first = several[0]
    pendings = start_reduce_together(
        [buffer.flat for buffer in buffers],
        comm,
        first.sum_dtype,
        first.pool,
        first.divide_factor,
        only_sums=first.only_sums,
    )
    for each, buffer, pending in zip(several, buffers, pendings, strict=True):
        buffer.release()
        each.expect(buffer, pending, comm)

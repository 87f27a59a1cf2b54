"""Reducing: which groups a backward reduces, and what becomes ``.grad`` of their parameters."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from vescale_fsdp.dbuffer import Comm, hand_back, start_reduce_together
from vescale_fsdp.engine.axes import Axes
from vescale_fsdp.engine.fingerprint import agree_on_frozen
from vescale_fsdp.engine.group import Group, together
from vescale_fsdp.engine.reduce import Gradients
from vescale_fsdp.engine.unit import Unit
from vescale_fsdp.engine.usage import Usage
from vescale_fsdp.program.reductions import Reduction


class Reducing:
    """The reductions of one model, backward by backward.

    Args:
        groups: of the model, in an order that all ranks have.
        axes: of the meshes they are on, in an order that all ranks have.
        comm: the communicators of a group's mesh.
        is_stalled: whether a rank is behind in the backward that runs.
        asks: whether parameters that no rank used stay without a gradient (`Usage`).
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

    def due(self, units: Iterable[Unit], small_bytes: float) -> list[Reduction]:
        """What the backward that begins reduces, those that are defined last first.

        Cost: nothing while what is frozen is as in the backward before, else a round through the
        store, as buffers are laid out by that.
        """
        due: list[_Due] = []
        for unit in units:
            reduces = unit.requires_gradient_sync or unit.row.cuts_gradients
            for group in unit.groups:
                group.gradients.sums_replicas = unit.requires_all_reduce
                if group.gradients.settle(not reduces) and reduces:
                    item = _Due(self._numbers[id(group)], unit, group, self._is_stalled)
                    if small_bytes:
                        item.parcel = group.gradients.parcel(self._comm(group), small_bytes)
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
        """Issue these reductions: of one unit, or several that travel together."""
        groups = _groups_of(batch)
        comms = [self._comm(group) for group in groups]
        if len(groups) > 1 and not groups[0].has_streams:
            _start_together([group.gradients for group in groups], comms[0])
            return
        with together(groups, comms):
            for group, comm in zip(groups, comms, strict=True):
                group.gradients.start_reduce(comm)

    def ask(self, due: Iterable[Reduction], *, gives_zeros: bool) -> None:
        """Ask which parameters were used, of the groups to be published on each mesh."""
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

    def publish(self, due: Iterable[Reduction], units: Iterable[Unit]) -> None:
        """Set the gradients of the sharded parameters."""
        reduced = _groups_of(due)
        for group in reduced:
            group.gradients.finish_sum()
        for unit in units:
            if unit.requires_gradient_sync:  # an optimizer comes next
                unit.drop_copies()
        for pool in {id(group.pool): group.pool for group in reduced}.values():
            pool.trim()
        usages, self._usages = self._usages, []
        for groups, usage in usages:
            for group, flags in zip(groups, usage.finish(), strict=True):
                group.gradients.publish(flags)
                group.pool.lane.join()
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
    """Issue the reductions of several groups as one, in one message (`Gradients.parcel`)."""
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

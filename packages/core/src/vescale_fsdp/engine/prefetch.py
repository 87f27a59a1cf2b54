"""Prefetch: the gathers that are under way beside the unit that runs.

In a forward ``in_flight - 1`` gathers are ahead. In a backward one reduction shares that room with
them. Where there is room for one (``in_flight=2``) they take turns, so that beside the unit that
runs there is one buffer less: while the first half of its gradients appears the reduction before it
is under way, then it has landed, and the next gather is. Each has half of the unit's compute to
hide behind, and both together take of the network what they take in any case::

    compute      | backward of 5                 | backward of 4                 |
    on the way   | reduction of 6 | gather of 4  | reduction of 5 | gather of 3  |

After the last gather of a backward, and where nothing is gathered in it, reductions have all of it.

From ``in_flight=3`` on there is room for units beside the reduction. So many, ``in_flight - 2``,
stay gathered from the end of a forward on: its backward would gather them again at once.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Mapping, Sequence, Set
from typing import TYPE_CHECKING

from vescale_fsdp.dbuffer import plain_tensors
from vescale_fsdp.engine.order import Walk
from vescale_fsdp.engine.reductions import Reductions

if TYPE_CHECKING:
    from vescale_fsdp.engine.unit import Unit

__all__ = ["Prefetch"]

_MAX_KEPT = 8  # units that need no gather, and are passed over in looking for some that do


class Prefetch:
    """Starts the gathers of one model, those that somebody wants and those ahead of them.

    Args:
        units: of the model. Held weakly.
        index: of a unit in ``units``, by its ``id``.
        in_flight: units gathered at a time; in a backward less as many reductions as are under way.
    """

    def __init__(
        self, units: Sequence[weakref.ref[Unit]], index: Mapping[int, int], in_flight: int
    ) -> None:
        self._units, self._index, self._room = units, index, in_flight - 1
        self.ahead: set[int] = set()  # units that are gathered before anybody wants them
        # The unit that runs, and the elements of gradients that are missing until half are there.
        self._missing: tuple[weakref.ref[Unit], float] | None = None

    def start(self, unit: Unit, walk: Walk, reductions: Reductions | None) -> None:
        """Start the gather of ``unit``, and those that are to be under way beside it.

        Args:
            reductions: of the backward that ``walk`` is; None in a forward.
        """
        in_backward = reductions is not None
        unit.start_gather(in_backward=in_backward)
        self.ahead.discard(self._index[id(unit)])
        self._missing = None
        if walk.is_recording:
            return
        explicit = unit.backward_prefetch if in_backward else unit.forward_prefetch
        if explicit is not None:
            known = (self._index[id(each)] for each in explicit if id(each) in self._index)
            upcoming = [each for each in known if each not in walk.order.written]
            self._start_ahead(upcoming, len(explicit), in_backward=in_backward)
            return
        room = self._room
        if (
            reductions is not None
            and reductions.num_flying
            and _takes_turns(unit, walk, reductions)
        ):
            num_elements = sum(sum(group.sizes) for group in unit.groups)
            self._missing = weakref.ref(unit), num_elements / 2
            room -= reductions.num_flying
        self._start_ahead(walk.ahead(), room, in_backward=in_backward, walk=walk)

    def gradient_arrived(
        self, unit: Unit, num_elements: int, walk: Walk, reductions: Reductions
    ) -> None:
        """A gradient of ``unit`` was taken. When half are there, gathers may have their turn."""
        if self._missing is None or self._missing[0]() is not unit:
            return
        missing = self._missing[1] - num_elements
        self._missing = (self._missing[0], missing) if missing > 0 else None
        if self._missing is None:
            with plain_tensors():
                reductions.land(self._room - 1)
                room = self._room - reductions.num_flying
                self._start_ahead(walk.ahead(), room, in_backward=True, walk=walk)

    def _start_ahead(
        self, upcoming: Iterable[int], room: int, *, in_backward: bool, walk: Walk | None = None
    ) -> None:
        """Start the gathers of ``room`` units, if they are not there already.

        Along a ``walk`` none is passed over that this rank has still to gather: gathers are issued
        in the order of the walk.
        """
        for index in itertools.islice(upcoming, max(room, 0) + _MAX_KEPT):
            if room <= 0:
                break
            coming = self._units[index]()
            if coming is None or not coming.groups or coming.is_done:
                continue
            if in_backward and not coming.unshard_in_backward:
                continue
            if coming.is_sharded:
                coming.start_gather(in_backward=in_backward)
                self.ahead.add(index)
            elif index not in self.ahead:
                if walk is not None and (index in walk.ran or not coming.stays_on_all_ranks):
                    break  # in use here, and to be gathered once more when it has been released
                continue  # kept since its forward: nothing to fetch
            room -= 1

    def drop(self, but: Set[int] = frozenset()) -> None:
        """Release what was gathered on a prediction that did not come true, except ``but``."""
        for index in self.ahead - but:
            unit = self._units[index]()
            if unit is not None:
                unit.reshard()
        self.ahead &= but
        self._missing = None

    def forget(self) -> None:
        """Nothing is ahead any more."""
        self.ahead.clear()
        self._missing = None


def _takes_turns(unit: Unit, walk: Walk, reductions: Reductions) -> bool:
    """Whether gathers wait for reductions while the backward of ``unit`` runs.

    Not where nothing is left to gather; nor where there are no gradients of its size beside it,
    or one of them is most of it and so comes with half of the compute or later; nor on an
    accelerator, where compute would wait for the reduction; nor where a user has said how many
    reductions may be under way.
    """
    if walk.is_at_end or reductions.is_told:
        return False
    if any(group.has_streams or not group.trainable for group in unit.groups):
        return False
    sizes = [size for group in unit.groups for size in group.sizes]
    # A unit of no parameters of its own may run here too: there is nothing to take turns with.
    return 2 * max(sizes, default=1) <= sum(sizes)

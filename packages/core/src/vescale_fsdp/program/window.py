"""Limits what is under way, and prefetches the units after the one that runs.

In a forward ``in_flight - 1`` all-gathers are ahead. In a backward one reduction shares that room
with them. If there is room for one (``in_flight=2``) they alternate, so that one buffer less is
needed beside the unit that runs: during the first half of its gradients the reduction before it is
under way, and during the second half the next all-gather. Each overlaps with half of the unit's
compute, and the network sends the same bytes::

    compute      | backward of 5                     | backward of 4                     |
    under way    | reduction of 6 | all-gather of 4  | reduction of 5 | all-gather of 3  |

After the last all-gather of a backward, and if a backward unshards nothing, reductions use all of
the compute.

From ``in_flight=3`` on there is room for ``in_flight - 2`` units beside the reduction. So many stay
unsharded at the end of a forward, because its backward would unshard them again at once.

The numbers are one row for a model (`Policy`), made when it first runs.
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from vescale_fsdp.program.order import Walk
from vescale_fsdp.program.reductions import Reductions
from vescale_fsdp.program.residency import Lease, Residency


@dataclass(frozen=True)
class Policy:
    """Limits of what is under way beside the unit that runs.

    Attributes:
        unshards: all-gathers ahead, less a reduction under way where they alternate.
        reductions: under way while gradients of another group appear; 0: each is waited for.
        reductions_at_end: under way while another is copied when the backward has ended.
        stays: units that a forward leaves unsharded, as its backward unshards them first.
        alternates: whether the reduction before and the next all-gather share the room of one.
        small_bytes: neighbours of at most so much for each rank are sent in one message (`order`).
    """

    unshards: int
    reductions: int
    reductions_at_end: int
    stays: int
    alternates: bool
    small_bytes: float = 0


def policy_of(
    in_flight: int, told: Iterable[int | None], *, has_streams: bool, small_bytes: float = 0
) -> Policy:
    """Return the policy for the user's settings.

    Args:
        in_flight: as of ``fully_shard``.
        told: for each unit how many reductions may be under way; None: it was not told.
        has_streams: of the device. Without them the ranks' processes wait for what is under way,
            so all-gathers and reductions alternate.
        small_bytes: as of `Policy`, where there are no streams.
    """
    most = max((each for each in told if each is not None), default=None)
    reductions = min(in_flight - 1, 1) if most is None else most
    return Policy(
        unshards=in_flight - 1,
        reductions=reductions,
        # What a user says holds to the end.
        reductions_at_end=reductions if most is None else max(reductions - 1, 0),
        stays=max(in_flight - 2, 0),
        alternates=most is None and not has_streams,
        small_bytes=0 if has_streams else small_bytes,
    )


_MAX_KEPT = 8  # units that need no all-gather, and are passed over in looking for some that do


class Window:
    """Starts the all-gathers of one model: the next one, and prefetched ones."""

    def __init__(self, units: Sequence[weakref.ref[Residency]], policy: Policy) -> None:
        self._units, self.policy = units, policy
        # The unit that runs, and the elements of gradients that are missing until half are there.
        self._awaited: tuple[Residency, float] | None = None

    def start(self, unit: Residency, walk: Walk, reductions: Reductions | None) -> None:
        """Start the all-gather of ``unit``, and those that are to be under way beside it.

        Args:
            reductions: of the backward that ``walk`` is; None in a forward.
        """
        in_backward = reductions is not None
        unit.start_unshard(in_backward=in_backward)
        unit.leases.discard(Lease.AHEAD)
        self._awaited = None
        if not walk.program.is_confirmed:
            return
        listed = unit.prefetch_list(in_backward=in_backward)
        if listed is not None:
            upcoming = [each for each in listed if each not in walk.program.written]
            self._start_ahead(upcoming, len(listed), in_backward=in_backward)
            return
        room = self.policy.unshards
        if reductions is not None and reductions.num_flying and self._alternates(unit, walk):
            self._awaited = unit, sum(unit.sizes) / 2
            room -= reductions.num_flying
        self._start_ahead(walk.ahead(), room, in_backward=in_backward, walk=walk)

    def gradient_arrived(self, unit: Residency, num_elements: int) -> bool:
        """A gradient of ``unit`` was taken. Returns whether all-gathers have their turn now."""
        if self._awaited is None or self._awaited[0] is not unit:
            return False
        missing = self._awaited[1] - num_elements
        self._awaited = (unit, missing) if missing > 0 else None
        return self._awaited is None

    def take_turn(self, walk: Walk, reductions: Reductions) -> None:
        """Half of the gradients are there: let the reduction end, and start the next all-gather."""
        reductions.land(self.policy.unshards - 1)
        room = self.policy.unshards - reductions.num_flying
        self._start_ahead(walk.ahead(), room, in_backward=True, walk=walk)

    def _start_ahead(
        self, upcoming: Iterable[int], room: int, *, in_backward: bool, walk: Walk | None = None
    ) -> None:
        """Start the all-gathers of ``room`` units, if they are not there already.

        Along a ``walk`` none is passed over that this rank has still to make: all-gathers are
        issued in the order of the walk.
        """
        for index in itertools.islice(upcoming, max(room, 0) + _MAX_KEPT):
            if room <= 0:
                break
            coming = self._units[index]()
            if coming is None or not coming.sizes or coming.is_over:
                continue
            if in_backward and not coming.unshard_in_backward:
                continue
            if coming.is_sharded:
                coming.start_unshard(in_backward=in_backward)
                coming.leases.add(Lease.AHEAD)
            elif Lease.AHEAD not in coming.leases:
                if walk is not None and (index in walk.ran or not coming.stays_on_all_ranks):
                    break  # in use here, and to be unsharded once more when it has been freed
                continue  # kept since its forward: nothing to fetch
            room -= 1

    def drop(self, but: Iterable[int] = ()) -> None:
        """Free prefetched units that did not run, except ``but``."""
        for unit in (ref() for ref in self._units):
            if unit is not None and Lease.AHEAD in unit.leases and unit.index not in but:
                unit.release()
        self._awaited = None

    def forget(self) -> None:
        """Forget the gradients that were expected."""
        self._awaited = None

    def _alternates(self, unit: Residency, walk: Walk) -> bool:
        """Whether all-gathers wait for reductions while the backward of ``unit`` runs.

        Not where nothing is left to unshard; nor where there are no gradients of its size beside
        it, or one of them is most of it and so comes with half of the compute or later; nor on an
        accelerator, where compute would wait for the reduction; nor where a user has said how many
        reductions may be under way.
        """
        if walk.is_at_end or not self.policy.alternates or not unit.all_trainable:
            return False
        # A unit of no parameters of its own may run here too: there is nothing to alternate with.
        return 2 * max(unit.sizes, default=1) <= sum(unit.sizes)

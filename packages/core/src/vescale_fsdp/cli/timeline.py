"""The memory of one training step on one rank, event by event, in bytes.

It follows the engine (``engine/schedule``, ``engine/reduce``, ``dbuffer/collectives``) in a step
after the first, with the default ``in_flight=2``. F is a unit's gathered parameters, m shards in
the compute dtype; M its gradients as autograd makes them, one after the other; G the buffer that
they are copied to when the unit is complete (on NCCL in the reduce dtype); R what its reduction
needs on top: on gloo a buffer of G's size to receive in (less this rank's part, where it is long),
on NCCL nothing; g its reduced gradient, one shard, which stays as ``.grad``. For a root ``r`` and
blocks 1 to 4::

    forward of r    F_r F_1                                the root first, and a gather ahead
    forward of 1    F_r F_1 F_2
    forward of 2    F_r F_2 F_3                            F_1 was freed after its forward
    forward of 4    F_r F_4
    backward of r   F_r F_4      M_r                       M_r lives until the end
    backward of 4   F_r F_4 F_3  M_r M_4
      its end       F_r F_3      M_r M_4 G_4, then M_r G_4 R_4
    backward of 3   F_r F_3      M_r G_4 R_4 M_3           the reduction of 4 is under way
      from half on  F_r F_3 F_2  M_r g_4 M_3               it has landed: the gather's turn
      its end       F_r F_2      M_r g_4 M_3 G_3
    backward of 1   F_r F_1      M_r g_4 g_3 G_2 R_2 M_1         nothing is left to gather
    end                          g_4 g_3 g_2 G_1 R_1 M_r G_r, then R_r in place of M_r
    after           g_4 g_3 g_2 g_1 g_r

With ``in_flight=3`` F_4 stays from the forward of 4 on, and so on.

On NCCL gathers and reductions do not take turns: F_2 is there from the start of the backward of 3,
and G_4 and R_4 until its end; nor do they where one tensor is more than half of a unit. Gradients
of a unit come in the reverse of the order in which its tensors are defined.

What travels in 8 bits (M ranks send messages of c bytes) has M c in the place of F until it is
used, and both for the moment of decoding; c more stays from forward to backward, to be sent again.
Its reduction has 2 M c (less one c, where it is long) in the place of G and R.

All the time there are the shards and the optimizer's states. What a root has ahead of its blocks
(an embedding) gets its gradient last; here all of M_r is there from the start, as nothing says
which tensors these are. So the peak is a little too high where the blocks make it.

Not counted: activations; what the optimizer needs for a moment; memory that an allocator or a
communication library keeps for itself; gradients that autograd holds back because a tied weight is
used elsewhere too.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import compress, islice
from typing import NamedTuple

from vescale_fsdp.cli.settings import Backend, Dtype

__all__ = ["KINDS", "GroupMemory", "Peak", "Step", "UnitMemory", "run_step"]

GATHERED = "gathered parameters"
LOCAL = "gradients on their way"
REDUCING = "reductions"
REDUCED = "reduced gradients"
KEPT = "messages for backward"
MADE = "gradients"
KINDS = (GATHERED, KEPT, MADE, LOCAL, REDUCING, REDUCED)

# As in `dbuffer.exchange`, which loads torch: from there on a rank's own part stays where it is.
SHORTEST_EXCHANGE = 1 << 13


@dataclass(frozen=True)
class GroupMemory:
    """Sizes and dtypes of one group, per rank."""

    shard_elements: int
    num_shards: int
    tensors: tuple[int, ...]  # elements of each, in the order of their definition
    shard_dtype: Dtype
    compute_dtype: Dtype
    reduce_dtype: Dtype
    trainable: bool
    gather_message: int | None = None  # bytes of codes that a rank sends; None: its part as it is
    reduce_message: int | None = None  # and to each rank, of its gradients

    @property
    def gathered_message(self) -> int:
        """Bytes that a rank brings to a gather."""
        if self.gather_message is not None:
            return self.gather_message
        return self.shard_elements * self.compute_dtype.itemsize

    @property
    def elements(self) -> int:
        """Elements of its tensors, without gaps."""
        return sum(self.tensors)

    @property
    def full_bytes(self) -> int:
        """Bytes of the gathered parameters."""
        return self.shard_elements * self.num_shards * self.compute_dtype.itemsize

    @property
    def made_bytes(self) -> int:
        """Bytes of the gradients that autograd makes."""
        return self.elements * self.compute_dtype.itemsize

    @property
    def shard_bytes(self) -> int:
        """Bytes of the shard; of its gradient too."""
        return self.shard_elements * self.shard_dtype.itemsize


@dataclass(frozen=True)
class UnitMemory:
    """One unit of a model, in a place of the order in which forward runs them."""

    title: str
    groups: tuple[GroupMemory, ...]
    is_root: bool
    keeps: bool  # its gathered parameters stay from forward to backward

    @property
    def trainable(self) -> bool:
        """Whether any of its parameters wants a gradient."""
        return any(group.trainable for group in self.groups)


class Peak(NamedTuple):
    """The moment with the most bytes in buffers that come and go within a step."""

    num_bytes: int
    when: str  # such as "the backward of model.layers.0-31"
    parts: dict[str, int]  # bytes by kind; they sum to num_bytes


class Step(NamedTuple):
    """What a step needs."""

    peak: Peak
    forward_gathers: list[int]  # indices of units, in the order of their gathers
    backward_gathers: list[int]


def _backward_order(units: Sequence[UnitMemory]) -> list[int]:
    """The units that a backward visits: the root, then the others from the last one.

    Frozen units ahead of the first trainable one see no gradient.
    """
    trained = [index for index, unit in enumerate(units) if unit.trainable]
    if not trained:
        return []
    return [0, *range(len(units) - 1, max(trained[0], 1) - 1, -1)]


def run_step(
    units: Sequence[UnitMemory], backend: Backend, *, num_replicas: int = 1, in_flight: int = 2
) -> Step:
    """The gathers of one step, and the peak of the buffers that come and go in it.

    Args:
        units: in the order in which forward runs them, the root first (without groups, if it
            has no parameters of its own).
        backend: "gloo" reduces by all-to-all, "nccl" by reduce-scatter.
        num_replicas: of HSDP; reduced gradients are summed over them, in place.
        in_flight: as of ``fully_shard``.
    """
    return _Simulation(units, backend, num_replicas, in_flight).run()


class _Upcoming:
    """Of the units in an order, those that are gathered in it. O(1) for each that is asked for."""

    def __init__(self, order: Sequence[int], is_gathered: Iterable[bool]) -> None:
        self._gathered = [
            (place, index)
            for place, (index, wanted) in enumerate(zip(order, is_gathered, strict=True))
            if wanted
        ]
        self._start = 0

    def after(self, place: int) -> Iterator[int]:
        """Indices of units that come after ``place``, which never goes back from call to call."""
        while self._start < len(self._gathered) and self._gathered[self._start][0] <= place:
            self._start += 1
        for position in range(self._start, len(self._gathered)):
            yield self._gathered[position][1]


class _Simulation:
    """What the schedule does in one step, on sizes instead of tensors."""

    def __init__(
        self, units: Sequence[UnitMemory], backend: Backend, num_replicas: int, in_flight: int
    ) -> None:
        self._units, self._in_flight, self._num_replicas = units, in_flight, num_replicas
        self._by_all_to_all = backend == "gloo"
        self._max_reductions = min(in_flight - 1, 1)
        self._live: Counter[str] = Counter()
        self._total = 0
        self._peak = Peak(0, "the start", {})
        self._when = "the start"
        self._is_in_backward = self._is_at_end = False
        self._gathered: set[int] = set()
        self._decoded: set[int] = set()
        self._ahead: set[int] = set()
        self._gathers: list[int] = []
        self._flying: deque[GroupMemory] = deque()
        self._summing: list[GroupMemory] = []  # over replicas, until the end

    def run(self) -> Step:
        """Forward, then backward."""
        in_forward = range(len(self._units))
        upcoming = _Upcoming(in_forward, (bool(unit.groups) for unit in self._units))
        order = _backward_order(self._units)
        again = [bool(self._units[i].groups) and not self._units[i].keeps for i in order]
        stays = set(islice(compress(order, again), max(self._in_flight - 2, 0)))
        for index, unit in enumerate(self._units):
            self._when = f"the forward of {unit.title}"
            self._gather(index, upcoming.after(index))
            if not unit.is_root:
                self._end_forward(index, index in stays)
        self._end_forward(0, 0 in stays)
        forward_gathers, self._gathers = self._gathers, []
        self._is_in_backward = True
        upcoming = _Upcoming(order, again)
        for place, index in enumerate(order):
            self._backward(index, upcoming.after(place), is_late=self._is_late(index, order))
        self._when, self._is_at_end = "the end of the backward", True
        late = [index for index in reversed(order) if self._is_late(index, order)]
        for index in late:  # its backward has begun, and nothing else of it is to come
            self._release(index)
        for index in late:
            self._reduce(index)
        self._land(0)
        for group in self._summing:
            self._keep(group)
        assert self._live[REDUCING] == self._live[LOCAL] == 0, "all have landed"
        return Step(self._peak, forward_gathers, self._gathers)

    def _is_late(self, index: int, order: Sequence[int]) -> bool:
        """Whether the unit's inputs need no gradient, so that only the end completes it."""
        return index == 0 or (index == order[-1] and not self._units[0].trainable)

    def _end_forward(self, index: int, stays: bool) -> None:
        if not (stays or self._units[index].keeps):
            self._release(index)
        elif not self._is_in_backward:  # nobody will send them again
            self._drop(KEPT, self._message_bytes(index))

    def _backward(self, index: int, upcoming: Iterable[int], *, is_late: bool) -> None:
        unit = self._units[index]
        self._when = f"the backward of {unit.title}"
        self._start_gather(index)
        self._decode(index)
        self._ahead.discard(index)
        coming = list(islice(upcoming, self._in_flight - 1))
        takes_turns = bool(self._flying and coming) and self._takes_turns(unit)
        room = self._in_flight - 1 - (len(self._flying) if takes_turns else 0)
        self._gather_ahead(coming[:room])
        missing = sum(group.elements for group in unit.groups) / 2 if takes_turns else 0
        for group in reversed(unit.groups):
            for elements in reversed(group.tensors) if group.trainable else ():
                self._add(MADE, elements * group.compute_dtype.itemsize)
                if missing > 0 and (missing := missing - elements) <= 0:
                    self._land(self._in_flight - 2)
                    self._gather_ahead(coming[: self._in_flight - 1 - len(self._flying)])
        if not is_late:
            self._release(index)
            self._reduce(index)

    # Parameters

    def _gather(self, index: int, upcoming: Iterable[int]) -> None:
        self._start_gather(index)
        self._decode(index)
        self._ahead.discard(index)
        self._gather_ahead(islice(upcoming, self._in_flight - 1))

    def _gather_ahead(self, upcoming: Iterable[int]) -> None:
        for coming in upcoming:
            if coming not in self._gathered:
                self._start_gather(coming)
                self._ahead.add(coming)

    def _takes_turns(self, unit: UnitMemory) -> bool:
        """Whether its first gradients wait for no gather (`engine/prefetch`)."""
        sizes = [size for group in unit.groups for size in group.tensors]
        has_halves = 2 * max(sizes, default=0) <= sum(sizes)
        return self._by_all_to_all and has_halves and all(g.trainable for g in unit.groups)

    def _start_gather(self, index: int) -> None:
        if index not in self._gathered:
            self._gathered.add(index)
            self._gathers.append(index)
            if not self._is_in_backward:
                self._add(KEPT, self._message_bytes(index))
            for group in self._units[index].groups:
                self._add(GATHERED, group.gathered_message * group.num_shards)

    def _decode(self, index: int) -> None:
        """The messages become parameters."""
        if index not in self._decoded:
            self._decoded.add(index)
            for group in self._units[index].groups:
                if group.gather_message is not None:
                    self._add(GATHERED, group.full_bytes)
                    self._drop(GATHERED, group.gather_message * group.num_shards)

    def _message_bytes(self, index: int) -> int:
        return sum(group.gather_message or 0 for group in self._units[index].groups)

    def _release(self, index: int) -> None:
        self._gathered.remove(index)
        self._decoded.remove(index)
        self._drop(GATHERED, sum(group.full_bytes for group in self._units[index].groups))

    # Reductions

    def _reduce(self, index: int) -> None:
        for group in reversed(self._units[index].groups):
            if group.trainable:
                most = self._max_reductions
                self._land(most if self._is_at_end else max(most - 1, 0))
                self._add(LOCAL, self._local_bytes(group))
                self._drop(MADE, group.made_bytes)
                self._add(REDUCING, self._scratch_bytes(group))
                if group.reduce_message is not None:
                    self._drop(LOCAL, self._local_bytes(group))
                if not (self._sums_at_end(group) or self._hands_over(group)):
                    self._add(REDUCED, self._sum_bytes(group))
                self._flying.append(group)
                self._land(self._max_reductions)

    def _land(self, most: int) -> None:
        while len(self._flying) > most:
            group = self._flying.popleft()
            if self._sums_at_end(group):
                self._add(REDUCED, self._sum_bytes(group))
            if group.reduce_message is None:
                self._drop(LOCAL, self._local_bytes(group))
            else:  # what one rank has sent, decoded in fp32
                self._add(REDUCING, 4 * group.shard_elements)
                self._drop(REDUCING, 4 * group.shard_elements)
            self._drop(REDUCING, self._scratch_bytes(group))
            if self._hands_over(group):
                self._add(REDUCED, self._sum_bytes(group))
            if self._num_replicas > 1:
                self._summing.append(group)
            else:
                self._keep(group)

    def _keep(self, group: GroupMemory) -> None:
        """Cast the sum to the dtype of the shard."""
        if group.shard_dtype != group.reduce_dtype:
            self._add(REDUCED, group.shard_bytes)
            self._drop(REDUCED, self._sum_bytes(group))

    def _sums_at_end(self, group: GroupMemory) -> bool:
        by_all_to_all = self._by_all_to_all or group.reduce_message is not None
        return by_all_to_all and group.num_shards > 1

    def _hands_over(self, group: GroupMemory) -> bool:
        """Whether there is nothing to sum: what was collected becomes ``.grad`` as it is."""
        return not self._by_all_to_all and group.num_shards == 1

    def _scratch_bytes(self, group: GroupMemory) -> int:
        if group.num_shards == 1:
            return 0
        if group.reduce_message is not None:
            sent = group.reduce_message * group.num_shards
            return sent + self._received_bytes(sent, group.num_shards)
        if self._by_all_to_all:
            return self._received_bytes(group.full_bytes, group.num_shards)
        return 0

    def _received_bytes(self, sent: int, num_shards: int) -> int:
        own = sent // num_shards
        return sent - (own if own >= SHORTEST_EXCHANGE else 0)

    def _local_bytes(self, group: GroupMemory) -> int:
        if self._by_all_to_all:
            return group.full_bytes
        return self._sum_bytes(group) * group.num_shards  # cast as they are copied

    def _sum_bytes(self, group: GroupMemory) -> int:
        return group.shard_elements * group.reduce_dtype.itemsize

    # The account

    def _add(self, kind: str, num_bytes: int) -> None:
        self._live[kind] += num_bytes
        self._total += num_bytes
        if self._total > self._peak.num_bytes:
            self._peak = Peak(self._total, self._when, {k: n for k, n in self._live.items() if n})

    def _drop(self, kind: str, num_bytes: int) -> None:
        self._live[kind] -= num_bytes
        self._total -= num_bytes

"""Simulates one training step on one rank: its memory in bytes, and its time in seconds.

The engine's scheduler (`vescale_fsdp.program`) runs the step on units and groups that only count
bytes, as many as ``engine/reduce`` and ``dbuffer/collectives`` need, and seconds. The letters mean:

* F: a unit's unsharded parameters, m shards in the compute dtype
* M: its gradients from autograd, which come one after the other
* G: the buffer that M is copied to when all gradients of the unit are there (on NCCL in the reduce
  dtype)
* R: what the reduce-scatter needs in addition: on gloo a receive buffer of G's size (without this
  rank's part, if that is long), on NCCL nothing
* g: the reduced gradient, one shard, which stays as ``.grad``

Example with the default ``in_flight=2``, a root ``r`` and blocks 1 to 4::

    forward of r    F_r F_1                                the root first, with one prefetch
    forward of 1    F_r F_1 F_2
    forward of 2    F_r F_2 F_3                            F_1 was freed after its forward
    forward of 4    F_r F_4
    backward of r   F_r F_4      M_r                       M_r lives until the end
    backward of 4   F_r F_4 F_3  M_r M_4
      its end       F_r F_3      M_r M_4 G_4, then M_r G_4 R_4
    backward of 3   F_r F_3      M_r G_4 R_4 M_3           the reduce-scatter of 4 runs
      second half   F_r F_3 F_2  M_r g_4 M_3               it has ended: now the prefetch of 2
      its end       F_r F_2      M_r g_4 M_3 G_3
    backward of 1   F_r F_1      M_r g_4 g_3 G_2 R_2 M_1         no unit left to prefetch
    end                          g_4 g_3 g_2 G_1 R_1 M_r G_r, then R_r in place of M_r
    after           g_4 g_3 g_2 g_1 g_r

With ``in_flight=3``, F_4 stays after the forward of 4, and so on.

On NCCL, all-gather and reduce-scatter do not alternate: F_2 exists from the start of the backward
of 3, and G_4 and R_4 until its end. The same holds if one tensor is more than half of a unit. The
gradients of a unit come in the reverse order of its tensors.

In 8 bits, each of m ranks sends a message of c bytes. m c bytes replace F until the unit is used;
both exist during decoding. Another c bytes stay from forward to backward, to be sent again. The
reduce-scatter has 2 m c bytes (minus one c, if it is long) instead of G and R.

Shards and optimizer states exist all the time. A root's tensors that run before the blocks (an
embedding) get their gradients last. The simulation does not know which tensors these are, and
counts all of M_r from the start, so the peak is a little too high if it is in a block's backward.

With a `Trace` the events are those of the model's own step, in its order, and its
activations are added at each of them. Without it they are not counted.

With several micro-batches, the backwards before the last do not synchronize. There M is added to
local sums in the reduce dtype, as large as G; or, if the row of the table shards gradients, reduced
each time, and added to the shard of before. The root and units that are not resharded after forward
are not gathered again in backward; if the row replicates parameters, F is freed at the end of the
last backward.

Time: compute takes the seconds that it is told. A network takes one collective at a time. Without
streams, casts and copies are time of the processor; with them, what is before an all-gather runs
beside compute.

Not counted: temporary memory of the optimizer, memory that an allocator or a
communication library caches, and gradients that autograd keeps because a tied weight is also used
elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from vescale_fsdp.costs.account import (
    COMPUTE,
    COPIES,
    ENGINE,
    GATHERED,
    INNER,
    KEPT,
    LOCAL,
    MADE,
    RECOMPUTATION,
    REDUCED,
    REDUCING,
    Account,
    Clock,
    Peak,
)
from vescale_fsdp.costs.model import Event, Trace
from vescale_fsdp.costs.units import GroupCosts, How, UnitCosts
from vescale_fsdp.program import (
    Bundles,
    Executor,
    Names,
    Parcel,
    Passes,
    Program,
    Record,
    Reduction,
    Residency,
    policy_of,
)

# As in `dbuffer.transport`, which loads torch: a rank's own part of at least this size is not
# copied to the receive buffer.
SHORTEST_EXCHANGE = 1 << 13

SHARDS, REPLICAS, HOST = "shards", "replicas", "host"  # networks


class Step(NamedTuple):
    """The result of a simulated step."""

    peak: Peak
    forward_gathers: list[int]  # indices of units, in the order of their all-gathers
    backward_gathers: list[int]
    seconds: dict[str, float]  # by kind


def run_step(units: Sequence[UnitCosts], how: How, trace: Trace | None = None) -> Step:
    """Simulate one step.

    Args:
        units: in forward order, the root first (without groups if it has no parameters).
        how: the settings of the engine.
        trace: events of the model's own micro-batch, with its activations. None: units run once,
            in order, and activations are not counted.
    """
    return _Model(units, how).step(trace)


class _Call:
    """Stands for a forward in the autograd graph."""

    pass_number = 0


class _Unit(Residency):
    """A unit. Counts the bytes and the time of its parameters."""

    version = 0
    is_stale = has_streams = trainable = all_trainable = False  # the last three: see __init__

    def __init__(self, costs: UnitCosts, model: _Model) -> None:
        super().__init__()
        groups = costs.groups
        self.costs, self.has_streams = costs, model.has_streams
        self._account, self._model = model.account, model
        self.sizes = costs.sizes
        self.is_root, self.trainable = costs.is_root, costs.trainable
        self.all_trainable = all(group.trainable for group in groups)
        self.reshard_after_forward = not costs.keeps
        self.reshard_after_backward = model.how.row.cuts_parameters
        self.is_encoded = any(group.gather_message is not None for group in groups)
        self._message_bytes = sum(group.gather_message or 0 for group in groups)
        self._full_bytes = sum(group.full_bytes for group in groups)
        self._arrives: float | None = None  # None: it is sharded
        self._is_decoded = False
        self.backward_left_s = 0.0

    @property
    def is_sharded(self) -> bool:
        return self._arrives is None

    def start_unshard(self, *, in_backward: bool = False) -> None:
        if self._arrives is None and self.sizes:
            self._arrives = self._model.gather(self)
            if not in_backward:
                self._account.add(KEPT, self._message_bytes)
            for group in self.costs.groups:
                self._account.add(GATHERED, group.gathered_message * group.num_shards)

    def wait_for_unshard(self) -> None:
        """Decode the messages to parameters."""
        if self._arrives is not None:
            self._model.clock.wait(self._arrives)
        if not self._is_decoded:
            self._is_decoded = True
            for group in self.costs.groups:
                self._model.clock.spend(COPIES, group.seconds.decode_s)
                if group.gather_message is not None:
                    self._account.add(GATHERED, group.full_bytes)
                    self._account.drop(GATHERED, group.gather_message * group.num_shards)

    def keeps_no_message(self) -> None:
        self._account.drop(KEPT, self._message_bytes)

    def join_unshard(self) -> None: ...

    def park(self) -> None: ...

    def free(self) -> None:
        if self._arrives is not None:
            self._arrives, self._is_decoded = None, False
            self._account.drop(GATHERED, self._full_bytes)

    def free_but_part(self) -> None:
        self.free()


class _Group(Reduction):
    """A group. Counts the bytes and the time of its gradients."""

    has_gradients = False

    def __init__(self, number: int, unit: _Unit, group: GroupCosts, model: _Model) -> None:
        self.number, self.unit, self.of = number, unit, group
        self._account, self._model = model.account, model
        self._sum_bytes = group.inner_elements * group.reduce_dtype.itemsize
        # On NCCL gradients are cast when they are copied. With one rank there is nothing to sum,
        # and the copy becomes ``.grad``.
        self._hands_over = model.has_streams and group.num_shards == 1
        self._sums_at_end = group.num_shards > 1 and (
            not model.has_streams or group.reduce_message is not None
        )
        self._made_bytes = self._scratch_bytes = self._local_bytes = self._outer_bytes = 0
        self._waits = False  # for gradients of later micro-batches
        self._has_sums = self._has_gradient = self._is_used = False
        self._ends = 0.0
        size = group.inner_elements * group.compute_dtype.itemsize
        if not model.has_streams and group.num_shards > 1 and 0 < size <= model.how.small_bytes:
            self.parcel = Parcel(size, (group.compute_dtype, group.reduce_dtype))

    def settle(self, *, waits: bool) -> None:
        """A backward begins."""
        self._waits |= waits

    def add(self, num_elements: int, largest: int) -> None:
        """Autograd has made gradients, of which the largest has so many elements."""
        group = self.of
        self._is_used = True
        made = (largest if self._waits else num_elements) * group.compute_dtype.itemsize
        self._account.add(MADE, made)
        self._made_bytes += made
        if not self._waits:
            return
        if not self._has_sums:
            self._has_sums = True
            self._local_bytes = group.full_elements * group.reduce_dtype.itemsize
            self._account.add(LOCAL, self._local_bytes)
        self._model.clock.spend(COPIES, group.seconds.copy_s * num_elements / group.elements)

    def let_go(self) -> None:
        """Free what was added to sums."""
        if self._waits:
            self._account.drop(MADE, self._made_bytes)
            self._made_bytes = 0

    def start(self) -> float:
        """Start the reduction. Returns the seconds that its bytes take on the network."""
        group, account, times = self.of, self._account, self.of.seconds
        seconds = times.wide_reduce_s if self._has_sums else times.reduce_s
        if not self._has_sums:
            dtype = group.reduce_dtype if self._model.has_streams else group.compute_dtype
            self._local_bytes = group.full_elements * dtype.itemsize
            account.add(LOCAL, self._local_bytes)
            self._model.clock.spend(COPIES, times.copy_s)
        account.drop(MADE, self._made_bytes)
        self._made_bytes, self._waits, self._has_sums = 0, False, False
        message = group.reduce_message
        if group.num_shards > 1 and message is not None:
            whole = message * group.num_shards
            self._scratch_bytes = whole + _received_bytes(whole, group.num_shards)
        elif self._sums_at_end:
            self._scratch_bytes = _received_bytes(self._local_bytes, group.num_shards)
        account.add(REDUCING, self._scratch_bytes)
        if message is not None:
            account.drop(LOCAL, self._local_bytes)
        if not (self._sums_at_end or self._hands_over):
            account.add(REDUCED, self._sum_bytes)
        self._model.clock.spend(ENGINE, times.reduce_cpu_s)
        return seconds

    def expect(self, ends: float) -> None:
        """Set when the reduction that was started ends."""
        self._ends = ends

    def has_arrived(self) -> bool:
        return True

    def finish(self) -> None:
        group, account, model = self.of, self._account, self._model
        self._model.clock.wait(self._ends)
        if self._sums_at_end:
            account.add(REDUCED, self._sum_bytes)
        if group.reduce_message is None:
            account.drop(LOCAL, self._local_bytes)
        else:  # the message of one rank, decoded in fp32
            account.add(REDUCING, 4 * group.inner_elements)
            account.drop(REDUCING, 4 * group.inner_elements)
        account.drop(REDUCING, self._scratch_bytes)
        self._model.clock.spend(COPIES, group.seconds.sum_s)
        if self._hands_over:
            account.add(REDUCED, self._sum_bytes)
        if model.how.num_replicas == 1:
            self.keep()
            return
        if group.num_outer > 1:
            own = group.shard_elements * group.reduce_dtype.itemsize
            received = 0 if model.has_streams else _received_bytes(self._sum_bytes, group.num_outer)
            self._outer_bytes = own if model.has_streams else received
            account.add(REDUCING, self._outer_bytes)
        self._ends = self._model.clock.issue(REPLICAS, group.seconds.replica_s)
        model.summing.append(self)

    def finish_sum(self) -> None:
        """Wait for the sum over the replicas."""
        group, account = self.of, self._account
        self._model.clock.wait(self._ends)
        if group.num_outer > 1:
            own = group.shard_elements * group.reduce_dtype.itemsize
            account.add(REDUCED, own)
            account.drop(REDUCED, self._sum_bytes)
            account.drop(REDUCING, self._outer_bytes)
        self.keep()

    def keep(self) -> None:
        """Cast the sum to the dtype of the shard. Without a gradient on any rank there is none."""
        group, account = self.of, self._account
        sum_bytes = group.shard_elements * group.reduce_dtype.itemsize
        if not self._is_used:
            account.drop(REDUCED, sum_bytes)
            return
        if group.shard_dtype != group.reduce_dtype:
            account.add(REDUCED, group.shard_bytes)
            account.drop(REDUCED, sum_bytes)
        self._model.kept.append(self)
        if self._model.how.offload:  # the one before it has arrived there
            self._model.move(self)

    def publish(self) -> None:
        """It becomes ``.grad``, or is added to it."""
        self._is_used = False
        if self._model.how.offload:
            return
        if self._has_gradient:
            self._account.drop(REDUCED, self.of.shard_bytes)
        self._has_gradient = True

    def zero(self) -> None:
        """Drop ``.grad``."""
        if self._has_gradient:
            self._account.drop(REDUCED, self.of.shard_bytes)
        self._has_gradient = False


def _received_bytes(sent: int, num_shards: int) -> int:
    own = sent // num_shards
    return sent - (own if own >= SHORTEST_EXCHANGE else 0)


class _Model(Executor):
    """Runs the step of a model on one simulated rank."""

    def __init__(self, costs: Sequence[UnitCosts], how: How) -> None:
        self.how, self.has_streams = how, how.backend == "nccl"
        self.account, self.clock = Account(), Clock()
        self.gathers: list[int] = []
        self.summing: list[_Group] = []  # groups that are summed over replicas until the end
        self.kept: list[_Group] = []  # those that become ``.grad`` then
        self._moving: _Group | None = None  # to the host
        self._units = [_Unit(each, self) for each in costs]
        self._groups: dict[tuple[int, int], _Group] = {}  # by unit and place in it; trainable ones
        number = 0
        for index, unit in enumerate(self._units):
            for place, group in enumerate(unit.costs.groups):
                if group.trainable:
                    self._groups[index, place] = _Group(number, unit, group, self)
                number += 1
        self._has_inner = False  # whether shards were gathered over the outer axis
        self._inner_ends = 0.0
        self._bundles: Bundles | None = None
        self._sent: dict[int, float] = {}  # units that were sent with others
        names = ["", *(f"units.{number}" for number in range(1, len(costs)))]
        empty = {number for number, each in enumerate(costs) if not each.groups}
        policy = policy_of(
            how.in_flight, [], has_streams=self.has_streams, small_bytes=how.small_bytes
        )
        kinds = ["Unit"] * len(names)
        self._passes = Passes(
            self._units, Names(names, kinds, empty), self, policy, can_settle=True, trusts=True
        )
        trained = [index for index, unit in enumerate(self._units) if unit.trainable]
        # Backward does not reach frozen units before the first trainable one.
        self._first = max(trained[0], 1) if trained else len(costs)

    def step(self, trace: Trace | None) -> Step:
        """Simulate a step. With ``in_flight`` of 3 or more, or a trace, it is the second.

        In the first, the scheduler finds out which units stay unsharded for backward, and records
        the order of the trace.
        """
        for _ in range(1 if self.how.in_flight < 3 and trace is None else 2):
            for group in self._groups.values():
                group.zero()
            self.account.peak, self.account.when = Peak(0, "the start", {}), "the start"
            self.clock = Clock()
            gathers = self._micro_batches(trace)
        return Step(self.account.peak, *gathers, self.clock.seconds)

    def _micro_batches(self, trace: Trace | None) -> tuple[list[int], list[int]]:
        """Simulate those of a step. Returns the all-gathers of forwards and of backwards."""
        more, forwards, backwards = self.how.micro_batches - 1, list[int](), list[int]()
        for number in range(min(more, 2) + 1):
            is_last = number == min(more, 2)
            for unit in self._units:
                unit.requires_gradient_sync = is_last
            before = dict(self.clock.seconds)
            forward_gathers = self._micro_batch(trace)
            repeats = more - 1 if number == 1 and not is_last else 1  # the others are like this one
            for kind, seconds in [*self.clock.seconds.items()]:
                self.clock.spend(kind, (repeats - 1) * (seconds - before.get(kind, 0.0)))
            forwards += repeats * forward_gathers
            backwards += repeats * self.gathers
        return forwards, backwards

    def _micro_batch(self, trace: Trace | None) -> list[int]:
        self.gathers = []
        if trace is not None:
            return self._replay(trace)
        calls = self._forward()
        forward_gathers, self.gathers = self.gathers, []
        if any(unit.trainable for unit in self._units):
            self._backward(calls)
        return forward_gathers

    def _replay(self, trace: Trace) -> list[int]:
        """Simulate the events of a trace. Returns the all-gathers of its forward."""
        account, passes = self.account, self._passes
        calls: dict[int, _Call] = {}
        running: list[_Unit] = []
        forward_gathers: list[int] | None = None
        for moment in trace.moments:
            account.set_activations(moment.highest_bytes, moment.live_bytes)
            unit = self._units[moment.unit]
            if moment.event is Event.FORWARD:
                running.append(unit)
                account.when = f"the forward of {unit.costs.title}"
                unit.open_calls.add(calls.setdefault(moment.call, _Call()))
                passes.before_forward(unit, "forward", True)
            elif moment.event is Event.END_OF_FORWARD:
                self._compute_forward(unit)
                passes.after_forward(
                    unit, is_closed=not moment.takes_gradients, is_visited=moment.is_reachable
                )
                if not moment.is_reachable:
                    unit.open_calls.discard(calls[moment.call])
                running.remove(unit)
                if running:
                    account.when = f"the forward of {running[-1].costs.title}"
            elif moment.event is Event.BACKWARD:
                if forward_gathers is None:
                    forward_gathers, self.gathers = self.gathers, []
                    passes.begin_backward()
                running.append(unit)
                account.when = f"the backward of {unit.costs.title}"
                unit.enter_backward(calls[moment.call])
                passes.before_backward(unit)
                self._begin_backward(unit)
            elif moment.event is Event.GRADIENT:
                elements = moment.num_elements
                self._gradient(moment.unit, moment.group, elements, elements)
            elif moment.event is Event.END_OF_BACKWARD:
                self._end_compute(unit)
                if unit.leave_backward(calls[moment.call]):
                    passes.after_backward(unit)
                running.remove(unit)
                account.when = f"the backward of {running[-1].costs.title}"
        if forward_gathers is None:  # nothing is trained
            forward_gathers, self.gathers = self.gathers, []
        else:
            account.when = "the end of the backward"
            passes.end_backward()
        return forward_gathers

    # Compute

    def _compute_forward(self, unit: _Unit) -> None:
        self.clock.spend(COMPUTE, unit.costs.forward_s)
        self.clock.spend(ENGINE, unit.costs.engine_s[0])

    def _begin_backward(self, unit: _Unit) -> None:
        costs = unit.costs
        self.clock.spend(ENGINE, costs.engine_s[1])
        self.clock.spend(RECOMPUTATION, costs.recompute_s)
        unit.backward_left_s = costs.backward_s
        if costs.is_root:  # the head; the embedding comes last
            self._end_compute(unit)

    def _end_compute(self, unit: _Unit) -> None:
        self.clock.spend(COMPUTE, unit.backward_left_s)
        unit.backward_left_s = 0.0

    def _gradient(self, index: int, place: int, num_elements: int, largest: int) -> None:
        unit, group = self._units[index], self._groups[index, place]
        if unit.backward_left_s:
            seconds = unit.costs.backward_s * num_elements / max(sum(unit.sizes), 1)
            seconds = min(seconds, unit.backward_left_s)
            self.clock.spend(COMPUTE, seconds)
            unit.backward_left_s -= seconds
        group.add(num_elements, largest)
        if self._passes.window.gradient_arrived(unit, num_elements):
            self._passes.take_turn()
        group.let_go()

    # A model whose units run in order

    def _forward(self) -> list[_Call]:
        calls = [_Call() for _ in self._units]
        for unit, call in zip(self._units, calls, strict=True):
            self.account.when = f"the forward of {unit.costs.title}"
            unit.open_calls.add(call)
            self._passes.before_forward(unit, "forward", True)
            if unit.index:
                self._end_forward(unit)
        self._end_forward(self._units[0])
        return calls

    def _end_forward(self, unit: _Unit) -> None:
        self._compute_forward(unit)
        comes_back = unit.index == 0 or unit.index >= self._first
        self._passes.after_forward(unit, is_closed=self._is_late(unit), is_visited=comes_back)

    def _is_late(self, unit: _Unit) -> bool:
        """Whether its inputs require no gradient, so that it is complete at the end of backward."""
        root = self._units[0]
        return unit is root or (unit.index <= self._first and not root.trainable)

    def _backward(self, calls: Sequence[_Call]) -> None:
        self._passes.begin_backward()
        for index in (0, *range(len(self._units) - 1, self._first - 1, -1)):
            unit = self._units[index]
            self.account.when = f"the backward of {unit.costs.title}"
            unit.enter_backward(calls[index])
            self._passes.before_backward(unit)
            self._begin_backward(unit)
            for place, elements, largest in unit.costs.gradients:
                self._gradient(index, place, elements, largest)
            self._end_compute(unit)
            if not self._is_late(unit) and unit.leave_backward(calls[index]):
                self._passes.after_backward(unit)
        self.account.when = "the end of the backward"
        self._passes.end_backward()

    # Communication

    def gather(self, unit: _Unit) -> float:
        """Issue the all-gathers of a unit. Returns when they end."""
        self.gathers.append(unit.index)
        together = None if self._bundles is None else self._bundles.send_with(unit.index)
        if together is None:
            return self._gather_groups(unit.costs.groups)
        if together:
            groups = [g for index in together for g in self._units[index].costs.groups]
            ends = self._gather_groups(groups, is_one=True)
            self._sent.update(dict.fromkeys(together, ends))
        return self._sent.pop(unit.index)

    def _gather_groups(self, groups: Sequence[GroupCosts], *, is_one: bool = False) -> float:
        ends = 0.0
        is_one |= self.has_streams
        for number, group in enumerate(groups):
            times, is_new = group.seconds, number == 0 or not is_one
            cpu_s = times.gather_cpu_s + (times.collective_s if is_new else 0.0)
            self.clock.spend(ENGINE, cpu_s)
            if not self.has_streams:
                self.clock.wait(self._inner_ends)
                self.clock.spend(COPIES, times.cast_s)
            seconds = times.gather_s + (times.latency_s if is_new else 0.0)
            if group.num_shards > 1 or times.gather_s:
                ends = self.clock.issue(SHARDS, seconds, after=self._inner_ends)
        return ends

    def move(self, group: _Group) -> None:
        """Move a reduced gradient to the host. Its memory is free when the next one is there."""
        before, self._moving = self._moving, group
        if before is not None:
            self.account.drop(REDUCED, before.of.shard_bytes)
        group.expect(self.clock.issue(HOST, group.of.seconds.host_s))

    # Methods of an executor. All ranks are assumed to be equal.

    def settle(self, mine: Record, timeout_s: float | None) -> Record:
        return mine

    def compare(self, entries: Sequence[str], unit: Residency | None) -> None: ...

    def stall(self) -> None: ...

    def begin_pass(self, first: Residency) -> None:
        outer = [g for unit in self._units for g in unit.costs.groups if g.num_outer > 1]
        if outer and not self._has_inner:
            self._has_inner = True
            for group in outer:
                self.account.add(INNER, group.gathered_message)
                seconds = group.seconds.replica_gather_s
                self._inner_ends = self.clock.issue(REPLICAS, seconds)

    def begin_walk(self, program: Program, *, in_backward: bool) -> None:
        if self.how.small_bytes and not self.has_streams:
            self._bundles = Bundles(program, self._parcel_of)

    def _parcel_of(self, index: int) -> Parcel | None:
        unit = self._units[index]
        size = sum(group.gathered_message for group in unit.costs.groups)
        is_small = 0 < size <= self.how.small_bytes and not unit.is_encoded
        return Parcel(size, None) if is_small else None

    def end_walk(self) -> None:
        self._bundles = None
        self._sent.clear()

    def due(self) -> Sequence[Reduction]:
        found = []
        for group in self._groups.values():
            reduces = group.unit.requires_gradient_sync or self.how.row.cuts_gradients
            group.settle(waits=not reduces)
            if reduces:
                found.append(group)
        return found[::-1]

    def start_reductions(self, batch: Sequence[Reduction]) -> None:
        groups = [group for group in batch if isinstance(group, _Group)]
        is_one = self.has_streams or len(groups) > 1
        first = groups[0].of.seconds
        self.clock.spend(ENGINE, first.collective_s)
        seconds = sum(group.start() for group in groups)
        if not is_one or groups[0].of.num_shards > 1:
            seconds += first.latency_s
        ends = self.clock.issue(SHARDS, seconds) if seconds else self.clock.now
        for group in groups:
            group.expect(ends)

    def end_backward(self) -> None:
        for group in self.summing:
            group.finish_sum()
        if self._moving is not None:
            self.clock.wait(self._moving._ends)
            self.account.drop(REDUCED, self._moving.of.shard_bytes)
            self._moving = None
        for group in self.kept:
            group.publish()
        self.summing.clear()
        self.kept.clear()
        if self._has_inner and self._units[0].requires_gradient_sync:
            self._has_inner = False
            outer = [g for unit in self._units for g in unit.costs.groups if g.num_outer > 1]
            self.account.drop(INNER, sum(group.gathered_message for group in outer))

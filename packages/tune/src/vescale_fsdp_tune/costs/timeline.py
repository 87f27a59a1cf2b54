"""Simulates one training step on one rank: its memory in bytes, and its time in seconds.

The engine's scheduler says what it does at each event (`vescale_fsdp.program.rehearsal`). Units and
groups count the bytes that ``engine/reduce`` and ``dbuffer/collectives`` need for it, and seconds.
The letters mean:

* F: a unit's unsharded parameters, m shards in the compute dtype
* M: its gradients from autograd, which come one after the other; the engine takes those of the
  later half of its tensors together, and then the others
* G: the buffer that M is copied to when all gradients of the unit are there (on NCCL in the reduce
  dtype)
* R: what the reduce-scatter needs in addition: on gloo a receive buffer of G's size (without this
  rank's part, if that is long), on NCCL nothing
* g: the reduced gradient, one shard, which stays as ``.grad``; without streams its memory stays for
  the next step, if parameters are not sharded

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
of 3, and G_4 and R_4 until its end. The same holds if the first tensor is more than half of a unit.
The gradients of a unit come in the reverse order of its tensors.

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
from dataclasses import dataclass
from typing import NamedTuple

from vescale_fsdp.program import Sendable, sendable_if_small
from vescale_fsdp.program.rehearsal import Act, Action, Rehearsal, RehearsedUnit
from vescale_fsdp_tune.costs.account import (
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
from vescale_fsdp_tune.costs.model import Event, Trace
from vescale_fsdp_tune.costs.traces import runs_in_order
from vescale_fsdp_tune.costs.units import HOST, SHARDS, GroupCosts, How, UnitCosts

# As in `dbuffer.transport`, which loads torch: a rank's own part of at least this size is not
# copied to the receive buffer.
SHORTEST_EXCHANGE = 1 << 13
SMALLEST_LASTING = 1 << 14  # as in `dbuffer.memory`


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


@dataclass
class _Message:
    """An all-gather of several small units: its bytes, and how many have not taken their part."""

    num_bytes: int
    num_left: int


class _Model:
    """The step of a model on one simulated rank: memory and time of what the engine does."""

    def __init__(self, costs: Sequence[UnitCosts], how: How) -> None:
        self.how, self.has_streams = how, how.backend == "nccl"
        self.account, self.clock = Account(), Clock()
        self.gathers: list[int] = []
        self.summing: list[SimulatedGroup] = []
        self.kept: list[SimulatedGroup] = []
        self._moving: SimulatedGroup | None = None  # to the host
        self._moves_until = 0.0
        self._units = [SimulatedUnit(index, each, self) for index, each in enumerate(costs)]
        # Trainable ones, by unit and place in it, and by number.
        self._groups: dict[tuple[int, int], SimulatedGroup] = {}
        self._numbered: dict[int, SimulatedGroup] = {}
        number = 0
        for index, unit in enumerate(costs):
            for place, group in enumerate(unit.groups):
                if group.trainable:
                    made = SimulatedGroup(group, self)
                    self._groups[index, place] = self._numbered[number] = made
                number += 1
        self._synchronizes = True
        self._has_inner = False  # whether shards were gathered over the outer axis
        self._inner_ends: dict[int, float] = {}  # by unit
        self._sent: dict[int, float] = {}  # units that were sent with others
        self._messages: dict[int, _Message] = {}  # by unit that has not taken its part
        self._engine = Rehearsal(
            [self._rehearsed(unit) for unit in costs],
            in_flight=how.in_flight,
            has_streams=self.has_streams,
            reshards=how.row.cuts_parameters,
            reduces_always=how.row.cuts_gradients,
            sends_small=bool(how.small_bytes),
        )
        trained = [index for index, unit in enumerate(costs) if unit.trainable]
        # Backward does not reach frozen units before the first trainable one.
        self._first = max(trained[0], 1) if trained else len(costs)

    def _rehearsed(self, unit: UnitCosts) -> RehearsedUnit:
        groups, small = unit.groups, self.how.small_bytes
        is_plain = groups and not any(group.gather_message is not None for group in groups)

        def reduces(group: GroupCosts) -> Sendable | None:
            if self.has_streams or group.num_shards == 1:
                return None
            size = group.inner_elements * group.copied_dtype.itemsize
            kind = (group.copied_dtype, group.reduce_dtype)
            return sendable_if_small(size, group.num_shards, kind, small)

        size = sum(group.gathered_message for group in groups)
        most = max((group.num_shards for group in groups), default=1)
        return RehearsedUnit(
            sizes=unit.sizes,
            trainable=[group.trainable for group in groups],
            keeps=unit.keeps,
            gather=sendable_if_small(size, most, None, small) if is_plain else None,
            reduces=[reduces(group) for group in groups],
        )

    def step(self, trace: Trace | None) -> Step:
        """Simulate a step. With ``in_flight`` of 3 or more, or another order, it is the second.

        In the first, the scheduler finds out which units stay unsharded for backward, and records
        the order of the trace, if that is not the order of definition. So it is if the memory of
        gradients lasts from step to step.
        """
        is_known = trace is None or runs_in_order(trace)
        lasts = not (self.has_streams or self.how.row.cuts_parameters)
        is_like_others = self.how.in_flight < 3 and is_known and not lasts
        for _ in range(1 if is_like_others else 2):
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
            self._synchronizes = is_last
            self._engine.begin(synchronizes=is_last)
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
        self._forward()
        forward_gathers, self.gathers = self.gathers, []
        if any(unit.costs.trainable for unit in self._units):
            self._backward()
        return forward_gathers

    def _replay(self, trace: Trace) -> list[int]:
        """Simulate the events of a trace. Returns the all-gathers of its forward."""
        account, engine = self.account, self._engine
        takers: set[int] = set()  # calls with an input that wants a gradient
        begun: dict[int, int] = {}  # units, with the calls whose backwards run
        running: list[SimulatedUnit] = []
        forward_gathers: list[int] | None = None
        for moment in trace.moments:
            account.set_activations(moment.highest_bytes, moment.live_bytes)
            unit = self._units[moment.unit]
            if moment.event is Event.FORWARD:
                running.append(unit)
                account.when = f"the forward of {unit.costs.title}"
                self._do(engine.before_forward(unit.index, moment.call))
            elif moment.event is Event.END_OF_FORWARD:
                self._compute_forward(unit)
                done = engine.after_forward(
                    unit.index,
                    moment.call,
                    is_closed=not (moment.takes_gradients or unit.costs.trainable),
                    is_visited=moment.is_reachable,
                    is_reachable=moment.is_reachable,
                )
                self._do(done)
                if moment.takes_gradients:
                    takers.add(moment.call)
                running.remove(unit)
                if running:
                    account.when = f"the forward of {running[-1].costs.title}"
            elif moment.event is Event.BACKWARD:
                if forward_gathers is None:
                    forward_gathers, self.gathers = self.gathers, []
                    self._enter_backward()
                running.append(unit)
                account.when = f"the backward of {unit.costs.title}"
                self._do(engine.before_backward(unit.index, moment.call))
                self._begin_backward(unit)
                begun[unit.index] = moment.call
            elif moment.event is Event.GRADIENT:
                self._gradient(moment.unit, moment.group, moment.num_elements)
                # Without a gradient for an input, it ends with the last one of a parameter.
                if not unit.left and unit in running and begun[unit.index] not in takers:
                    self._end_backward(unit, begun[unit.index])
            elif moment.event is Event.END_OF_BACKWARD:
                self._end_backward(unit, moment.call)
                running.remove(unit)
                account.when = f"the backward of {running[-1].costs.title}"
        if forward_gathers is None:  # nothing is trained
            forward_gathers, self.gathers = self.gathers, []
        else:
            account.when = "the end of the backward"
            self._do(engine.finish_backward())
        return forward_gathers

    # Compute

    def _compute_forward(self, unit: SimulatedUnit) -> None:
        self.clock.spend(COMPUTE, unit.costs.forward_s)
        self.clock.spend(ENGINE, unit.costs.engine_s[0])

    def _begin_backward(self, unit: SimulatedUnit) -> None:
        costs = unit.costs
        self.clock.spend(ENGINE, costs.engine_s[1])
        self.clock.spend(RECOMPUTATION, costs.recompute_s)
        unit.backward_left_s = costs.backward_s
        unit.later_left, unit.left = costs.later_half, costs.trained
        if costs.is_root:  # the head; the embedding comes last
            self._end_compute(unit)

    def _end_compute(self, unit: SimulatedUnit) -> None:
        self.clock.spend(COMPUTE, unit.backward_left_s)
        unit.backward_left_s = 0.0

    def _end_backward(self, unit: SimulatedUnit, call: int) -> None:
        self._end_compute(unit)
        self._take(unit)
        self._do(self._engine.after_backward(unit.index, call))

    def _take(self, unit: SimulatedUnit) -> None:
        """A node of autograd gives the engine what has come of its gradients (`engine.gather`)."""
        for place, group in enumerate(unit.costs.groups):
            if group.trainable:
                self._groups[unit.index, place].let_go()

    def _gradient(self, index: int, place: int, num_elements: int) -> None:
        unit, group = self._units[index], self._groups[index, place]
        if unit.backward_left_s:
            seconds = unit.costs.backward_s * num_elements / max(sum(unit.costs.sizes), 1)
            seconds = min(seconds, unit.backward_left_s)
            self.clock.spend(COMPUTE, seconds)
            unit.backward_left_s -= seconds
        group.add(num_elements)
        unit.left -= num_elements
        if unit.later_left > 0:
            unit.later_left -= num_elements
            if unit.later_left <= 0:
                self._take(unit)
                self._do(self._engine.half_of_gradients(index))

    # A model whose units run in order

    def _forward(self) -> None:
        for unit in self._units:
            self.account.when = f"the forward of {unit.costs.title}"
            self._do(self._engine.before_forward(unit.index, unit.index))
            if unit.index:
                self._end_forward(unit)
        self._end_forward(self._units[0])

    def _end_forward(self, unit: SimulatedUnit) -> None:
        self._compute_forward(unit)
        index = unit.index
        comes_back = index == 0 or index >= self._first
        is_closed = not unit.costs.trainable and (index == 0 or not comes_back)
        done = self._engine.after_forward(index, index, is_closed=is_closed, is_visited=comes_back)
        self._do(done)

    def _backward(self) -> None:
        self._enter_backward()
        for index in (0, *range(len(self._units) - 1, self._first - 1, -1)):
            unit = self._units[index]
            self.account.when = f"the backward of {unit.costs.title}"
            self._do(self._engine.before_backward(index, index))
            self._begin_backward(unit)
            for place, elements in unit.costs.gradients:
                self._gradient(index, place, elements)
            if index:
                self._end_backward(unit, index)
        self.account.when = "the end of the backward"
        root = self._units[0]
        if root.costs.trainable:  # it was called first, so its nodes run last
            self._end_backward(root, 0)
        self._do(self._engine.finish_backward())

    def _enter_backward(self) -> None:
        waits = not (self._synchronizes or self.how.row.cuts_gradients)
        for group in self._groups.values():
            group.settle(waits=waits)
        self._do(self._engine.begin_backward())

    # What the engine does

    def _do(self, actions: Sequence[Action]) -> None:
        """Count the bytes and the seconds of what the engine does."""
        for act, index, items, in_backward in actions:
            if act is Act.GATHER:
                self._gather(self._units[index], items, in_backward=in_backward)
            elif act is Act.WAIT:
                self._units[index].wait()
                self._took(index)
            elif act is Act.DROP_MESSAGE:
                self._units[index].drop_message()
            elif act is Act.FREE:
                self._units[index].free()
            elif act is Act.REDUCE:
                self._reduce([self._numbered[number] for number in items])
            elif act is Act.FINISH:
                self._numbered[items[0]].finish()
            elif act is Act.BEGIN_PASS:
                self._gather_inner()
            elif act is Act.END_WALK:
                self._sent.clear()
                for left in [*self._messages]:
                    self._took(left)
            else:
                assert act is Act.END_BACKWARD, act
                self._finish_backward()

    # Communication

    def _gather(self, unit: SimulatedUnit, items: Sequence[int], *, in_backward: bool) -> None:
        self.gathers.append(unit.index)
        if len(items) == 1:
            ends = self._gather_units([unit])
        else:
            if items:
                units = [self._units[index] for index in items]
                ends = self._gather_units(units, is_one=True)
                self._sent.update(dict.fromkeys(items, ends))
                groups = [group for each in units for group in each.costs.groups]
                num_bytes = sum(group.gathered_message * group.num_shards for group in groups)
                message = _Message(num_bytes, len(units))
                self._messages.update(dict.fromkeys(items, message))
                self.account.add(GATHERED, message.num_bytes)
            ends = self._sent.pop(unit.index)
        unit.gather(ends, in_backward=in_backward)

    def _took(self, index: int) -> None:
        """A unit has its parameters. The last one frees the message that they were in."""
        message = self._messages.pop(index, None)
        if message is not None:
            message.num_left -= 1
            if not message.num_left:
                self.account.drop(GATHERED, message.num_bytes)

    def _gather_units(self, units: Sequence[SimulatedUnit], *, is_one: bool = False) -> float:
        ends, is_one = 0.0, is_one or self.has_streams
        inner_ends = max((self._inner_ends.get(unit.index, 0.0) for unit in units), default=0.0)
        for number, group in enumerate(group for unit in units for group in unit.costs.groups):
            times, is_new = group.seconds, number == 0 or not is_one
            cpu_s = times.gather_cpu_s + (times.collective_s if is_new else 0.0)
            self.clock.spend(ENGINE, cpu_s)
            if not self.has_streams:
                self.clock.wait(inner_ends)
                self.clock.spend(COPIES, times.cast_s)
            seconds = times.gather_s + (times.latency_s if is_new else 0.0)
            if group.num_shards > 1 or times.gather_s:
                ends = self.clock.issue(SHARDS, seconds, after=inner_ends)
        return ends

    def move(self, group: SimulatedGroup) -> None:
        """Move a reduced gradient to the host. Its memory is free when the next one is there."""
        before, self._moving = self._moving, group
        if before is not None:
            self.account.drop(REDUCED, before.of.shard_bytes)
        self._moves_until = self.clock.issue(HOST, group.of.seconds.host_s)

    def _gather_inner(self) -> None:
        """Gather shards over the outer axis, once in a step."""
        if self.how.num_outer > 1 and not self._has_inner:
            self._has_inner = True
            for unit in self._units:
                for group in unit.costs.groups:
                    self.account.add(INNER, group.gathered_message)
                    seconds = group.seconds.replica_gather_s
                    ends = self.clock.issue(self.how.replica_network, seconds)
                    self._inner_ends[unit.index] = ends

    def _reduce(self, groups: Sequence[SimulatedGroup]) -> None:
        is_one = self.has_streams or len(groups) > 1
        first = groups[0].of.seconds
        self.clock.spend(ENGINE, first.collective_s)
        num_sent = sum(group.sent_bytes for group in groups) if len(groups) > 1 else 0
        seconds = sum(group.start(0 if self.has_streams else num_sent) for group in groups)
        if num_sent and not self.has_streams:  # a copy of all, which are freed then
            self.account.add(LOCAL, num_sent)
            self.account.drop(LOCAL, num_sent)
        if not is_one or groups[0].of.num_shards > 1:
            seconds += first.latency_s
        ends = self.clock.issue(SHARDS, seconds) if seconds else self.clock.now
        for group in groups:
            group.expect(ends)

    def _finish_backward(self) -> None:
        for group in self.summing:
            group.finish_sum()
        if self._moving is not None:
            self.clock.wait(self._moves_until)
            self.account.drop(REDUCED, self._moving.of.shard_bytes)
            self._moving = None
        for group in self.kept:
            group.publish()
        self.summing.clear()
        self.kept.clear()
        if self._has_inner and self._synchronizes:
            self._has_inner = False
            groups = (group for unit in self._units for group in unit.costs.groups)
            self.account.drop(INNER, sum(group.gathered_message for group in groups))


class SimulatedUnit:
    """A unit. Counts the bytes and the time of its parameters."""

    def __init__(self, index: int, costs: UnitCosts, model: _Model) -> None:
        groups = costs.groups
        self.index, self.costs = index, costs
        self._account, self._model = model.account, model
        self._message_bytes = sum(group.gather_message or 0 for group in groups)
        # Without streams, parameters that are not sharded keep their memory from step to step.
        self._stays = not model.has_streams and not model.how.row.cuts_parameters
        lasting = sum(self._lasting_bytes(group) for group in groups)
        self._account.add(GATHERED, lasting)
        self._full_bytes = self._num_bytes - lasting
        self._arrives = 0.0
        self._is_decoded = False
        self.backward_left_s = 0.0
        self.later_left = self.left = 0  # elements of gradients that are to come in a backward

    @property
    def _num_bytes(self) -> int:
        return sum(0 if self._is_one(group) else group.full_bytes for group in self.costs.groups)

    def _is_one(self, group: GroupCosts) -> bool:
        return group.is_one and not self._model.how.offload

    def _lasting_bytes(self, group: GroupCosts) -> int:
        return group.full_bytes if self._stays and not self._is_one(group) else 0

    def gather(self, arrives: float, *, in_backward: bool) -> None:
        """Its all-gather is under way, and ends then."""
        self._arrives = arrives
        if not in_backward:
            self._account.add(KEPT, self._message_bytes)
        for group in self.costs.groups:
            if group.gather_message is not None:
                self._account.add(GATHERED, group.gather_message * group.num_shards)
            elif not self._is_one(group):
                self._account.add(GATHERED, group.full_bytes - self._lasting_bytes(group))

    def wait(self) -> None:
        """Wait for it, and decode the messages to parameters."""
        self._model.clock.wait(self._arrives)
        if not self._is_decoded:
            self._is_decoded = True
            for group in self.costs.groups:
                self._model.clock.spend(COPIES, group.seconds.decode_s)
                if group.gather_message is not None:
                    self._account.add(GATHERED, group.full_bytes - self._lasting_bytes(group))
                    self._account.drop(GATHERED, group.gather_message * group.num_shards)

    def drop_message(self) -> None:
        """No backward will send its message again."""
        self._account.drop(KEPT, self._message_bytes)

    def free(self) -> None:
        """Free the parameters."""
        self._is_decoded = False
        self._account.drop(GATHERED, self._full_bytes)


class SimulatedGroup:
    """A group. Counts the bytes and the time of its gradients."""

    def __init__(self, group: GroupCosts, model: _Model) -> None:
        self.of = group
        self._account, self._model = model.account, model
        self._sum_bytes = group.inner_elements * group.reduce_dtype.itemsize
        # With one rank there is nothing to sum, and the copy of the gradients becomes ``.grad``. On
        # NCCL they are cast when they are copied. On gloo the memory is used in the next step too.
        self._hands_over = model.has_streams and group.num_shards == 1
        how, is_cast = model.how, group.shard_dtype != group.reduce_dtype
        is_cast |= group.reduce_dtype.name == "float16"  # which is summed in fp32
        frees = how.row.cuts_parameters or how.row.cuts_gradients
        self._lasts = not (model.has_streams or frees or how.offload or is_cast)
        self._lasts &= group.reduce_message is None and group.shard_bytes >= SMALLEST_LASTING
        self._is_spare = self._is_under_way = False
        self._sums_at_end = group.num_shards > 1 and (
            not model.has_streams or group.reduce_message is not None
        )
        self._made_bytes = self._scratch_bytes = self._local_bytes = self._outer_bytes = 0
        self._waits = False  # for gradients of later micro-batches
        self._has_sums = self._has_gradient = self._is_used = False
        self._ends = 0.0

    @property
    def sent_bytes(self) -> int:
        """Of its gradients, which a message with others has a copy of."""
        dtype = self.of.reduce_dtype if self._has_sums else self.of.copied_dtype
        return self.of.full_elements * dtype.itemsize

    def settle(self, *, waits: bool) -> None:
        """A backward begins."""
        self._waits |= waits

    def add(self, num_elements: int) -> None:
        """Autograd has made gradients of so many elements."""
        group = self.of
        self._is_used = True
        made = num_elements * group.compute_dtype.itemsize
        self._account.add(MADE, made)
        self._made_bytes += made
        if not self._waits:
            return
        if not self._has_sums:
            self._has_sums = True
            self._local_bytes = group.full_elements * group.reduce_dtype.itemsize
            self._take_local()
        self._model.clock.spend(COPIES, group.seconds.copy_s * num_elements / group.elements)

    def _take_local(self) -> None:
        if self._is_spare and self.of.num_shards == 1:
            self._is_spare = False
            self._account.drop(REDUCED, self.of.shard_bytes)
        self._account.add(LOCAL, self._local_bytes)

    def let_go(self) -> None:
        """The engine has taken gradients, and frees those that it has added to sums."""
        if self._waits:
            self._account.drop(MADE, self._made_bytes)
            self._made_bytes = 0

    def start(self, num_sent: int = 0) -> float:
        """Start the reduction. Returns the seconds that its bytes take on the network.

        Args:
            num_sent: bytes of the message, if it is sent together with others.
        """
        group, account, times = self.of, self._account, self.of.seconds
        seconds = times.wide_reduce_s if self._has_sums else times.reduce_s
        if not self._has_sums:
            dtype = group.reduce_dtype if self._model.has_streams else group.copied_dtype
            self._local_bytes = group.full_elements * dtype.itemsize
            self._take_local()
            self._model.clock.spend(COPIES, times.copy_s)
        if group.num_shards == 1 and not self._model.has_streams:
            filled = group.reduce_dtype if self._has_sums else group.copied_dtype
            self._lasts = filled == group.reduce_dtype == group.shard_dtype
            self._hands_over = self._lasts
        account.drop(MADE, self._made_bytes)
        self._made_bytes, self._waits, self._has_sums = 0, False, False
        message = group.reduce_message
        if group.num_shards > 1 and message is not None:
            whole = message * group.num_shards
            self._scratch_bytes = whole + _received_bytes(whole, group.num_shards)
        elif self._sums_at_end:
            self._scratch_bytes = _received_bytes(self._local_bytes, group.num_shards, num_sent)
        account.add(REDUCING, self._scratch_bytes)
        if message is not None:
            account.drop(LOCAL, self._local_bytes)
        if not (self._sums_at_end or self._hands_over):
            account.add(REDUCED, self._sum_bytes)
        self._model.clock.spend(ENGINE, times.reduce_cpu_s)
        return seconds

    def expect(self, ends: float) -> None:
        """Set when the reduction that was started ends."""
        self._ends, self._is_under_way = ends, True
        if self.of.num_shards == 1:  # the sum over the replicas need not wait
            self.finish()

    def finish(self) -> None:
        """Wait for it, if it is under way."""
        group, account, model = self.of, self._account, self._model
        if not self._is_under_way:
            return
        self._is_under_way = False
        self._model.clock.wait(self._ends)
        if self._sums_at_end and not self._is_spare:
            account.add(REDUCED, self._sum_bytes)
        self._is_spare = False
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
        self._model.clock.spend(ENGINE, group.seconds.replica_cpu_s)
        self._ends = self._model.clock.issue(model.how.replica_network, group.seconds.replica_s)
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
            self._is_spare = self._lasts and not self._has_gradient
            if not self._is_spare:
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
        if self._has_gradient and self._lasts:
            self._is_spare = True
        elif self._has_gradient:
            self._account.drop(REDUCED, self.of.shard_bytes)
        self._has_gradient = False


def _received_bytes(sent: int, num_shards: int, in_message: int = 0) -> int:
    """The receive buffer for so many bytes, which may be a part of a message of more."""
    is_exchange = max(sent, in_message) // num_shards >= SHORTEST_EXCHANGE
    return sent - (sent // num_shards if is_exchange else 0)

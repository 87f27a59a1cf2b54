"""Simulates the memory of one training step on one rank, in bytes.

The engine's scheduler (`vescale_fsdp.program`) runs the step on units and groups that only count
bytes, as many as ``engine/reduce`` and ``dbuffer/collectives`` need. The letters mean:

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

Not counted: temporary memory of the optimizer, memory that an allocator or a
communication library caches, and gradients that autograd keeps because a tied weight is also used
elsewhere.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vescale_fsdp.costs.machine import Backend
from vescale_fsdp.costs.model import Dtype, Event, Trace
from vescale_fsdp.program import Executor, Names, Passes, Record, Reduction, Residency, policy_of

GATHERED = "unsharded parameters"
LOCAL = "gradients on their way"
REDUCING = "reductions"
REDUCED = "reduced gradients"
KEPT = "messages for backward"
MADE = "gradients"
ACTIVATIONS = "activations"
KINDS = (ACTIVATIONS, GATHERED, KEPT, MADE, LOCAL, REDUCING, REDUCED)

# As in `dbuffer.transport`, which loads torch: a rank's own part of at least this size is not
# copied to the receive buffer.
SHORTEST_EXCHANGE = 1 << 13


@dataclass(frozen=True)
class GroupMemory:
    """Sizes and dtypes of one group on one rank."""

    shard_elements: int
    num_shards: int
    tensors: tuple[int, ...]  # elements of each tensor, in the order of definition
    shard_dtype: Dtype
    compute_dtype: Dtype
    reduce_dtype: Dtype
    trainable: bool
    gather_message: int | None = None  # bytes that a rank sends in 8 bits; None: not encoded
    reduce_message: int | None = None  # the same for gradients, to each rank

    @property
    def gathered_message(self) -> int:
        """Bytes that a rank contributes to an all-gather."""
        if self.gather_message is not None:
            return self.gather_message
        return self.shard_elements * self.compute_dtype.itemsize

    @property
    def elements(self) -> int:
        """Elements of its tensors, without padding."""
        return sum(self.tensors)

    @property
    def full_bytes(self) -> int:
        """Bytes of the unsharded parameters."""
        return self.shard_elements * self.num_shards * self.compute_dtype.itemsize

    @property
    def shard_bytes(self) -> int:
        """Bytes of the shard, and also of its gradient."""
        return self.shard_elements * self.shard_dtype.itemsize


@dataclass(frozen=True)
class UnitMemory:
    """One unit at its position in forward order."""

    title: str
    groups: tuple[GroupMemory, ...]
    is_root: bool
    keeps: bool  # it stays unsharded from forward to backward

    @property
    def trainable(self) -> bool:
        """Whether any of its parameters requires a gradient."""
        return any(group.trainable for group in self.groups)


class Peak(NamedTuple):
    """The highest memory of buffers that are allocated and freed within a step."""

    num_bytes: int
    when: str  # such as "the backward of model.layers.0-31"
    parts: dict[str, int]  # bytes by kind; they sum to num_bytes


class Step(NamedTuple):
    """The result of a simulated step."""

    peak: Peak
    forward_gathers: list[int]  # indices of units, in the order of their all-gathers
    backward_gathers: list[int]


def run_step(
    units: Sequence[UnitMemory],
    backend: Backend,
    *,
    num_replicas: int = 1,
    in_flight: int = 2,
    trace: Trace | None = None,
) -> Step:
    """Simulate one step. Returns its all-gathers and its peak.

    Args:
        units: in forward order, the root first (without groups if it has no parameters).
        backend: "gloo" reduces by all-to-all, "nccl" by reduce-scatter.
        num_replicas: of HSDP. Reduced gradients are summed over them, in place.
        in_flight: as in ``fully_shard``.
        trace: events of the model's own step, with its activations. None: units run once, in
            order, and activations are not counted.
    """
    return _Model(units, backend, num_replicas, in_flight).step(trace)


class _Account:
    """The allocated bytes by kind, and the peak."""

    def __init__(self) -> None:
        self._live: Counter[str] = Counter()
        self._total = 0
        self.peak = Peak(0, "the start", {})
        self.when = "the start"
        self.gathers: list[int] = []

    def add(self, kind: str, num_bytes: int) -> None:
        self._live[kind] += num_bytes
        self._total += num_bytes
        if self._total > self.peak.num_bytes:
            self.peak = Peak(self._total, self.when, {k: n for k, n in self._live.items() if n})

    def drop(self, kind: str, num_bytes: int) -> None:
        self._live[kind] -= num_bytes
        self._total -= num_bytes

    def set_activations(self, highest: int, now: int) -> None:
        """Note the most activations since the last call, and those that are there now."""
        self.add(ACTIVATIONS, highest - self._live[ACTIVATIONS])
        self.drop(ACTIVATIONS, highest - now)

    def begin_step(self) -> None:
        self._live.clear()
        self._total, self.peak, self.gathers = 0, Peak(0, "the start", {}), []


class _Call:
    """Stands for a forward in the autograd graph."""

    pass_number = 0


class _Unit(Residency):
    """A unit. Counts the bytes of its parameters."""

    version = 0
    is_stale = has_streams = trainable = all_trainable = False  # the last three: see __init__

    def __init__(self, memory: UnitMemory, account: _Account, *, has_streams: bool) -> None:
        super().__init__()
        groups = memory.groups
        self.memory, self._account, self.has_streams = memory, account, has_streams
        self.sizes = [size for group in groups for size in group.tensors]
        self.is_root, self.trainable = memory.is_root, memory.trainable
        self.all_trainable = all(group.trainable for group in groups)
        self.reshard_after_forward = not memory.keeps
        self._message_bytes = sum(group.gather_message or 0 for group in groups)
        self._is_there = self._is_decoded = False

    @property
    def is_sharded(self) -> bool:
        return not self._is_there

    def start_unshard(self, *, in_backward: bool = False) -> None:
        if not self._is_there and self.sizes:
            self._is_there = True
            self._account.gathers.append(self.index)
            if not in_backward:
                self._account.add(KEPT, self._message_bytes)
            for group in self.memory.groups:
                self._account.add(GATHERED, group.gathered_message * group.num_shards)

    def wait_for_unshard(self) -> None:
        """Decode the messages to parameters."""
        if not self._is_decoded:
            self._is_decoded = True
            for group in self.memory.groups:
                if group.gather_message is not None:
                    self._account.add(GATHERED, group.full_bytes)
                    self._account.drop(GATHERED, group.gather_message * group.num_shards)

    def keeps_no_message(self) -> None:
        self._account.drop(KEPT, self._message_bytes)

    def join_unshard(self) -> None: ...

    def park(self) -> None: ...

    def free(self) -> None:
        if self._is_there:
            self._is_there = self._is_decoded = False
            self._account.drop(GATHERED, sum(group.full_bytes for group in self.memory.groups))

    def free_but_part(self) -> None:
        self.free()


class _Group(Reduction):
    """A group. Counts the bytes of its gradients."""

    has_gradients = False

    def __init__(self, number: int, unit: _Unit, group: GroupMemory, model: _Model) -> None:
        self.number, self.unit, self._group, self._model = number, unit, group, model
        self._account = model.account
        message, shards = group.reduce_message, group.num_shards
        self._sum_bytes = group.shard_elements * group.reduce_dtype.itemsize
        # On NCCL gradients are cast when they are copied. With one rank there is nothing to sum,
        # and the copy becomes ``.grad``.
        self._local_bytes = group.full_bytes if model.by_all_to_all else self._sum_bytes * shards
        self._hands_over = not model.by_all_to_all and shards == 1
        self._sums_at_end = shards > 1 and (model.by_all_to_all or message is not None)
        self._scratch_bytes = self._made_bytes = 0
        self._is_used = False  # in this backward
        if shards > 1 and message is not None:
            self._scratch_bytes = message * shards + _received_bytes(message * shards, shards)
        elif self._sums_at_end:
            self._scratch_bytes = _received_bytes(group.full_bytes, shards)

    def add(self, num_elements: int) -> None:
        """Autograd has made the gradient of one tensor."""
        num_bytes = num_elements * self._group.compute_dtype.itemsize
        self._made_bytes += num_bytes
        self._account.add(MADE, num_bytes)

    def start(self) -> None:
        group, account = self._group, self._account
        account.add(LOCAL, self._local_bytes)
        account.drop(MADE, self._made_bytes)
        self._made_bytes, self._is_used = 0, self._made_bytes > 0
        account.add(REDUCING, self._scratch_bytes)
        if group.reduce_message is not None:
            account.drop(LOCAL, self._local_bytes)
        if not (self._sums_at_end or self._hands_over):
            account.add(REDUCED, self._sum_bytes)

    def has_arrived(self) -> bool:
        return True

    def finish(self) -> None:
        group, account = self._group, self._account
        if self._sums_at_end:
            account.add(REDUCED, self._sum_bytes)
        if group.reduce_message is None:
            account.drop(LOCAL, self._local_bytes)
        else:  # the message of one rank, decoded in fp32
            account.add(REDUCING, 4 * group.shard_elements)
            account.drop(REDUCING, 4 * group.shard_elements)
        account.drop(REDUCING, self._scratch_bytes)
        if self._hands_over:
            account.add(REDUCED, self._sum_bytes)
        if self._model.num_replicas > 1:
            self._model.summing.append(self)
        else:
            self.keep()

    def keep(self) -> None:
        """Cast the sum to the dtype of the shard. Without a gradient on any rank there is none."""
        if not self._is_used:
            self._account.drop(REDUCED, self._sum_bytes)
        elif self._group.shard_dtype != self._group.reduce_dtype:
            self._account.add(REDUCED, self._group.shard_bytes)
            self._account.drop(REDUCED, self._sum_bytes)


def _received_bytes(sent: int, num_shards: int) -> int:
    own = sent // num_shards
    return sent - (own if own >= SHORTEST_EXCHANGE else 0)


class _Model(Executor):
    """Runs the step of a model on one simulated rank."""

    def __init__(
        self, memories: Sequence[UnitMemory], backend: Backend, num_replicas: int, in_flight: int
    ) -> None:
        self.by_all_to_all, self.num_replicas = backend == "gloo", num_replicas
        self.account = _Account()
        self.summing: list[_Group] = []  # groups that are summed over replicas until the end
        has_streams = not self.by_all_to_all
        self._units = [_Unit(each, self.account, has_streams=has_streams) for each in memories]
        self._groups: dict[tuple[int, int], _Group] = {}  # by unit and place in it; trainable ones
        number = 0
        for index, unit in enumerate(self._units):
            for place, group in enumerate(unit.memory.groups):
                if group.trainable:
                    self._groups[index, place] = _Group(number, unit, group, self)
                number += 1
        names = ["", *(f"units.{number}" for number in range(1, len(memories)))]
        empty = {number for number, each in enumerate(memories) if not each.groups}
        policy = policy_of(in_flight, [], has_streams=has_streams)
        kinds = ["Unit"] * len(names)
        self._passes = Passes(
            self._units, Names(names, kinds, empty), self, policy, can_settle=True, trusts=True
        )
        self._in_flight = in_flight
        trained = [index for index, unit in enumerate(self._units) if unit.trainable]
        # Backward does not reach frozen units before the first trainable one.
        self._first = max(trained[0], 1) if trained else len(memories)

    def step(self, trace: Trace | None) -> Step:
        """Simulate a step. With ``in_flight`` of 3 or more, or a trace, it is the second.

        In the first, the scheduler finds out which units stay unsharded for backward, and records
        the order of the trace.
        """
        for _ in range(1 if self._in_flight < 3 and trace is None else 2):
            self.account.begin_step()
            if trace is not None:
                forward_gathers = self._replay(trace)
                continue
            calls = self._forward()
            forward_gathers, self.account.gathers = self.account.gathers, []
            if any(unit.trainable for unit in self._units):
                self._backward(calls)
        return Step(self.account.peak, forward_gathers, self.account.gathers)

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
                account.when = f"the forward of {unit.memory.title}"
                unit.open_calls.add(calls.setdefault(moment.call, _Call()))
                passes.before_forward(unit, "forward", True)
            elif moment.event is Event.END_OF_FORWARD:
                passes.after_forward(
                    unit, is_closed=not moment.takes_gradients, is_visited=moment.is_reachable
                )
                if not moment.is_reachable:
                    unit.open_calls.discard(calls[moment.call])
                running.remove(unit)
                if running:
                    account.when = f"the forward of {running[-1].memory.title}"
            elif moment.event is Event.BACKWARD:
                if forward_gathers is None:
                    forward_gathers, account.gathers = account.gathers, []
                    passes.begin_backward()
                running.append(unit)
                account.when = f"the backward of {unit.memory.title}"
                unit.enter_backward(calls[moment.call])
                passes.before_backward(unit)
            elif moment.event is Event.GRADIENT:
                self._gradient(moment.unit, moment.group, moment.num_elements)
            elif moment.event is Event.END_OF_BACKWARD:
                if unit.leave_backward(calls[moment.call]):
                    passes.after_backward(unit)
                running.remove(unit)
                account.when = f"the backward of {running[-1].memory.title}"
        if forward_gathers is None:  # nothing is trained
            forward_gathers, account.gathers = account.gathers, []
        else:
            account.when = "the end of the backward"
            passes.end_backward()
        return forward_gathers

    def _gradient(self, unit: int, group: int, num_elements: int) -> None:
        self._groups[unit, group].add(num_elements)
        if self._passes.window.gradient_arrived(self._units[unit], num_elements):
            self._passes.take_turn()

    def _forward(self) -> list[_Call]:
        calls = [_Call() for _ in self._units]
        for unit, call in zip(self._units, calls, strict=True):
            self.account.when = f"the forward of {unit.memory.title}"
            unit.open_calls.add(call)
            self._passes.before_forward(unit, "forward", True)
            if unit.index:
                self._end_forward(unit)
        self._end_forward(self._units[0])
        return calls

    def _end_forward(self, unit: _Unit) -> None:
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
            self.account.when = f"the backward of {unit.memory.title}"
            unit.enter_backward(calls[index])
            self._passes.before_backward(unit)
            for place, group in reversed([*enumerate(unit.memory.groups)]):
                for elements in reversed(group.tensors) if group.trainable else ():
                    self._gradient(index, place, elements)
            if not self._is_late(unit) and unit.leave_backward(calls[index]):
                self._passes.after_backward(unit)
        self.account.when = "the end of the backward"
        self._passes.end_backward()

    # Methods of an executor. All ranks are assumed to be equal.

    def settle(self, mine: Record, timeout_s: float | None) -> Record:
        return mine

    def compare(self, entries: Sequence[str], unit: Residency | None) -> None: ...

    def stall(self) -> None: ...

    def due(self) -> Sequence[Reduction]:
        return [*self._groups.values()][::-1]

    def start_reductions(self, batch: Sequence[Reduction]) -> None:
        for group in batch:
            assert isinstance(group, _Group)
            group.start()

    def end_backward(self) -> None:
        for group in self.summing:
            group.keep()
        self.summing.clear()

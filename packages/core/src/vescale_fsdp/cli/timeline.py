"""The memory of one training step on one rank, event by event, in bytes.

The engine's own core (`vescale_fsdp.program`) runs the step, on units and groups that count bytes,
as ``engine/reduce`` and ``dbuffer/collectives`` need them. Here with the default ``in_flight=2``:
F is a unit's unsharded parameters, m shards in the compute dtype; M its gradients as autograd makes
them, one after the other; G the buffer that they are copied to when the unit is complete (on NCCL
in the reduce dtype); R what its reduction needs on top: on gloo a buffer of G's size to receive in
(less this rank's part, where it is long), on NCCL nothing; g its reduced gradient, one shard, which
stays as ``.grad``. For a root ``r`` and blocks 1 to 4::

    forward of r    F_r F_1                                the root first, and a gather ahead
    forward of 1    F_r F_1 F_2
    forward of 2    F_r F_2 F_3                            F_1 was freed after its forward
    forward of 4    F_r F_4
    backward of r   F_r F_4      M_r                       M_r lives until the end
    backward of 4   F_r F_4 F_3  M_r M_4
      its end       F_r F_3      M_r M_4 G_4, then M_r G_4 R_4
    backward of 3   F_r F_3      M_r G_4 R_4 M_3           the reduction of 4 is under way
      from half on  F_r F_3 F_2  M_r g_4 M_3               it is complete: now the all-gather
      its end       F_r F_2      M_r g_4 M_3 G_3
    backward of 1   F_r F_1      M_r g_4 g_3 G_2 R_2 M_1         nothing is left to gather
    end                          g_4 g_3 g_2 G_1 R_1 M_r G_r, then R_r in place of M_r
    after           g_4 g_3 g_2 g_1 g_r

With ``in_flight=3`` F_4 stays from the forward of 4 on, and so on.

On NCCL all-gathers and reductions do not alternate: F_2 is there from the start of the backward of
3, and G_4 and R_4 until its end; nor do they where one tensor is more than half of a unit.
Gradients of a unit come in the reverse of the order in which its tensors are defined.

What is sent in 8 bits (M ranks send messages of c bytes) has M c in the place of F until it is
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

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from vescale_fsdp.cli.model import Dtype
from vescale_fsdp.cli.settings import Backend
from vescale_fsdp.program import Executor, Names, Passes, Record, Reduction, Residency, policy_of

GATHERED = "unsharded parameters"
LOCAL = "gradients on their way"
REDUCING = "reductions"
REDUCED = "reduced gradients"
KEPT = "messages for backward"
MADE = "gradients"
KINDS = (GATHERED, KEPT, MADE, LOCAL, REDUCING, REDUCED)

# As in `dbuffer.transport`, which loads torch: from there on a rank's own part stays where it is.
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
    return _Model(units, backend, num_replicas, in_flight).step()


class _Account:
    """Bytes that are there now, by kind, and the most there were."""

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

    def begin_step(self) -> None:
        self._live.clear()
        self._total, self.peak, self.gathers = 0, Peak(0, "the start", {}), []


class _Call:
    """A forward, as the graph holds it."""

    pass_number = 0


class _Unit(Residency):
    """A unit's parameters, as bytes."""

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
        """The messages become parameters."""
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
    """A group's gradients, as bytes."""

    has_gradients = False

    def __init__(self, number: int, unit: _Unit, group: GroupMemory, model: _Model) -> None:
        self.number, self.unit, self._group, self._model = number, unit, group, model
        self._account = model.account
        message, shards = group.reduce_message, group.num_shards
        self._sum_bytes = group.shard_elements * group.reduce_dtype.itemsize
        # On NCCL they are cast as they are copied. One rank alone has nothing to sum there: what
        # was collected becomes ``.grad`` as it is.
        self._local_bytes = group.full_bytes if model.by_all_to_all else self._sum_bytes * shards
        self._hands_over = not model.by_all_to_all and shards == 1
        self._sums_at_end = shards > 1 and (model.by_all_to_all or message is not None)
        self._scratch_bytes = 0
        if shards > 1 and message is not None:
            self._scratch_bytes = message * shards + _received_bytes(message * shards, shards)
        elif self._sums_at_end:
            self._scratch_bytes = _received_bytes(group.full_bytes, shards)

    def start(self) -> None:
        group, account = self._group, self._account
        account.add(LOCAL, self._local_bytes)
        account.drop(MADE, group.made_bytes)
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
        else:  # what one rank has sent, decoded in fp32
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
        """Cast the sum to the dtype of the shard."""
        if self._group.shard_dtype != self._group.reduce_dtype:
            self._account.add(REDUCED, self._group.shard_bytes)
            self._account.drop(REDUCED, self._sum_bytes)


def _received_bytes(sent: int, num_shards: int) -> int:
    own = sent // num_shards
    return sent - (own if own >= SHORTEST_EXCHANGE else 0)


class _Model(Executor):
    """Runs a step of a model, unit by unit, with one rank that stands for all."""

    def __init__(
        self, memories: Sequence[UnitMemory], backend: Backend, num_replicas: int, in_flight: int
    ) -> None:
        self.by_all_to_all, self.num_replicas = backend == "gloo", num_replicas
        self.account = _Account()
        self.summing: list[_Group] = []  # over replicas, until the end
        has_streams = not self.by_all_to_all
        self._units = [_Unit(each, self.account, has_streams=has_streams) for each in memories]
        pairs = [(unit, group) for unit in self._units for group in unit.memory.groups]
        self._groups = [
            _Group(number, unit, group, self)
            for number, (unit, group) in enumerate(pairs)
            if group.trainable
        ]
        names = ["", *(f"units.{number}" for number in range(1, len(memories)))]
        empty = {number for number, each in enumerate(memories) if not each.groups}
        policy = policy_of(in_flight, [], has_streams=has_streams)
        kinds = ["Unit"] * len(names)
        self._passes = Passes(
            self._units, Names(names, kinds, empty), self, policy, can_settle=True, trusts=True
        )
        self._in_flight = in_flight
        trained = [index for index, unit in enumerate(self._units) if unit.trainable]
        # Frozen units ahead of the first trainable one see no gradient.
        self._first = max(trained[0], 1) if trained else len(memories)

    def step(self) -> Step:
        """A step; the second where the first finds out which units stay for its backward."""
        for _ in range(1 if self._in_flight < 3 else 2):
            self.account.begin_step()
            calls = self._forward()
            forward_gathers, self.account.gathers = self.account.gathers, []
            if any(unit.trainable for unit in self._units):
                self._backward(calls)
        return Step(self.account.peak, forward_gathers, self.account.gathers)

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
        """Whether its inputs need no gradient, so that only the end completes it."""
        root = self._units[0]
        return unit is root or (unit.index <= self._first and not root.trainable)

    def _backward(self, calls: Sequence[_Call]) -> None:
        self._passes.begin_backward()
        for index in (0, *range(len(self._units) - 1, self._first - 1, -1)):
            unit = self._units[index]
            self.account.when = f"the backward of {unit.memory.title}"
            unit.enter_backward(calls[index])
            self._passes.before_backward(unit)
            for group in reversed(unit.memory.groups):
                for elements in reversed(group.tensors) if group.trainable else ():
                    self.account.add(MADE, elements * group.compute_dtype.itemsize)
                    if self._passes.window.gradient_arrived(unit, elements):
                        self._passes.take_turn()
            if not self._is_late(unit) and unit.leave_backward(calls[index]):
                self._passes.after_backward(unit)
        self.account.when = "the end of the backward"
        self._passes.end_backward()

    # As an executor: every rank is like this one.

    def settle(self, mine: Record, timeout_s: float | None) -> Record:
        return mine

    def compare(self, entries: Sequence[str], unit: Residency | None) -> None: ...

    def stall(self) -> None: ...

    def due(self) -> Sequence[Reduction]:
        return self._groups[::-1]

    def start_reductions(self, batch: Sequence[Reduction]) -> None:
        for group in batch:
            assert isinstance(group, _Group)
            group.start()

    def end_backward(self) -> None:
        for group in self.summing:
            group.keep()
        self.summing.clear()

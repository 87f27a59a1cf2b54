"""Units and groups of a simulated rank: they count bytes and seconds (`timeline`)."""

from __future__ import annotations

from typing import Protocol

from vescale_fsdp_tune.costs.account import (
    COPIES,
    ENGINE,
    GATHERED,
    KEPT,
    LOCAL,
    MADE,
    REDUCED,
    REDUCING,
    Account,
    Clock,
)
from vescale_fsdp_tune.costs.units import GroupCosts, How, UnitCosts

# As in `dbuffer.transport`, which loads torch: a rank's own part of at least this size is not
# copied to the receive buffer.
SHORTEST_EXCHANGE = 1 << 13
SMALLEST_LASTING = 1 << 14  # as in `dbuffer.memory`


class Rank(Protocol):
    """The rank that has them."""

    how: How
    has_streams: bool
    account: Account
    clock: Clock
    summing: list[SimulatedGroup]  # groups that are summed over replicas until the end
    kept: list[SimulatedGroup]  # those that become ``.grad`` then

    def move(self, group: SimulatedGroup) -> None:
        """Move a reduced gradient to the host."""


class SimulatedUnit:
    """A unit. Counts the bytes and the time of its parameters."""

    def __init__(self, index: int, costs: UnitCosts, model: Rank) -> None:
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

    def __init__(self, group: GroupCosts, model: Rank) -> None:
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

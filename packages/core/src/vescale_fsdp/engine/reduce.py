"""Gradients of a group, from autograd to ``.grad`` of its sharded parameters.

::

    settle         a backward begins: parameters that are frozen now get no place in the buffer
    add            a gradient of this rank is added to the flat buffer
    start_reduce   the buffer is reduce-scattered over the ranks that shard
    finish_reduce  with replicas: the shard is all-reduced over them, unless that is postponed
    finish_sum     the result is added to those of earlier reductions in this backward
    publish        the shard's parts become ``.grad``, or are added to it
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from vescale_fsdp import compat, devices, transfers
from vescale_fsdp.dbuffer import (
    SMALLEST_LASTING,
    Comm,
    GradientBuffer,
    Lasting,
    Packing,
    ParameterBuffer,
    PendingReduce,
    Residuals,
    SharedReduce,
    SlabPool,
    on_lane,
)
from vescale_fsdp.engine.fsdp_param import FSDPParam, flags_of, fsdp_param_of, publish
from vescale_fsdp.program import Sendable, sendable_if_small

if TYPE_CHECKING:
    from vescale_fsdp.dbuffer import BlockCodec, Coding

_SHORT_S, _LONG_S = 0.05, 1.0  # between looks at whether a rank is behind


class Gradients:
    """The gradients of a group, between backward and optimizer.

    Args:
        buffer: the parameters' buffer, with the layout and the dtypes.
        fsdp_params: the parameters, in the order of the buffer's layout.
        reduce_dtype: in which gradients are summed. None: see `sum_dtype`.
        pool: provides the memory for gradients before the reduction.
        cuts_outside: also shard optimizer state over the replicas.

    Attributes:
        lane: the stream that allocates and frees the memory of the group, also that of parameters.
    """

    def __init__(
        self,
        buffer: ParameterBuffer,
        fsdp_params: Sequence[FSDPParam],
        reduce_dtype: torch.dtype | None,
        pool: SlabPool,
        *,
        cuts_outside: bool = False,
    ) -> None:
        self._cuts_outside = cuts_outside
        self.lane = devices.Lane(pool.device)
        self.unit_name = ""
        self.sums_replicas = True  # whether the coming reduction is for all replicas
        self.divide_factor: float | None = None  # of the sum; None: the number of ranks
        self.only_sums = False  # whether the collective must not average
        self.casts_first = False  # whether gradients are cast to the sum's dtype as they appear
        self.custom: Any = None  # a reduce-scatter that the user supplies
        self.codings: Sequence[Coding | None] = ()  # how gradients travel, if not as they are
        self.corrects = False  # whether what rounding takes from a gradient is added to the next
        self._codec: BlockCodec | None = None
        self.residuals = Residuals()
        self.hook: Callable[[torch.Tensor], None] | None = None  # on each reduced shard
        self.hook_stream: Any = None
        self._reduce_dtype = reduce_dtype
        self._has_accumulated = False  # whether any rank may hold gradients that wait
        self.sum_lasts = False  # whether a sum that becomes ``.grad`` keeps its memory (CPU)
        self._memory = Lasting()
        self._filling: GradientBuffer | None = None
        self._reducing: tuple[GradientBuffer, PendingReduce | SharedReduce, Comm] | None = None
        self._summing: tuple[torch.Tensor, PendingReduce] | None = None
        self._unsummed: torch.Tensor | None = None  # reduced shards that wait for the replicas
        self._reduced: torch.Tensor | None = None
        self._arrival: transfers.Arrival | None = None  # of ``_reduced``, if moved to the CPU
        self._packing = Packing(buffer.layout)  # of all that is not published yet
        self.pool = pool
        self.bind(buffer, fsdp_params, pool)

    def bind(
        self, buffer: ParameterBuffer, fsdp_params: Sequence[FSDPParam], pool: SlabPool
    ) -> None:
        """Change to another buffer, after the group was converted, moved or planned again."""
        if self.awaits_more:
            self.lane.join()  # the new one may be of another device
        self._buffer, self._fsdp_params, self.pool = buffer, fsdp_params, pool
        if self.lane.device != pool.device:
            self.lane = devices.Lane(pool.device)
        for fsdp_param in fsdp_params:
            fsdp_param.gradients = weakref.ref(self)
        if self._packing.source is not buffer.layout:
            self._packing = Packing(buffer.layout)
        self._codec, self.residuals = None, Residuals()
        if self.awaits_more:
            self._move_waiting()

    @on_lane
    def _move_waiting(self) -> None:
        """Keep what waits for a later backward. Ranks that have nothing send the same dtype."""
        if self._filling is not None:
            self._filling.move(self._filling_dtype, self.pool)
        if self._unsummed is not None:
            self._unsummed = self._unsummed.to(self.pool.device)

    def copied(
        self, buffer: ParameterBuffer, fsdp_params: Sequence[FSDPParam], pool: SlabPool
    ) -> Gradients:
        """Return a copy for a copy of the group, with the same settings and without gradients."""
        twin = Gradients(
            buffer, fsdp_params, self._reduce_dtype, pool, cuts_outside=self._cuts_outside
        )
        if twin.lane.device == self.lane.device:
            twin.lane.stream = self.lane.stream  # of what is copied
        twin.divide_factor, twin.only_sums = self.divide_factor, self.only_sums
        twin.custom, twin.hook, twin.hook_stream = self.custom, self.hook, self.hook_stream
        twin.codings, twin.corrects = self.codings, self.corrects
        twin._packing = self._packing
        twin.residuals = self.residuals.copied()
        twin.casts_first, twin.sum_lasts = self.casts_first, self.sum_lasts
        return twin

    @property
    def may_wait(self) -> bool:
        """Whether any rank may hold gradients of earlier backwards. The same on every rank."""
        return self._has_accumulated or self._unsummed is not None

    @property
    def are_waiting(self) -> bool:
        """Whether there are gradients that were not reduced yet."""
        return self._filling is not None

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype in which gradients are summed over ranks and micro-batches.

        Without a ``reduce_dtype`` it is the ``grad_dtype`` that was set, or else what FSDP2 of the
        installed torch documents. A ``grad_dtype`` of None is the dtype of compute: ranks must know
        what they send, also one that got no gradient.
        """
        if self._reduce_dtype is not None:
            return self._reduce_dtype
        # All parameters of a group have the same.
        buffer, (is_set, dtype) = self._buffer, self._fsdp_params[0].grad_dtype
        if is_set:
            return dtype or buffer.full_dtype
        return buffer.shard.dtype if compat.REDUCES_IN_OWN_DTYPE else buffer.full_dtype

    @property
    def may_be_wider(self) -> bool:
        """Whether gradients are to be taken in the dtype that they have.

        A function of a user (a fused kernel) may make them wider than the dtype of compute, to
        which autograd would cast them. All others are as they were.
        """
        full, wanted = self._buffer.full_dtype, self.sum_dtype
        if self._fsdp_params[0].grad_dtype.is_set:
            return wanted != full
        return compat.REDUCES_IN_OWN_DTYPE and wanted.itemsize > full.itemsize

    @property
    def wanted(self) -> Sequence[bool]:
        """For each parameter whether it is in the buffer: trainable when backward began.

        If gradients accumulate, also parameters that were trainable before.
        """
        return self._packing.wanted

    @property
    def left_out(self) -> list[str]:
        """The names of the parameters that are not in the buffer."""
        flags = zip(self._fsdp_params, self.wanted, strict=True)
        return [fsdp_param.fqn for fsdp_param, is_wanted in flags if not is_wanted]

    @on_lane
    def settle(self, waits: bool) -> bool:
        """Begin a backward: decide which parameters are in the buffer.

        Args:
            waits: whether its gradients are reduced in a later backward.

        Returns:
            Whether there will be a reduction. It is the same on every rank, because it depends only
            on ``requires_grad`` and on the settings of earlier backwards.

        Cost: no communication; a copy of accumulated gradients if ``requires_grad`` has changed.
        """
        wanted = flags_of(self._fsdp_params)
        is_trainable, is_open = any(wanted), self.may_wait
        self._has_accumulated |= waits and is_trainable
        if is_open:
            wanted = [a or b for a, b in zip(wanted, self.wanted, strict=True)]
        if (is_trainable or is_open) and tuple(wanted) != self.wanted:
            self._repack(Packing(self._buffer.layout, wanted))
        return is_trainable or is_open

    def _repack(self, packing: Packing) -> None:
        former, self._packing, self._codec = self._packing, packing, None
        if self._filling is not None:
            self._filling.repack(packing)
        if self._unsummed is not None:
            ranks = self._ranks_of_unsummed(self._unsummed, former)
            self._unsummed = packing.moved(self._unsummed, former, ranks)
        self.residuals.move(packing, former)

    def _ranks_of_unsummed(self, unsummed: torch.Tensor, packing: Packing) -> range:
        """The ranks of its sections: as many resting shards as one rank has in a step."""
        size = packing.layout.shard_size
        count = unsummed.numel() // size if size else 1
        first = self._buffer.rank // count * count
        return range(first, first + count)

    def add(self, index: int, gradient: torch.Tensor) -> None:
        """Add the gradient of parameter ``index``. Other code must not use it any more.

        It is dropped if the parameter was frozen when the backward began.
        """
        if not self._packing.wanted[index]:
            self._refuse_unfrozen(index)
            return
        lane = self.lane
        if lane.is_current:
            (self._filling or self._fillable()).add(index, gradient)
        else:
            lane.borrow(gradient)
            with lane.entered():
                self._fillable().add(index, gradient)
        self._fsdp_params[index].used = True

    def add_all(self, gradients: dict[int, torch.Tensor]) -> None:
        """Add gradients by parameter, as `add` does."""
        wanted = self._packing.wanted
        kept = {index: each for index, each in gradients.items() if wanted[index]}
        for index in gradients.keys() - kept.keys():
            self._refuse_unfrozen(index)
        lane = self.lane
        if lane.is_current:
            self._fillable().add_all(kept)
        else:
            for gradient in kept.values():
                lane.borrow(gradient)
            with lane.entered():
                self._fillable().add_all(kept)
        for index in kept:
            self._fsdp_params[index].used = True

    def _refuse_unfrozen(self, index: int) -> None:
        """Raise if a parameter that was frozen when the backward began is trainable now."""
        fsdp_param = self._fsdp_params[index]
        if fsdp_param.sharded.requires_grad:
            raise RuntimeError(
                f"parameter {fsdp_param.fqn!r} was unfrozen while a backward ran, which had begun "
                "without a place for its gradient; call requires_grad_(True) before backward"
            )

    def _fillable(self) -> GradientBuffer:
        if self._filling is None:  # for a late gradient another: its first may still be sent
            self._filling = self._new_buffer()
        return self._filling

    @property
    def _filling_dtype(self) -> torch.dtype:
        """The dtype of the gradients; if several are summed here, the reduce dtype.

        Also if that is narrower, or if gradients may be wider: it is what is sent then, as by
        FSDP2.
        """
        full, wanted = self._buffer.full_dtype, self.sum_dtype
        is_narrower = wanted.itemsize < full.itemsize and not any(self.codings)
        # The same on every rank, also on one that had no gradient in the backwards before.
        is_cast = self._has_accumulated or self.casts_first or is_narrower
        is_cast |= self._fsdp_params[0].grad_dtype.is_set
        return wanted if is_cast else full

    def _new_buffer(self) -> GradientBuffer:
        dtype = self._filling_dtype
        shapes = [fsdp_param.shape for fsdp_param in self._fsdp_params]
        waits = self._has_accumulated
        memory = self._memory_of_grad(dtype) if self._buffer.layout.num_shards == 1 else None
        return GradientBuffer(self._packing, shapes, dtype, self.pool, waits=waits, memory=memory)

    def _memory_of_grad(self, dtype: torch.dtype) -> Lasting | None:
        """Return memory for what becomes ``.grad``. None: it is cast before, or has streams."""
        has_streams = devices.has_streams(self.pool.device)  # its pool does not take memory back
        is_set, wanted = self._fsdp_params[0].grad_dtype
        wanted = wanted or dtype if is_set else self._buffer.shard.dtype
        is_final = not has_streams and dtype == self.sum_dtype == wanted
        return self._memory if is_final else None

    def _memory_of_sum(self, comm: Comm) -> Lasting | None:
        """Return memory for a sum that becomes ``.grad``. None: new memory in each step."""
        is_last = self.sum_lasts and comm.replica_group is None
        is_small = self._buffer.shard.nbytes < SMALLEST_LASTING
        return self._memory_of_grad(self.sum_dtype) if is_last and not is_small else None

    @on_lane
    def start_reduce(self, comm: Comm) -> None:
        """Start the reduction of the gradients that were added (zero if there is none)."""
        gradients = self.sealed()
        full = gradients.flat
        codec = self._codec_for(comm)
        if codec is not None:
            errors = self.residuals.of_sending(full) if self.corrects else None
            pending = comm.start_encoded_reduce(
                codec, codec.layout, full, self.sum_dtype, self.pool, self.divide_factor, errors
            )
            gradients.release()
        else:
            pending = comm.start_reduce(
                full,
                self.sum_dtype,
                self.pool,
                self.divide_factor,
                only_sums=self.only_sums,
                custom=self.custom,
                copies=not gradients.becomes_grad,
            )
            pending.memory = self._memory_of_sum(comm)
        self.expect(gradients, pending, comm)
        if comm.size == 1:  # the sum over the replicas need not wait
            self.finish_reduce()

    def rehearse(self, comm: Comm) -> Callable[[], None]:
        """Start a reduction of zeros, as in a backward that began now. Returns how to wait for it.

        It is queued on the current stream, and nothing is kept.
        """
        self.casts_first = comm.sends_sums
        if not self.settle(waits=False):
            return lambda: None  # all are frozen
        full = self.pool.take(self._packing.layout.total_size, self._filling_dtype).zero_()
        codec = self._codec_for(comm)
        dtype, pool, divisor = self.sum_dtype, self.pool, self.divide_factor
        if codec is not None:
            pending = comm.start_encoded_reduce(codec, codec.layout, full, dtype, pool, divisor)
        else:
            pending = comm.start_reduce(full, dtype, pool, divisor, only_sums=self.only_sums)

        def finish() -> None:
            reduced = pending.finish(self._reduction())
            pool.give(full)
            if comm.replica_group is not None:
                averages, cuts = divisor is None, self._cuts_outside
                over = comm.start_replica_sum(reduced, pool, averages=averages, cuts=cuts)
                over.finish(self._outer_sum())

        return finish

    def sealed(self) -> GradientBuffer:
        """Return the gradients that were added, ready to be sent."""
        assert self._reducing is None, "one reduction of a group at a time"
        gradients = self._filling or self._new_buffer()
        self._filling = None
        gradients.seal()
        return gradients

    def expect(
        self, gradients: GradientBuffer, pending: PendingReduce | SharedReduce, comm: Comm
    ) -> None:
        """Set the running reduction of ``gradients``."""
        self._has_accumulated = False
        self._reducing = (gradients, pending, comm)

    def sendable(self, comm: Comm, small_bytes: float) -> Sendable | None:
        """Return what a reduction sends. None: more than ``small_bytes``, or it must be sent alone.

        It is the same on every rank. Call it after `settle`.
        """
        layout, dtype = self._packing.layout, self._filling_dtype
        has_streams = devices.has_streams(self.pool.device)
        if has_streams or comm.size == 1 or self.custom is not None or any(self.codings):
            return None
        kind = (dtype, self.sum_dtype, self.divide_factor, self.only_sums, self.pool.device)
        num_bytes = layout.shard_size * dtype.itemsize
        return sendable_if_small(num_bytes, comm.size, kind, small_bytes)

    def _codec_for(self, comm: Comm) -> BlockCodec | None:
        """Return the codec of the gradients. None: they are not encoded, or not sent."""
        layout = self._packing.layout
        if comm.size == 1 or not any(self.codings) or not layout.total_size:
            return None
        codings = self._packing.of_layout(self.codings)
        if not any(codings):  # of those that are not frozen
            return None
        if self._codec is None:
            from vescale_fsdp.dbuffer import BlockCodec

            self._codec = BlockCodec(layout, codings, self.sum_dtype)
        return self._codec

    @property
    def has_feedback(self) -> bool:
        """Whether rounding errors are added to the next gradients."""
        return self.corrects and any(self.codings)

    def residual_of(self) -> dict[int, torch.Tensor]:
        """Return the rounding errors by parameter, without frozen ones."""
        return self.residuals.by_parameter(
            self._packing, [fsdp_param.shape for fsdp_param in self._fsdp_params]
        )

    def replace_residuals(self, values: Sequence[torch.Tensor | None]) -> Residuals:
        """Replace the rounding errors. None: zero. Returns the old ones."""
        before, self.residuals = self.residuals, Residuals()
        self.residuals.put(self._packing, values, self.pool.device)
        return before

    def has_arrived(self, is_stalled: Callable[[], bool]) -> bool:
        """Wait for the running reduction, if any; False if ``is_stalled`` before its end."""
        seconds = _SHORT_S
        while self._reducing is not None:
            if self._reducing[1].has_arrived(seconds, self.pool.device):
                return True
            if is_stalled():
                return False
            seconds = min(2 * seconds, _LONG_S)
        return True

    @on_lane
    def finish_reduce(self) -> None:
        """Wait for the running reduction, if any, and start the all-reduce over the replicas."""
        if self._reducing is None:
            return
        gradients, pending, comm = self._reducing
        self._reducing = None
        self.finish_sum()  # of an earlier reduction in the same backward
        with compat.recorded("wait_for_reduce", [self.unit_name]):
            reduced = pending.finish(self._reduction())
        gradients.release()
        if comm.replica_group is None:
            self._keep(reduced)
            return
        if self._unsummed is not None:
            reduced.add_(self._unsummed)
            self._unsummed = None
        if self.sums_replicas:
            averages = self.divide_factor is None
            pending = comm.start_replica_sum(
                reduced, self.pool, averages=averages, cuts=self._cuts_outside
            )
            self._summing = (reduced, pending)
        else:
            self._unsummed = reduced

    @on_lane
    def finish_sum(self) -> None:
        """Wait for the running all-reduce over the replicas, if any."""
        if self._summing is None:
            return
        _, pending = self._summing
        summed = pending.finish(self._outer_sum())
        self._summing = None
        self._keep(summed)

    def _reduction(self) -> str:
        return f"the reduction of {self.unit_name}"

    def _outer_sum(self) -> str:
        return f"the sum of {self.unit_name} over the replicas"

    def _keep(self, reduced: torch.Tensor) -> None:
        if self.hook is not None:
            with devices.on_stream(reduced.device, self.hook_stream):
                self.hook(reduced)
        shard, (is_set, dtype) = self._buffer.shard, self._fsdp_params[0].grad_dtype
        wanted = dtype if is_set else shard.dtype
        if wanted is not None:
            reduced = reduced.to(wanted)
        if self._reduced is None and self._moves_beside(reduced):
            self._arrival = transfers.moved_to_host(reduced)
            self._reduced = self._arrival.value
            return
        self._await_arrival()
        reduced = transfers.brought_to(shard, reduced)
        self._reduced = reduced if self._reduced is None else self._reduced.add_(reduced)

    def _moves_beside(self, reduced: torch.Tensor) -> bool:
        """Whether gradients are offloaded to the CPU by an asynchronous copy."""
        shard = self._buffer.shard
        return devices.has_streams(reduced.device) and devices.is_pinned(shard)

    def _await_arrival(self) -> None:
        if self._arrival is not None:
            self._arrival.wait()
            self._arrival = None

    @on_lane
    def publish(self, used: list[bool]) -> None:
        """Set or add to ``.grad`` of the sharded parameters that were used on any rank."""
        self._await_arrival()
        reduced, self._reduced = self._reduced, None
        for fsdp_param in self._fsdp_params:
            fsdp_param.used = False
        if reduced is not None:
            locals_ = self._packing.shard_views(reduced, self._buffer.rank)
            gets = [a and b for a, b in zip(used, self.wanted, strict=True)]
            publish(self._fsdp_params, locals_, gets)

    def held(self) -> list[torch.Tensor]:
        """The memory of the lane that is in use between passes."""
        filling = [] if self._filling is None else self._filling.held()
        others = (self._unsummed, self.residuals.flat)
        return filling + [each for each in others if each is not None]

    @property
    def awaits_more(self) -> bool:
        """Whether it has gradients of which a later backward sets ``.grad``."""
        return self._filling is not None or self._unsummed is not None

    @on_lane
    def drop_waiting(self, cleared: Collection[FSDPParam]) -> None:
        """Drop those of the gradients that wait (`awaits_more`) that are of these parameters."""
        for index, fsdp_param in enumerate(self._fsdp_params):
            if fsdp_param not in cleared:
                continue
            fsdp_param.used = False
            if self._filling is not None:
                self._filling.drop(index)
            if self._unsummed is not None:
                self._zero_unsummed(self._unsummed, index)
        if self._filling is not None and self._filling.is_empty:
            self._filling.release()
            self._filling = None
        # Not by what is left here, which is not the same on every rank.
        if all(fsdp_param in cleared for fsdp_param in self._fsdp_params):
            self._unsummed = None

    def _zero_unsummed(self, unsummed: torch.Tensor, index: int) -> None:
        size = self._packing.layout.shard_size
        for section, rank in enumerate(self._ranks_of_unsummed(unsummed, self._packing)):
            own = unsummed.narrow(0, section * size, size)
            self._packing.shard_views(own, rank)[index].zero_()

    @on_lane
    def reset(self) -> None:
        """Discard an interrupted step: wait for running collectives, drop unpublished gradients."""
        self.finish_reduce()
        self.finish_sum()
        self._drop()
        self._await_arrival()
        self._reduced = None
        for fsdp_param in self._fsdp_params:
            fsdp_param.used = False
            if fsdp_param.gathered is not None:
                fsdp_param.gathered.grad = None

    def _drop(self) -> None:
        if self._filling is not None:
            self._filling.release()
        self._filling = self._unsummed = None


def drop_waiting(params: Iterable[torch.Tensor]) -> None:
    """Drop gradients of these parameters that wait to be reduced, and so are not in ``.grad`` yet.

    Those of others are kept, also where they share a buffer.
    """
    cleared = {fsdp_param for param in params if (fsdp_param := fsdp_param_of(param)) is not None}
    for each in {fsdp_param.gradients() for fsdp_param in cleared}:
        if each is not None and each.awaits_more:
            each.drop_waiting(cleared)

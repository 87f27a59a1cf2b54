"""Group: the parameters of a unit that share one buffer: same mesh, dtype and trainability.

A group is in one of three states, and says so in `state`:

    SHARDED    the modules hold the sharded parameters; only the shard has memory
    GATHERING  an all-gather writes the full buffer; nobody may touch it
    GATHERED   the modules hold views of the full buffer

A parameter is two ``nn.Parameter`` objects for life: the sharded one (a RaggedTensor, which the
optimizer and the state dict see) and the gathered one (a plain view of the full buffer, which
forward and backward see). Gradients of the gathered one are taken away as they appear.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from enum import Enum, auto
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp import compat, devices, waiting
from vescale_fsdp.dbuffer import (
    BlockCodec,
    Codec,
    Comm,
    DBuffer,
    Outbox,
    ThenCopy,
    pool_for,
    shard_view,
)
from vescale_fsdp.devices import Waitable
from vescale_fsdp.engine.axes import Axes
from vescale_fsdp.engine.guard import Guard
from vescale_fsdp.engine.inner_shard import InnerShard
from vescale_fsdp.engine.padding import warn_of_padding
from vescale_fsdp.engine.parallel import given_spec, placements_of, spec_at_rest
from vescale_fsdp.engine.placement import even_chunks
from vescale_fsdp.engine.reduce import Gradients, ParameterBuffer
from vescale_fsdp.engine.slot import (
    ParamToShard,
    Slot,
    checked_local,
    flags_of,
    local_of,
    register,
    resting_spec,
    same_memory,
)
from vescale_fsdp.engine.steps import num_steps
from vescale_fsdp.planner import TensorSpec, lay_out
from vescale_fsdp.ragged import RaggedShard, RaggedTensor

__all__ = ["Group", "GroupState", "together"]

# Starts of tensors are multiples of 16 bytes in the narrowest dtype that travels (bf16, or a
# byte dtype where the group holds one): NCCL falls back to scalar copies below that.
_ALIGNMENT_BYTES = 16


class GroupState(Enum):
    """Where the data of a group is; see the module's docstring."""

    SHARDED = auto()
    GATHERING = auto()
    GATHERED = auto()


class Group:
    """One flat buffer of parameters, and the collectives on it.

    Args:
        params: the parameters, all of one dtype and trainability, in definition order.
        axes: of the mesh, over which they are sharded and replicated.
        device: on which the shard rests (meta while the parameters are there).
        offloads: whether the shard is to rest on the CPU, wherever the parameters are used.
        compute_device: of the gathered parameters.
        pin_memory: of a shard on the CPU.
        compute_dtype: of the gathered parameters; None for that of the sharded ones.
        reduce_dtype: in which gradients are summed; None for the compute dtype.
        on_gradient: called after each gradient that the group has taken, with its elements.
    """

    _has_views = True  # whether gathered parameters are views of the full buffer
    _narrowest = 2  # bytes of the elements of a full buffer, if not fewer
    _face_dtype: torch.dtype | None = None  # of what a full buffer holds, if not the parameters'

    def __init__(
        self,
        params: list[ParamToShard],
        axes: Axes,
        device: torch.device,
        *,
        offloads: bool,
        compute_device: torch.device,
        pin_memory: bool,
        compute_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        on_gradient: Callable[[int], None],
    ) -> None:
        self.axes = axes
        self.rank, self.num_shards = axes.resting_rank, axes.num_resting_shards
        self._inner_shard = InnerShard() if axes.cuts_outside else None
        self.compute_dtype, self.reduce_dtype = compute_dtype, reduce_dtype
        self._compute_device, self._pin_memory = compute_device, pin_memory
        self._offloads = offloads
        self._users = devices.Users(compute_device)
        self.on_gradient = on_gradient
        self.state = GroupState.SHARDED
        self._gathered_version = (0, 0)  # of the shards, when the last gather began
        self._guard = Guard()  # of the gathered parameters
        # Whether code that is not of the unit's own forward may have seen the gathered parameters;
        # and whether the user has gathered them, to look at or change until they are resharded.
        self.is_exposed = self.is_by_hand = False
        self._work: Waitable | None = None
        self.unit_name = ""
        self.custom_gather: Any = None  # that the user supplies
        self.codec: Codec | None = None  # of what travels in a gather; None: the shard itself
        self._outbox = Outbox()
        self.codings = [(p.gather, p.reduce) for p in params]  # of gathers and of reductions
        self.frees_before_backward = False  # whether gradients come while nothing is gathered
        self._part: torch.Tensor | None = None  # of the full buffer, kept from forward to backward
        self._part_in_flight: torch.Tensor | None = None
        narrowest = min(self._narrowest, *(p.data.element_size() for p in params))
        self._alignment = _ALIGNMENT_BYTES // narrowest
        self.slots: list[Slot] = []
        specs = [TensorSpec(p.fqn, tuple(p.data.shape), p.block) for p in params]
        placements = self._lay_out(specs, params[0].dim)
        itemsize = params[0].data.element_size()
        warn_of_padding(self.layout, itemsize, self.rank, stacklevel=4)  # fully_shard's caller
        buffer = self._allocate([p.data.shape for p in params], params[0].param.dtype, device)
        self.gradients = Gradients(
            buffer, self.slots, reduce_dtype, self.pool, cuts_outside=axes.cuts_outside
        )
        self.gradients.codings = [reduce for _, reduce in self.codings]
        for index, (p, placement) in enumerate(zip(params, placements, strict=True)):
            self.slots.append(self._new_slot(p, placement, self._own_part(index, p.data)))
        self._make_gathered()

    def _lay_out(self, specs: list[TensorSpec], dim: int | None = None) -> list[Placement]:
        """Plan the buffer; return where each tensor lies."""
        self.sizes = [math.prod(spec.shape) for spec in specs]
        if dim is not None:
            self.layout = even_chunks(specs, self.num_shards)
            return [Shard(dim)]
        self.layout = lay_out(specs, self.num_shards, alignment=self._alignment)
        size = self.layout.shard_size
        return [
            RaggedShard.from_interval(offset, size, self.num_shards, spec.shape)
            for offset, spec in zip(self.layout.offsets, specs, strict=True)
        ]

    def _allocate(
        self, shapes: list[torch.Size], dtype: torch.dtype, device: torch.device
    ) -> ParameterBuffer:
        self.drop_copies()
        floating = dtype.is_floating_point
        full_dtype = self.compute_dtype if self.compute_dtype and floating else dtype
        self.buffer = DBuffer(
            self.layout,
            shapes,
            self.rank,
            shard_dtype=dtype,
            full_dtype=full_dtype,
            device=device,
            full_device=self._compute_device,
            face_dtype=self._face_dtype,
            pin_memory=self._pin_memory,
        )
        self.pool = pool_for(self._compute_device)
        codings = [gather for gather, _ in self.codings]
        self.codec = BlockCodec(self.layout, codings, full_dtype) if any(codings) else None
        return self.buffer

    def _own_part(self, index: int, data: torch.Tensor) -> torch.Tensor:
        """The place of tensor ``index`` in the shard, with its part of ``data`` copied to it."""
        start, stop = self.layout.local_range(index, self.rank)
        view = shard_view(self.layout, self.rank, self.buffer.shard, index)
        with torch.no_grad():
            view.copy_(data.reshape(-1)[start:stop])
        return view

    def _new_slot(self, p: ParamToShard, placement: Placement, view: torch.Tensor) -> Slot:
        spec = resting_spec(p, placement, view.dtype)
        slot = Slot(
            fqn=p.fqn,
            sites=p.sites,
            shape=p.data.shape,
            spec=spec,
            axes=p.axes,
            given=given_spec(p.param),
            inner=p.inner,
            dim=p.dim,
            sharded=p.param,
            local=view,
            original=weakref.ref(p.param),
        )
        slot.sharded = slot.new_sharded(view, p.param.requires_grad)
        slot.local = local_of(slot.sharded)
        slot.register(slot.sharded)
        return slot

    def _make_gathered(self) -> None:
        """Make the parameters that forward sees, once, as views of the full buffer."""
        if self.buffer.full_face is None:
            return
        full = self.buffer.full
        full.materialize()  # views are checked against the memory that is there
        for index, (slot, view) in enumerate(zip(self.slots, full.views, strict=True)):
            self._set_gathered(index, slot.in_forward(view))
        full.release()

    def _set_gathered(self, index: int, tensor: torch.Tensor) -> None:
        """Make ``tensor`` the parameter that forward sees, whose gradients we take."""
        slot = self.slots[index]
        differentiable = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        slot.gathered = nn.Parameter(tensor, requires_grad=differentiable)
        if differentiable:  # also where it is frozen now: it may be unfrozen later
            _take_gradients(slot.gathered, weakref.ref(self), index)
        slot.gathered.requires_grad_(slot.sharded.requires_grad)

    # Parameters

    @property
    def trainable(self) -> bool:
        """Whether any parameter wants a gradient now (users freeze and unfreeze)."""
        return any(slot.sharded.requires_grad for slot in self.slots)

    @property
    def has_streams(self) -> bool:
        """Whether what is done with the gathered parameters is queued on streams."""
        return devices.has_streams(self._compute_device)

    @property
    def is_on_meta(self) -> bool:
        """Whether the parameters have no data yet."""
        return self.buffer.full_face is None

    @property
    def is_sharded(self) -> bool:
        """Whether the modules hold the sharded parameters and no gather is under way."""
        return self.state is GroupState.SHARDED

    @property
    def is_gathered(self) -> bool:
        """Whether the modules hold the gathered parameters."""
        return self.state is GroupState.GATHERED

    def start_gather(self, comm: Comm, *, in_backward: bool = False) -> None:
        """Issue the all-gather, unless the parameters are there or on their way.

        In backward, from the larger parts that forward has kept, if it has.
        """
        if self.state is GroupState.SHARDED:
            with self.pool.lane.entered():
                self._start_gather(comm, in_backward)
            self._gathered_version = self.version
            self.state = GroupState.GATHERING

    def _start_gather(self, comm: Comm, in_backward: bool) -> None:
        self.gradients.casts_first = comm.sends_sums
        part, self._part = self._part, None
        if in_backward and part is not None:
            self._work = comm.start_gather_of_parts(self.buffer, part)
        else:
            self.follow_conversions()
            self.start_outer_gather(comm)
            inner, first = None, None
            if self._inner_shard is not None:
                inner = self._inner_shard.values
                first = partial(waiting.wait, self._inner_shard, self._outer_gather())
            if self.codec is not None and inner is None:
                # Where gradients wait for more, no optimizer has stepped since the backward.
                may_repeat = in_backward or self.gradients.are_waiting
                self._outbox.prepare(self.version, may_repeat=may_repeat)
            with waiting.Named(self._gather()):
                self._work = comm.start_gather(
                    self.buffer,
                    self.custom_gather,
                    self.codec,
                    self.pool,
                    inner,
                    self._outbox,
                    first,
                )
        self._part_in_flight = part

    def follow_conversions(self) -> None:
        """Take over what a conversion of a submodule has made of its parameters."""
        if self.is_sharded and any(s.sharded._local_tensor is not s.local for s in self.slots):  # type: ignore[attr-defined]
            self.rebind()  # they have left the shard

    @property
    def travels_plainly(self) -> bool:
        """Whether a gather sends the shard, and nothing that its unit or a user has to say."""
        is_plain = self._has_views and self.codec is None and self.custom_gather is None
        is_plain = is_plain and self._inner_shard is None and not self.is_on_meta
        return is_plain and not self.has_streams and self.num_shards > 1

    def expect(self, work: ThenCopy, comm: Comm) -> None:
        """The all-gather is ``work``, which writes to the full buffer when it is waited for."""
        assert self.state is GroupState.SHARDED, "nobody has started another"
        self.gradients.casts_first = comm.sends_sums
        self._part, self._work = None, work
        self._gathered_version = self.version
        self.state = GroupState.GATHERING

    def keep_writes(self) -> None:
        """Take over what was written to the gathered parameters, if they are there."""
        self._wait()
        if self.is_gathered:
            self._keep_writes()

    def take_part(self, comm: Comm) -> None:
        """Make a gather that other ranks need, though the parameters are there.

        It writes to them what they hold.
        """
        self._wait()
        self._keep_writes()
        state, self.state = self.state, GroupState.SHARDED
        self.start_gather(comm)
        self._wait()
        self.state = state

    def start_outer_gather(self, comm: Comm) -> None:
        """Start to gather over the outer axis, where what rests is cut over that too."""
        if self._inner_shard is not None and not self.is_on_meta:
            outer, version = comm.among_replicas, self.version
            with self.pool.lane.entered():
                self._inner_shard.start_gather(self.buffer, outer, version, self.codec)

    def drop_copies(self) -> None:
        """Forget what was gathered, or written to send, of shards that may have changed since."""
        self._outbox.drop()
        if self._inner_shard is not None:
            self._inner_shard.drop()

    def drop_message(self) -> None:
        """Forget what was written to send: no backward will send it again."""
        self._outbox.drop()

    def has_arrived(self, seconds: float) -> bool:
        """Whether the all-gather has ended, waiting so long at most; True on streams."""
        if self._work is None or self.has_streams or isinstance(self._work, ThenCopy):
            return True
        if not isinstance(self._work, waiting.Ending):
            self._work = waiting.Ending(self._work, has_streams=False)
        return self._work.has_ended(seconds)

    def finish_gather(self) -> None:
        """Wait for the all-gather and give the modules the gathered parameters."""
        assert self.state is not GroupState.SHARDED, "start_gather comes first"
        if self.state is GroupState.GATHERING:
            self._wait()
            gathered = self._gathered_params()
            register(self.slots, gathered)
            self._guard.open(gathered)
            self.state = GroupState.GATHERED
        self.follow_flags()
        self._users.add()

    def follow_flags(self) -> None:
        """Let gathered parameters want gradients as the sharded ones do: users freeze those."""
        for slot, wanted in zip(self.slots, flags_of(self.slots), strict=True):
            gathered = slot.gathered
            if gathered is not None and gathered.requires_grad != wanted:
                gathered.requires_grad_(wanted)

    def _gathered_params(self) -> list[nn.Parameter]:
        return [slot.gathered for slot in self.slots if slot.gathered is not None]

    def _wait(self) -> None:
        if isinstance(self._work, ThenCopy):  # what is left to do allocates, or frees
            with self.pool.lane.entered():
                waiting.wait(self._work, self._gather())
            self.pool.lane.join()
        elif self._work is not None:
            waiting.wait(self._work, self._gather())
        self._work = self._part_in_flight = None

    def _gather(self) -> str:
        return f"the gather of {self.unit_name}"

    def _outer_gather(self) -> str:
        return f"the gather of {self.unit_name} over the replicas"

    def keep_part(self, num_parts: int) -> None:
        """Reshard, but keep one of ``num_parts`` equal parts of the full buffer for backward."""
        if self.state is not GroupState.SHARDED:
            self._wait()
            with self.pool.lane.entered():
                part = self.buffer.part(num_parts)
                kept = torch.empty_like(part)  # not a view: the full buffer is freed
                kept.copy_(part)
            self.reshard()
            self.drop_message()
            self._part = kept

    def reshard(self) -> None:
        """Give the modules the sharded parameters and free the full buffer."""
        self._part = None
        if self.state is GroupState.SHARDED:
            return
        self._wait()
        if self.is_gathered:
            self._keep_writes()
        self._guard.close()
        self._show_sharded()
        with self.pool.lane.entered():
            self._users.end()
            self._release()
        self.is_exposed = self.is_by_hand = False
        self.state = GroupState.SHARDED

    def _release(self) -> None:
        self.buffer.full.release()

    def gathered_storages(self) -> set[int]:
        """Of what a reshard frees: the ``_cdata`` of each storage."""
        return {self.buffer.full.region.storage._cdata}

    def set_aside(self) -> None:
        """Keep what is gathered for the backward, but show the modules' sharded parameters.

        From then on it is as if it had been gathered ahead.
        """
        if self.is_gathered:
            self._keep_writes()
            self._show_sharded()
            self.state = GroupState.GATHERING

    def _show_sharded(self) -> None:
        register(self.slots, [slot.sharded for slot in self.slots])

    def take_by_hand(self) -> None:
        """The user has gathered it: what is written from now on is dropped, as by FSDP2."""
        if not self.is_by_hand:
            self._keep_writes()
            self.is_by_hand = True

    def _keep_writes(self) -> None:
        """Write back what a forward has written to its parameters while they were gathered.

        As a momentum update of a teacher in ``training_step`` does, for example.

        Raises:
            RuntimeError: the sharded parameters were written to meanwhile, too.
        """
        if self.is_by_hand:  # dropped, as by FSDP2
            return
        moved = self._guard.saw_move and self._take_over_data()
        if moved or self._guard.saw_write:
            if self.is_stale:
                raise RuntimeError(
                    f"the parameters {[slot.fqn for slot in self.slots]} were written to as "
                    "gathered and as sharded parameters in one pass, and one of the writes would "
                    "be lost. In a forward, write to what module.parameters() gives there"
                )
            self.write_back()
        elif self.is_exposed and not self.is_stale and self._may_differ():
            self.write_back()

    def _take_over_data(self) -> bool:
        """Copy what ``p.data = ...`` has given gathered parameters into the full buffer."""
        found = False
        for index, slot in enumerate(self.slots if self._has_views else []):
            assert slot.gathered is not None, "it is gathered"
            now, view = compat.local_tensor(slot.gathered), self.buffer.full.views[index]
            if now.data_ptr() == view.data_ptr() or not view.numel():
                continue
            expected = view.movedim(0, slot.dim) if slot.dim else view
            if now.shape != expected.shape:
                raise ValueError(
                    f"parameter {slot.fqn!r} was given data of shape {tuple(now.shape)} in a "
                    f"forward; expected {tuple(expected.shape)}"
                )
            expected.copy_(now)
            slot.gathered.data = slot.in_forward(view)
            found = True
        return found

    def _may_differ(self) -> bool:
        """Whether this rank's part of the full buffer may be another than its shard."""
        if not self._has_views or self.has_streams:
            return self._has_views  # `write_back` finds out, and does not keep the host waiting
        return not torch.equal(self.buffer.own_slice(), self._sent())

    def write_back(self) -> None:
        """Copy what was changed in this rank's part of the full buffer into the shard."""
        shard = self.buffer.shard
        own = devices.brought_to(shard, self.buffer.own_slice())
        was = self._sent()
        changed = (own != was) & ~(own.isnan() & was.isnan())
        shard.copy_(torch.where(changed, own.to(shard.dtype), shard))
        self.drop_copies()

    def _sent(self) -> torch.Tensor:
        """What a gather makes of this rank's shard."""
        buffer, device, codec = self.buffer, self._compute_device, self.codec
        if codec is None:
            return buffer.shard.to(buffer.full_dtype)
        message = torch.empty(codec.num_bytes(self.layout), dtype=torch.uint8, device=device)
        values = torch.empty(self.layout.shard_size, dtype=buffer.full_dtype, device=device)
        codec.encode(self.layout, self.rank, buffer.shard, message)
        codec.decode(self.layout, self.rank, message, values)
        return devices.brought_to(buffer.shard, values)

    @property
    def is_stale(self) -> bool:
        """Whether the shards were written to since what is gathered was sent."""
        return not self.is_sharded and self.version != self._gathered_version

    @property
    def version(self) -> tuple[int, int]:
        """Of the shards: another one after each write to them."""
        # Many kernels of optimizers count nowhere. Operators on a DTensor that is not ragged count
        # on the wrapper only, which takes three times as long to read.
        writes = sum([slot.sharded._local_tensor._version for slot in self.slots])  # type: ignore[attr-defined]
        if self.slots and not isinstance(self.slots[0].sharded, RaggedTensor):
            writes += sum([slot.sharded._version for slot in self.slots])
        return writes, num_steps()

    # Gradients

    def take_gradient(self, index: int, param: torch.Tensor) -> None:
        """Move the gradient of ``param``, a gathered parameter, into the buffer, and drop it."""
        slot, gradient = self.slots[index], param.grad
        if gradient is None:  # its part of the graph ran, for an output that was not used
            return
        if self.state is not GroupState.GATHERED and not self.frees_before_backward:
            raise RuntimeError(
                f"a gradient of {slot.fqn!r} appeared while its parameters were freed: the loss "
                "depends on it by a way around the outputs of its module (an attribute that "
                "forward has set, for example). Return that tensor from forward instead"
            )
        self.gradients.add(index, self._in_buffer(slot, gradient))
        param.grad = None
        self.on_gradient(slot.shape.numel())

    def _in_buffer(self, slot: Slot, gradient: torch.Tensor) -> torch.Tensor:
        return slot.in_buffer(gradient)

    def reset(self) -> None:
        """Forget a step that was broken off."""
        self._wait()
        self.gradients.reset()
        self.reshard()

    # Rebinding

    def rebind(self, *, may_wait: bool = False) -> None:
        """Make the registered parameters views of the shard again, after somebody moved them.

        With ``may_wait``, do nothing while only some of them have been moved: the other modules
        of the unit are still to come.

        ``module.to()``, ``to_empty()`` and ``load_state_dict(assign=True)`` give a parameter
        another local tensor, or register another parameter. The data is copied into the shard
        (a new one, if dtype or device changed), and the parameters keep their identity.
        """
        assert self.is_sharded, "the sharded parameters are registered"
        for slot in self.slots:
            _refuse_methods(slot)
        current = [slot.registered() for slot in self.slots]
        views = self.buffer.shard_views()
        if all(
            param is slot.sharded and same_memory(param, view)
            for param, slot, view in zip(current, self.slots, views, strict=True)
        ):
            return
        dtypes = {param.dtype for param in current}
        kinds = {param.device.type for param in current}
        if len(kinds) > 1 and (may_wait or self.is_on_meta):  # the others are still to come
            return
        if may_wait and len(dtypes) > 1:
            return
        if len(dtypes) > 1:
            raise NotImplementedError(
                f"the parameters {[slot.fqn for slot in self.slots]} share one buffer but now "
                f"have dtypes {dtypes}; give all of them the same dtype, or convert the model "
                "before fully_shard"
            )
        locals_ = [
            checked_local(param, slot) for param, slot in zip(current, self.slots, strict=True)
        ]
        device = next((t.device for t in locals_ if t.numel()), locals_[0].device)
        if device.type != "meta":
            self._move_compute(device)
        placements = [slot.spec.placements for slot in self.slots]
        self._move_into_new_buffer(current, locals_, placements, dtypes.pop(), device)

    def _move_compute(self, device: torch.device) -> None:
        """The shard rests on ``device`` from now on: compute there too, unless it is offloaded."""
        if not self._offloads:
            self._compute_device, self._users = device, devices.Users(device)
        elif device.type != "cpu":
            raise RuntimeError(
                f"the parameters {[slot.fqn for slot in self.slots]} are on {device}, but were to "
                "rest on the CPU (offload_policy=CPUOffloadPolicy()); load a state dict of CPU "
                'tensors, or call module.to_empty(device="cpu")'
            )

    def copied(self, memo: dict[int, Any], on_gradient: Callable[[int], None]) -> Group:
        """A group of its own with the same data and layout, for ``copy.deepcopy``.

        ``memo`` learns the copies of the sharded parameters. They are registered nowhere yet.
        """
        assert self.is_sharded, "the unit has released it"
        twin = copy.copy(self)
        twin.on_gradient, twin._work, twin._outbox = on_gradient, None, Outbox()
        twin._guard, twin._users = Guard(), devices.Users(self._compute_device)
        twin._inner_shard = None if self._inner_shard is None else InnerShard()
        shapes = [slot.shape for slot in self.slots]
        twin._allocate(shapes, self.buffer.shard.dtype, self.buffer.shard.device)
        twin.buffer.shard.copy_(self.buffer.shard)
        twin.slots = []
        for index, slot in enumerate(self.slots):
            view = shard_view(twin.layout, twin.rank, twin.buffer.shard, index)
            sharded = slot.new_sharded(view, slot.sharded.requires_grad)
            sharded.grad = None if slot.sharded.grad is None else slot.sharded.grad.clone()
            memo[id(slot.sharded)] = sharded
            local = local_of(sharded)
            new = replace(slot, sites=[], sharded=sharded, local=local, gathered=None, used=False)
            twin.slots.append(new)
        twin.gradients = self.gradients.copied(twin.buffer, twin.slots, twin.pool)
        twin._make_gathered()
        return twin

    def give_back(self, index: int) -> Slot:
        """Take parameter ``index`` out of the group; what is left moves to a new layout.

        Collective: one redistribution for each parameter that is left.
        """
        assert self.is_sharded, "before the first forward"
        gone = self.slots.pop(index)
        self.codings.pop(index)
        self.gradients.codings = [reduce for _, reduce in self.codings]
        if not self.slots:
            return gone
        specs = [spec for i, spec in enumerate(self.layout.specs) if i != index]
        placements = [
            placements_of(self.axes, placement, slot.inner)
            for placement, slot in zip(self._lay_out(specs), self.slots, strict=True)
        ]
        current = [slot.sharded for slot in self.slots]
        shard = self.buffer.shard
        locals_ = [
            None if shard.is_meta else local_of(_redistributed(param, target))
            for param, target in zip(current, placements, strict=True)
        ]
        self._move_into_new_buffer(current, locals_, placements, shard.dtype, shard.device)
        return gone

    def _move_into_new_buffer(
        self,
        current: Sequence[nn.Parameter],
        locals_: Sequence[torch.Tensor | None],
        placements: Sequence[tuple[Placement, ...]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate for the present layout, and make the slots' parameters views of it."""
        self._allocate([slot.shape for slot in self.slots], dtype, device)
        moved = zip(self.slots, current, locals_, placements, strict=True)
        for index, (slot, param, local, placed) in enumerate(moved):
            view = shard_view(self.layout, self.rank, self.buffer.shard, index)
            if local is not None:
                with torch.no_grad():
                    view.copy_(slot.flat(local))
            slot.spec = spec_at_rest(slot.spec.mesh, placed, slot.spec.shape, dtype)
            fresh = slot.new_sharded(view, param.requires_grad)
            if param is slot.sharded:  # keep its identity: an optimizer may hold it
                fresh.grad = param.grad
                torch.utils.swap_tensors(slot.sharded, fresh)
            else:
                slot.sharded = fresh
            slot.register(slot.sharded)
            slot.local = local_of(slot.sharded)
        self._make_gathered()
        self.gradients.bind(self.buffer, self.slots, self.pool)


def together(groups: Sequence[Group], comms: Sequence[Comm]) -> AbstractContextManager[object]:
    """A context in which collectives of the groups of a unit are issued as one, on streams."""
    if len(groups) < 2 or not groups[0].has_streams:
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(groups[0].pool.lane.entered())  # also for what its end issues
    for comm in {id(each): each for each in comms}.values():
        stack.enter_context(comm.together(groups[0].pool.device))
    return stack


def _redistributed(param: nn.Parameter, placements: tuple[Placement, ...]) -> torch.Tensor:
    sharded = cast(DTensor, param.detach())
    return sharded.redistribute(placements=placements)


def _take_gradients(param: nn.Parameter, group_ref: weakref.ref[Group], index: int) -> None:
    def take(param: torch.Tensor) -> None:
        group = group_ref()
        if group is not None:
            group.take_gradient(index, param)

    param.register_post_accumulate_grad_hook(take)


def _refuse_methods(slot: Slot) -> None:
    if hasattr(slot.local, "fsdp_pre_all_gather"):
        raise NotImplementedError(
            f"the local part of parameter {slot.fqn!r} was given fsdp_pre_all_gather, but it lies "
            "in a flat buffer, which is gathered as it is. Make the parameter a tensor subclass "
            "before fully_shard: its local part may be given the methods until the first forward"
        )

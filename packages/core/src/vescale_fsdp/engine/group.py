"""Group: the parameters of a unit with the same mesh, dtype and ``requires_grad``, in one buffer.

A group is in one of three states (`residency.State`):

    SHARDED      the modules have the sharded parameters; only the shard has memory
    UNSHARDING   an all-gather writes the full buffer, which must not be used
    UNSHARDED    the modules have views of the full buffer

Gradients of the unsharded parameters are moved into a gradient buffer as they appear. `parameters`
has the sharded parameters, and `moving` moves them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from vescale_fsdp import compat, transfers
from vescale_fsdp.backends import collective_device
from vescale_fsdp.dbuffer import (
    Comm,
    ThenCopy,
)
from vescale_fsdp.engine.inputs import refuse_graph
from vescale_fsdp.engine.lent import show_gathered, show_sharded
from vescale_fsdp.engine.moving import MovableParameters
from vescale_fsdp.engine.slot import Slot, flags_of, slot_of
from vescale_fsdp.program import State
from vescale_fsdp.ranks import collectives, notes, waits


class Fetched(NamedTuple):
    """A running all-gather of one group, in a message with others."""

    work: ThenCopy
    version: tuple[int, int]  # of the shard that was sent


class Group(MovableParameters):
    """The parameters with their collectives. The arguments are those of `Parameters`."""

    def start_gather(self, comm: Comm, *, in_backward: bool = False) -> None:
        """Start the all-gather, unless the group is unsharded or an all-gather runs.

        In backward it gathers the larger parts that forward has kept, if any.
        """
        if self.state is State.SHARDED:
            with self.pool.lane.entered(), compat.recorded("unshard", [self.unit_name]):
                self._start_gather(comm, in_backward)
            self._gathered_version = self.version
            self.state = State.UNSHARDING

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
                first = partial(waits.wait, self._inner_shard, self._outer_gather())
            if self.codec is not None and inner is None:
                # Where gradients wait for more, no optimizer has stepped since the backward.
                may_repeat = in_backward or self.gradients.are_waiting
                self._outbox.prepare(self.version, may_repeat=may_repeat)
            with notes.Named(self._gather()):
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

    def equalize_replicas(self) -> None:
        """Give all replicas the parameters of the first one, as DDP does. Collective.

        Replicas that begin with other values, because their ranks drew other numbers, would stay
        apart. Cost: one broadcast of the shard; one more of the full buffer if somebody has
        unsharded it before, and may have written to it.
        """
        axes, buffer = self.axes, self.buffer
        if axes.num_replicas == 1 or axes.cuts_outside or self.is_on_meta:
            return
        flats = [buffer.shard]
        if not (self.is_sharded or buffer.is_one):
            self._wait()
            flats.append(buffer.full.flat)
        assert axes.replicate is not None, "there are replicas"
        replicas = collectives.mesh_group(axes.mesh, axes.replicate)
        for flat in flats:
            if flat.numel():
                sent = flat.to(collective_device(replicas, flat.device)).view(torch.uint8)
                collectives.broadcast(sent, axes.replica_ranks[0], replicas).wait()
                if axes.replica:
                    with torch.no_grad():
                        flat.copy_(sent.view(flat.dtype))

    def follow_conversions(self) -> None:
        """Update the shard if a submodule was converted, for example by ``module.to()``."""
        locals_ = [slot.sharded._local_tensor for slot in self.slots]  # type: ignore[attr-defined]
        if self.is_sharded and not all(map(operator.is_, locals_, [s.local for s in self.slots])):
            self.rebind()  # they have left the shard

    @property
    def travels_plainly(self) -> bool:
        """Whether an all-gather sends the shard as is: no codec, custom collective or streams."""
        is_plain = self._has_views and self.codec is None and self.custom_gather is None
        is_plain = is_plain and self._inner_shard is None and not self.is_on_meta
        return is_plain and not self.has_streams and self.num_shards > 1

    def expect(self, fetched: Fetched, comm: Comm) -> None:
        """Set the running all-gather. ``fetched.work.wait()`` writes to the full buffer."""
        assert self.state is State.SHARDED, "nobody has started another"
        self.gradients.casts_first = comm.sends_sums
        self._part, self._work, self._gathered_version = None, *fetched
        self.state = State.UNSHARDING

    def keep_writes(self) -> None:
        """Copy writes to unsharded parameters to the shard, if the group is unsharded."""
        self._wait()
        if self.is_gathered:
            self._keep_writes()

    def take_part(self, comm: Comm) -> None:
        """Take part in an all-gather that other ranks need, although the group is unsharded.

        It writes the same values to the parameters.
        """
        self._wait()
        self._keep_writes()
        state, self.state = self.state, State.SHARDED
        self.start_gather(comm)
        self._wait()
        self.state = state

    def start_outer_gather(self, comm: Comm) -> None:
        """Start the all-gather over the outer axis, if parameters are sharded over it too."""
        if self._inner_shard is not None and not self.is_on_meta:
            outer, version = comm.among_replicas, self.version
            with self.pool.lane.entered():
                self._inner_shard.start_gather(self.buffer, outer, version, self.codec)

    def drop_message(self) -> None:
        """Drop the encoded message, because no backward will send it again."""
        self._outbox.drop()

    def has_arrived(self, seconds: float) -> bool:
        """Wait at most ``seconds``. Returns whether the all-gather has ended; True on streams."""
        if self._work is None or self.has_streams or isinstance(self._work, ThenCopy):
            return True
        if not isinstance(self._work, waits.Ending):
            self._work = waits.Ending(self._work, has_streams=False)
        return self._work.has_ended(seconds)

    def finish_gather(self) -> None:
        """Wait for the all-gather, and register the unsharded parameters in the modules."""
        assert self.state is not State.SHARDED, "start_gather comes first"
        if self.state is State.UNSHARDING:
            with compat.recorded("wait_for_unshard", [self.unit_name]):
                self._wait()
            self._guard.open(self._gathered_params())
            self.state = State.UNSHARDED
        self.has_lent = show_gathered(self.slots)
        self.follow_flags()
        self._users.add()

    def follow_flags(self) -> None:
        """Set ``requires_grad`` of unsharded parameters to that of the sharded ones.

        While the unit's forward runs, none is frozen: what is frozen now (``toggle_optimizer`` of
        Lightning) may be trained later in it. `take_gradient` drops its gradients.
        """
        for slot, wanted in zip(self.slots, flags_of(self.slots), strict=True):
            gathered = slot.gathered
            if gathered is None or gathered.requires_grad == wanted:
                continue
            if wanted or not self.is_in_forward:
                gathered.requires_grad_(wanted)

    def _gathered_params(self) -> list[nn.Parameter]:
        return [slot.gathered for slot in self.slots if slot.gathered is not None]

    def _wait(self) -> None:
        if isinstance(self._work, ThenCopy):  # what is left to do allocates, or frees
            with self.pool.lane.entered():
                waits.wait(self._work, self._gather())
            self.pool.lane.join()
        elif self._work is not None:
            waits.wait(self._work, self._gather())
        self._work = self._part_in_flight = None

    def _gather(self) -> str:
        return f"the gather of {self.unit_name}"

    def _outer_gather(self) -> str:
        return f"the gather of {self.unit_name} over the replicas"

    def keep_part(self, num_parts: int) -> None:
        """Reshard, but keep one of ``num_parts`` equal parts of the full buffer for backward."""
        if self.state is not State.SHARDED:
            self._wait()
            with self.pool.lane.entered():
                part = self.buffer.part(num_parts)
                kept = torch.empty_like(part)  # not a view: the full buffer is freed
                kept.copy_(part)
            self.reshard()
            self.drop_message()
            self._part = kept

    def reshard(self) -> None:
        """Register the sharded parameters in the modules, and free the full buffer."""
        self._part = None
        if self.state is State.SHARDED:
            return
        self._wait()
        if self.is_gathered:
            self._keep_writes()
        self._guard.close()
        # An autocast that is open over several forwards keeps casts, also those of a recomputation.
        torch.clear_autocast_cache()
        # What code has done between `unshard` and `reshard` is dropped, as by FSDP2.
        show_sharded(self.slots, drops=self.is_by_hand and not compat.in_functional_call())
        with self.pool.lane.entered():
            self._users.end()
            self._release()
        self.is_exposed = self.is_by_hand = False
        self._own_before = None
        self.state = State.SHARDED

    def _release(self) -> None:
        self.buffer.full.release()

    def gathered_storages(self) -> set[int]:
        """Return ``_cdata`` of each storage that a reshard frees."""
        return {self.buffer.full.region.storage._cdata}

    def set_aside(self) -> None:
        """Keep the full buffer for backward, but register the sharded parameters.

        The group is then in the same state as after a prefetch.
        """
        if self.is_gathered:
            self._keep_writes()
            show_sharded(self.slots)
            self.state = State.UNSHARDING

    def take_by_hand(self) -> None:
        """Record that the user has unsharded it. Writes are then dropped, as in FSDP2.

        They stay where the shard is the unsharded parameters (`DBuffer.is_one`), as in DDP.
        """
        if not self.is_by_hand:
            self._keep_writes()
            self.is_by_hand = True

    def _keep_writes(self) -> None:
        """Copy writes of a forward to unsharded parameters back to the shard.

        An example is the momentum update of a teacher in ``training_step``.

        Raises:
            RuntimeError: the sharded parameters were also written to.
        """
        if self.is_by_hand:  # dropped, as by FSDP2
            return
        moved = self._guard.saw_move and self._take_over_data()
        if moved or self._guard.saw_write:
            if self.is_stale:
                raise RuntimeError(
                    f"the parameters {[slot.fqn for slot in self.slots]} were written to "
                    "both unsharded and sharded in one pass, and one of the writes would be "
                    "lost. In a forward, write to what module.parameters() gives there"
                )
            self.write_back()
        elif self.is_exposed and not self.is_stale and self._may_differ():
            self.write_back()

    def take_writes(self) -> None:
        """Keep writes of a forward that stays unsharded and has no backward, as a reshard does.

        After it users read and write the sharded parameters.
        """
        is_kept = self.is_gathered and not self.is_by_hand
        if is_kept and (self._guard.saw_move or self._guard.saw_write):
            self.tell_writes_apart()

    def write_back_by_hand(self) -> None:
        """Copy what the user has changed to the shard, also by ``p.data = ...``.

        Raises:
            RuntimeError: another parameter is registered in the place of an unsharded one.
        """
        for slot in self.slots:
            for module_ref, name in slot.sites:
                module = module_ref()
                found = None if module is None else module._parameters.get(name)
                if isinstance(found, nn.Parameter) and slot_of(found) is None:
                    raise RuntimeError(
                        f"the parameter {slot.fqn!r} was replaced by another one inside of "
                        "`unsharded(...)`, which is dropped at its end; write to the parameter "
                        f"that is there: `module.{name}.data = ...`, or `copy_` within "
                        "torch.no_grad()"
                    )
        if self.is_gathered:
            self._take_over_data()
        self.write_back()

    def tell_writes_apart(self) -> None:
        """Call when users get the sharded parameters while others are registered.

        Until it is resharded, writes to the registered ones by ``p.data.mul_()``, of which no
        version tells, are then found without those to the shards. Cost: memory of a shard, where
        `is_exposed`.
        """
        if self.is_gathered:
            was_stale = self.is_stale
            self._keep_writes()
            if not was_stale:  # now both hold what was written
                self._gathered_version = self.version
            self._guard.open(self._gathered_params())
            if self.is_exposed and self._has_views and not self.buffer.is_one:
                self._own_before = self.buffer.own_slice().clone()

    def _take_over_data(self) -> bool:
        """Copy data that ``p.data = ...`` has set on unsharded parameters into the full buffer."""
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
            expected.data.copy_(now)  # not a new version: autograd has saved what was set
            slot.gathered.data = slot.in_forward(view)
            found = True
        return found

    def _may_differ(self) -> bool:
        """Whether this rank's part of the full buffer may differ from its shard."""
        if not self._has_views or self.buffer.is_one:
            return False
        if self.has_streams:
            return True  # `write_back` finds out, and does not keep the host waiting
        return not _same_bits(self.buffer.own_slice(), self._sent())

    def write_back(self) -> None:
        """Copy changes in this rank's part of the full buffer to the shard."""
        shard = self.buffer.shard
        if not self.buffer.is_one:
            own = transfers.brought_to(shard, self.buffer.own_slice())
            was = self._sent()
            changed = (own != was) & ~(own.isnan() & was.isnan())
            shard.copy_(torch.where(changed, own.to(shard.dtype), shard))
            if self._own_before is not None:
                self._own_before.copy_(self.buffer.own_slice())
        self.drop_copies()

    def _sent(self) -> torch.Tensor:
        """Return this rank's shard as an all-gather would write it to the full buffer.

        Or what that was when the shard could first be written to beside it.
        """
        if self._own_before is not None:
            return transfers.brought_to(self.buffer.shard, self._own_before)
        buffer, device, codec = self.buffer, self._compute_device, self.codec
        if codec is None:
            return buffer.shard.to(buffer.full_dtype)
        message = torch.empty(codec.num_bytes(self.layout), dtype=torch.uint8, device=device)
        values = torch.empty(self.layout.shard_size, dtype=buffer.full_dtype, device=device)
        codec.encode(self.layout, self.rank, buffer.shard, message)
        codec.decode(self.layout, self.rank, message, values)
        return transfers.brought_to(buffer.shard, values)

    @property
    def is_stale(self) -> bool:
        """Whether the shard was written to since the last all-gather started."""
        return not self.is_sharded and self.version != self._gathered_version

    # Gradients

    def take_gradient(self, index: int, param: torch.Tensor) -> None:
        """Move the gradient of ``param``, an unsharded parameter, into the gradient buffer."""
        slot, gradient = self.slots[index], param.grad
        if gradient is None:  # its part of the graph ran, for an output that was not used
            return
        if self.is_in_forward:
            self.on_gradient(0)  # the backward begins here, if it has passed no output of a unit
            if not slot.sharded.requires_grad:  # it was frozen in the forward (`follow_flags`)
                param.grad = None
                return
        if torch.is_grad_enabled():
            refuse_graph(slot)
        if self.state is not State.UNSHARDED and not self.frees_before_backward:
            raise RuntimeError(
                f"a gradient of {slot.fqn!r} appeared while its parameters were freed: the loss "
                "depends on it by a tensor that is not an output of its module (an attribute that "
                "forward has set, for example). Return that tensor from forward instead"
            )
        self.gradients.add(index, self._in_buffer(slot, gradient))
        param.grad = None
        self.on_gradient(self.sizes[index])

    def collect_gradients(self) -> None:
        """Move gradients that were set on unsharded parameters into the gradient buffer.

        Those of ``torch.autograd.grad``, for which autograd calls no hooks (see `pipelining`).
        """
        for index, slot in enumerate(self.slots):
            if slot.gathered is not None and slot.gathered.grad is not None:
                self.gradients.add(index, self._in_buffer(slot, slot.gathered.grad))
                slot.gathered.grad = None

    def _in_buffer(self, slot: Slot, gradient: torch.Tensor) -> torch.Tensor:
        if slot.sharded._backward_hooks:
            gradient = slot.hooked(gradient)
        return gradient if slot.lies_plainly else slot.in_buffer(gradient)

    def reset(self) -> None:
        """Discard the state of an interrupted step."""
        self.is_in_forward = False
        self._wait()
        self.gradients.reset()
        self.reshard()

    # Rebinding


def _same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two flat tensors of a dtype have the same bits."""
    places = [each.storage_offset() * each.itemsize for each in (one, other)]
    if not any(number % 8 for number in (one.nbytes, *places)):
        # Eight bytes at a time, because torch compares one element after the other.
        one, other = one.view(torch.int64), other.view(torch.int64)
    return torch.equal(one, other)


def together(groups: Sequence[Group], comms: Sequence[Comm]) -> AbstractContextManager[object]:
    """A context that joins the collectives of a unit's groups into one operation, on streams."""
    if len(groups) < 2 or not groups[0].has_streams:
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(groups[0].pool.lane.entered())  # also for what its end issues
    for comm in {id(each): each for each in comms}.values():
        stack.enter_context(comm.together(groups[0].pool.device))
    return stack

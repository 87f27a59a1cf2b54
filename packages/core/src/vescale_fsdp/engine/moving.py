"""Moves the sharded parameters of a group to a new buffer.

They move when other code has converted or replaced them (``module.to()``), when a copy is made,
when one of them leaves the group, and when the number of ranks changes. They keep their identity,
because an optimizer may hold them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace
from typing import Any, Self, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp import devices
from vescale_fsdp.dbuffer import Outbox, shard_view
from vescale_fsdp.engine.axes import Axes
from vescale_fsdp.engine.guard import Guard
from vescale_fsdp.engine.parameters import Parameters
from vescale_fsdp.engine.placement import InnerShard, mesh_at_rest, placements_of, spec_at_rest
from vescale_fsdp.engine.slot import (
    Slot,
    carry,
    checked_local,
    local_of,
    refuse_methods,
    same_memory,
)
from vescale_fsdp.program import State


class MovableParameters(Parameters):
    """`Parameters` that can move to a new buffer. It has the same arguments."""

    def rebind(self, *, may_wait: bool = False) -> None:
        """Make the registered parameters views of the shard again, after other code moved them.

        With ``may_wait``, do nothing if only some of them were moved, because the other modules of
        the unit come later.

        ``module.to()``, ``to_empty()`` and ``load_state_dict(assign=True)`` give a parameter
        another local tensor, or register another parameter. The data is copied into the shard
        (a new one, if dtype or device changed). The registered parameters keep their identity.
        """
        assert self.is_sharded, "the sharded parameters are registered"
        for slot in self.slots:
            refuse_methods(slot)
        current = [slot.registered() for slot in self.slots]
        views = self.buffer.shard_views()
        if all(
            param is slot.sharded and same_memory(param, view)
            for param, slot, view in zip(current, self.slots, views, strict=True)
        ):
            for slot in self.slots:  # an assignment of data has wrapped the memory anew
                slot.hold(slot.sharded)
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
        """Use ``device`` for the unsharded parameters too, unless the shard is offloaded."""
        if not self._offloads:
            self._compute_device, self._users = device, devices.Users(device)
        elif device.type != "cpu":
            raise RuntimeError(
                f"the parameters {[slot.fqn for slot in self.slots]} are on {device}, but must be "
                "on the CPU (offload_policy=CPUOffloadPolicy()); load a state dict of CPU "
                'tensors, or call module.to_empty(device="cpu")'
            )

    def copied(self, memo: dict[int, Any], on_gradient: Callable[[int], None]) -> Self:
        """Return a new group with the same data and layout, for ``copy.deepcopy``.

        The copies of the sharded parameters are added to ``memo``, and not registered yet.
        """
        assert self.is_sharded, "the unit has released it"
        twin = self._twin()
        twin.on_gradient = on_gradient
        shapes = [slot.shape for slot in self.slots]
        twin._allocate(shapes, self.buffer.shard.dtype, self.buffer.shard.device)
        twin.buffer.shard.copy_(self.buffer.shard)
        twin.slots = []
        for index, slot in enumerate(self.slots):
            view = shard_view(twin.layout, twin.rank, twin.buffer.shard, index)
            sharded = slot.new_sharded(view, slot.sharded.requires_grad)
            sharded.grad = None if slot.sharded.grad is None else slot.sharded.grad.clone()
            memo[id(slot.sharded)] = sharded
            twin.slots.append(slot.copied(sharded))
        twin.gradients = self.gradients.copied(twin.buffer, twin.slots, twin.pool)
        twin._make_gathered()
        return twin

    def _twin(self) -> Self:
        """Return a copy in which nothing is under way, with the buffer and slots of this group."""
        twin = copy.copy(self)
        twin._work, twin._outbox = None, Outbox()
        twin._guard, twin._users = Guard(), devices.Users(self._compute_device)
        twin._inner_shard = None if self._inner_shard is None else InnerShard()
        return twin

    def parted(self, indices: Collection[int]) -> Self:
        """Move these parameters to a new group, without communication.

        In both groups they keep their places, so there are gaps where those of the other are.
        """
        assert self.is_sharded, "before the first forward"
        twin, former = self._twin(), self.layout
        slots, codings, sizes, shard = self.slots, self.codings, self.sizes, self.buffer.shard
        specs = self._specs
        every = range(len(slots))
        for group, kept in (
            (twin, [index for index in every if index in indices]),
            (self, [index for index in every if index not in indices]),
        ):
            group.slots = [slots[index] for index in kept]
            group.codings = [codings[index] for index in kept]
            group.sizes = [sizes[index] for index in kept]
            group._specs = [specs[index] for index in kept]
            group.layout = replace(
                former,
                specs=tuple(former.specs[index] for index in kept),
                offsets=tuple(former.offsets[index] for index in kept),
                order=tuple(kept.index(index) for index in former.order if index in kept),
                exact=False,
                optimal=False,
            )
            group.gradients = self.gradients.copied(self.buffer, group.slots, self.pool)
            group.gradients.codings = [reduce for _, reduce in group.codings]
            group._move_into_new_buffer(
                [slot.sharded for slot in group.slots],
                [local_of(slot.sharded) for slot in group.slots],
                [slot.spec.placements for slot in group.slots],
                shard.dtype,
                shard.device,
            )
        return twin

    def give_back(self, index: int) -> Slot:
        """Remove parameter ``index`` from the group. The others move to a new layout.

        Collective: one redistribution for each other parameter.
        """
        assert self.is_sharded, "before the first forward"
        gone = self.slots.pop(index)
        self.codings.pop(index)
        self.gradients.codings = [reduce for _, reduce in self.codings]
        if not self.slots:
            return gone
        self._specs = [spec for i, spec in enumerate(self._specs) if i != index]
        planned = self._lay_out([slot.shape for slot in self.slots], None)
        placements = [
            placements_of(self.axes, placement, slot.inner)
            for placement, slot in zip(planned, self.slots, strict=True)
        ]
        current = [slot.sharded for slot in self.slots]
        shard = self.buffer.shard
        locals_ = [
            None
            if shard.is_meta
            else local_of(cast(DTensor, param.detach()).redistribute(placements=target))
            for param, target in zip(current, placements, strict=True)
        ]
        self._move_into_new_buffer(current, locals_, placements, shard.dtype, shard.device)
        return gone

    def move_to(self, axes: Axes) -> None:
        """Shard over the ranks of other axes. Values and gradients are lost; no communication.

        The parameters keep their identity. Nothing may be under way on the former axes.
        """
        self.axes, self.rank, self.num_shards = axes, axes.resting_rank, axes.num_resting_shards
        self._work = self._part = self._part_in_flight = None
        self.state, self.is_exposed, self.is_by_hand = State.SHARDED, False, False
        self._own_before = None
        self._guard, self._users = Guard(), devices.Users(self._compute_device)
        self._inner_shard = InnerShard() if axes.cuts_outside else None
        self.gradients = self.gradients.copied(self.buffer, self.slots, self.pool)
        planned = self._lay_out([slot.shape for slot in self.slots], self.slots[0].dim)
        for slot in self.slots:
            slot.axes, slot.used, slot.sharded.grad = axes, False, None
        placements = [
            placements_of(axes, placement, slot.inner)
            for placement, slot in zip(planned, self.slots, strict=True)
        ]
        current, shard = [slot.sharded for slot in self.slots], self.buffer.shard
        nothing = [None] * len(current)
        self._move_into_new_buffer(current, nothing, placements, shard.dtype, shard.device)

    def _move_into_new_buffer(
        self,
        current: Sequence[nn.Parameter],
        locals_: Sequence[torch.Tensor | None],
        placements: Sequence[tuple[Placement, ...]],
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate a shard for the current layout, and make the slots' parameters views of it."""
        self._allocate([slot.shape for slot in self.slots], dtype, device)
        moved = zip(self.slots, current, locals_, placements, strict=True)
        for index, (slot, param, local, placed) in enumerate(moved):
            view = shard_view(self.layout, self.rank, self.buffer.shard, index)
            if local is not None:
                with torch.no_grad():
                    view.copy_(slot.flat(local))
            mesh = mesh_at_rest(slot.axes, slot.inner, slot.fqn)
            slot.spec = spec_at_rest(mesh, placed, slot.spec.shape, dtype)
            fresh = slot.new_sharded(view, param.requires_grad)
            # What is registered keeps its identity: an optimizer may hold it.
            if _is_alike(param, fresh):
                param._local_tensor, param._spec = fresh._local_tensor, fresh._spec  # type: ignore[attr-defined]
                param.__dict__.update(fresh.__dict__)  # its name, which `module.to()` drops
            else:
                fresh.grad = param.grad
                carry(param, fresh)
                torch.utils.swap_tensors(param, fresh)
            slot.hold(param)
            slot.register(param)
        self._make_gathered()
        self.gradients.bind(self.buffer, self.slots, self.pool)


def _is_alike(param: nn.Parameter, other: nn.Parameter) -> bool:
    """Whether only the local parts and placements differ, not what autograd knows of them."""
    return (
        type(param) is type(other)
        and (param.dtype, param.device, param.shape) == (other.dtype, other.device, other.shape)
        and param.stride() == other.stride()
    )

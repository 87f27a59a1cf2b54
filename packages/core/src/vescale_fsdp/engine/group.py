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

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import nn

from vescale_fsdp.compat import DTensorSpec
from vescale_fsdp.dbuffer import (
    Comm,
    DBuffer,
    GradientBuffer,
    PendingReduce,
    pool_for,
    shard_view,
)
from vescale_fsdp.engine.axes import Axes
from vescale_fsdp.planner import ShardLayout, TensorSpec, plan
from vescale_fsdp.ragged import RaggedShard
from vescale_fsdp.ragged.tensor import make_spec, wrap_local

__all__ = ["Group", "GroupState", "Slot"]

# Starts of tensors are multiples of 16 bytes in the narrowest dtype that travels (bf16, or a
# byte dtype where the group holds one): NCCL falls back to scalar copies below that.
_ALIGNMENT_BYTES = 16


class GroupState(Enum):
    """Where the data of a group is; see the module's docstring."""

    SHARDED = auto()
    GATHERING = auto()
    GATHERED = auto()


@dataclass
class Slot:
    """One parameter of a group, and every place in the model where it is registered."""

    fqn: str
    sites: list[tuple[weakref.ref[nn.Module], str]]
    shape: torch.Size
    spec: DTensorSpec
    sharded: nn.Parameter
    local: torch.Tensor  # the view of the shard that ``sharded`` wraps
    gathered: nn.Parameter | None = None  # None while the group is on meta
    used: bool = False  # whether a gradient appeared since the last reduction

    def register(self, param: nn.Parameter) -> None:
        """Make ``param`` the one that the modules hold."""
        for module_ref, name in self.sites:
            module = module_ref()
            if module is not None:
                module._parameters[name] = param


@dataclass(frozen=True)
class ParamToShard:
    """An original parameter with what the group needs to know of it."""

    fqn: str
    param: nn.Parameter
    sites: list[tuple[weakref.ref[nn.Module], str]]
    block: int


class Group:
    """One flat buffer of parameters, and the collectives on it.

    Args:
        params: the parameters, all of one dtype and trainability, in definition order.
        axes: of the mesh, over which they are sharded and replicated.
        device: on which the shard lives (meta while the parameters are there).
        compute_dtype: of the gathered parameters; None for that of the sharded ones.
        reduce_dtype: in which gradients are summed; None for the compute dtype.
        on_gradient: called after each gradient that the group has taken.
    """

    def __init__(
        self,
        params: list[ParamToShard],
        axes: Axes,
        device: torch.device,
        *,
        compute_dtype: torch.dtype | None,
        reduce_dtype: torch.dtype | None,
        on_gradient: Callable[[], None],
    ) -> None:
        self.axes = axes
        self.rank, self.num_shards = axes.rank, axes.num_shards
        self.compute_dtype, self.reduce_dtype = compute_dtype, reduce_dtype
        self.on_gradient = on_gradient
        self.state = GroupState.SHARDED
        self.accumulates = False  # whether gradients wait for a later backward
        self._has_accumulated = False  # whether any rank may hold such gradients
        self._kept_version = 0
        self._work: torch.distributed.Work | None = None
        self._filling: GradientBuffer | None = None
        self.sums_replicas = True  # whether the coming reduction is for all replicas
        self.divide_factor: float | None = None  # of the gradients; None: number of ranks
        self._reducing: tuple[GradientBuffer, PendingReduce, Comm] | None = None
        self._summing: tuple[torch.Tensor, torch.distributed.Work] | None = None
        self._unsummed: torch.Tensor | None = None  # reduced shards that wait for the replicas
        self._reduced: torch.Tensor | None = None
        dtype = params[0].param.dtype
        self.layout = _plan(params, self.num_shards)
        placements = [
            RaggedShard.from_interval(
                offset, self.layout.shard_size, self.num_shards, p.param.shape
            )
            for offset, p in zip(self.layout.offsets, params, strict=True)
        ]
        self.shapes = [p.param.shape for p in params]
        self._allocate(dtype, device)
        self.slots: list[Slot] = []
        views = self.buffer.shard_views()
        for index, (p, placement, view) in enumerate(zip(params, placements, views, strict=True)):
            start, stop = self.layout.local_range(index, self.rank)
            with torch.no_grad():
                view.copy_(p.param.detach().reshape(-1)[start:stop])
            spec = make_spec(axes.mesh, axes.placements(placement), p.param.shape, dtype)
            tensor = wrap_local(view, spec, False)
            sharded = nn.Parameter(tensor, requires_grad=p.param.requires_grad)
            slot = Slot(p.fqn, p.sites, p.param.shape, spec, sharded, _local(sharded))
            slot.register(sharded)
            self.slots.append(slot)
        self._make_gathered()

    def _allocate(self, dtype: torch.dtype, device: torch.device) -> None:
        floating = dtype.is_floating_point
        full_dtype = self.compute_dtype if self.compute_dtype and floating else dtype
        self.buffer = DBuffer(
            self.layout,
            self.shapes,
            self.rank,
            shard_dtype=dtype,
            full_dtype=full_dtype,
            device=device,
        )
        self.pool = pool_for(device)

    def _make_gathered(self) -> None:
        """Make the parameters that forward sees, once, as views of the full buffer."""
        if self.buffer.full_face is None:
            return
        group_ref = weakref.ref(self)
        for index, (slot, view) in enumerate(zip(self.slots, self.buffer.full.views, strict=True)):
            differentiable = view.dtype.is_floating_point or view.dtype.is_complex
            slot.gathered = nn.Parameter(view, requires_grad=differentiable)
            if differentiable:  # also where it is frozen now: it may be unfrozen later
                _take_gradients(slot.gathered, group_ref, index)
            slot.gathered.requires_grad_(slot.sharded.requires_grad)

    # Parameters

    @property
    def trainable(self) -> bool:
        """Whether any parameter wants a gradient now (users freeze and unfreeze)."""
        return any(slot.sharded.requires_grad for slot in self.slots)

    @property
    def is_sharded(self) -> bool:
        """Whether the modules hold the sharded parameters and no gather is under way."""
        return self.state is GroupState.SHARDED

    @property
    def is_gathered(self) -> bool:
        """Whether the modules hold the gathered parameters."""
        return self.state is GroupState.GATHERED

    @property
    def has_gradients(self) -> bool:
        """Whether gradients were taken that no reduction has sent yet."""
        return self._filling is not None

    def start_gather(self, comm: Comm) -> None:
        """Issue the all-gather, unless the parameters are there or on their way."""
        if self.state is GroupState.SHARDED:
            if any(_local(slot.sharded) is not slot.local for slot in self.slots):
                self.rebind()  # a submodule was converted: its parameters left the shard
            self._work = comm.start_gather(self.buffer)
            self.state = GroupState.GATHERING

    def finish_gather(self) -> None:
        """Wait for the all-gather and give the modules the gathered parameters."""
        assert self.state is not GroupState.SHARDED, "start_gather comes first"
        if self.state is GroupState.GATHERING:
            self._wait()
            for slot in self.slots:
                gathered = slot.gathered
                assert gathered is not None, "a group on meta is refused at lazy init"
                if gathered.requires_grad != slot.sharded.requires_grad:
                    gathered.requires_grad_(slot.sharded.requires_grad)
                slot.register(gathered)
            self.state = GroupState.GATHERED

    def _wait(self) -> None:
        if self._work is not None:
            self._work.wait()
            self._work = None

    def reshard(self) -> None:
        """Give the modules the sharded parameters and free the full buffer."""
        if self.state is GroupState.SHARDED:
            return
        self._wait()
        for slot in self.slots:
            slot.register(slot.sharded)
        self.buffer.full.release()
        self.state = GroupState.SHARDED

    def mark_kept(self) -> None:
        """Remember the weights that are gathered now, for `is_stale`."""
        self._kept_version = self._version()

    @property
    def is_stale(self) -> bool:
        """Whether an optimizer has changed the shards since `mark_kept`."""
        return self._version() != self._kept_version

    def _version(self) -> int:
        # Of the wrapper: below it, where operators run on the local part, nothing is counted.
        return sum(slot.sharded._version for slot in self.slots)

    # Gradients

    def wait_for_more(self, waits: bool) -> None:
        """Say whether the gradients of the coming backward wait for a later one."""
        self.accumulates = waits
        self._has_accumulated |= waits

    def take_gradient(self, index: int) -> None:
        """Move the gathered parameter's gradient into the buffer, and drop it."""
        slot = self.slots[index]
        param = slot.gathered
        assert param is not None, "autograd knows the gathered parameter"
        if param.grad is None:  # its part of the graph ran, for an output that was not used
            return
        if self.state is not GroupState.GATHERED:
            raise RuntimeError(
                f"a gradient of {slot.fqn!r} appeared while its parameters were freed: the loss "
                "depends on it by a way around the outputs of its module (an attribute that "
                "forward has set, for example). Return that tensor from forward instead"
            )
        if self._filling is None:
            self.finish_reduce()  # a late gradient: its buffer may still be travelling
            self._filling = self._gradient_buffer()
        self._filling.add(index, param.grad)
        param.grad = None
        slot.used = True
        self.on_gradient()

    def _gradient_buffer(self) -> GradientBuffer:
        """In the dtype of the gradients, or, where several are summed here, the reduce dtype."""
        # The same on every rank, also on one that had no gradient in the backwards before.
        dtype = self.sum_dtype if self._has_accumulated else self.buffer.full.flat.dtype
        return GradientBuffer(self.layout, self.shapes, dtype, self.pool)

    @property
    def sum_dtype(self) -> torch.dtype:
        """The dtype in which gradients are summed over ranks and micro-batches."""
        return self.reduce_dtype or self.buffer.full.flat.dtype

    def start_reduce(self, comm: Comm) -> None:
        """Issue the reduction of the gradients taken so far (zeros where there is none)."""
        assert self._reducing is None, "one reduction of a group at a time"
        gradients = self._filling or self._gradient_buffer()
        self._filling = None
        pending = comm.start_reduce(gradients.seal(), self.sum_dtype, self.pool, self.divide_factor)
        self._has_accumulated = False
        self._reducing = (gradients, pending, comm)

    def finish_reduce(self) -> None:
        """Wait for the reduction, if one is under way, and start the sum over the replicas.

        Without replicas the shard is kept for `publish` at once.
        """
        if self._reducing is None:
            return
        gradients, pending, comm = self._reducing
        self._reducing = None
        self.finish_sum()  # of an earlier reduction in the same backward
        reduced = pending.finish()
        gradients.release()
        if comm.replica_group is None:
            self._keep(reduced)
            return
        if self._unsummed is not None:
            reduced.add_(self._unsummed)
            self._unsummed = None
        if self.sums_replicas:
            self._summing = (reduced, comm.start_replica_sum(reduced))
        else:
            self._unsummed = reduced

    def finish_sum(self) -> None:
        """Wait for the sum over the replicas, if one is under way, and keep it for `publish`."""
        if self._summing is None:
            return
        summed, work = self._summing
        self._summing = None
        work.wait()
        if self.divide_factor is None:
            summed.mul_(1.0 / self.axes.num_replicas)
        self._keep(summed)

    def _keep(self, reduced: torch.Tensor) -> None:
        reduced = reduced.to(self.buffer.shard.dtype)
        self._reduced = reduced if self._reduced is None else self._reduced.add_(reduced)

    def publish(self, used: list[bool]) -> None:
        """Set or add to ``.grad`` of the sharded parameters that were used on any rank."""
        reduced, self._reduced = self._reduced, None
        for index, (slot, was_used) in enumerate(zip(self.slots, used, strict=True)):
            slot.used = False
            if reduced is None or not was_used or not slot.sharded.requires_grad:
                continue
            local = shard_view(self.layout, self.rank, reduced, index)
            if slot.sharded.grad is None:
                slot.sharded.grad = wrap_local(local, slot.spec, False)
            else:
                slot.sharded.grad._local_tensor.add_(local)  # type: ignore[attr-defined]

    def zero_grad(self, set_to_none: bool) -> None:
        """Drop or zero the gradients, those that wait for a later backward included."""
        for slot in self.slots:
            slot.used = False
            if slot.sharded.grad is not None:
                if set_to_none:
                    slot.sharded.grad = None
                else:
                    slot.sharded.grad.detach_().zero_()
        if self._filling is not None:
            self._filling.release()
            self._filling = None
        self._unsummed = None

    def reset(self) -> None:
        """Forget a step that was broken off: wait for what flies, drop all gradients of it."""
        self._wait()
        self.finish_reduce()
        self.finish_sum()
        if self._filling is not None:
            self._filling.release()
        self._filling = self._reduced = self._unsummed = None
        for slot in self.slots:
            slot.used = False
            if slot.gathered is not None:
                slot.gathered.grad = None
        self.reshard()

    # Rebinding

    def rebind(self) -> None:
        """Make the registered parameters views of the shard again, after somebody moved them.

        ``module.to()``, ``to_empty()`` and ``load_state_dict(assign=True)`` give a parameter
        another local tensor, or register another parameter. The data is copied into the shard
        (a new one, if dtype or device changed), and the parameters keep their identity.
        """
        assert self.is_sharded, "the sharded parameters are registered"
        current = [_registered(slot) for slot in self.slots]
        views = self.buffer.shard_views()
        if all(
            param is slot.sharded and _same_memory(param, view)
            for param, slot, view in zip(current, self.slots, views, strict=True)
        ):
            return
        dtypes = {param.dtype for param in current}
        if len(dtypes) > 1:
            raise NotImplementedError(
                f"the parameters {[slot.fqn for slot in self.slots]} share one buffer but now "
                f"have dtypes {dtypes}; give all of them the same dtype, or convert the model "
                "before fully_shard"
            )
        locals_ = [_local_of(param, slot) for param, slot in zip(current, self.slots, strict=True)]
        device = next((t.device for t in locals_ if t.numel()), self.buffer.shard.device)
        self._allocate(dtypes.pop(), device)
        for slot, param, local, view in zip(
            self.slots, current, locals_, self.buffer.shard_views(), strict=True
        ):
            with torch.no_grad():
                view.copy_(local)
            slot.spec = make_spec(self.axes.mesh, slot.spec.placements, slot.shape, view.dtype)
            requires_grad = param.requires_grad
            fresh = nn.Parameter(wrap_local(view, slot.spec, False), requires_grad=requires_grad)
            if param is slot.sharded:  # keep its identity: an optimizer may hold it
                fresh.grad = param.grad
                torch.utils.swap_tensors(slot.sharded, fresh)
            else:
                slot.sharded = fresh
            slot.register(slot.sharded)
            slot.local = _local(slot.sharded)
        self._make_gathered()


def _plan(params: list[ParamToShard], num_shards: int) -> ShardLayout:
    narrowest = min(2, *(p.param.element_size() for p in params))
    specs = [TensorSpec(p.fqn, tuple(p.param.shape), p.block) for p in params]
    return plan(specs, num_shards, alignment=_ALIGNMENT_BYTES // narrowest)


def _take_gradients(param: nn.Parameter, group_ref: weakref.ref[Group], index: int) -> None:
    def take(_: torch.Tensor) -> None:
        group = group_ref()
        if group is not None:
            group.take_gradient(index)

    param.register_post_accumulate_grad_hook(take)


def _local(param: torch.Tensor) -> torch.Tensor:
    local: torch.Tensor = param._local_tensor  # type: ignore[attr-defined]
    return local


def _registered(slot: Slot) -> nn.Parameter:
    module_ref, name = slot.sites[0]
    module = module_ref()
    param = None if module is None else module._parameters[name]
    return slot.sharded if param is None else param


def _same_memory(param: torch.Tensor, view: torch.Tensor) -> bool:
    local = _local(param)
    return bool(
        local.untyped_storage()._cdata == view.untyped_storage()._cdata
        and local.storage_offset() == view.storage_offset()
        and local.dtype == view.dtype
    )


def _local_of(param: nn.Parameter, slot: Slot) -> torch.Tensor:
    local: torch.Tensor | None = getattr(param, "_local_tensor", None)
    placements = getattr(param, "placements", None)
    if local is None or placements != slot.spec.placements or param.shape != slot.shape:
        raise ValueError(
            f"parameter {slot.fqn!r} was replaced by one of shape {tuple(param.shape)} with "
            f"{placements or 'no placements'}; expected shape {tuple(slot.shape)} with "
            f"{slot.spec.placements}. Load it into the existing parameter (assign=False), or "
            "distribute it with that placement"
        )
    return local

"""The sharded parameters of a group, and the plan of their buffer. `moving` moves them to another.

Each parameter has two ``nn.Parameter`` objects: the sharded one (a RaggedTensor, for optimizer and
state dict) and the unsharded one (a plain view of the full buffer, for forward and backward). The
first changes only if other code registers another one.
"""

from __future__ import annotations

import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp import compat, devices
from vescale_fsdp.dbuffer import (
    BlockCodec,
    Codec,
    DBuffer,
    Outbox,
    ParameterBuffer,
    pool_for,
    shard_view,
)
from vescale_fsdp.devices import Waitable
from vescale_fsdp.engine.axes import Axes
from vescale_fsdp.engine.guard import Guard, num_steps
from vescale_fsdp.engine.placement import (
    InnerShard,
    even_chunks,
    given_spec,
    warn_of_padding,
)
from vescale_fsdp.engine.reduce import Gradients
from vescale_fsdp.engine.slot import (
    ParamToShard,
    Slot,
    carry,
    gradient_seen,
    resting_spec,
)
from vescale_fsdp.planner import TensorSpec, lay_out
from vescale_fsdp.program import State
from vescale_fsdp.ragged import RaggedShard, RaggedTensor

# Starts of tensors are multiples of 16 bytes in the narrowest dtype that travels (bf16, or a
# byte dtype where the group holds one): NCCL falls back to scalar copies below that.
_ALIGNMENT_BYTES = 16


class Parameters(ABC):
    """The parameters of one flat buffer. `Group` adds the collectives of a step.

    Args:
        params: the parameters, all with the same dtype and ``requires_grad``, in definition order.
        axes: of the mesh, over which they are sharded and replicated.
        device: of the shard (meta while the parameters are there).
        offloads: whether the shard stays on the CPU, wherever the parameters are used.
        keeps_full: whether the full buffer keeps its memory for the next step.
        keeps_sums: whether reduced gradients do.
        compute_device: of the unsharded parameters.
        pin_memory: of a shard on the CPU.
        compute_dtype: of the unsharded parameters; None for that of the sharded ones.
        reduce_dtype: in which gradients are summed; None for the default (`Gradients.sum_dtype`).
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
        keeps_full: bool,
        keeps_sums: bool,
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
        self._offloads, self._keeps_full = offloads, keeps_full
        self._users = devices.Users(compute_device)
        self.on_gradient = on_gradient
        self.state = State.SHARDED
        self._gathered_version = (0, 0)  # of the shards, when the last gather began
        self._guard = Guard()  # of the gathered parameters
        # Whether code that is not of the unit's own forward may have seen the gathered parameters;
        # and whether the user has gathered them, to look at or change until they are resharded.
        self.is_exposed = self.is_by_hand = False
        self._own_before: torch.Tensor | None = None  # this rank's part (`tell_writes_apart`)
        self.is_in_forward = False  # whether that of the unit runs; not in a backward
        self.has_lent = False  # other tensors are registered in place of parameters (see `lent`)
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
        self.follows_statistics = False  # whether ``compute_dtype`` may change (`statistics`)
        self.slots: list[Slot] = []
        self._specs = [TensorSpec(p.fqn, p.parts[0], p.block) for p in params]
        shapes = [p.data.shape for p in params]
        placements = self._lay_out(shapes, params[0].dim)
        itemsize = params[0].data.element_size()
        warn_of_padding(self.layout, itemsize, self.rank, stacklevel=4)  # fully_shard's caller
        buffer = self._allocate(shapes, params[0].param.dtype, device)
        self.gradients = Gradients(
            buffer, self.slots, reduce_dtype, self.pool, cuts_outside=axes.cuts_outside
        )
        self.gradients.codings = [reduce for _, reduce in self.codings]
        self.gradients.sum_lasts = keeps_sums
        for index, (p, placement) in enumerate(zip(params, placements, strict=True)):
            self.slots.append(self._new_slot(p, placement, self._own_part(index, p.data)))
        self._make_gathered()

    def _lay_out(self, shapes: Sequence[torch.Size], dim: int | None) -> list[Placement]:
        """Plan the buffer. Returns the placement of each tensor, in the largest part of it.

        Args:
            shapes: of this rank's parts by an inner parallelism, in the order of the buffer.
            dim: the one of ``Shard(dim)``. None: of RaggedShard.
        """
        self.sizes = [math.prod(shape) for shape in shapes]
        if dim is not None:
            self.layout = even_chunks(self._specs, self.num_shards)
            return [Shard(dim)]
        planned = lay_out(self._specs, self.num_shards, alignment=self._alignment)
        self.layout = planned.of_parts(shapes)
        size = planned.shard_size
        return [
            RaggedShard.from_interval(offset, size, self.num_shards, spec.shape)
            for offset, spec in zip(planned.offsets, planned.specs, strict=True)
        ]

    def _allocate(
        self, shapes: list[torch.Size], dtype: torch.dtype, device: torch.device
    ) -> ParameterBuffer:
        self.drop_copies()
        full_dtype, is_one = self._full_kind(dtype)
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
            keeps_full=self._keeps_full,
            is_one=is_one,
        )
        self.pool = pool_for(self._compute_device)
        self._set_codec()
        return self.buffer

    def _full_kind(self, dtype: torch.dtype) -> tuple[torch.dtype, bool]:
        """The dtype of the full buffer for shards of ``dtype``, and whether it is the shard."""
        full_dtype = (self.compute_dtype if dtype.is_floating_point else None) or dtype
        is_plain = not (self._offloads or self._face_dtype or any(each for each, _ in self.codings))
        return full_dtype, self.layout.num_shards == 1 and is_plain and full_dtype == dtype

    def _set_codec(self) -> None:
        codings = [gather for gather, _ in self.codings]
        is_coded = any(codings)
        self.codec = BlockCodec(self.layout, codings, self.buffer.full_dtype) if is_coded else None

    def compute_in(self, dtype: torch.dtype | None) -> None:
        """Change the dtype of the unsharded parameters. The shards stay. No communication."""
        assert self.is_sharded, "what is unsharded has another dtype"
        self.drop_copies()
        self.compute_dtype = dtype
        full_dtype, is_one = self._full_kind(self.buffer.shard.dtype)
        self.buffer.make_full(full_dtype, is_one=is_one)
        self._set_codec()
        self._make_gathered()

    def _own_part(self, index: int, data: torch.Tensor) -> torch.Tensor:
        """Copy this rank's part of tensor ``index`` into the shard. Returns its view there."""
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
            sums=p.sums,
            dim=p.dim,
            sharded=p.param,
            local=view,
            original=weakref.ref(p.param),
            gradient_before=gradient_seen(p.param),
        )
        slot.hold(slot.new_sharded(view, p.param.requires_grad))
        carry(p.param, slot.sharded)
        slot.register(slot.sharded)
        return slot

    def _make_gathered(self) -> None:
        """Make the unsharded parameters as views of the full buffer, for each new buffer."""
        if self.buffer.full_face is None:
            return
        full = self.buffer.full
        full.materialize()  # views are checked against the memory that is there
        for index, (slot, view) in enumerate(zip(self.slots, full.views, strict=True)):
            self._set_gathered(index, slot.in_forward(view))
        full.release()

    def _set_gathered(self, index: int, tensor: torch.Tensor) -> None:
        """Make ``tensor`` the unsharded parameter, with a hook for its gradients."""
        slot = self.slots[index]
        differentiable = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        gathered = nn.Parameter(tensor, requires_grad=differentiable)
        slot.hold_gathered(gathered)
        if differentiable:  # also where it is frozen now: it may be unfrozen later
            _take_gradients(gathered, weakref.ref(self), index)
        gathered.requires_grad_(slot.sharded.requires_grad)

    @property
    def trainable(self) -> bool:
        """Whether any parameter requires a gradient now (users may freeze and unfreeze)."""
        return any(slot.sharded.requires_grad for slot in self.slots)

    @property
    def has_streams(self) -> bool:
        """Whether work on the unsharded parameters is queued on streams."""
        return devices.has_streams(self._compute_device)

    @property
    def is_on_meta(self) -> bool:
        """Whether the parameters have no data yet."""
        return self.buffer.full_face is None

    @property
    def is_sharded(self) -> bool:
        """Whether the modules have the sharded parameters and no all-gather runs."""
        return self.state is State.SHARDED

    @property
    def is_gathered(self) -> bool:
        """Whether the modules have the unsharded parameters."""
        return self.state is State.UNSHARDED

    def drop_copies(self) -> None:
        """Drop unsharded copies and encoded messages, because the shard may have changed."""
        self._outbox.drop()
        if self._inner_shard is not None:
            self._inner_shard.drop()

    @property
    def version(self) -> tuple[int, int]:
        """The version of the shard. It changes with each write to it."""
        # Many kernels of optimizers count nowhere. Operators on a DTensor that is not ragged, and
        # code of ``torch.compile``, count on the wrapper only, which takes longer to read.
        writes = sum([slot.sharded._local_tensor._version for slot in self.slots])  # type: ignore[attr-defined]
        is_ragged = bool(self.slots) and isinstance(self.slots[0].sharded, RaggedTensor)
        if compat.has_traced() or not is_ragged:
            writes += sum([slot.sharded._version for slot in self.slots])
        return writes, num_steps()

    @abstractmethod
    def take_gradient(self, index: int, param: torch.Tensor) -> None:
        """Take the gradient of ``param``, an unsharded parameter."""


def _take_gradients(param: nn.Parameter, group_ref: weakref.ref[Parameters], index: int) -> None:
    def take(param: torch.Tensor) -> None:
        group = group_ref()
        if group is not None:
            group.take_gradient(index, param)

    param.register_post_accumulate_grad_hook(take)

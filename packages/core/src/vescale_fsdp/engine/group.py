"""Group: the parameters of a unit with the same mesh, dtypes and ``requires_grad``, in one buffer.

A group is in one of three states (`residency.State`):

    SHARDED      forwards see the sharded parameters; only the shard has memory
    UNSHARDING   an all-gather writes the full buffer, which must not be used
    UNSHARDED    forwards see views of the full buffer

Each parameter is one ``nn.Parameter``, the sharded one (a RaggedTensor, for optimizers and state
dicts). What forward computes with is a view of the full buffer, in its place (`shadows`).

The shards move to a new buffer when other code has converted or replaced them (``module.to()``),
when a copy is made, when one of them leaves the group, and when the number of ranks changes. They
keep their identity, because an optimizer may hold them.
"""

from __future__ import annotations

import copy
import math
import weakref
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from functools import cached_property, partial
from typing import Any, NamedTuple, Self, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp import compat, devices, transfers
from vescale_fsdp.backends import collective_device
from vescale_fsdp.dbuffer import (
    Codec,
    Comm,
    DBuffer,
    EncodedShard,
    ParameterBuffer,
    ThenCopy,
    is_checked,
    pool_for,
    shard_view,
)
from vescale_fsdp.devices import Waitable
from vescale_fsdp.engine.axes import Axes
from vescale_fsdp.engine.fsdp_param import (
    FSDPParam,
    ParamToShard,
    carry,
    checked_local,
    flags_of,
    fsdp_param_of,
    gradient_seen,
    listed,
    local_of,
    refuse_methods,
    resting_spec,
    same_memory,
)
from vescale_fsdp.engine.guard import Guard
from vescale_fsdp.engine.placement import (
    InnerShard,
    even_chunks,
    given_spec,
    mesh_at_rest,
    placements_of,
    spec_at_rest,
    warn_of_padding,
)
from vescale_fsdp.engine.reduce import Gradients
from vescale_fsdp.engine.shadows import Shadows
from vescale_fsdp.engine.substitutes import show_gathered, show_sharded
from vescale_fsdp.planner import TensorSpec, lay_out
from vescale_fsdp.program import State
from vescale_fsdp.ragged import RaggedShard, redistribute
from vescale_fsdp.ranks import collectives, notes, waits

# Starts of tensors are multiples of 16 bytes in the narrowest dtype that travels (bf16, or a
# byte dtype where the group holds one): NCCL falls back to scalar copies below that.
_ALIGNMENT_BYTES = 16


class Fetched(NamedTuple):
    """A running all-gather of one group, in a message with others."""

    work: ThenCopy
    version: list[int]  # of the shard that was sent


class Group:
    """The parameters of one flat buffer, and their collectives.

    Args:
        params: the parameters, all with the same dtype, ``grad_dtype`` and ``requires_grad``, in
            definition order.
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
        self.keeps_storage = False  # whether a reshard frees nothing, so that addresses stay
        self._users = devices.Users(compute_device)
        self._is_checked = is_checked()
        self.on_gradient = on_gradient
        self.state = State.SHARDED
        # Of the shards: when the last gather began, and up to where autograd knows of writes.
        self._gathered_version: list[int] = []
        self._known_version: list[int] = []
        self._guard = Guard()  # of the gathered parameters
        # Whether the user has gathered them, to look at or change until they are resharded.
        self.is_by_hand = False
        self.is_in_forward = False  # whether that of the unit runs; not in a backward
        self._wholes: list[nn.Parameter] | None = None  # the unsharded parameters
        self.flags: list[bool] = []  # ``requires_grad`` of each, when they were gathered
        self.num_writes = 0  # that no version of a shard tells
        self._work: Waitable | None = None
        self.unit_name = ""
        self.custom_gather: Any = None  # that the user supplies
        self.codec: Codec | None = None  # of what travels in a gather; None: the shard itself
        self._encoded_shard = EncodedShard()
        self.codings = [(p.gather, p.reduce) for p in params]  # of gathers and of reductions
        self.frees_before_backward = False  # whether gradients come while nothing is gathered
        self._part: torch.Tensor | None = None  # of the full buffer, kept from forward to backward
        self._part_in_flight: torch.Tensor | None = None
        narrowest = min(self._narrowest, *(p.data.element_size() for p in params))
        self._alignment = _ALIGNMENT_BYTES // narrowest
        # Whether gradients are taken in the dtype that they have (`Gradients.may_be_wider`).
        self.takes_any_dtype = False
        self.follows_statistics = False  # whether `Unit` may change ``compute_dtype``
        self.asked_dtype = compute_dtype  # what the policy of mixed precision says
        self.fsdp_params: list[FSDPParam] = []
        self._specs = [TensorSpec(p.fqn, p.parts[0], p.block) for p in params]
        shapes = [p.data.shape for p in params]
        placements = self._lay_out(shapes, params[0].dim)
        itemsize = params[0].data.element_size()
        warn_of_padding(self.layout, itemsize, self.rank, stacklevel=4)  # fully_shard's caller
        buffer = self._allocate(shapes, params[0].param.dtype, device)
        self.gradients = Gradients(
            buffer, self.fsdp_params, reduce_dtype, self.pool, cuts_outside=axes.cuts_outside
        )
        self.gradients.codings = [reduce for _, reduce in self.codings]
        self.gradients.sum_lasts = keeps_sums
        for index, (p, placement) in enumerate(zip(params, placements, strict=True)):
            self.fsdp_params.append(
                self._new_fsdp_param(p, placement, self._own_part(index, p.data))
            )
            self.fsdp_params[-1].gradients = weakref.ref(self.gradients)
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
        self.codec = None
        if any(codings):
            from vescale_fsdp.dbuffer import BlockCodec

            self.codec = BlockCodec(self.layout, codings, self.buffer.full_dtype)

    def compute_in(self, dtype: torch.dtype | None) -> None:
        """Change the dtype of the unsharded parameters. The shards stay. No communication."""
        assert self.is_sharded, "what is unsharded has another dtype"
        self.drop_copies()
        self.compute_dtype = dtype
        full_dtype, is_one = self._full_kind(self.buffer.shard.dtype)
        self.buffer.make_full(full_dtype, is_one=is_one)
        self._set_codec()
        self._make_gathered()

    def sum_for(self, grad_dtype: compat.GradDtype) -> None:
        """Change the dtype of the gradients of all parameters. No communication."""
        assert self.is_sharded, "gradients of what is unsharded have another dtype"
        for fsdp_param in self.fsdp_params:
            fsdp_param.grad_dtype = grad_dtype
            fsdp_param.keep_grad_dtype(fsdp_param.sharded)
        self._make_gathered()

    def _own_part(self, index: int, data: torch.Tensor) -> torch.Tensor:
        """Copy this rank's part of tensor ``index`` into the shard. Returns its view there."""
        start, stop = self.layout.local_range(index, self.rank)
        view = shard_view(self.layout, self.rank, self.buffer.shard, index)
        with torch.no_grad():
            view.copy_(data.reshape(-1)[start:stop])
        return view

    def _new_fsdp_param(
        self, p: ParamToShard, placement: Placement, view: torch.Tensor
    ) -> FSDPParam:
        spec = resting_spec(p, placement, view.dtype)
        fsdp_param = FSDPParam(
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
            grad_dtype=compat.grad_dtype_of(p.param),
        )
        fsdp_param.hold(fsdp_param.new_sharded(view, p.param.requires_grad))
        carry(p.param, fsdp_param.sharded)
        fsdp_param.register(fsdp_param.sharded)
        return fsdp_param

    def _make_gathered(self) -> None:
        """Make the unsharded parameters as views of the full buffer, for each new buffer."""
        if self.buffer.full_face is None:
            return
        full = self.buffer.full
        full.materialize()  # views are checked against the memory that is there
        for index, (fsdp_param, view) in enumerate(zip(self.fsdp_params, full.views, strict=True)):
            self._set_gathered(index, fsdp_param.in_forward(view))
        full.release()

    def _set_gathered(self, index: int, tensor: torch.Tensor) -> None:
        """Make ``tensor`` the unsharded parameter, with a hook for its gradients."""
        fsdp_param, self._wholes = self.fsdp_params[index], None
        differentiable = tensor.dtype.is_floating_point or tensor.dtype.is_complex
        gathered = nn.Parameter(tensor, requires_grad=differentiable)
        fsdp_param.hold_gathered(gathered)
        if differentiable:  # also where it is frozen now: it may be unfrozen later
            _take_gradients(gathered, weakref.ref(self), index)
            self.takes_any_dtype = self.gradients.may_be_wider
            if self.takes_any_dtype:
                gathered.grad_dtype = None
        gathered.requires_grad_(fsdp_param.sharded.requires_grad)

    @property
    def trainable(self) -> bool:
        """Whether any parameter requires a gradient now (users may freeze and unfreeze)."""
        return any(fsdp_param.sharded.requires_grad for fsdp_param in self.fsdp_params)

    @property
    def has_streams(self) -> bool:
        """Whether work on the unsharded parameters is queued on streams."""
        return devices.has_streams(self._compute_device)

    @property
    def is_gathering(self) -> bool:
        """Whether an all-gather was started, and nobody has waited for it."""
        return self._work is not None

    def held(self) -> list[torch.Tensor]:
        """The memory of the lane that is in use between passes."""
        full, part = self.buffer.full_face, self._part
        found = [] if full is None or not full.is_materialized else [full.flat]
        found += [] if part is None else [part]
        found += [] if self._inner_shard is None else self._inner_shard.held()
        return found + self._encoded_shard.held() + self.gradients.held()

    @property
    def fqns(self) -> list[str]:
        """The names of the parameters."""
        return [fsdp_param.fqn for fsdp_param in self.fsdp_params]

    @property
    def is_on_meta(self) -> bool:
        """Whether the parameters have no data yet."""
        return self.buffer.full_face is None

    @property
    def is_sharded(self) -> bool:
        """Whether only the shards have memory, and no all-gather runs."""
        return self.state is State.SHARDED

    @property
    def is_gathered(self) -> bool:
        """Whether the full buffer may be read."""
        return self.state is State.UNSHARDED

    def drop_copies(self) -> None:
        """Drop unsharded copies and encoded messages, because the shard may have changed."""
        self._encoded_shard.drop()
        if self._inner_shard is not None:
            self._inner_shard.drop()

    @property
    def version(self) -> list[int]:
        """The versions of the shard, first of each parameter. They change with each write to it."""
        # Operators on a DTensor that is not ragged, and code of ``torch.compile``, count on the
        # wrapper only, which takes longer to read.
        writes = [fsdp_param.sharded._local_tensor._version for fsdp_param in self.fsdp_params]  # type: ignore[attr-defined]
        writes.append(self.num_writes)
        if compat.has_traced() or not self.fsdp_params[0].counts_writes:
            writes += [fsdp_param.sharded._version for fsdp_param in self.fsdp_params]
        return writes

    def _tell_of_writes(self, version: list[int]) -> None:
        """Raise the versions of unsharded parameters whose shards were written to.

        What a graph has saved of them is not what they are now. So its backward raises torch's
        error if it reads them, as in one process.
        """
        known, self._known_version = self._known_version, version
        if len(known) == len(version):  # else it is the first one
            size = len(self.fsdp_params)
            changed = [at for at, each in enumerate(version) if each != known[at] and at != size]
            self._guard.outdate({at % (size + 1) for at in changed})

    # All-gathers

    def message(self, comm: Comm) -> tuple[torch.dtype, int] | None:
        """The dtype and number of elements that a rank brings to an all-gather.

        None: they are known in the first one only.
        """
        if self.codec is not None:
            num_bytes = self.codec.num_bytes(self.layout)
            return torch.uint8, num_bytes * self.layout.num_shards // comm.size
        return self.buffer.full.flat.dtype, self.layout.total_size // comm.size

    def start_gather(self, comm: Comm, *, in_backward: bool = False) -> None:
        """Start the all-gather, unless the group is unsharded or an all-gather runs.

        In backward it gathers the larger parts that forward has kept, if any.
        """
        if self.state is State.SHARDED:
            with self.gradients.lane.entered(), compat.recorded("unshard", [self.unit_name]):
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
            inner, first = None, None
            if self._inner_shard is not None:
                self.start_outer_gather(comm)
                inner = self._inner_shard.values
                first = partial(waits.wait, self._inner_shard, self._outer_gather())
            if self.codec is not None and inner is None:
                # Where gradients wait for more, no optimizer has stepped since the backward.
                may_repeat = in_backward or self.gradients.are_waiting
                self._encoded_shard.prepare(self.version, may_repeat=may_repeat)
            with notes.Named(self._gather()):
                self._work = comm.start_gather(
                    self.buffer,
                    self.custom_gather,
                    self.codec,
                    self.pool,
                    inner,
                    self._encoded_shard,
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
        for fsdp_param in self.fsdp_params if self.state is State.SHARDED else ():
            if fsdp_param.sharded._local_tensor is not fsdp_param.local:  # type: ignore[attr-defined]
                self.rebind()  # it has left the shard
                return

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
            with self.gradients.lane.entered():
                self._inner_shard.start_gather(self.buffer, outer, version, self.codec)

    def drop_message(self) -> None:
        """Drop the encoded message, because no backward will send it again."""
        self._encoded_shard.drop()

    def has_arrived(self, seconds: float) -> bool:
        """Wait at most ``seconds``. Returns whether the all-gather has ended; True on streams."""
        if self._work is None or self.has_streams or isinstance(self._work, ThenCopy):
            return True
        if not isinstance(self._work, waits.Ending):
            self._work = waits.Ending(self._work, has_streams=False)
        return self._work.has_ended(seconds)

    def finish_gather(self) -> None:
        """Wait for the all-gather. `show` then lets modules have the unsharded parameters."""
        assert self.state is not State.SHARDED, "start_gather comes first"
        # Without an all-gather it has stayed since its forward, and may have been written to.
        version = self.version if self._work is None else self._gathered_version
        if self.state is State.UNSHARDING:
            with compat.recorded("wait_for_unshard", [self.unit_name]):
                self._wait()
            self._guard.open(self._gathered_params())
            self.state = State.UNSHARDED
        if version != self._known_version:
            self._tell_of_writes(version)
        self.follow_flags()
        self._users.add()

    @cached_property
    def shadows(self) -> Shadows:
        """The places of the parameters in modules."""
        shadows = Shadows(self.fsdp_params)
        shadows.is_swapped = self.is_by_hand
        return shadows

    def forget_shadows(self) -> None:
        """The parameters have other places. Nothing is shown."""
        vars(self).pop("shadows", None)

    def show(self, views: Sequence[torch.Tensor] | None = None) -> None:
        """Show ``views`` in the place of the parameters. Default: those that every pass shares.

        The latter are leaves. A backward shows them, for what is computed again in it, and a
        forward without gradients.
        """
        self.shadows.show(self._gathered_params() if views is None else views)

    def outdate(self, written: Sequence[torch.Tensor]) -> None:
        """The shards were written to, in a forward that runs and has seen the unsharded ones.

        Args:
            written: local tensors.
        """
        self.num_writes += 1
        ids = {id(each) for each in written}
        spans = [(at := each.storage_offset(), at + each.numel()) for each in written]
        found = set()
        for index, fsdp_param in enumerate(self.fsdp_params):
            start = fsdp_param.local.storage_offset()
            stop = start + fsdp_param.local.numel()
            # Of an empty part, views tell nothing; other ranks may have written to theirs.
            if id(fsdp_param.local) in ids or any(
                (start < end and begin < stop) or (begin == end and start == stop)
                for begin, end in spans
            ):
                found.add(index)
        self._guard.outdate(found)

    def is_in(self, storages: set[int]) -> bool:
        """Whether the shards are in one of these storages, by ``_cdata``."""
        return self.buffer.shard.untyped_storage()._cdata in storages

    def check_forward(self) -> None:
        """Raise for what a forward of the unit has done that a backward would not see.

        Raises:
            RuntimeError: it has written to a parameter while autograd records; or registered
                another one; or, with ``VESCALE_FSDP_CHECK_MEMORY=1``, set ``.data`` of a view.
        """
        shadows = self.shadows
        if shadows.is_shown:
            if self._is_checked and self._has_views and shadows.have_moved:
                raise RuntimeError(self._lost_write)
            if self._guard.saw_write:
                shadows.refuse_writes(self.fsdp_params)
        if shadows.has_substitutes:
            shadows.refuse_replaced(self.fsdp_params)

    def follow_flags(self) -> None:
        """Set ``requires_grad`` of unsharded parameters to that of the sharded ones.

        While the unit's forward runs, none is frozen: what is frozen now (``toggle_optimizer`` of
        Lightning) may be trained later in it. `take_gradient` drops its gradients.
        """
        self.flags = flags_of(self.fsdp_params)
        if [whole.requires_grad for whole in self._gathered_params()] == self.flags:
            return
        for fsdp_param, wanted in zip(self.fsdp_params, self.flags, strict=True):
            gathered = fsdp_param.gathered
            if gathered is None or gathered.requires_grad == wanted:
                continue
            if wanted or not self.is_in_forward:
                gathered.requires_grad_(wanted)

    def _gathered_params(self) -> list[nn.Parameter]:
        if self._wholes is None:
            self._wholes = [
                fsdp_param.gathered
                for fsdp_param in self.fsdp_params
                if fsdp_param.gathered is not None
            ]
        return self._wholes

    def _wait(self) -> None:
        if isinstance(self._work, ThenCopy):  # what is left to do allocates, or frees
            with self.gradients.lane.entered():
                waits.wait(self._work, self._gather())
            self.gradients.lane.join()
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
            with self.gradients.lane.entered():
                part = self.buffer.part(num_parts)
                kept = torch.empty_like(part)  # not a view: the full buffer is freed
                kept.copy_(part)
            self.reshard()
            self.drop_message()
            self._part = kept

    def reshard(self) -> None:
        """Hide the unsharded parameters, and free the full buffer."""
        self._part = None
        if self.state is State.SHARDED:
            return
        self._wait()
        kept = self._keep_writes() if self.state is State.UNSHARDED else None
        self._guard.close(is_known=kept is False)
        # An autocast that is open over several forwards keeps casts, also those of a recomputation.
        torch.clear_autocast_cache()
        # What code has done between `unshard` and `reshard` is dropped, as by FSDP2.
        self.shadows.hide()
        if self.is_by_hand:
            # At the end of a forward, ``functional_call`` may have put what is registered.
            show_sharded(self.fsdp_params, drops=not self.is_in_forward)
            self.shadows.is_swapped = False
        with self.gradients.lane.entered():
            self._users.end()
            self._release()
        self.is_by_hand = False
        self.state = State.SHARDED

    def _release(self) -> None:
        self.buffer.full.release(keeps=self.keeps_storage)

    def gathered_storages(self) -> set[int]:
        """Return ``_cdata`` of each storage that a reshard frees."""
        return {self.buffer.full.region.storage._cdata}

    def set_aside(self) -> None:
        """Keep the full buffer for backward, but hide the unsharded parameters.

        The group is then in the same state as after a prefetch.
        """
        if self.is_gathered:
            self._keep_writes()
            self.shadows.hide()
            if self.is_by_hand:
                show_sharded(self.fsdp_params)
            self.state = State.UNSHARDING

    def take_by_hand(self) -> None:
        """Register the unsharded parameters, for the user. Writes are then dropped, as in FSDP2.

        They stay where the shard is the unsharded parameters (`DBuffer.is_one`), as in DDP.
        """
        if not (self.is_by_hand and self.shadows.is_swapped):
            self._keep_writes()
            self.is_by_hand = True
            self.shadows.is_swapped = True
            show_gathered(self.fsdp_params)

    def register_sharded(self) -> None:
        """A forward of the unit begins: ``parameters()`` gives the sharded ones again."""
        if self.is_by_hand:
            show_sharded(self.fsdp_params)
            self.shadows.is_swapped = False

    def _keep_writes(self) -> bool | None:
        """Copy writes of a forward to unsharded parameters back to the shard.

        Returns whether there were any. None: not known. Examples are ``weight.clamp_()`` and
        ``Embedding(max_norm=...)``. Writes to ``weight.data`` raise no version, and are lost, as in
        FSDP2.

        Raises:
            RuntimeError: the sharded parameters were also written to; or, with
                ``VESCALE_FSDP_CHECK_MEMORY=1``, a write to ``.data`` would be lost.
        """
        if self.is_by_hand:  # dropped, as by FSDP2
            return None
        moved = self._guard.saw_move and self._take_over_data()
        if moved or self._guard.saw_write:
            if self.is_stale:
                raise RuntimeError(
                    f"the parameters {self.fqns} were written to both unsharded and sharded in one "
                    "pass, and one of the writes would be lost. In a forward, write to what "
                    "module.parameters() gives there"
                )
            self.write_back()
            return True
        if self._is_checked and not self.is_stale and self._differs():
            raise RuntimeError(self._lost_write)
        return False

    @property
    def _lost_write(self) -> str:
        return (
            f"a forward has written to the data of {listed([s.fqn for s in self.fsdp_params])}, as "
            "by `self.weight.data.mul_()`, and the write would be lost. Write within "
            "torch.no_grad() to the parameter itself (`self.weight.mul_()`), or to what "
            "module.parameters() gives"
        )

    def take_writes(self) -> None:
        """Keep writes of a forward that stays unsharded and has no backward, as a reshard does.

        After it users read and write the sharded parameters.
        """
        if not self.is_gathered or self.is_by_hand:
            return
        if self._guard.saw_move or self._guard.saw_write:
            was_stale = self.is_stale
            self._keep_writes()
            if not was_stale:  # now both hold what was written
                self._gathered_version = self.version
            self._guard.open(self._gathered_params())

    def write_back_by_hand(self) -> None:
        """Copy what the user has changed to the shard, also by ``p.data = ...``.

        Raises:
            RuntimeError: another parameter is registered in the place of an unsharded one.
        """
        for fsdp_param in self.fsdp_params:
            for module_ref, name in fsdp_param.sites:
                module = module_ref()
                found = None if module is None else module._parameters.get(name)
                if isinstance(found, nn.Parameter) and fsdp_param_of(found) is None:
                    raise RuntimeError(
                        f"the parameter {fsdp_param.fqn!r} was replaced by another one inside of "
                        "`unsharded(...)`, which is dropped at its end; write to the parameter "
                        f"that is there: `module.{name}.data = ...`, or `copy_` within "
                        "torch.no_grad()"
                    )
        if self.is_gathered:
            self._take_over_data()
        self.write_back()

    def _take_over_data(self) -> bool:
        """Copy data that ``p.data = ...`` has set on unsharded parameters into the full buffer."""
        found = False
        for index, fsdp_param in enumerate(self.fsdp_params if self._has_views else []):
            assert fsdp_param.gathered is not None, "it is gathered"
            now, view = compat.local_tensor(fsdp_param.gathered), self.buffer.full.views[index]
            if now.data_ptr() == view.data_ptr() or not view.numel():
                continue
            expected = view.movedim(0, fsdp_param.dim) if fsdp_param.dim else view
            if now.shape != expected.shape:
                raise ValueError(
                    f"parameter {fsdp_param.fqn!r} was given data of shape {tuple(now.shape)} in a "
                    f"forward; expected {tuple(expected.shape)}"
                )
            expected.data.copy_(now)  # not a new version: autograd has saved what was set
            fsdp_param.gathered.data = fsdp_param.in_forward(view)
            found = True
        return found

    def _differs(self) -> bool:
        """Whether this rank's part of the full buffer differs from its shard."""
        if not self._has_views or self.buffer.is_one:
            return False
        return not _same_bits(self.buffer.own_slice(), self._sent())

    def write_back(self) -> None:
        """Copy changes in this rank's part of the full buffer to the shard."""
        shard = self.buffer.shard
        if not self.buffer.is_one:
            own = transfers.brought_to(shard, self.buffer.own_slice())
            was = self._sent()
            changed = (own != was) & ~(own.isnan() & was.isnan())
            shard.copy_(torch.where(changed, own.to(shard.dtype), shard))
        self.drop_copies()

    def _sent(self) -> torch.Tensor:
        """Return this rank's shard as an all-gather would write it to the full buffer."""
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
        return self.state is not State.SHARDED and self.version != self._gathered_version

    # Gradients

    def take_gradient(self, index: int, param: torch.Tensor) -> None:
        """Move the gradient of ``param``, an unsharded parameter, into the gradient buffer.

        Such parameters are leaves of what a checkpoint inside of the unit runs again in a backward.
        Other gradients come by `gather.Gather`.
        """
        fsdp_param, gradient = self.fsdp_params[index], param.grad
        if gradient is None:  # its part of the graph ran, for an output that was not used
            return
        if self.is_in_forward:
            self.on_gradient(0)  # the backward begins here, if it has passed no output of a unit
            if (
                not fsdp_param.sharded.requires_grad
            ):  # it was frozen in the forward (`follow_flags`)
                param.grad = None
                return
        if torch.is_grad_enabled():
            fsdp_param.refuse_graph()
        if self.state is not State.UNSHARDED and not self.frees_before_backward:
            raise RuntimeError(
                f"a gradient of {fsdp_param.fqn!r} appeared while its parameters were freed: the "
                "loss depends on it by a tensor that is not an output of its module (an attribute "
                "that forward has set, for example). Return that tensor from forward instead"
            )
        self.gradients.add(index, self.in_buffer_of(fsdp_param, gradient))
        param.grad = None
        self.on_gradient(self.sizes[index])

    def add_gradient(self, index: int, gradient: torch.Tensor) -> None:
        """Move a gradient of an unsharded parameter into the buffer."""
        self.gradients.add(index, self.in_buffer_of(self.fsdp_params[index], gradient))

    def add_gradients(self, gradients: dict[int, torch.Tensor]) -> None:
        """Add gradients by parameter, as the buffer wants them (`FSDPParam.lies_plainly`)."""
        if gradients:
            self.gradients.add_all(gradients)

    def in_buffer_of(self, fsdp_param: FSDPParam, gradient: torch.Tensor) -> torch.Tensor:
        if fsdp_param.sharded._backward_hooks:
            gradient = fsdp_param.hooked(gradient)
        return gradient if fsdp_param.lies_plainly else fsdp_param.in_buffer(gradient)

    def reset(self) -> None:
        """Discard the state of an interrupted step."""
        self.is_in_forward = False
        self._wait()
        self.gradients.reset()
        self.reshard()

    # Moves to another buffer

    def rebind(self, *, may_wait: bool = False) -> None:
        """Make the registered parameters views of the shard again, after other code moved them.

        With ``may_wait``, do nothing if only some of them were moved, because the other modules of
        the unit come later.

        ``module.to()``, ``to_empty()`` and ``load_state_dict(assign=True)`` give a parameter
        another local tensor, or register another parameter. The data is copied into the shard
        (a new one, if dtype or device changed). The registered parameters keep their identity.
        """
        assert self.is_sharded, "the sharded parameters are registered"
        for fsdp_param in self.fsdp_params:
            refuse_methods(fsdp_param)
        current = [fsdp_param.registered() for fsdp_param in self.fsdp_params]
        views = self.buffer.shard_views()
        if all(
            param is fsdp_param.sharded and same_memory(param, view)
            for param, fsdp_param, view in zip(current, self.fsdp_params, views, strict=True)
        ):
            for fsdp_param in self.fsdp_params:  # an assignment of data has wrapped the memory anew
                fsdp_param.hold(fsdp_param.sharded)
            return
        dtypes = {param.dtype for param in current}
        kinds = {param.device.type for param in current}
        if len(kinds) > 1 and (may_wait or self.is_on_meta):  # the others are still to come
            return
        if may_wait and len(dtypes) > 1:
            return
        if len(dtypes) > 1:
            raise NotImplementedError(
                f"the parameters {self.fqns} share one buffer but now "
                f"have dtypes {dtypes}; give all of them the same dtype, or convert the model "
                "before fully_shard"
            )
        locals_ = [
            checked_local(param, fsdp_param)
            for param, fsdp_param in zip(current, self.fsdp_params, strict=True)
        ]
        device = next((t.device for t in locals_ if t.numel()), locals_[0].device)
        if device.type != "meta":
            self._move_compute(device)
        placements = [fsdp_param.spec.placements for fsdp_param in self.fsdp_params]
        self._move_into_new_buffer(current, locals_, placements, dtypes.pop(), device)

    def _move_compute(self, device: torch.device) -> None:
        """Use ``device`` for the unsharded parameters too, unless the shard is offloaded."""
        if not self._offloads:
            self._compute_device, self._users = device, devices.Users(device)
        elif device.type != "cpu":
            raise RuntimeError(
                f"the parameters {self.fqns} are on {device}, but must be on the CPU "
                "(offload_policy=CPUOffloadPolicy()); load a state dict of CPU "
                'tensors, or call module.to_empty(device="cpu")'
            )

    def copied(self, memo: dict[int, Any], on_gradient: Callable[[int], None]) -> Self:
        """Return a new group with the same data and layout, for ``copy.deepcopy``.

        The copies of the sharded parameters are added to ``memo``, and not registered yet.
        """
        assert self.is_sharded, "the unit has released it"
        twin = self._twin()
        twin.on_gradient = on_gradient
        shapes = [fsdp_param.shape for fsdp_param in self.fsdp_params]
        twin._allocate(shapes, self.buffer.shard.dtype, self.buffer.shard.device)
        twin.buffer.shard.copy_(self.buffer.shard)
        twin.fsdp_params = []
        for index, fsdp_param in enumerate(self.fsdp_params):
            view = shard_view(twin.layout, twin.rank, twin.buffer.shard, index)
            sharded = fsdp_param.new_sharded(view, fsdp_param.sharded.requires_grad)
            sharded.grad = (
                None if fsdp_param.sharded.grad is None else fsdp_param.sharded.grad.clone()
            )
            memo[id(fsdp_param.sharded)] = sharded
            twin.fsdp_params.append(fsdp_param.copied(sharded))
        twin.gradients = self.gradients.copied(twin.buffer, twin.fsdp_params, twin.pool)
        twin._make_gathered()
        return twin

    def _twin(self) -> Self:
        """Return a copy in which nothing is under way, with this buffer and these parameters."""
        twin = copy.copy(self)
        twin._work, twin._encoded_shard = None, EncodedShard()
        twin.forget_shadows(), self.forget_shadows()  # of one of the two there are fewer
        twin._wholes = None
        twin._guard, twin._users = Guard(), devices.Users(self._compute_device)
        twin._inner_shard = None if self._inner_shard is None else InnerShard()
        return twin

    def parted(self, indices: Collection[int]) -> Self:
        """Move these parameters to a new group, without communication.

        In both groups they keep their places, so there are gaps where those of the other are.
        """
        assert self.is_sharded, "before the first forward"
        twin, former = self._twin(), self.layout
        fsdp_params, codings, sizes, shard = (
            self.fsdp_params,
            self.codings,
            self.sizes,
            self.buffer.shard,
        )
        specs = self._specs
        every = range(len(fsdp_params))
        for group, kept in (
            (twin, [index for index in every if index in indices]),
            (self, [index for index in every if index not in indices]),
        ):
            group.fsdp_params = [fsdp_params[index] for index in kept]
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
            group.gradients = self.gradients.copied(self.buffer, group.fsdp_params, self.pool)
            group.gradients.codings = [reduce for _, reduce in group.codings]
            group._move_into_new_buffer(
                [fsdp_param.sharded for fsdp_param in group.fsdp_params],
                [local_of(fsdp_param.sharded) for fsdp_param in group.fsdp_params],
                [fsdp_param.spec.placements for fsdp_param in group.fsdp_params],
                shard.dtype,
                shard.device,
            )
        return twin

    def give_back(self, index: int) -> FSDPParam:
        """Remove parameter ``index`` from the group. The others move to a new layout.

        Collective: one redistribution for each other parameter.
        """
        assert self.is_sharded, "before the first forward"
        gone = self.fsdp_params.pop(index)
        self.forget_shadows()
        self.codings.pop(index)
        self.gradients.codings = [reduce for _, reduce in self.codings]
        if not self.fsdp_params:
            return gone
        self._specs = [spec for i, spec in enumerate(self._specs) if i != index]
        planned = self._lay_out([fsdp_param.shape for fsdp_param in self.fsdp_params], None)
        placements = [
            placements_of(self.axes, placement, fsdp_param.inner)
            for placement, fsdp_param in zip(planned, self.fsdp_params, strict=True)
        ]
        current = [fsdp_param.sharded for fsdp_param in self.fsdp_params]
        shard = self.buffer.shard
        locals_ = [
            None
            if shard.is_meta
            else local_of(redistribute(cast(DTensor, param.detach()), placements=target))
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
        self.state, self.is_by_hand = State.SHARDED, False
        self._guard, self._users = Guard(), devices.Users(self._compute_device)
        self._inner_shard = InnerShard() if axes.cuts_outside else None
        self.gradients = self.gradients.copied(self.buffer, self.fsdp_params, self.pool)
        planned = self._lay_out(
            [fsdp_param.shape for fsdp_param in self.fsdp_params], self.fsdp_params[0].dim
        )
        for fsdp_param in self.fsdp_params:
            fsdp_param.axes, fsdp_param.used, fsdp_param.sharded.grad = axes, False, None
        placements = [
            placements_of(axes, placement, fsdp_param.inner)
            for placement, fsdp_param in zip(planned, self.fsdp_params, strict=True)
        ]
        current, shard = [fsdp_param.sharded for fsdp_param in self.fsdp_params], self.buffer.shard
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
        """Allocate a shard for the current layout, and make the parameters views of it."""
        self._allocate([fsdp_param.shape for fsdp_param in self.fsdp_params], dtype, device)
        moved = zip(self.fsdp_params, current, locals_, placements, strict=True)
        for index, (fsdp_param, param, local, placed) in enumerate(moved):
            view = shard_view(self.layout, self.rank, self.buffer.shard, index)
            fsdp_param.keep_grad_dtype(param)
            if local is not None:
                with torch.no_grad():
                    view.copy_(fsdp_param.flat(local))
            mesh = mesh_at_rest(fsdp_param.axes, fsdp_param.inner, fsdp_param.fqn)
            fsdp_param.spec = spec_at_rest(mesh, placed, fsdp_param.spec.shape, dtype)
            fresh = fsdp_param.new_sharded(view, param.requires_grad)
            # What is registered keeps its identity: an optimizer may hold it.
            if _is_alike(param, fresh):
                param._local_tensor, param._spec = fresh._local_tensor, fresh._spec  # type: ignore[attr-defined]
                param.__dict__.update(fresh.__dict__)  # its name, which `module.to()` drops
            else:
                fresh.grad = param.grad
                carry(param, fresh)
                torch.utils.swap_tensors(param, fresh)
            fsdp_param.hold(param)
            fsdp_param.register(param)
        self.gradients.bind(self.buffer, self.fsdp_params, self.pool)
        self._make_gathered()

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
    stack.enter_context(groups[0].gradients.lane.entered())  # also for what its end issues
    for comm in {id(each): each for each in comms}.values():
        stack.enter_context(comm.together(groups[0].pool.device))
    return stack


def _take_gradients(param: nn.Parameter, group_ref: weakref.ref[Group], index: int) -> None:
    def take(param: torch.Tensor) -> None:
        group = group_ref()
        if group is not None:
            group.take_gradient(index, param)

    param.register_post_accumulate_grad_hook(take)


def _is_alike(param: nn.Parameter, other: nn.Parameter) -> bool:
    """Whether only the local parts and placements differ, not what autograd knows of them."""
    return (
        type(param) is type(other)
        and (param.dtype, param.device, param.shape) == (other.dtype, other.device, other.shape)
        and param.stride() == other.stride()
    )

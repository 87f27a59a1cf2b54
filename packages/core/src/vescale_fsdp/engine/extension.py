"""Parameters with their own all-gather: tensor subclasses with FSDP2's two extension methods.

A subclass determines what is sent (bf16 for fp32, codes with a scale) and what forward gets::

    local part  --fsdp_pre_all_gather-->  inputs        any number, of any dtype, and metadata
    inputs      --one even all-gather-->  outputs       the rows of all ranks, by input
    outputs     --fsdp_post_all_gather->  the unsharded parameter, or None: written into ``out``

Such a parameter has its own group, and is sharded by rows like ``Shard(0)``. Its local part is an
instance of the subclass, for optimizer and state dict; there is no flat shard. Its gradients are
plain tensors, and are reduced as all others.

Outputs, and the tensors that the second method returns, have memory only while the parameter is
unsharded. Autograd saves views of them, so their storages stay the same.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from vescale_fsdp import compat, devices
from vescale_fsdp.dbuffer import Comm, ParameterBuffer, pool_for
from vescale_fsdp.engine.axes import Axes
from vescale_fsdp.engine.fsdp_param import FSDPParam, ParamToShard, carry, checked_local, local_of
from vescale_fsdp.engine.group import Group
from vescale_fsdp.engine.guard import Guard, Kind, Outputs
from vescale_fsdp.engine.placement import has_gather_methods, spec_at_rest
from vescale_fsdp.errors import RankMismatchError
from vescale_fsdp.planner import ShardLayout
from vescale_fsdp.program import State
from vescale_fsdp.ragged import contiguous_strides
from vescale_fsdp.ranks import merge_pairs, over


@dataclass(frozen=True)
class _NoBuffer:
    """The properties that gradients need, for a parameter that is in no buffer."""

    layout: ShardLayout
    rank: int
    shard: torch.Tensor  # without elements
    full_dtype: torch.dtype


class ExtensionGroup(Group):
    """The group of one parameter with its own all-gather.

    Args:
        mp_policy: as in ``fully_shard``. It is passed to the first method.
        params: the parameter.
        options: as in `Group`.

    Codecs are not used, because the subclass determines what is sent. Gradients are sent in the
    dtype that is passed to the second method, for any dtype of the unsharded parameter.

    Cost: one all-gather of the first method's results, and the work of the two methods. The first
    all-gather compares the sizes of the inputs through the store.
    """

    _has_views = False

    def __init__(
        self,
        mp_policy: MixedPrecisionPolicy,
        params: list[ParamToShard],
        axes: Axes,
        device: torch.device,
        **options: Any,
    ) -> None:
        self._mp_policy, self._mesh = mp_policy, _shard_mesh(axes)
        self._outputs: Outputs | None = None  # None until the first gather
        self._inner: list[tuple[torch.UntypedStorage, int]] = []  # freed too, with their bytes
        self._metadata: Any = None  # from the first method to the second
        super().__init__(params, axes, device, **options)

    def _allocate(
        self, shapes: list[torch.Size], dtype: torch.dtype, device: torch.device
    ) -> ParameterBuffer:
        self._rests_on, self._outputs, self._inner = device, None, []
        self._param_dtype = dtype
        if self.compute_dtype is not None and dtype.is_floating_point:
            self._param_dtype = self.compute_dtype
        self.pool = pool_for(self._compute_device)
        nothing = torch.empty(0, dtype=dtype, device=device)
        return _NoBuffer(self.layout, self.rank, nothing, self._param_dtype)

    def _own_part(self, index: int, data: torch.Tensor) -> torch.Tensor:
        # The operators that FSDP2 asks of a subclass too, and no others.
        chunks = torch.chunk(data, self.num_shards)
        part = chunks[self.rank] if self.rank < len(chunks) else data.narrow(0, 0, 0)
        with torch.no_grad():
            own = part.new_zeros(part.shape).copy_(part)
        return self._at_rest(own)

    def _at_rest(self, own: torch.Tensor) -> torch.Tensor:
        if own.device.type != self._rests_on.type:
            own = own.to(self._rests_on)
        pins = self._pin_memory and own.device.type == "cpu"
        return devices.pinned(own) if pins else own

    def _make_gathered(self) -> None:
        """Let the second method make the parameter anew, in the next all-gather."""
        self._outputs = None

    @property
    def is_on_meta(self) -> bool:
        """Whether the parameter has no data yet."""
        return self.fsdp_params[0].local.is_meta

    # Gathers

    def message(self, comm: Comm) -> tuple[torch.dtype, int] | None:
        """None: the first method tells."""
        return None

    def start_gather(self, comm: Comm, *, in_backward: bool = False) -> None:
        """Start the all-gather, unless the parameter is unsharded or an all-gather runs.

        Raises:
            AssertionError: one of the methods is missing, or the first has another signature; or,
                in the first all-gather and on every rank, an uneven part was not padded.
            RankMismatchError: ranks send inputs of different sizes.
        """
        if self.state is State.SHARDED:
            with self.gradients.lane.entered():
                self._start_gather(comm, in_backward)
            self._gathered_version = self.version
            self.state = State.UNSHARDING

    def _start_gather(self, comm: Comm, in_backward: bool) -> None:
        self.gradients.casts_first = comm.sends_sums
        if local_of(self.fsdp_params[0].sharded) is not self.fsdp_params[0].local:
            self.rebind()
        inputs = self._inputs()
        kinds = [(tensor.shape, tensor.dtype) for tensor in inputs]
        if self._outputs is None or self._outputs.kinds != kinds:
            self._agree_on(kinds, comm)
            self.fsdp_params[0].gathered, self._wholes, self._inner = None, None, []
            self._outputs = Outputs(kinds, comm.size, self._compute_device)
        self._work = self._outputs.start_gather(inputs, comm, self.custom_gather, self.pool)

    def _inputs(self) -> Sequence[torch.Tensor]:
        """Call the first method. Returns its inputs, and stores its metadata for the second."""
        (fsdp_param,) = self.fsdp_params
        local = fsdp_param.local
        has_methods = has_gather_methods(local, fsdp_param.fqn)
        if self._offloads:
            local = local.to(self._compute_device, non_blocking=True)
        if not has_methods:
            return (self._values(local),)
        pre: Callable[..., Any] = local.fsdp_pre_all_gather  # type: ignore[attr-defined]
        signature = inspect.signature(pre)
        module = fsdp_param.sites[0][0]() if fsdp_param.sites else None
        shape = fsdp_param.shape
        given = (self._mesh, shape, contiguous_strides(shape), module, self._mp_policy)
        if len(signature.parameters) not in (1, len(given)):
            raise AssertionError(
                f"Invalid fsdp_pre_all_gather: {signature} of {type(local).__name__}\nExpects "
                "fsdp_pre_all_gather(self, mesh, outer_size, outer_stride, module, mp_policy), or "
                "the mesh alone"
            )
        inputs: Sequence[torch.Tensor]
        inputs, self._metadata = pre(*given[: len(signature.parameters)])
        return inputs

    def _values(self, local: torch.Tensor) -> torch.Tensor:
        """Return the input of a wrapper without the methods: plain rows, padded with zeros."""
        rows = -(-self.fsdp_params[0].shape[0] // self.num_shards)
        size = (rows, *local.shape[1:])
        values = torch.zeros(size, dtype=self._param_dtype, device=local.device)
        values[: local.shape[0]].copy_(local)
        return values

    def _agree_on(self, kinds: list[Kind], comm: Comm) -> None:
        """Raise on every rank unless all of them send inputs of the same shapes and dtypes."""
        mine = str([f"{tuple(shape)} {dtype}" for shape, dtype in kinds])
        said = [[mine, dist.get_rank(comm.gather_group)]]
        group = comm.gather_group
        answer = over(group).exchange("inputs of an extension", said, merge_pairs, _differing)
        if not answer:
            return
        (fsdp_param,) = self.fsdp_params
        rows = fsdp_param.shape[0]
        if rows % self.num_shards == 0:
            raise RankMismatchError(
                f"fsdp_pre_all_gather of parameter {fsdp_param.fqn!r} returned inputs of different "
                f"sizes: {answer}. Return the same shapes and dtypes on every rank"
            )
        padded = (-(-rows // self.num_shards), *fsdp_param.shape[1:])
        raise AssertionError(
            "When a parameter is unevenly sharded by FSDP "
            f"(orig size={tuple(fsdp_param.shape)}, FSDP world size={self.num_shards}), "
            "fsdp_pre_all_gather must return all-gather inputs with the padded sharded size "
            f"{padded} but got, for parameter {fsdp_param.fqn!r}, {answer}"
        )

    def finish_gather(self) -> None:
        """Wait for the all-gather, and call the second method, which makes the parameter."""
        if self.state is State.UNSHARDING:
            self._wait()
            with self.gradients.lane.entered():
                self._make_parameter()
            self.gradients.lane.join()
        super().finish_gather()

    def _make_parameter(self) -> None:
        (fsdp_param,) = self.fsdp_params
        assert self._outputs is not None, "start_gather comes first"
        post: Callable[..., Any] = getattr(fsdp_param.local, "fsdp_post_all_gather", _as_it_came)
        given = (tuple(self._outputs.tensors), self._metadata, self._param_dtype)
        self._metadata = None
        if fsdp_param.gathered is not None:
            for storage, num_bytes in self._inner:
                storage.resize_(num_bytes)
            post(*given, out=fsdp_param.gathered)
            return
        whole, inner = post(*given)
        storages = {s._cdata: s for s in (tensor.untyped_storage() for tensor in inner)}
        own = self._outputs.storages
        self._inner = [(s, s.nbytes()) for key, s in storages.items() if key not in own]
        # Without the padding of uneven rows.
        shape = fsdp_param.shape
        whole = torch.as_strided(whole, shape, contiguous_strides(shape), 0)
        self._set_gathered(0, fsdp_param.in_forward(whole))

    def is_in(self, storages: set[int]) -> bool:
        """As `Group.is_in`."""
        return not storages.isdisjoint(compat.storages_of(self.fsdp_params[0].local))

    def keep_part(self, num_parts: int) -> None:
        """Reshard. The outputs have no equal parts to keep, so backward gathers all of them."""
        self.reshard()

    def _release(self) -> None:
        self._metadata = None
        if self._outputs is not None:
            self._outputs.release(keeps=self.keeps_storage)
        for storage, _ in () if self.keeps_storage else self._inner:
            storage.resize_(0)

    def gathered_storages(self) -> set[int]:
        """Return ``_cdata`` of each storage that a reshard frees."""
        own = set() if self._outputs is None else self._outputs.storages
        return own | {storage._cdata for storage, _ in self._inner}

    def held(self) -> list[torch.Tensor]:
        """As `Group.held`, with what the second method has allocated."""
        outputs = self._outputs.tensors if self._outputs is not None else []
        inner = [torch.empty(0, dtype=torch.uint8, device=s.device).set_(s) for s, _ in self._inner]
        found = [tensor for tensor in (*outputs, *inner) if tensor.untyped_storage().nbytes()]
        return found + self.gradients.held()

    def write_back(self) -> None:
        """Not supported: the unsharded parameter is another representation of the local parts.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"unsharded(writeback=True) of parameter {self.fsdp_params[0].fqn!r}, which gathers "
            "itself, is not supported yet; change the sharded parameter in place"
        )

    # Gradients

    def equalize_replicas(self) -> None:
        """Does nothing: only the subclass can tell what of it is data."""

    def add_gradients(self, gradients: dict[int, torch.Tensor]) -> None:
        """As `Group.add_gradients`."""
        for index, gradient in gradients.items():
            self.add_gradient(index, gradient)

    def in_buffer_of(self, fsdp_param: FSDPParam, gradient: torch.Tensor) -> torch.Tensor:
        local = super().in_buffer_of(fsdp_param, gradient)
        if not compat.is_wrapper(local):
            return local
        # An operator with a wrapper runs once per wrapped tensor: an addition would add them all.
        plain = torch.empty(local.shape, dtype=local.dtype, device=local.device)
        return plain.copy_(local)

    # Rebinding

    def rebind(self, *, may_wait: bool = False) -> None:
        """Use the parameter that is registered now, after other code converted or replaced it.

        Raises:
            ValueError: it has another shape or placement.
        """
        assert self.is_sharded, "the sharded parameter is registered"
        (fsdp_param,) = self.fsdp_params
        param = fsdp_param.registered()
        if param is fsdp_param.sharded and local_of(param) is fsdp_param.local:
            return
        local = checked_local(param, fsdp_param)
        if not local.is_meta:
            self._move_compute(local.device)
        fsdp_param.spec = spec_at_rest(
            fsdp_param.spec.mesh, fsdp_param.spec.placements, fsdp_param.spec.shape, local.dtype
        )
        if local is not local_of(param):
            former = param
            param = nn.Parameter(fsdp_param.wrap(local), requires_grad=former.requires_grad)
            carry(former, param)
        fsdp_param.keep_grad_dtype(param)
        fsdp_param.gathered = self._wholes = None
        fsdp_param.hold(param)
        fsdp_param.register(param)
        buffer = self._allocate([fsdp_param.shape], local.dtype, local.device)
        self.gradients.bind(buffer, self.fsdp_params, self.pool)

    def copied(self, memo: dict[int, Any], on_gradient: Callable[[int], None]) -> Self:
        """Return a new group with the same data, for ``copy.deepcopy``."""
        assert self.is_sharded, "the unit has released it"
        (fsdp_param,) = self.fsdp_params
        twin = copy.copy(self)
        twin.on_gradient, twin._work, twin._guard = on_gradient, None, Guard()
        twin.forget_shadows()
        twin._wholes = None
        twin._users = devices.Users(self._compute_device)
        buffer = twin._allocate([fsdp_param.shape], fsdp_param.local.dtype, fsdp_param.local.device)
        part = twin._at_rest(
            fsdp_param.local.new_zeros(fsdp_param.local.shape).copy_(fsdp_param.local)
        )
        sharded = fsdp_param.new_sharded(part, fsdp_param.sharded.requires_grad)
        sharded.grad = None if fsdp_param.sharded.grad is None else fsdp_param.sharded.grad.clone()
        memo[id(fsdp_param.sharded)] = sharded
        new = fsdp_param.copied(sharded)
        twin.fsdp_params = [new]
        twin.gradients = self.gradients.copied(buffer, twin.fsdp_params, twin.pool)
        return twin


def _as_it_came(
    outputs: tuple[torch.Tensor, ...], *_: Any, out: torch.Tensor | None = None
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
    """The second method of a wrapper without one: the output is the parameter."""
    return None if out is not None else (outputs[0], ())


def _differing(said: list[tuple[str, int]]) -> str:
    """Return a sentence with a difference of two ranks; "" if there is none."""
    (first, _), *others = said
    for theirs, rank in others:
        return f"{first} on the first rank and {theirs} on rank {rank} after it"
    return ""


def _shard_mesh(axes: Axes) -> DeviceMesh:
    """Return the axis that shards as a mesh, over which the first method may communicate."""
    if axes.mesh.ndim == 1:
        return axes.mesh
    names = axes.mesh.mesh_dim_names
    assert names is not None, "fully_shard refuses unnamed meshes of several axes"
    assert axes.shard is not None, "fully_shard refuses what gathers itself where nothing is cut"
    return axes.mesh[names[axes.shard]]

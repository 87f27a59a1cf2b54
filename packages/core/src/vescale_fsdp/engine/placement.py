"""Computes the mesh and placements of one parameter.

It checks the results of the user's ``shard_placement_fn``, which are as in FSDP2, and warns of much
padding.

A parameter may already be a DTensor of tensor or expert parallelism (inner parallelism). Its local
tensor is then laid out in a group's buffer, all-gathered and reduced. When sharded, the parameter
is one DTensor over all axes, the data axes first. Within a forward it is the user's DTensor::

    sharded         mesh (data, tensor)    (RaggedShard, Shard(0))    global shape
    unsharded       mesh (tensor,)         (Shard(0),)                global shape, a view of the
                                                                      full buffer as local tensor
    in the buffer                                                     local shape of this rank

It may also be plain, cut by the user, with types of ``spmd_types`` that say how. Then it is plain
within a forward too, and the types say over which axes its gradients are summed. torchtitan's
default backend makes such types, and FSDP2 of torch 2.14 reads them.

HSDP may shard the sharded parameters over the outer axis, too (``"hsdp_zero1"``). During a step a
rank then holds an *inner shard*. Four ranks as 2 x 2, a full buffer of four parts::

                     sharded     in a step: the inner shard     full buffer
    rank (0, 0)      part 0      parts 0 1                      parts 0 1 2 3
    rank (1, 0)      part 1      parts 0 1                      parts 0 1 2 3
    rank (0, 1)      part 2          parts 2 3                  parts 0 1 2 3
    rank (1, 1)      part 3          parts 2 3                  parts 0 1 2 3
                          |__________|  |__________________________|
                           outer axis      inner axis: as in HSDP
                           once a step

Each parameter and each gradient is sent over the slow outer axis once per step, and optimizer
states are sharded over all ranks. With a codec, messages are all-gathered: first those of an inner
shard, then all. Each rank writes the message of its part, and all ranks read each message.
"""

from __future__ import annotations

import math
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from vescale_fsdp import compat, devices, transfers
from vescale_fsdp.compat import AsyncCollectiveTensor, DTensorSpec, TensorMeta
from vescale_fsdp.dbuffer import Codec, Comm, DBuffer
from vescale_fsdp.devices import Waitable
from vescale_fsdp.engine.axes import Axes
from vescale_fsdp.planner import PaddingWarning, ShardLayout, TensorSpec, advise
from vescale_fsdp.ragged import (
    RaggedShard,
    boxes_of,
    contiguous_strides,
    make_spec,
    redistribute,
)
from vescale_fsdp.ranks import collectives

_SPMD = "spmd_types"  # the types that this package puts on plain tensors, if it is in use


def placement_of(
    choose: Callable[[nn.Parameter], Any] | None, param: nn.Parameter, axes: Axes, fqn: str
) -> tuple[Axes, int | None]:
    """Return the axes that shard a parameter, and d for ``Shard(d)`` (None: RaggedShard).

    A parameter with ``Shard(d)`` has its own group; sizes need not divide. If a parameter is
    already a DTensor, such as experts on their own mesh axis, ``Shard(0)`` (FSDP2's default) means
    that it is sharded in whole blocks.

    Raises:
        ValueError: the result is neither None, nor a ``Shard``, nor a ``ShardPlacementResult``.
        AssertionError: there is no such dimension.
    """
    answer = None if choose is None else choose(param)
    if isinstance(answer, compat.ShardPlacementResult):
        info = answer.mesh_info
        shard: int | None = info.shard_mesh_dim
        assert info.mesh is not None, "FSDPMeshInfo has checked it"
        assert shard is not None, "FSDPMeshInfo has checked it"
        axes = Axes(info.mesh, shard, getattr(info, "replicate_mesh_dim", None))
        if info.spmd_mesh is not None and info.dp_mesh_dims is not None:
            names = info.dp_mesh_dims
            axes = Axes.named(info.spmd_mesh, names.shard_names, names.replicate_names)
        answer = answer.placement
    if answer is None:
        return axes, None
    if type(answer) is not Shard:
        raise ValueError(f"Invalid shard_placement_fn result: {answer}, for parameter {fqn!r}")
    dim = answer.dim + param.dim() if answer.dim < 0 else answer.dim
    if not 0 <= dim < param.dim():
        raise AssertionError(
            f"Shard dim {dim} is invalid for {param.dim()}D tensor: {param.shape}\n"
            f"Found for parameter {fqn!r}"
        )
    return axes, None if isinstance(param, DTensor) and dim == 0 else dim


def gathers_itself(param: nn.Parameter, dim: int | None, fqn: str) -> bool:
    """Whether a parameter needs its own group with its own all-gather.

    A wrapper of other tensors does, because it cannot be in a flat buffer. It may get the methods
    until the first all-gather. Without them its values are sent, and forward gets a plain tensor. A
    subclass without ``__torch_dispatch__`` does not: DTensor cannot hold it, so it is sharded as a
    plain tensor, as with FSDP2.

    Args:
        dim: d of ``Shard(d)``, if ``shard_placement_fn`` returns that.

    Raises:
        AssertionError: it has only one of the two methods.
        ValueError: it is a scalar, which has no rows.
        NotImplementedError: it is to be sharded along a dimension other than the first.
    """
    with compat.without_torch_function():  # a DTensor holds what dispatch preserves
        local = local_data(param)
    if not (has_gather_methods(local, fqn) or compat.is_wrapper(local)):
        return False
    if param.dim() == 0:
        raise ValueError(
            f"fully_shard doesn't support scalar parameters of a tensor subclass. Change {fqn} to "
            "a 1D tensor with numel equal to 1."
        )
    if dim:
        raise NotImplementedError(
            f"fully_shard: shard_placement_fn wants Shard({dim}) for {fqn!r}, a "
            f"{type(local).__name__} that gathers itself, by rows; return None or Shard(0) for it"
        )
    return True


def has_gather_methods(local: torch.Tensor, fqn: str) -> bool:
    """Whether a tensor has FSDP2's two extension methods (see `extension`).

    Raises:
        AssertionError: it has only one of them.
    """
    has_pre = hasattr(local, "fsdp_pre_all_gather")
    has_post = hasattr(local, "fsdp_post_all_gather")
    if has_pre != has_post:
        raise AssertionError(
            "Both fsdp_pre_all_gather and fsdp_post_all_gather should be defined if using "
            f"all-gather extensions: {type(local).__name__}, of parameter {fqn!r}, has only "
            f"fsdp_{'pre' if has_pre else 'post'}_all_gather"
        )
    return has_pre


def even_chunks(specs: list[TensorSpec], num_shards: int) -> ShardLayout:
    """Return the layout of ``Shard`` for one tensor: equal numbers of rows, the last ones fewer."""
    (spec,) = specs
    rows = spec.shape[0]
    row = spec.numel // rows if rows else 0
    return ShardLayout(
        specs=(TensorSpec(spec.name, spec.shape, max(row, 1)),),
        num_shards=num_shards,
        alignment=1,
        shard_size=-(-rows // num_shards) * row,
        offsets=(0,),
        order=(0,),
        exact=True,
    )


_LEAST_BYTES = 1 << 20  # of padding in the whole buffer: toy models pad a lot, and nobody minds


def warn_of_padding(layout: ShardLayout, itemsize: int, rank: int, stacklevel: int) -> None:
    """Warn on rank 0 if blocks force more than 5% padding and more than 1 MiB."""
    if rank == 0 and layout.padding * itemsize >= _LEAST_BYTES:
        advice = advise(layout)
        if advice is not None:
            warnings.warn(
                f"fully_shard: {advice} `vescale-fsdp plan` shows it",
                PaddingWarning,
                stacklevel=stacklevel + 1,
            )


def given_spec(param: torch.Tensor) -> DTensorSpec | None:
    """Return the spec of a parameter that the user has made a DTensor; None for a plain one."""
    return param._spec if isinstance(param, DTensor) else None


def inner_spec(param: torch.Tensor, axes: Axes, fqn: str) -> DTensorSpec | None:
    """Return the part of that spec without the data axes; None if nothing is left.

    Raises:
        ValueError: parameters must be DTensors on ``axes.whole``, or have types of ``spmd_types``,
            and be replicated over the data axes, and this one is not.
    """
    given = given_spec(param)
    if axes.whole is None:
        if given is None and _spmd_types_of(param):
            raise ValueError(
                f"parameter '{fqn}' has types of spmd_types: pass the mesh of all axes, and "
                "dp_mesh_dims=DataParallelMeshDims(shard=..., replicate=...), which names those "
                "that share the data"
            )
        return given
    if given is None:
        given, _ = annotated_spec(param, axes, fqn)
    if given.mesh != axes.whole:
        raise ValueError(
            "Expected param's DTensor mesh to be the same mesh passed to fully_shard, but got "
            f"{given.mesh} for parameter '{fqn}' and {axes.whole}"
        )
    names = axes.whole.mesh_dim_names or ()
    by_name = dict(zip(names, given.placements, strict=True))
    for name in axes.data_names:
        if not by_name[name].is_replicate():
            raise ValueError(
                f"Expected Replicate() on DP dim '{name}' but got {by_name[name]} for parameter "
                f"'{fqn}'"
            )
    inner = axes.inner_names
    if not inner:
        return None
    mesh = axes.whole[inner[0]] if len(inner) == 1 else axes.whole[inner]
    return DTensorSpec(mesh, tuple(by_name[name] for name in inner), given.tensor_meta)


def annotated_spec(
    param: torch.Tensor, axes: Axes, fqn: str
) -> tuple[DTensorSpec, list[dist.ProcessGroup]]:
    """Return the spec on ``axes.whole`` of a plain parameter that has types of ``spmd_types``.

    And the groups of inner axes over which its gradients are to be summed: the types say so.

    Raises:
        ValueError: it has no types, not one for each inner axis, or others along the data axes.
    """
    assert axes.whole is not None, "the caller has checked it"
    types = _spmd_types_of(param)
    if not types:
        raise ValueError(
            "When dp_mesh_dims is provided, all parameters must be DTensors on the full SPMD mesh "
            f"(e.g. via distribute_module). Got plain tensor for parameter '{fqn}'."
        )
    placements: list[Placement] = []
    sums: list[dist.ProcessGroup] = []
    shape = list(param.shape)
    for axis, name in enumerate(axes.whole.mesh_dim_names or ()):
        placements.append(Replicate())
        if name in axes.data_names or axes.whole.size(axis) == 1:
            continue
        group = collectives.mesh_group(axes.whole, axis)
        try:
            placements[axis], of_gradient = _take_spmd_type(types, group)
        except (KeyError, ValueError) as error:
            raise ValueError(
                f"the types of spmd_types on parameter '{fqn}' need R, I or a sharded dimension "
                f"along '{name}', got {error}"
            ) from None
        if of_gradient.is_partial():
            sums.append(group)
        if isinstance(placements[axis], Shard):
            shape[placements[axis].dim] *= axes.whole.size(axis)  # type: ignore[attr-defined]
    if any(kind is not sys.modules[_SPMD].R for kind in types.values()):
        raise ValueError(
            f"Expected spmd.R on the data axes {axes.data_names} for parameter '{fqn}' but got "
            f"{types}"
        )
    size = torch.Size(shape)
    meta = TensorMeta(size, tuple(contiguous_strides(size)), param.dtype)
    return DTensorSpec(axes.whole, tuple(placements), meta), sums


def _spmd_types_of(tensor: torch.Tensor) -> dict[Any, Any]:
    """Return the types of a plain tensor by mesh axis; empty if it has none."""
    if _SPMD not in sys.modules:
        return {}
    runtime, types = (import_module(f"{_SPMD}.{name}") for name in ("runtime", "types"))
    found = dict(sys.modules[_SPMD].get_local_type(tensor))
    dims = runtime.get_partition_spec(tensor)
    return found if dims is None else {**found, **types.partition_spec_to_shard_types(dims)}


def _take_spmd_type(types: dict[Any, Any], group: dist.ProcessGroup) -> tuple[Placement, Placement]:
    """Remove the type along a group; return the placements of the tensor and of its gradient.

    Raises:
        KeyError: there is no type for it.
        ValueError: the type is no placement.
    """
    package = sys.modules[_SPMD]
    kind = types.pop(package.MeshAxis.of(group))
    if isinstance(kind, package.types.Shard):
        return Shard(kind.dim), Shard(kind.dim)
    if kind is package.R or kind is package.I:
        return Replicate(), Partial() if kind is package.R else Replicate()
    raise ValueError(f"{kind}")


def local_data(param: nn.Parameter) -> torch.Tensor:
    """Return this rank's part of a parameter before it is sharded."""
    return (param._local_tensor if isinstance(param, DTensor) else param).detach()


def placements_of(
    axes: Axes, sharded: Placement, inner: DTensorSpec | None
) -> tuple[Placement, ...]:
    """Return the sharded placements: of the data axes, then of the inner parallelism."""
    if inner is None or axes.shard is None:
        return (*axes.placements(sharded), *(inner.placements if inner is not None else ()))
    assert isinstance(sharded, RaggedShard | Shard), "a group is laid out as one of the two"
    if isinstance(sharded, RaggedShard):
        parts = boxes_of(inner.shape, inner.placements, inner.mesh.shape)
        sharded = sharded.fixed_in(parts[0]) if len(parts) > 1 else sharded
    dims = sharded.dims if isinstance(sharded, RaggedShard) else (sharded.dim,)
    split = math.prod(
        inner.mesh.size(axis)
        for axis, placement in enumerate(inner.placements)
        if isinstance(placement, Shard) and placement.dim in dims
    )
    if isinstance(sharded, RaggedShard):
        sharded = sharded.with_split_factor(split)
    elif split > 1:
        sharded = compat.StridedShard(sharded.dim, split_factor=split)
    return (*axes.placements(sharded), *inner.placements)


def mesh_at_rest(axes: Axes, inner: DTensorSpec | None, fqn: str) -> DeviceMesh:
    """Return the mesh of the sharded parameter: the data axes, then those of the inner parallelism.

    Raises:
        NotImplementedError: optimizer states are to be sharded over the replicas, too.
        ValueError: the meshes are not slices of one mesh.
    """
    if inner is None:
        return axes.resting_mesh
    if axes.cuts_outside:
        raise NotImplementedError(
            f"fully_shard: sharding='hsdp_zero1' of {fqn!r}, a DTensor on {inner.mesh}, is not "
            "there yet; use sharding='hsdp'"
        )
    return axes.joined(inner.mesh, fqn)


def spec_at_rest(
    mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int], dtype: torch.dtype
) -> DTensorSpec:
    """Return the spec of a contiguous tensor with RaggedShard or ``Shard``."""
    if any(isinstance(placement, RaggedShard) for placement in placements):
        return make_spec(mesh, placements, shape, dtype)
    meta = TensorMeta(torch.Size(shape), contiguous_strides(shape), dtype)
    return DTensorSpec(mesh, tuple(placements), meta)


def as_gathered(view: torch.Tensor, given: DTensorSpec | None) -> torch.Tensor:
    """Return the unsharded parameter for its view of the full buffer: plain, or a DTensor."""
    if given is None:
        return view
    meta = given.tensor_meta
    assert meta is not None, "every DTensor that exists has its meta"
    meta = TensorMeta(meta.shape, meta.stride, view.dtype)
    return DTensor(view, DTensorSpec(given.mesh, given.placements, meta), requires_grad=False)


def local_gradient(gradient: torch.Tensor, given: DTensorSpec | None, axes: Axes) -> torch.Tensor:
    """Return this rank's part of a gradient. ``Partial`` over inner axes is reduced first.

    It is not reduced over the data axes; the group does that.
    """
    if given is None:
        return gradient
    assert isinstance(gradient, DTensor), "autograd gives gradients of the parameter's type"
    names = given.mesh.mesh_dim_names or ("",) * given.mesh.ndim
    wanted = tuple(
        have if name in axes.data_names else want
        for name, have, want in zip(names, gradient.placements, given.placements, strict=True)
    )
    if gradient.placements != wanted:
        gradient = redistribute(gradient, placements=wanted)
    local = gradient._local_tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


class InnerShard:
    """The inner shard of one group, in the compute dtype or as messages."""

    def __init__(self) -> None:
        self._values: torch.Tensor | None = None
        self._work: Waitable | None = None
        self._version: object = None

    def start_gather(
        self, buffer: DBuffer, outer: Comm, version: object, codec: Codec | None
    ) -> None:
        """Start to all-gather it over the outer axis, unless it exists for this ``version``.

        Args:
            buffer: the parameters' buffer, sharded over all ranks.
            outer: the communicators of the outer axis.
            version: of the sharded parameters.
            codec: encodes the messages.

        Cost: one all-gather of ``outer.size`` shards or messages, and memory for them until the
        parameters change.
        """
        if self._version == version:
            return
        self.drop()
        shard, place = buffer.shard, outer.rank
        full = buffer.full.flat
        size, dtype = shard.numel(), full.dtype
        if codec is not None and size:
            size, dtype = codec.num_bytes(buffer.layout), torch.uint8
        values = torch.empty(outer.size * size, dtype=dtype, device=full.device)
        own = values[place * size : (place + 1) * size]

        def start() -> Waitable:
            if codec is None:
                transfers.copy_async(own, shard)
            else:
                codec.encode(buffer.layout, buffer.rank, shard, own)
            return outer.all_gather(values, own)

        if values.numel():
            self._work = devices.start_beside(full.device, start)
        self._values, self._version = values, version

    @property
    def values(self) -> torch.Tensor:
        """The inner shard, flat; or its messages, one after the other. Read them after `wait`."""
        assert self._values is not None, "start_gather comes first"
        return self._values

    def held(self) -> list[torch.Tensor]:
        """The values, if there are any, also before they have arrived."""
        return [] if self._values is None else [self._values]

    def wait(self) -> None:
        """Wait for the values. On CUDA the current stream waits."""
        if self._work is not None:
            self._work.wait()
            self._work = None

    def drop(self) -> None:
        """Drop the values, because the sharded parameters may have changed."""
        if self._work is not None:
            self._work.wait()
        self._values = self._work = self._version = None

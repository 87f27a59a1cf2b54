"""``fully_shard``: the function that shards a module's parameters."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    OffloadPolicy,
)
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from vescale_fsdp import compat, devices, engine
from vescale_fsdp.dbuffer import plain_tensors
from vescale_fsdp.engine.arguments import (
    Activations,
    axes_of,
    check_arguments,
    check_engine_arguments,
    checked_modules,
    resolved_policy,
    without_override,
)
from vescale_fsdp.engine.axes import row_of
from vescale_fsdp.engine.fsdp2_state import register_state, state_of
from vescale_fsdp.engine.fsdp_param import ParamToShard
from vescale_fsdp.engine.group import Group
from vescale_fsdp.engine.hooks import register_hooks
from vescale_fsdp.engine.late import mark_managed
from vescale_fsdp.engine.loading import take_parts_of_loads
from vescale_fsdp.engine.methods import FSDPModule, swap_class
from vescale_fsdp.engine.ownership import mark_taken, own_modules, params_to_shard
from vescale_fsdp.engine.shadows import refuse_hidden
from vescale_fsdp.engine.unit import Unit, follows_statistics, has_statistics

ModuleT = TypeVar("ModuleT", bound=nn.Module | list[nn.Module])


def fully_shard(
    module: ModuleT,
    *,
    mesh: DeviceMesh | None = None,
    reshard_after_forward: bool | int | None = None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008  # frozen
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008  # frozen
    ignored_params: set[nn.Parameter] | None = None,
    dp_mesh_dims: Any = None,
    sharding: str | None = None,
    accumulate: Literal["unsharded", "sharded"] | None = None,
    granularity: engine.Granularity | engine.GranularityPolicy | None = None,
    unused: Literal["auto", "zeros"] = "auto",
    in_flight: int = 2,
    broadcast_buffers: bool = False,
    activations: Activations | None = None,
    gather_codec: engine.QuantizedGather | None = None,
    reduce_codec: engine.QuantizedReduce | None = None,
) -> ModuleT:
    """Shard a module's parameters over the ranks of a mesh, in place.

    Call it bottom-up: first on the repeated blocks, and last on the whole model. Each call makes
    one unit of the parameters that belong to no earlier call. A unit has one flat buffer per dtype
    and trainability. The buffer is split into equal shards, at boundaries of blocks.

    Args:
        module: any module with a forward, or a list of modules that form one unit. A list is
            unsharded from the forward of its first module to the forward of its last. Each module
            becomes an ``FSDPModule``, but its class keeps its name and its module.
        mesh: one axis to shard over, or two named axes: the first holds replicas and the
            second shards (HSDP). Default: all ranks, on the accelerator or the CPU.
        reshard_after_forward: whether to reshard after forward and all-gather again in backward.
            None: yes, except for the root of a model in training. An int k, which must divide the
            number of ranks: after forward each rank keeps one of k parts of the parameters, so
            that the all-gather in backward is among k neighbouring ranks (of one machine). In all
            cases a backward that reads parameters which were changed since the forward raises
            torch's error about "an inplace operation", as in one process.
        shard_placement_fn: ``parameter -> None | Shard(d) | ShardPlacementResult``, as in FSDP2.
            None: RaggedShard. ``Shard(d)``: this placement, in a buffer of its own. A
            result with a mesh: shard over that mesh (experts).
        mp_policy: the dtypes of compute, reduction and outputs. The shards keep the dtype that the
            parameters have now. ``param_dtype_override_fn`` (torch 2.15) is called once for each
            parameter of this call: a router or a norm for which it returns float32 computes in
            it. It must return the same on every rank. Inputs are cast to ``param_dtype`` in any
            case. ``.grad`` has the ``grad_dtype`` of its parameter, if that is set before the
            first forward, and is summed in it without a ``reduce_dtype``.
        offload_policy: ``CPUOffloadPolicy()`` keeps shards and gradients on the CPU, so the
            optimizer runs there. Shards are copied to the mesh's device for each all-gather, and
            gradients back to the CPU after each reduction.
        ignored_params: parameters that are not sharded, and whose gradients are not reduced. They
            may belong to modules around this one too, if the caller reduces them.
        dp_mesh_dims: FSDP2's ``DataParallelMeshDims``. ``mesh`` then has all axes of the job, and
            the parameters are DTensors on it. This argument names the axes to shard over and those
            to replicate over. Without axes to shard over, the parameters are not sharded (DDP).
        sharding: a row of the table of ZeRO's stages (`vescale_fsdp.program.zero_table`): "ddp",
            "zero1", "zero2", "zero3" on one axis; "hsdp", "hsdp_zero1" on two. None is "zero3" on
            one axis and "hsdp" on two. The first three do not reshard after forward.
        accumulate: how a backward accumulates gradients while synchronization is off
            (``set_requires_gradient_sync(False)``, ``no_sync``). "unsharded": nothing is sent, and
            each rank keeps its own sum, as with FSDP2. "sharded": gradients are reduced along the
            shard axis, and each rank keeps its shard, which takes less memory. None is "sharded"
            for ``sharding="zero2"`` and "unsharded" for all others.
        granularity: the blocks that must not be split: one for all parameters, or a policy
            ``(fqn, param) -> Granularity | None``. The fqn is relative to ``module``.
            Default: split anywhere, with the least padding.
        unused: what happens to parameters that no rank used in a backward. "auto": their
            ``.grad`` stays None. For this, one byte a parameter is sent with the last reductions
            of each backward. "zeros": nothing is sent, and ``.grad`` becomes zeros. With momentum
            or weight decay, an optimizer changes parameters whose gradients are zeros.
        in_flight: how many units may be unsharded at a time: the one that runs,
            and ``in_flight - 1`` that are prefetched. Units that are never resharded do not count
            (``reshard_after_forward=False``, and the root's own parameters). 1: no prefetch, and
            each reduction is waited for. From 3 on, the last ``in_flight - 2`` units of a forward
            are not resharded, because backward begins with them. On the CPU a reduction under way
            counts as one all-gather, so with 2 they alternate. Set it on the root.
        broadcast_buffers: whether to send the buffers of the first rank, such as BatchNorm's
            statistics, to all ranks, as DDP does. They are sent in one message, before each
            forward that follows a synchronized forward with gradients. False, as in FSDP2: each
            rank keeps its own buffers. Set it on the root.
        activations: what the unit keeps of its forward for its backward. "recompute": it keeps its
            inputs, and backward runs the forward again. "offload": the tensors that autograd
            saves are moved to pinned memory of the host, and come back one unit ahead in
            backward. On the CPU nothing is moved. "recompute+offload": the inputs are moved. A
            policy function, or a list of operators, as for torch's
            ``create_selective_checkpoint_contexts``: the outputs that it names are kept, and the
            others are recomputed. None: all tensors that autograd saves are kept. It holds for
            modules inside of the unit too, if they are no units of their own.
        gather_codec: with a `QuantizedGather`, all-gathers send weights in 8 bits, and forward
            computes with the rounded weights. Its blocks become the granularity of parameters
            without one. Embeddings and heads are recognized by the names of their modules. So do
            not pass it in a call of ``fully_shard`` on a head alone.
        reduce_codec: with a `QuantizedReduce`, reductions send gradients in 8 bits.

    Returns:
        ``module`` itself.

    Cost: no communication in this call. In a step, each unit has one all-gather in forward, one
    more in backward if it was resharded, and one reduction. With replicas it also has one
    all-reduce of the shard. Memory between steps is the shard. A unit whose parameters compute in
    two dtypes has two buffers, and each of these collectives twice; on an accelerator the two
    are issued as one operation.

    A parameter of a tensor subclass with ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``
    gathers itself, as with FSDP2. Each such parameter has one all-gather and one reduction of its
    own.

    Ranks must run units in the same order. If all units are on one mesh, a rank may skip any of
    them; it still takes part in their collectives. In the first pass of each kind, the order of
    definition is the predicted order of units. At its end the ranks compare the orders in one
    round through the store, and in one more round for each difference. Opposite orders are an
    error on every rank. With ``VESCALE_FSDP_CHECK_ORDER=1`` each all-gather of every pass is
    compared.

    On the CPU a rank waits for others for at most ``VESCALE_FSDP_TIMEOUT_S`` seconds (default 60;
    0 for no limit). Then it raises a ``RankMismatchError`` that says what the other ranks do.

    With ``VESCALE_FSDP_CHECK_MEMORY=1`` unsharded parameters and buffers are filled with NaN
    instead of being freed. This shows views of them that are read too late. A write by
    ``self.weight.data`` in a forward, which is lost, is then an error.

    Raises:
        ValueError, AssertionError, RuntimeError: as FSDP2, with its words for the same mistake.
        ValueError: ``activations`` is none of these, or the module has torch's composable
            ``checkpoint`` already.
        TypeError: a policy or the granularity has a wrong type; or torch's FSDP has sharded a
            module in ``module``.
        ValueError: the machine has no device of the mesh's type; or a class has an attribute with
            the name of a parameter.
        ValueError: a granularity splits the blocks of a codec; the device lacks the dtype of a
            codec; or a parameter with a codec is smaller than a block, gathers itself or has a
            ``Shard(d)``.
        NotImplementedError: ``Shard(d)`` of a dimension that tensor parallelism shards unevenly; a
            codec with ``decode=False`` is used for a DTensor; or "hsdp_zero1" is used for a DTensor
            or for a parameter that gathers itself.
        PlanError: the parameters cannot be laid out.

    Source: FSDP2 for the signature, up to ``dp_mesh_dims``; arXiv 2602.22437 for the engine.
    """
    modules = checked_modules(module)
    for each in modules:
        refuse_other_engines(each, "for all of it")
    check_arguments(reshard_after_forward, granularity)
    check_engine_arguments(mp_policy, offload_policy, unused, in_flight, broadcast_buffers)
    if activations is not None:
        from vescale_fsdp.engine.activations import apply_activations, check_activations

        check_activations(modules, activations)
    mesh = default_mesh() if mesh is None else mesh
    axes = axes_of(mesh, dp_mesh_dims)
    row = row_of(sharding, axes.num_axes, accumulate, reshard_after_forward)
    axes = axes.as_in(row)
    if not row.cuts_parameters:
        reshard_after_forward = False
    device = devices.current_device(mesh.device_type)
    ignored = set(ignored_params or ())
    codecs = None
    if gather_codec is not None or reduce_codec is not None:
        from vescale_fsdp.engine.quantized import Choice, check_quantized

        check_quantized(gather_codec, reduce_codec, axes, device)
        codecs = Choice(modules, gather_codec, reduce_codec, device)
    params = [
        replace(item, mp_policy=resolved_policy(mp_policy, item.param, item.fqn))
        for item in params_to_shard(modules, ignored, granularity, axes, shard_placement_fn, codecs)
    ]
    _move_buffers(modules, device)
    reshard, num_parts = _reshard(reshard_after_forward, axes.num_shards)
    unit = Unit(
        modules,
        device,
        without_override(mp_policy),
        reshard,
        unused,
        in_flight,
        row,
        broadcasts_buffers=broadcast_buffers,
    )
    unit.num_parts, unit.has_ignored = num_parts, bool(ignored)
    with plain_tensors():
        unit.groups = _make_groups(unit, params, device, offload_policy)
        for group in unit.groups:
            group.gradients.corrects = bool(reduce_codec and reduce_codec.error_feedback)
    mark_taken(params, unit)
    if activations is not None:
        unit.offloads_activations = apply_activations(modules, activations)
        unit.recomputes = activations != "offload"
    take_parts_of_loads(unit.fsdp_params())
    for each in modules:
        register_hooks(each)
        swap_class(each)
        register_state(each, unit)
    mark_managed(modules, ignored)
    return module


fully_shard.state = state_of  # type: ignore[attr-defined]  # as torch's composable functions


def refuse_other_engines(module: nn.Module, way_out: str) -> None:
    """Raise if torch's own ``fully_shard`` or FSDP has sharded a part of a model.

    Args:
        way_out: what to do instead, the end of the error.

    Raises:
        TypeError: names the module.
    """
    for name, child in module.named_modules():
        is_fsdp2 = isinstance(child, TorchFSDPModule) and not isinstance(child, FSDPModule)
        if is_fsdp2 or isinstance(child, FullyShardedDataParallel):
            raise TypeError(
                f"fully_shard: {name or type(child).__name__!r} has been sharded by "
                "torch.distributed.fsdp, and two engines cannot share a model; use "
                f"vescale_fsdp.fully_shard, which takes the same arguments, {way_out}"
            )


def default_mesh() -> DeviceMesh:
    """A mesh of all ranks, on the accelerator or the CPU."""
    if not dist.is_initialized():
        try:
            dist.init_process_group()
        except ValueError as error:  # it lacks a variable of torchrun
            raise ValueError(
                "fully_shard: torch.distributed is not started in this process, and its variables "
                "are not set. Start the script with a launcher, one process alone too: torchrun "
                f"--nproc-per-node 2 {os.path.basename(sys.argv[0]) or 'train.py'}; or call "
                "torch.distributed.init_process_group(...) before fully_shard"
            ) from error
    return init_device_mesh(devices.accelerator_type() or "cpu", (dist.get_world_size(),))


def _reshard(reshard_after_forward: bool | int | None, num_shards: int) -> tuple[bool | None, int]:
    """Whether to reshard after forward, and in how many parts; each rank keeps one (1: none)."""
    if reshard_after_forward is None or isinstance(reshard_after_forward, bool):
        return reshard_after_forward, 1
    size = reshard_after_forward
    if size < 1 or num_shards % size:
        raise ValueError(
            "If passing reshard_after_forward as an int, it should be a factor of "
            f"{num_shards}, not {size}"
        )
    if size == 1:
        warnings.warn(
            "reshard_after_forward=1 (int) keeps the whole parameters after forward, as "
            "reshard_after_forward=False does; pass that",
            stacklevel=3,
        )
        return False, 1
    return True, size if size < num_shards else 1


def _make_groups(
    unit: Unit,
    params: list[ParamToShard],
    device: torch.device,
    offload_policy: OffloadPolicy,
) -> list[Group]:
    """One group per dtypes, trainability and ranks, in order of first appearance.

    A parameter with ``Shard(d)``, or one that gathers itself, is a group of its own. Parameters
    whose codes forward uses directly (``decode=False``) are in a separate group.
    """
    by_kind: dict[tuple[Any, ...], list[ParamToShard]] = {}
    for item in params:
        ranks = (item.axes.shard_ranks, item.axes.replica_ranks)
        alone = None if item.dim is None else item.fqn
        param, stays, asked = item.param, item.stays_coded, item.mp_policy.param_dtype
        keeps = any(follows_statistics(module(), param) for module, _ in item.sites)
        dtype = None if keeps else asked
        # These may still be cast, or not: their first forward decides.
        is_open = any(has_statistics(module()) for module, _ in item.sites)
        is_open = is_open and asked is not None
        kind = (
            param.is_meta, dtype, asked, is_open, param.dtype, param.requires_grad, ranks, alone,
            stays, compat.grad_dtype_of(param),
        )  # fmt: skip
        by_kind.setdefault(kind, []).append(item)
    offloads = isinstance(offload_policy, CPUOffloadPolicy)
    pins = isinstance(offload_policy, CPUOffloadPolicy) and offload_policy.pin_memory
    rests_on = torch.device("cpu") if offloads else device
    groups = []
    for (on_meta, compute_dtype, asked, is_open, *_), members in by_kind.items():
        make: Callable[..., Group] = Group
        if members[0].extends:
            from vescale_fsdp.engine.extension import ExtensionGroup

            if members[0].axes.shard is None or members[0].axes.cuts_outside:
                raise NotImplementedError(
                    f"fully_shard: {members[0].fqn!r} gathers itself, and such a parameter can "
                    "only be sharded over one axis so far; use sharding='zero3' or 'hsdp'"
                )
            make = partial(ExtensionGroup, members[0].mp_policy)
        elif members[0].stays_coded:
            from vescale_fsdp.engine.quantized_weight import CodedGroup

            make = CodedGroup
        groups.append(
            make(
                members,
                members[0].axes,
                torch.device("meta") if on_meta else rests_on,
                offloads=offloads,
                keeps_full=not unit.row.cuts_parameters,
                keeps_sums=not (unit.row.cuts_parameters or unit.row.cuts_gradients),
                compute_device=device,
                pin_memory=pins,
                compute_dtype=compute_dtype,
                reduce_dtype=unit.mp_policy.reduce_dtype,
                on_gradient=unit.gradient_callback(),
            )
        )
        for fsdp_param in groups[-1].fsdp_params:
            refuse_hidden(fsdp_param)
        groups[-1].follows_statistics = is_open and type(groups[-1]) is Group
        groups[-1].asked_dtype = asked
    return groups


def _move_buffers(modules: list[nn.Module], device: torch.device) -> None:
    for _, child in own_modules(modules):
        for buffer in child._buffers.values():
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                buffer.data = buffer.to(device)

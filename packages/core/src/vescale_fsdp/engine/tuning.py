"""FSDP2's methods that tune communication: prefetch lists, divide factors, custom collectives."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule

from vescale_fsdp import compat
from vescale_fsdp.engine.axes import comm_for
from vescale_fsdp.engine.engine import engine_of
from vescale_fsdp.engine.group import Group
from vescale_fsdp.engine.unit import Unit, unit_of, units_in
from vescale_fsdp.errors import warn_no_effect
from vescale_fsdp.ranks import collectives


class TuningMethods:
    """A mixin of ``FSDPModule``. Its methods do not change results, unless their docstrings say so.

    Some setters of FSDP2 have no effect here. If a user calls one, it warns and says what to do.
    """

    # Prefetch

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        """Prefetch these modules while this one computes in forward.

        They replace the next modules of the recorded order. All of them are prefetched, whatever
        ``in_flight`` is. It takes effect from the second pass on. An empty list restores the
        recorded order.

        Raises:
            ValueError: one of them is not sharded.
        """
        self._unit().forward_prefetch = _units_to_prefetch(modules)

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """Prefetch these modules while this one computes in backward.

        They replace the next modules of the recorded order. It takes effect from the second
        backward on. An empty list restores the recorded order.

        Raises:
            ValueError: one of them is not sharded.
        """
        self._unit().backward_prefetch = _units_to_prefetch(modules)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Set whether to unshard this module in backward.

        Switch it off only for a module whose backward reads no parameter, such as an embedding. A
        backward that does read one reads freed memory.
        """
        self._unit().unshard_in_backward = unshard_in_backward

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the next all-gathers wait for this event, for example of an optimizer's stream.

        They also wait for all work that the current stream has queued. Call it on the root. The
        event is used once. Without an accelerator it has no effect, and warns.
        """
        unit = self._unit()
        if _is_below_root(unit, "set_post_optim_event"):
            return
        if not any(each.has_streams for each in units_of(self, recurse=True)):
            warn_no_effect(
                "set_post_optim_event",
                "the parameters are on the CPU, where the step of an optimizer has ended when it "
                "returns; leave the call out",
            )
            return
        unit.post_optim_event = event

    def _set_unshard_async_op(self, async_op: bool) -> None:
        """No effect: all-gathers are always asynchronous, and allocate on one stream."""
        warn_no_effect(
            "_set_unshard_async_op", "all-gathers are always asynchronous; leave the call out"
        )

    # Reduction of gradients

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Switch the all-reduce of gradients over replicas (HSDP) on or off.

        While it is off, gradients are reduced within each replica and accumulated there, and
        ``.grad`` does not change. The next backward with it on all-reduces the sum.
        """
        for unit in units_of(self, recurse):
            unit.requires_all_reduce = requires_all_reduce

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the sum of gradients by ``factor`` instead of by the number of ranks."""
        for group in self._unit().groups:
            group.gradients.divide_factor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The former name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Let collectives sum, and divide afterwards. NCCL could also average in the collective."""
        unit = self._unit()
        if enable and _is_on_cpu(unit):
            warn_no_effect(
                "set_force_sum_reduction_for_comms",
                "reductions on the CPU are always sums, which are divided after it; leave the call "
                "out",
            )
        for group in unit.groups:
            group.gradients.only_sums = enable

    def set_reduce_scatter_unused_params(
        self, reduce_scatter_unused_params: bool, *, recurse: bool = True
    ) -> None:
        """Set whether trainable parameters that no rank used get zero gradients.

        Off: their ``.grad`` stays None. Parameters that only some ranks used always get gradients.
        The root's setting holds for the whole model.
        """
        own = self._unit()
        if not reduce_scatter_unused_params and own.unused == "zeros":
            warn_no_effect(
                "set_reduce_scatter_unused_params",
                "fully_shard was called with unused='zeros', which has precedence; leave unused= "
                "out",
            )
        engine = engine_of(own)
        if engine is not None and engine.units()[0].gives_zeros != reduce_scatter_unused_params:
            _is_below_root(own, "set_reduce_scatter_unused_params")
        for unit in units_of(self, recurse):
            unit.gives_zeros = reduce_scatter_unused_params

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """Set how many reductions may be under way at a time. The largest value of all units holds.

        Raises:
            TypeError: not an int.
            ValueError: below 1.
        """
        if isinstance(max_input_buffers, bool) or not isinstance(max_input_buffers, int):
            raise TypeError(
                f"max_input_buffers must be an int, got {type(max_input_buffers).__name__}"
            )
        if max_input_buffers < 1:
            raise ValueError(f"max_input_buffers must be a positive int, got {max_input_buffers}")
        for unit in units_of(self, recurse):
            unit.max_reductions = max_input_buffers

    def set_separate_reduce_scatter_group(
        self, enable: bool = True, *, recurse: bool = True
    ) -> None:
        """No effect: reductions always have communicators of their own."""
        warn_no_effect(
            "set_separate_reduce_scatter_group",
            "reductions always have communicators of their own; leave the call out",
        )

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """No effect: each backward that reduces waits for its own reductions.

        To accumulate micro-batches without reductions, use `set_requires_gradient_sync`.
        """
        warn_no_effect(
            "set_is_last_backward",
            "each backward waits for its own reductions. For micro-batches without reductions use "
            "set_requires_gradient_sync(False); leave the call out",
        )

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: Any = None
    ) -> None:
        """Call ``hook`` with each reduced shard, before it becomes ``.grad``.

        The shard is a flat tensor in the dtype of the reduction, after the all-reduce over
        replicas if there are any. The hook may change the gradients in place.

        Args:
            stream: the stream on which to call the hook. Only without replicas, and without effect
                on the CPU.

        Raises:
            ValueError: the parameters are on several meshes; or a stream is passed with replicas.
        """
        groups = self._groups_on_one_mesh("set_all_reduce_hook")
        if stream is not None and any(group.axes.replicate is not None for group in groups):
            raise ValueError("stream cannot be set when using native HSDP")
        if stream is not None and _is_on_cpu(self._unit()):
            warn_no_effect(
                "set_all_reduce_hook(stream=...)",
                "gradients on the CPU are not queued on streams; leave stream= out",
            )
        for group in groups:
            group.gradients.hook, group.gradients.hook_stream = hook, stream

    # Collectives that the user supplies

    def set_custom_all_gather(self, comm: Any) -> None:
        """All-gather by ``comm``: FSDP2's ``AllGather``, with ``allocate`` and ``__call__``.

        The shards are received in the memory that ``comm`` allocates, and then copied to the
        unit's full buffer.

        Raises:
            ValueError: the parameters are on several meshes, or are sent in 8 bits.
        """
        for group in self._groups_on_one_mesh("set_custom_all_gather"):
            _refuse_coded(group, "set_custom_all_gather")
            group.custom_gather = comm

    def set_custom_reduce_scatter(self, comm: Any) -> None:
        """Reduce by ``comm``: FSDP2's ``ReduceScatter``, with ``allocate`` and ``__call__``.

        Raises:
            ValueError: the parameters are on several meshes, or are sent in 8 bits.
        """
        for group in self._groups_on_one_mesh("set_custom_reduce_scatter"):
            _refuse_coded(group, "set_custom_reduce_scatter")
            group.gradients.custom = comm

    def set_allocate_memory_from_process_group_for_comm(self, enable: bool) -> None:
        """Let the process group allocate the buffers of collectives, as in FSDP2.

        If its backend cannot allocate them (gloo), this only costs a copy, and warns.

        Raises:
            AssertionError: custom collectives are set.
            ValueError: the parameters are sent in 8 bits.
        """
        for group in self._unit().groups:
            _refuse_custom(group, "set_allocate_memory_from_process_group")
            _refuse_coded(group, "set_allocate_memory_from_process_group_for_comm")
            gather, reduce = None, None
            if enable:
                comm = comm_for(group.axes)
                if not collectives.allocates(comm.gather_group, group.pool.device):
                    warn_no_effect(
                        "set_allocate_memory_from_process_group_for_comm",
                        "the backend of the process group allocates no memory for communication, "
                        "and each collective costs a copy more; leave the call out",
                    )
                gather = compat.ProcessGroupAllocAllGather(comm.gather_group)
                reduce = compat.ProcessGroupAllocReduceScatter(comm.reduce_group)
            group.custom_gather, group.gradients.custom = gather, reduce

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """All-gather through symmetric memory (CUDA), in place: nothing is copied out.

        Collective. All ranks must unshard in the same order. For example, `unsharded` must not be
        entered on some ranks only. If NCCL uses copy engines, all-gathers take no processors from
        the compute.

        Raises:
            AssertionError: custom collectives are set.
            ValueError: the parameters are sent in 8 bits.
        """
        for group in self._unit().groups:
            _refuse_custom(group, "set_symm_mem")
            _refuse_coded(group, "set_symm_mem_for_comm")
            gather_group = comm_for(group.axes).gather_group
            group.custom_gather = compat.SymmMemAllGather(gather_group, cast(Any, backend))

    # Of torch 2.15

    def set_keep_unsharded_storage(self, keep: bool, *, recurse: bool = True) -> None:
        """Set whether a reshard leaves the unsharded parameters their memory, for CUDA graphs.

        Their ``data_ptr()`` is the same after each unshard, until the module is converted or moved
        (``module.to()``). What they hold is undefined while they are sharded. Switched off, the
        next reshard frees the memory.

        Memory: the unsharded parameters of all of these units, in the dtype of compute, at all
        times.
        """
        for unit in units_of(self, recurse):
            for group in unit.groups:
                group.keeps_storage = keep

    def _unit(self) -> Unit:
        unit = unit_of(self)  # type: ignore[arg-type]
        assert unit is not None, "only fully_shard makes an FSDPModule"
        return unit

    def _groups_on_one_mesh(self, method: str) -> list[Group]:
        groups = self._unit().groups
        if len({group.axes.shard_ranks for group in groups}) > 1:
            raise ValueError(
                f"{method} is not supported with multiple param groups (from per-param mesh via "
                "shard_placement_fn). It would be ambiguous across groups with different meshes"
            )
        return groups


def units_of(module: Any, recurse: bool) -> list[Unit]:
    """The unit of a module and those below it, or its own unit only."""
    if recurse:
        return list(units_in(module).values())
    return [module._unit()]


def _is_on_cpu(unit: Unit) -> bool:
    return bool(unit.groups) and not unit.has_streams


def _is_below_root(unit: Unit, setter: str) -> bool:
    """Whether the model has run and its root is another unit. If so, this warns."""
    engine = engine_of(unit)
    if engine is None or unit.is_root:
        return False
    root = engine.units()[0]
    warn_no_effect(
        setter,
        f"this is {unit.fqn!r}, but the setting holds for the whole model. Call it on the root, "
        f"the outermost module ({root.kind})",
    )
    return True


def _units_to_prefetch(modules: Iterable[Any]) -> list[Unit] | None:
    units = []
    for module in modules:
        unit = unit_of(module) if isinstance(module, nn.Module) else None
        if unit is None or not isinstance(module, TorchFSDPModule):
            raise ValueError(f"Expects FSDPModule but got {type(module)}: {module}")
        units.append(unit)
    return units or None


def _refuse_custom(group: Group, method: str) -> None:
    own = collectives.is_fsdp2_collective
    for what, custom in (
        ("all gather", group.custom_gather),
        ("reduce scatter", group.gradients.custom),
    ):
        if custom is not None and not own(custom):
            raise AssertionError(
                f"cannot call {method}() when {what} comm is custom: {type(custom).__name__}"
            )


def _refuse_coded(group: Group, method: str) -> None:
    if any(gather or reduce for gather, reduce in group.codings):
        raise ValueError(
            f"{method}: parameters of this module are sent in 8 bits (gather_codec= or "
            "reduce_codec= of fully_shard), which other collectives do not support; use one of the "
            "two"
        )

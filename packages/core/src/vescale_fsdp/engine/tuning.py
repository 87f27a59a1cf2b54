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


class TuningMethods:
    """Mixed into ``FSDPModule``. None of these changes what is computed, unless it says so.

    A setter that has no effect here warns where a user calls it, and says what to do.
    """

    # What is gathered ahead

    def set_modules_to_forward_prefetch(self, modules: list[Any]) -> None:
        """Gather these modules while this one computes in forward, instead of the recorded next.

        All of the list, whatever ``in_flight`` says. Takes effect from the second pass on. An empty
        list takes it back.

        Raises:
            ValueError: one of them is not sharded.
        """
        self._unit().forward_prefetch = _units_to_prefetch(modules)

    def set_modules_to_backward_prefetch(self, modules: list[Any]) -> None:
        """Gather these modules while this one computes in backward, instead of the recorded next.

        An empty list takes it back.

        Raises:
            ValueError: one of them is not sharded.
        """
        self._unit().backward_prefetch = _units_to_prefetch(modules)

    def set_unshard_in_backward(self, unshard_in_backward: bool) -> None:
        """Off: backward does not gather this module. For those whose backward reads no parameter.

        An embedding, for example. If it does read one, it reads freed memory.
        """
        self._unit().unshard_in_backward = unshard_in_backward

    def set_post_optim_event(self, event: torch.Event) -> None:
        """Let the next gathers wait for this event instead of for all work so far. Used once.

        On the root. Without an accelerator there is nothing to wait for, and a warning says so.
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
        """Nothing to set: gathers are asynchronous, and allocate nothing on another stream."""
        warn_no_effect(
            "_set_unshard_async_op", "all-gathers are always asynchronous; leave the call out"
        )

    # How gradients are summed

    def set_requires_all_reduce(self, requires_all_reduce: bool, *, recurse: bool = True) -> None:
        """Switch the sum over replicas (HSDP) on or off.

        While it is off, gradients are reduced within each replica, and kept there until a
        backward with it on sums all of them; ``.grad`` is not touched.
        """
        for unit in units_of(self, recurse):
            unit.requires_all_reduce = requires_all_reduce

    def set_gradient_divide_factor(self, factor: float) -> None:
        """Divide the summed gradients by ``factor`` instead of by the number of ranks."""
        for group in self._unit().groups:
            group.gradients.divide_factor = float(factor)

    def set_reduce_scatter_divide_factor(self, factor: float) -> None:
        """The former name of `set_gradient_divide_factor`."""
        self.set_gradient_divide_factor(factor)

    def set_force_sum_reduction_for_comms(self, enable: bool) -> None:
        """Sum in the collective and scale after it, also where it could average (NCCL)."""
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
        """On: trainable parameters that no rank used get zero gradients (else: None).

        Parameters that only some ranks use need no switch here. Holds for the whole model, by what
        its root was set to.
        """
        own = self._unit()
        if not reduce_scatter_unused_params and own.unused == "zeros":
            warn_no_effect(
                "set_reduce_scatter_unused_params",
                "fully_shard was given unused='zeros', which holds; leave that out",
            )
        engine = engine_of(own)
        if engine is not None and engine.units()[0].gives_zeros != reduce_scatter_unused_params:
            _is_below_root(own, "set_reduce_scatter_unused_params")
        for unit in units_of(self, recurse):
            unit.gives_zeros = reduce_scatter_unused_params

    def set_reduce_scatter_max_input_buffers(
        self, max_input_buffers: int, *, recurse: bool = True
    ) -> None:
        """How many reductions may be under way at a time. The largest of all units holds.

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
        """Nothing to set: reductions always have communicators of their own."""
        warn_no_effect(
            "set_separate_reduce_scatter_group",
            "reductions always have communicators of their own; leave the call out",
        )

    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """Nothing to set: each backward that reduces waits for its own reductions.

        Micro-batches that are not to be reduced say so by `set_requires_gradient_sync`.
        """
        warn_no_effect(
            "set_is_last_backward",
            "each backward waits for its own reductions. Micro-batches without reductions are "
            "those with set_requires_gradient_sync(False); leave the call out",
        )

    def set_all_reduce_hook(
        self, hook: Callable[[torch.Tensor], None], *, stream: Any = None
    ) -> None:
        """Call ``hook`` with each reduced shard, before it becomes ``.grad``. May change numbers.

        The shard is flat, in the dtype of the reduction, after the sum over replicas if there
        are any. The hook works in place.

        Args:
            stream: to run it on, where there are no replicas. On the CPU there are no streams.

        Raises:
            ValueError: the parameters are on several meshes; or a stream, and replicas.
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
        """Gather by ``comm``: FSDP2's ``AllGather``, with ``allocate`` and ``__call__``.

        What it allocates receives the shards; one copy takes them to where the parameters lie.

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
        """Let the process group allocate what collectives send and receive, as FSDP2 does.

        Where its backend cannot (gloo), this costs a copy for nothing, and a warning says so.

        Raises:
            AssertionError: custom collectives are set.
        """
        for group in self._unit().groups:
            _refuse_custom(group, "set_allocate_memory_from_process_group")
            _refuse_coded(group, "set_allocate_memory_from_process_group_for_comm")
            gather, reduce = None, None
            if enable:
                comm = comm_for(group.axes)
                if not compat.allocates(comm.gather_group, group.pool.device):
                    warn_no_effect(
                        "set_allocate_memory_from_process_group_for_comm",
                        "the backend of the process group allocates no memory for communication, "
                        "and each collective costs a copy more; leave the call out",
                    )
                gather = compat.ProcessGroupAllocAllGather(comm.gather_group)
                reduce = compat.ProcessGroupAllocReduceScatter(comm.reduce_group)
            group.custom_gather, group.gradients.custom = gather, reduce

    def set_symm_mem_for_comm(self, backend: str = "NCCL") -> None:
        """Gather through symmetric memory (CUDA), and in place: nothing is copied out.

        Collective. All ranks have to gather in the same order, as without `unsharded` on some only.
        Where NCCL copies by the copy engines, the parameters arrive beside the compute without
        taking a part of the processors.

        Raises:
            AssertionError: custom collectives are set.
        """
        for group in self._unit().groups:
            _refuse_custom(group, "set_symm_mem")
            _refuse_coded(group, "set_symm_mem_for_comm")
            gather_group = comm_for(group.axes).gather_group
            group.custom_gather = compat.SymmMemAllGather(gather_group, cast(Any, backend))

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
    """The units of a module and below it, or its own only."""
    if recurse:
        return list(units_in(module).values())
    return [module._unit()]


def _is_on_cpu(unit: Unit) -> bool:
    return bool(unit.groups) and not unit.has_streams


def _is_below_root(unit: Unit, setter: str) -> bool:
    """Whether the model has run, and its root is another unit; warns then."""
    engine = engine_of(unit)
    if engine is None or unit.is_root:
        return False
    root = engine.units()[0]
    warn_no_effect(
        setter,
        f"this is {unit.fqn!r}, and it holds for a whole model. Call it on the root, the outermost "
        f"module ({root.kind})",
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
    own = compat.is_fsdp2_collective
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
            "reduce_codec= of fully_shard), by messages that other collectives do not know; use "
            "one of the two"
        )

"""Unit: what one call of ``fully_shard`` made of a module, and its life around each forward.

Several modules may be one unit: it stays gathered from the forward of the first to that of the
last, in whatever order they run.

The events of a step, for a unit in the middle of the model::

    pre_forward    wait for the gather, register the gathered parameters, start the next gather
    post_forward   release (unless kept), put the boundary around the outputs
    pre_backward   gather again, start the gather of the unit before this one
    post_backward  all gradients of the unit are in: release, reduce

A unit may be entered again while it runs (``training_step`` calls ``self(x)``): the inner call
is part of the outer one. It may be called several times before a backward, and in an activation
checkpoint's recomputation inside of one.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from vescale_fsdp import compat
from vescale_fsdp.dbuffer import hand_back, plain_tensors
from vescale_fsdp.engine import boundary
from vescale_fsdp.engine.buffers import broadcast_buffers
from vescale_fsdp.engine.comms import comm_for
from vescale_fsdp.engine.engine import Engine
from vescale_fsdp.engine.group import Group, together
from vescale_fsdp.engine.linear_gradients import set_in_place
from vescale_fsdp.engine.root import check_materialized, make_root, sole_module
from vescale_fsdp.engine.slot import Site
from vescale_fsdp.engine.tree import map_tensors
from vescale_fsdp.engine.zero_table import Row
from vescale_fsdp.program.residency import Lease, Residency

__all__ = ["UNIT_ATTRIBUTE", "Unit", "unit_of", "units_in"]

UNIT_ATTRIBUTE = "_vescale_fsdp_unit"


class Unit(Residency):
    """The state of a sharded module, or of several. They own it; it knows them weakly.

    Args:
        modules: those that ``fully_shard`` was called on; one, or several that gather together.
        mp_policy: dtypes of compute, reduction and outputs.
        reshard_after_forward: None means True, except for the root of a model in training.
        row: what is cut between the passes and micro-batches of a step.
        unused, in_flight, broadcasts_buffers: as of ``fully_shard``; a root's values hold for its
            engine.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        mp_policy: MixedPrecisionPolicy,
        reshard_after_forward: bool | None,
        unused: str,
        in_flight: int,
        row: Row,
        *,
        broadcasts_buffers: bool,
    ) -> None:
        super().__init__()
        self.module_refs = [weakref.ref(module) for module in modules]
        self.mp_policy = mp_policy
        self.reshard_after_forward = reshard_after_forward
        self.row = row
        self.reshard_after_backward = row.cuts_parameters
        self.unused, self.in_flight = unused, in_flight
        self.broadcasts_buffers = broadcasts_buffers
        self._buffers_are_due = True  # since the last forward of a step that was synchronized
        self.requires_all_reduce = True
        self.forward_prefetch: list[Unit] | None = None  # instead of what was recorded
        self.backward_prefetch: list[Unit] | None = None
        self.linear_gradients_in_place = False
        self.gives_zeros = False  # whether parameters that no rank used get zero gradients
        self.post_optim_event: torch.Event | None = None
        self.fqn = ""
        self.forward_methods: set[str] = set()  # that gather, as forward does
        self.groups: list[Group] = []
        self.engine: Engine | None = None
        self._depth = 0  # forwards of this unit that are running
        self._handled: BaseException | None = None  # that was being handled when they began
        self._has_begun = False  # whether the engine knows of the outermost of them
        self._call: boundary.Call | None = None  # of the forward that is running
        self._to_run: set[int] = set()  # modules of the unit that are still to run in this pass
        for module in modules:
            object.__setattr__(module, UNIT_ATTRIBUTE, self)

    # Parameters

    def unshard(self) -> None:
        """Have the parameters unsharded and registered when this returns. Outside of a pass too."""
        self.drop_stale()
        with plain_tensors():
            self.start_unshard()
            self.wait_for_unshard()

    def drop_stale(self) -> None:
        """Reshard, outside of a pass, if an optimizer has stepped since the all-gather."""
        if self.is_stale and not self._is_running:
            self.reshard()

    @property
    def _tag(self) -> int:
        """The same on all ranks, and another for each unit of each model."""
        return 0 if self.engine is None else self.engine.number << 20 | self.index

    @property
    def _is_running(self) -> bool:
        return self.engine is not None and self.engine.is_running

    @property
    def is_sharded(self) -> bool:
        """Whether no group is unsharded or on its way."""
        return all(group.is_sharded for group in self.groups)

    @property
    def is_stale(self) -> bool:
        """Whether what is unsharded is not what the shards hold now, and not pinned."""
        return not self.num_pins and any(group.is_stale for group in self.groups)

    @property
    def version(self) -> list[tuple[int, int]]:
        """Of the shards of its groups: another one after a write."""
        return [group.version for group in self.groups]

    def take_by_hand(self) -> None:
        """Unshard for the user, who may change what is unsharded until it is resharded."""
        self.unshard()
        for group in self.groups:
            group.take_by_hand()

    def rest(self) -> None:
        """Reshard, and forget what was gathered: the weights may be changed from outside."""
        self.reshard()
        self.drop_copies()

    def drop_copies(self) -> None:
        """Forget what was gathered, or written to send, of shards that may have changed since."""
        for group in self.groups:
            group.drop_copies()

    def start_unshard(self, *, in_backward: bool = False) -> None:
        """Have the all-gathers of all groups under way. Within `plain_tensors`."""
        engine = self.engine
        if engine is None:  # before the first forward: somebody wants to look inside
            check_materialized([self])
        comms = [engine.comm(g) if engine else comm_for(g.axes) for g in self.groups]
        with together(self.groups, comms):
            for group, comm in zip(self.groups, comms, strict=True):
                comm.issued.subject = self._tag
                group.start_gather(comm, in_backward=in_backward)

    def join_unshard(self) -> None:
        """Make the all-gathers for other ranks, of what is here already."""
        assert self.engine is not None, "other ranks run the model"
        for group in self.groups:
            comm = self.engine.comm(group)
            comm.issued.subject = self._tag
            group.take_part(comm)

    def has_arrived(self) -> bool:
        """Whether the all-gathers have ended; waits a second for each, where the host waits."""
        return all(group.has_arrived(1.0) for group in self.groups)

    def wait_for_unshard(self) -> None:
        """Wait for the all-gathers and register the unsharded parameters."""
        for group in self.groups:
            group.finish_gather()

    def reshard(self) -> None:
        """Free the unsharded parameters, unless a context pins them."""
        self.release(Lease.FORWARD, Lease.BACKWARD)
        if not self._is_running:
            hand_back()

    def free(self) -> None:
        """Free the unsharded parameters of all groups."""
        for group in self.groups:
            group.reshard()

    def free_but_part(self) -> None:
        """Free all but this rank's part of ``num_parts``."""
        for group in self.groups:
            if self.num_parts < group.num_shards and group.num_shards % self.num_parts == 0:
                group.keep_part(self.num_parts)
            else:  # on a mesh of its own, which cannot be divided so
                group.reshard()

    def park(self) -> None:
        """Keep what is unsharded, but register the sharded parameters."""
        for group in self.groups:
            group.set_aside()

    def keeps_no_message(self) -> None:
        """No backward will send again what was written to send."""
        for group in self.groups:
            group.drop_message()

    def expose(self) -> None:
        """Code that is not of the unit's own forward may write to what is unsharded."""
        engine = self.engine
        for group in self.groups:
            group.is_exposed |= engine is not None and engine.exposes(group)

    def prefetch_list(self, *, in_backward: bool) -> list[int] | None:
        """The units to unshard beside its forward or backward, where a user has said so."""
        units = self.backward_prefetch if in_backward else self.forward_prefetch
        if units is None:
            return None
        return [unit.index for unit in units if unit.engine is self.engine]

    def copy_gathered(self, state_dict: dict[str, Any]) -> None:
        """Replace the tensors of ``state_dict`` that lie in the gathered buffers by copies."""
        storages = {each for group in self.groups for each in group.gathered_storages()}
        for key, value in state_dict.items():
            if isinstance(value, torch.Tensor) and compat.storages_of(value) & storages:
                state_dict[key] = value.clone()

    def write_back(self) -> None:
        """Take over changes that were made to the gathered parameters."""
        with plain_tensors():
            for group in self.groups:
                group.write_back()

    def refuse_if_pinned(self, what: str) -> None:
        """Raise if the parameters are gathered by `unsharded`: changes would be lost."""
        if self.num_pins:
            raise RuntimeError(
                f"{what} inside of `unsharded(...)` would change the gathered parameters only, "
                "which are dropped at its end; do it outside"
            )

    @property
    def has_streams(self) -> bool:
        """Whether what is done with the unsharded parameters is queued on streams."""
        return any(group.has_streams for group in self.groups)

    def ready_engine(self) -> Engine:
        """The engine of the model this unit is part of; the first to ask becomes its root."""
        if self.engine is None:
            with plain_tensors():
                module = sole_module(self)
                make_root(self, module, units_in(module))
        assert self.engine is not None, "make_root sets it"
        return self.engine

    # Forward

    def pre_forward(
        self,
        module: nn.Module,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        method: str = "forward",
    ) -> Any:
        """What happens before the forward of one of its modules; returns its arguments."""
        self._depth += 1
        if self._depth == 1:
            self._handled = sys.exception()
        engine = self.ready_engine()
        if len(self.module_refs) > 1 and self._depth == 1:
            if not self._to_run:
                self._to_run = {id(ref()) for ref in self.module_refs}
            self._to_run.discard(id(module))
        if self._depth > 1:
            if self.is_stale:  # an optimizer has stepped, or somebody has written to the shards
                self.refresh()
            self.unshard()
            self.leases.add(Lease.FORWARD)
            return self._cast_inputs((args, kwargs))
        if Lease.BACKWARD in self.leases and compat.current_backward() != -1:
            # An activation checkpoint runs the forward again.
            self.unshard()
            return self._cast_inputs((args, kwargs))
        wants_gradients = torch.is_grad_enabled()
        if self.broadcasts_buffers and self.is_root:
            if self._buffers_are_due:
                broadcast_buffers(module, [g.axes for u in engine.units() for g in u.groups])
            self._buffers_are_due = wants_gradients and self.requires_gradient_sync
        with plain_tensors():
            engine.before_forward(self, method, wants_gradients)
        self._has_begun = True
        self.leases.discard(Lease.USER)
        self.leases.add(Lease.FORWARD)
        args, kwargs = self._cast_inputs((args, kwargs))
        if not torch.is_grad_enabled():
            return args, kwargs
        # Whether a backward comes back is known from the outputs: frozen parameters too are needed
        # again, for the gradients of the inputs and of what comes before them in the unit.
        self._call = boundary.Call(self, engine.passes.num_passes)
        args, kwargs = boundary.enter(self._call, (args, kwargs))
        self.open_calls.add(self._call)
        return args, kwargs

    def post_forward(self, output: Any) -> Any:
        """What happens after it, also when it raised (``output`` is None then)."""
        self._depth = max(self._depth - 1, 0)
        if self._depth:
            return self._cast_output(output)
        call, self._call = self._call, None
        has_begun, self._has_begun = self._has_begun, False
        if has_begun:
            reachable = True
            if call is not None:
                output, reachable = boundary.leave(call, output)
            assert self.engine is not None, "pre_forward made it"
            # Without a tensor to come back through, a backward could not unshard them again.
            strays = call is not None and not reachable and self._may_get_gradients(call)
            with plain_tensors():
                self.engine.after_forward(
                    self,
                    has_more=bool(self._to_run),
                    strays=strays,
                    # Hooks that run after an exception see it as the one that is being handled.
                    has_failed=sys.exception() is not self._handled,
                    is_closed=call is not None and not call.takes_gradients,
                    is_visited=call is not None and reachable,
                    is_hidden=call is None or strays,
                )
        self.leases.discard(Lease.FORWARD)
        self._handled = None
        return self._cast_output(output)

    def _may_get_gradients(self, call: boundary.Call) -> bool:
        """Whether a call may be part of a graph: by its inputs, or by parameters in the unit."""
        modules = [module for ref in self.module_refs if (module := ref()) is not None]
        below = (unit for module in modules for unit in units_in(module).values())
        return call.takes_gradients or any(unit.trainable for unit in below)

    def end_forward(self, keep: bool, comes_back: bool) -> None:
        """Release the parameters unless they are to be kept."""
        super().end_forward(keep, comes_back)
        if keep and Lease.AHEAD not in self.leases:
            self.expose()

    def _cast_inputs(self, value: Any) -> Any:
        dtype = self.mp_policy.param_dtype
        if dtype is None or not self.mp_policy.cast_forward_inputs:
            return value
        return map_tensors(lambda tensor: _cast(tensor, dtype), value)

    @property
    def kind(self) -> str:
        """The class of its first module."""
        module = self.module_refs[0]()
        return "" if module is None else type(module).__qualname__

    def _cast_output(self, output: Any) -> Any:
        dtype = self.mp_policy.output_dtype
        return output if dtype is None else map_tensors(lambda tensor: _cast(tensor, dtype), output)

    @property
    def is_idle(self) -> bool:
        """Whether no forward or backward runs and nobody has asked for unsharded parameters."""
        is_used = self._depth or self.num_pins or Lease.USER in self.leases
        return not (self._is_running or is_used)

    @property
    def trainable(self) -> bool:
        """Whether any parameter of the unit wants a gradient now."""
        return any(group.trainable for group in self.groups)

    @property
    def all_trainable(self) -> bool:
        """Whether each of its groups has a parameter that wants a gradient."""
        return all(group.trainable for group in self.groups)

    # Backward

    def gradient_callback(self) -> Callable[[int], None]:
        """`on_gradient` for a group to call, without keeping the unit alive."""
        self_ref = weakref.ref(self)

        def on_gradient(num_elements: int) -> None:
            unit = self_ref()
            if unit is not None:
                unit.on_gradient(num_elements)

        return on_gradient

    def on_gradient(self, num_elements: int) -> None:
        """A gradient was taken: see that this backward ends with the final callback."""
        assert self.engine is not None, "a forward has made it"
        self.engine.gradient_arrived(self, num_elements)

    def pre_backward(self, call: boundary.Call) -> None:
        """A gradient has reached the outputs of a call of this unit."""
        assert self.engine is not None, "a forward has made it"
        self.enter_backward(call)
        with plain_tensors():
            self.engine.before_backward(self)

    def post_backward(self, call: boundary.Call) -> None:
        """The gradients of the inputs of one call are there: nothing in it is left to run."""
        if self.leave_backward(call):  # else another call is to come, and adds to the gradients
            assert self.engine is not None, "a forward has made it"
            with plain_tensors():
                self.engine.passes.after_backward(self)

    def end_backward(self) -> None:
        """The whole backward has ended."""
        self._to_run.clear()
        super().end_backward()

    def end_modules(self) -> bool:
        """The outermost forward has ended; returns whether modules of a list have not run in it."""
        had_more = bool(self._to_run)
        self._to_run.clear()
        return had_more

    def copied(self, memo: dict[int, Any]) -> Unit:
        """A unit of its own with the same parameters, for ``copy.deepcopy``; of no module yet.

        Raises:
            RuntimeError: a forward or backward runs, or a context pins the parameters.
        """
        if not self.is_idle:
            raise RuntimeError(
                f"copy.deepcopy of the sharded module {self.fqn!r} while a forward or backward "
                "runs or its parameters are unsharded; copy it between steps"
            )
        self.reshard()
        twin = Unit(
            [],
            self.mp_policy,
            self.reshard_after_forward,
            self.unused,
            self.in_flight,
            self.row,
            broadcasts_buffers=self.broadcasts_buffers,
        )
        twin.num_parts, twin.reshard_after_backward = self.num_parts, self.reshard_after_backward
        twin.requires_gradient_sync = self.requires_gradient_sync
        twin.requires_all_reduce = self.requires_all_reduce
        twin.unshard_in_backward, twin.gives_zeros = self.unshard_in_backward, self.gives_zeros
        twin.max_reductions = self.max_reductions
        twin.linear_gradients_in_place = self.linear_gradients_in_place
        with plain_tensors():
            twin.groups = [g.copied(memo, twin.gradient_callback()) for g in self.groups]
        memo[id(self)] = twin
        twin.forward_prefetch = _copies(self.forward_prefetch, memo)
        twin.backward_prefetch = _copies(self.backward_prefetch, memo)
        return twin

    def join(self, module: nn.Module, original: Unit, memo: dict[int, Any]) -> None:
        """Belong to ``module``, the copy of a module of ``original``."""
        object.__setattr__(module, UNIT_ATTRIBUTE, self)
        self.module_refs.append(weakref.ref(module))
        for group, former in zip(self.groups, original.groups, strict=True):
            for slot, old in zip(group.slots, former.slots, strict=True):
                copies = [(memo.get(id(ref())), name) for ref, name in old.sites]
                slot.sites = [(weakref.ref(m), name) for m, name in copies if m is not None]
        if self.linear_gradients_in_place:
            set_in_place(self.groups, True)

    def give_back(self, param: nn.Parameter) -> list[Site]:
        """Give up an original parameter, whole: it is used in other units as well. Collective.

        Raises:
            RuntimeError: a forward has run: an optimizer may have changed what is sharded.
        """
        if self.engine is not None:
            raise RuntimeError(
                "fully_shard met a parameter that is tied to one in a unit that has run before; "
                "call fully_shard on all modules before the first forward"
            )
        self.reshard()
        for group in self.groups:
            for index, slot in enumerate(group.slots):
                if slot.original() is param:
                    group.give_back(index)
                    slot.register(param)
                    self.groups = [each for each in self.groups if each.slots]
                    if self.linear_gradients_in_place:  # parameters have moved up
                        set_in_place(self.groups, True)
                    return slot.sites
        raise AssertionError("the mark on a parameter names the unit that has it")

    def forget_running(self) -> None:
        """No forward runs: one was broken off by what no hook sees (KeyboardInterrupt)."""
        self._depth, self._handled = 0, None

    def forget(self) -> None:
        """Forget a step that was broken off."""
        super().forget()
        self._to_run.clear()
        self._call, self._has_begun = None, False
        for group in self.groups:
            group.reset()


def _copies(units: list[Unit] | None, memo: dict[int, Any]) -> list[Unit] | None:
    return None if units is None else [memo.get(id(u)) or u.copied(memo) for u in units]


def unit_of(module: nn.Module) -> Unit | None:
    """The unit that ``fully_shard`` made of this very module, if it did."""
    unit = module.__dict__.get(UNIT_ATTRIBUTE)
    return unit if isinstance(unit, Unit) else None


def units_in(module: nn.Module) -> dict[str, Unit]:
    """The units of a module and its descendants by module name, outermost first."""
    found: dict[int, tuple[str, Unit]] = {}
    for name, child in module.named_modules():
        unit = unit_of(child)
        if unit is not None:
            found.setdefault(id(unit), (name, unit))
    return dict(found.values())


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor

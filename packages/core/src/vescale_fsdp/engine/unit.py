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
from vescale_fsdp.engine.group import Group, together
from vescale_fsdp.engine.linear_gradients import set_in_place
from vescale_fsdp.engine.root import check_materialized, make_root, sole_module
from vescale_fsdp.engine.schedule import Schedule
from vescale_fsdp.engine.slot import Site
from vescale_fsdp.engine.tree import map_tensors
from vescale_fsdp.engine.zero_table import Row

__all__ = ["UNIT_ATTRIBUTE", "Unit", "unit_of", "units_in"]

UNIT_ATTRIBUTE = "_vescale_fsdp_unit"


class Unit:
    """The state of a sharded module, or of several. They own it; it knows them weakly.

    Args:
        modules: those that ``fully_shard`` was called on; one, or several that gather together.
        mp_policy: dtypes of compute, reduction and outputs.
        reshard_after_forward: None means True, except for the root of a model in training.
        row: what is cut between the passes and micro-batches of a step.
        unused, in_flight, broadcasts_buffers: as of ``fully_shard``; a root's values hold for its
            schedule.
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
        self.module_refs = [weakref.ref(module) for module in modules]
        self.mp_policy = mp_policy
        self.reshard_after_forward = reshard_after_forward
        self.num_parts = 1  # more: what forward releases is kept, one part on each of so many ranks
        self.row = row
        self.reshard_after_backward = row.cuts_parameters
        self.unused, self.in_flight = unused, in_flight
        self.broadcasts_buffers = broadcasts_buffers
        self._buffers_are_due = True  # since the last forward of a step that was synchronized
        self.requires_gradient_sync = True
        self.requires_all_reduce = True
        self.unshard_in_backward = True
        self.forward_prefetch: list[Unit] | None = None  # instead of what was recorded
        self.backward_prefetch: list[Unit] | None = None
        self.max_reductions: int | None = None  # under way at a time; None: in_flight - 1
        self.linear_gradients_in_place = False
        self.gives_zeros = False  # whether parameters that no rank used get zero gradients
        self.post_optim_event: torch.Event | None = None
        self.fqn = ""
        self.is_root = False
        self.forward_methods: set[str] = set()  # that gather, as forward does
        self.groups: list[Group] = []
        self.schedule: Schedule | None = None
        self.pins = 0  # contexts that want the parameters to stay gathered
        self.held = False  # gathered at the user's request, until used or resharded
        self._is_kept = False  # gathered since a backward, for the next forward
        self._depth = 0  # forwards of this unit that are running
        self._handled: BaseException | None = None  # that was being handled when they began
        self._has_begun = False  # whether the schedule knows of the outermost of them
        self._call: boundary.Call | None = None  # of the forward that is running
        self._open_calls: weakref.WeakSet[boundary.Call] = weakref.WeakSet()
        self._done_calls: weakref.WeakSet[boundary.Call] = weakref.WeakSet()  # may come again
        self._in_backward = False
        self.is_done = False  # at the end of a backward: nothing of it is left to run in it
        self._to_run: set[int] = set()  # modules of the unit that are still to run in this pass
        for module in modules:
            object.__setattr__(module, UNIT_ATTRIBUTE, self)

    # Gathering

    def gather(self) -> None:
        """Have the parameters gathered and registered when this returns. Outside of a pass too."""
        self.drop_stale()
        with plain_tensors():
            self.start_gather()
            self.finish_gather()

    def drop_stale(self) -> None:
        """Reshard, outside of a pass, if an optimizer has stepped since the gather."""
        running = self.schedule is not None and self.schedule.is_running
        if self.is_stale and not running:
            self.reshard()

    @property
    def is_stale(self) -> bool:
        """Whether what is gathered is not what the shards hold now, and not pinned."""
        return not self.pins and any(group.is_stale for group in self.groups)

    @property
    def versions(self) -> list[tuple[int, int]]:
        """Of the shards of its groups: others after a write."""
        return [group.version for group in self.groups]

    def take_by_hand(self) -> None:
        """Gather for the user, who may change what is gathered until it is resharded."""
        self.gather()
        for group in self.groups:
            group.take_by_hand()

    def rest(self) -> None:
        """Reshard, and forget what was gathered: the weights may be changed from outside."""
        self.reshard()
        for group in self.groups:
            group.drop_copies()

    def start_gather(self, *, in_backward: bool = False) -> None:
        """Have the gathers of all groups under way when this returns. Within `plain_tensors`."""
        schedule = self.schedule
        if schedule is None:  # before the first forward: somebody wants to look inside
            check_materialized([self])
        comms = [schedule.comm(g) if schedule else comm_for(g.axes) for g in self.groups]
        with together(self.groups, comms):
            for group, comm in zip(self.groups, comms, strict=True):
                group.start_gather(comm, in_backward=in_backward)

    def take_part(self) -> None:
        """Gather for other ranks what is gathered here already. Within `plain_tensors`."""
        assert self.schedule is not None, "other ranks run the model"
        for group in self.groups:
            group.take_part(self.schedule.comm(group))

    def finish_gather(self) -> None:
        """Wait for the gathers under way and register the gathered parameters."""
        for group in self.groups:
            group.finish_gather()

    def reshard(self) -> None:
        """Free the gathered parameters, unless a context pins them."""
        if not self.pins:
            self.held = self._is_kept = False
            for group in self.groups:
                group.reshard()
            if self.schedule is None or not self.schedule.is_running:
                hand_back()

    def release_after_forward(self, comes_back: bool) -> None:
        """Free the gathered parameters, or all but this rank's part if a backward may come."""
        if self.num_parts > 1 and comes_back and not self.pins:
            self.held = False
            for group in self.groups:
                if self.num_parts < group.num_shards and group.num_shards % self.num_parts == 0:
                    group.keep_part(self.num_parts)
                else:  # on a mesh of its own, which cannot be divided so
                    group.reshard()
        else:
            self.reshard()

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
        if self.pins:
            raise RuntimeError(
                f"{what} inside of `unsharded(...)` would change the gathered parameters only, "
                "which are dropped at its end; do it outside"
            )

    @property
    def is_sharded(self) -> bool:
        """Whether no group is gathered or being gathered."""
        return all(group.is_sharded for group in self.groups)

    def ready_schedule(self) -> Schedule:
        """The schedule of the model this unit is part of; the first to ask becomes its root."""
        if self.schedule is None:
            with plain_tensors():
                module = sole_module(self)
                make_root(self, module, units_in(module))
        assert self.schedule is not None, "make_root sets it"
        return self.schedule

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
        schedule = self.ready_schedule()
        if len(self.module_refs) > 1 and self._depth == 1:
            if not self._to_run:
                self._to_run = {id(ref()) for ref in self.module_refs}
            self._to_run.discard(id(module))
        if self._depth > 1:
            if self.is_stale:  # an optimizer has stepped, or somebody has written to the shards
                self.reshard()
            self.gather()
            return self._cast_inputs((args, kwargs))
        if self._in_backward and compat.current_backward() != -1:
            # An activation checkpoint runs the forward again.
            self.gather()
            return self._cast_inputs((args, kwargs))
        wants_gradients = torch.is_grad_enabled()
        if self.broadcasts_buffers and self.is_root:
            if self._buffers_are_due:
                broadcast_buffers(module, [g.axes for u in schedule.units() for g in u.groups])
            self._buffers_are_due = wants_gradients and self.requires_gradient_sync
        with plain_tensors():
            schedule.before_forward(self, method, wants_gradients)
        self._has_begun, self.held = True, False
        args, kwargs = self._cast_inputs((args, kwargs))
        if not torch.is_grad_enabled():
            return args, kwargs
        # Whether a backward comes back is known from the outputs: frozen parameters too are needed
        # again, for the gradients of the inputs and of what comes before them in the unit.
        self._call = boundary.Call(self, schedule.num_passes)
        args, kwargs = boundary.enter(self._call, (args, kwargs))
        self._open_calls.add(self._call)
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
            assert self.schedule is not None, "pre_forward made it"
            comes_back = self.schedule.wants_gradients
            # Without a tensor to come back through, a backward could not gather them again.
            strays = call is not None and not reachable and self._may_get_gradients(call)
            keep = bool(self._to_run) or self.schedule.stays(self) or strays
            # Hooks that run after an exception see it as the one that is being handled.
            has_failed = sys.exception() is not self._handled
            with plain_tensors():
                self.end_forward(keep, comes_back)
                self.schedule.after_forward(has_failed)
        self._handled = None
        return self._cast_output(output)

    def _may_get_gradients(self, call: boundary.Call) -> bool:
        """Whether a call may be part of a graph: by its inputs, or by parameters in the unit."""
        modules = [module for ref in self.module_refs if (module := ref()) is not None]
        below = (unit for module in modules for unit in units_in(module).values())
        return call.takes_gradients or any(unit.trainable for unit in below)

    def keeps_after_forward(self, wants_gradients: bool) -> bool:
        """Whether it is told to have the parameters stay gathered between forward and backward."""
        if self.reshard_after_forward is None:
            return self.is_root and wants_gradients
        return not self.reshard_after_forward

    def end_forward(self, keep: bool, comes_back: bool) -> None:
        """Release the parameters unless they are to be kept."""
        if compat.current_backward() != -1:
            return
        if keep or not comes_back:
            for group in self.groups:
                group.drop_message()
        if not keep:
            self.release_after_forward(comes_back)
        elif self.schedule is not None and self.schedule.is_ahead(self):
            for group in self.groups:
                group.set_aside()
        else:
            for group in self.groups:
                group.is_exposed |= self.schedule is not None and self.schedule.exposes(group)

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
    def is_busy(self) -> bool:
        """Whether a forward or a backward of the unit is running on this rank."""
        return self._depth > 0 or self._in_backward

    @property
    def awaits_backward(self) -> bool:
        """Whether a gradient may still come back through one of its forwards."""
        return bool(self._open_calls) or self._in_backward

    @property
    def is_idle(self) -> bool:
        """Whether no forward or backward runs and nobody has asked for gathered parameters."""
        running = self.schedule is not None and self.schedule.is_running
        return not (running or self._depth or self.pins or self.held)

    @property
    def stays_on_all_ranks(self) -> bool:
        """Whether what is gathered is so by hand, or since the last backward: on every rank."""
        return bool(self.pins) or self.held or self._is_kept

    @property
    def may_release(self) -> bool:
        """Whether gathered parameters that a finished forward has left may be freed."""
        # Decided by what is the same on every rank; who still holds a graph is not.
        if self.pins:
            return False
        keeps = self.held or self.reshard_after_forward is False or self._is_kept
        return not keeps or any(group.is_stale for group in self.groups)

    @property
    def trainable(self) -> bool:
        """Whether any parameter of the unit wants a gradient now."""
        return any(group.trainable for group in self.groups)

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
        assert self.schedule is not None, "a forward has made it"
        self.schedule.gradient_arrived(self, num_elements)

    def pre_backward(self, call: boundary.Call) -> None:
        """A gradient has reached the outputs of a call of this unit."""
        assert self.schedule is not None, "a forward has made it"
        if call not in self._open_calls:  # a retained graph: the other calls of its pass come again
            again = (each for each in self._done_calls if each.pass_number == call.pass_number)
            self._open_calls |= set(again)
        self._in_backward = True
        with plain_tensors():
            self.schedule.before_backward(self)

    def post_backward(self, call: boundary.Call) -> None:
        """The gradients of the inputs of one call are there: nothing in it is left to run."""
        self._open_calls.discard(call)
        self._done_calls.add(call)
        if self._open_calls:  # another call is still to come, and adds to the same gradients
            return
        assert self.schedule is not None, "a forward has made it"
        self._in_backward = False
        with plain_tensors():
            self.schedule.after_backward(self)

    def end_backward(self) -> None:
        """The whole backward has ended."""
        self._in_backward = self.is_done = False
        self._to_run.clear()
        for group in self.groups:
            if self.requires_gradient_sync:  # an optimizer comes next
                group.drop_copies()
        if self._rests_after_backward:
            self.reshard()
            return
        self._is_kept = True

    @property
    def _rests_after_backward(self) -> bool:
        return self.reshard_after_backward or self.requires_gradient_sync

    def release_open(self) -> None:
        """A backward has ended: reshard, if it has run and was not told that nothing of it is left.

        That is where its inputs want no gradient (tokens, say), or where another forward of it has
        got none.
        """
        if self._in_backward and self._rests_after_backward:
            self.reshard()
            self.is_done = True

    def end_pass(self) -> None:
        """The outermost forward has ended: modules of a list that have not run do not any more."""
        if self._to_run:
            assert self.schedule is not None, "its pass has ended"
            self._to_run.clear()
            self.end_forward(self.schedule.stays(self), self.schedule.wants_gradients)

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
        if self.schedule is not None:
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

    def reset(self) -> None:
        """Forget a step that was broken off."""
        self._to_run.clear()
        self._call, self._has_begun = None, False
        self._in_backward = self.is_done = False
        self._open_calls.clear()
        self._done_calls.clear()
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

"""Unit: the state of the parameters of one call of ``fully_shard``.

Several modules may be one unit. It is unsharded from the first of their forwards to the last, in
any order. The hooks around forward and backward are in `hooks`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from vescale_fsdp import compat
from vescale_fsdp.dbuffer import Comm, hand_back, plain_tensors
from vescale_fsdp.engine.axes import comm_for
from vescale_fsdp.engine.containers import Copies
from vescale_fsdp.engine.group import Fetched, Group, together
from vescale_fsdp.engine.lent import Place
from vescale_fsdp.engine.slot import Site, Slot, carry
from vescale_fsdp.engine.statistics import follows_statistics
from vescale_fsdp.engine.unfilled import check_materialized
from vescale_fsdp.program import Lease, Residency, Row

UNIT_ATTRIBUTE = "_vescale_fsdp_unit"


class Owner(Protocol):
    """The methods of the engine (`engine.Engine`) that a unit calls."""

    number: int

    @property
    def is_running(self) -> bool:
        """Whether a forward or a backward runs."""

    @property
    def is_after_backward(self) -> bool:
        """Whether a backward has ended inside of the forward that runs."""

    def comm(self, group: Group) -> Comm:
        """Return the communicators of a group's mesh."""

    def exposes(self, group: Group) -> bool:
        """Whether the pass may write to unsharded parameters in ways that no version tells."""

    def gradient_arrived(self, unit: Unit, num_elements: int) -> None:
        """Called after a gradient of ``unit`` with ``num_elements`` elements was taken."""

    def fetch(self, unit: Unit) -> list[Fetched] | None:
        """Start the all-gathers in one message with others. None: not possible."""


@dataclass
class Running:
    """The forwards of a unit that are running.

    Attributes:
        depth: how many, one inside of another.
        handled: the exception that was being handled when the outermost began.
        has_begun: whether the engine knows of it.
        is_in_pass: whether it is part of a pass; else a backward runs it again.
        range: of profilers, from the beginning of the outermost to its end.
        call: of the outermost, if a backward may come back to it (`boundary.Call`).
        aside: a context around one that a checkpoint runs again (`activations.aside`).
        modules_left: ids of modules of the unit that are still to run in this pass.
        lent: what each has made of tensors that stand in for parameters, by depth (see `lent`).
        copies: of containers that each was given, by depth.
        is_reachable: whether a backward can reach what the outermost has returned, while hooks of
            users run; else None.
    """

    depth: int = 0
    handled: BaseException | None = None
    has_begun: bool = False
    is_in_pass: bool = False
    range: AbstractContextManager[object] | None = None
    call: Any = None
    aside: Any = None
    modules_left: set[int] = field(default_factory=set)
    lent: dict[int, list[Place]] = field(default_factory=dict)
    copies: dict[int, Copies] = field(default_factory=dict)
    is_reachable: bool | None = None


class Unit(Residency):
    """The state of a sharded module, or of several. They own it; it knows them weakly.

    Args:
        modules: those that ``fully_shard`` was called on; one, or several that gather together.
        device: on which they run.
        mp_policy: dtypes of compute, reduction and outputs.
        reshard_after_forward: None means True, except for the root of a model in training.
        row: what is sharded between the passes and micro-batches of a step.
        unused, in_flight, broadcasts_buffers: as of ``fully_shard``; a root's values hold for its
            engine.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        device: torch.device,
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
        self.device, self.mp_policy = device, mp_policy
        self.reshard_after_forward = reshard_after_forward
        self.row = row
        self.reshard_after_backward = row.cuts_parameters
        self.unused, self.in_flight = unused, in_flight
        self.broadcasts_buffers = broadcasts_buffers
        self.buffers_are_due = True  # since the last forward of a step that was synchronized
        self.requires_all_reduce = True
        self.forward_prefetch: list[Unit] | None = None  # instead of what was recorded
        self.backward_prefetch: list[Unit] | None = None
        self.gives_zeros = False  # whether parameters that no rank used get zero gradients
        self.post_optim_event: torch.Event | None = None
        self.fqn = ""
        self.forward_methods: set[str] = set()  # that gather, as forward does
        self.offloads_activations = False
        self.recomputes = False  # `fully_shard` has put torch's composable checkpoint on it
        self.has_ignored = False  # whether ``ignored_params`` were passed with it
        self.is_in_whole = False  # whether all in the model around it was found to be reduced
        self.writes_data: bool | None = None  # in a forward (`writers`); None: not known
        self.before_pass: Callable[[Unit], None] | None = None  # that begins with this unit
        self.groups: list[Group] = []
        self.engine: Owner | None = None
        self.running = Running()
        for module in modules:
            object.__setattr__(module, UNIT_ATTRIBUTE, self)

    def modules(self) -> list[nn.Module]:
        """The modules that still exist."""
        return [module for ref in self.module_refs if (module := ref()) is not None]

    def slots(self) -> Iterator[Slot]:
        """The parameters of all its groups."""
        return (slot for group in self.groups for slot in group.slots)

    # Parameters

    def unshard(self) -> None:
        """Unshard and register the parameters, and wait for it. Works outside of a pass too."""
        self.drop_stale()
        with plain_tensors():
            self.start_unshard()
            self.wait_for_unshard()

    def drop_stale(self) -> None:
        """Reshard, outside of a pass, if an optimizer has stepped since the all-gather."""
        if self.is_stale and not self._is_running:
            self.reshard()

    @property
    def tag(self) -> int:
        """A number that is the same on all ranks, and different for each unit of each model."""
        return 0 if self.engine is None else self.engine.number << 20 | self.index

    @property
    def _is_running(self) -> bool:
        return self.engine is not None and self.engine.is_running

    @property
    def is_sharded(self) -> bool:
        """Whether no group is unsharded and no all-gather runs."""
        return all(group.is_sharded for group in self.groups)

    @property
    def is_stale(self) -> bool:
        """Whether unsharded parameters are out of date and not pinned."""
        return not self.num_pins and any(group.is_stale for group in self.groups)

    @property
    def version(self) -> list[tuple[int, int]]:
        """The versions of its groups' shards. They change with each write."""
        return [group.version for group in self.groups]

    def take_by_hand(self) -> None:
        """Unshard for the user, who may change the parameters until they are resharded."""
        self.unshard()
        for group in self.groups:
            group.take_by_hand()

    def rest(self) -> None:
        """Reshard, and drop unsharded copies, because other code may change the parameters."""
        self.reshard()
        self.drop_copies()

    def drop_copies(self) -> None:
        """Drop unsharded copies and encoded messages, because the shards may have changed."""
        for group in self.groups:
            group.drop_copies()

    def follow_statistics(self, *, is_final: bool = False) -> None:
        """Cast the parameters of norms, or do not, as their statistics are now (see `statistics`).

        Not while a context shows them. Shards stay as they are, and there is no communication.

        Args:
            is_final: whether it holds from now on, because a forward is about to run. In a context
                the first forward after it decides (`late.with_late_units`).
        """
        for group in [each for each in self.groups if each.follows_statistics]:
            if self.num_pins:
                continue
            group.follows_statistics = not is_final
            follows = [
                any(follows_statistics(module(), slot.sharded) for module, _ in slot.sites)
                for slot in group.slots
            ]
            parts = {group: None if any(follows) else self.mp_policy.param_dtype}
            # In a functional call other tensors are registered, which a move would replace.
            if any(follows) and not all(follows) and not compat.in_functional_call():
                self.reshard()
                cast = group.parted([index for index, keeps in enumerate(follows) if not keeps])
                self.groups.insert(self.groups.index(group) + 1, cast)
                parts[cast] = self.mp_policy.param_dtype
            for part, dtype in parts.items():
                if part.compute_dtype != dtype:
                    self.reshard()
                    part.compute_in(dtype)

    @property
    def may_follow_statistics(self) -> bool:
        """Whether no forward has decided yet about norms (`follow_statistics`)."""
        return any(group.follows_statistics for group in self.groups)

    def start_unshard(self, *, in_backward: bool = False) -> None:
        """Start the all-gathers of all groups. Call it within `plain_tensors`."""
        engine = self.engine
        if engine is None:  # before the first forward: somebody wants to look inside
            check_materialized(self.modules(), self.slots())
            if self.is_sharded:
                self.follow_statistics()
        fetched = engine.fetch(self) if engine is not None and self.is_sharded else None
        if engine is not None and fetched is not None:
            for group, each in zip(self.groups, fetched, strict=True):
                group.expect(each, engine.comm(group))
            return
        comms = [engine.comm(g) if engine else comm_for(g.axes) for g in self.groups]
        with together(self.groups, comms):
            for group, comm in zip(self.groups, comms, strict=True):
                comm.issued.subject = self.tag
                group.start_gather(comm, in_backward=in_backward)

    def join_unshard(self) -> None:
        """Take part in the all-gathers for other ranks, although the unit is unsharded."""
        assert self.engine is not None, "other ranks run the model"
        for group in self.groups:
            group.keep_writes()
        fetched = self.engine.fetch(self)
        if fetched is not None:
            for each in fetched:  # it writes what is there
                each.work.wait()
            return
        for group in self.groups:
            comm = self.engine.comm(group)
            comm.issued.subject = self.tag
            group.take_part(comm)

    def has_arrived(self) -> bool:
        """Whether the all-gathers have ended. Without streams it waits up to a second for each."""
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
        """Drop encoded messages, because no backward will send them again."""
        for group in self.groups:
            group.drop_message()

    def expose(self) -> None:
        """Record that code outside of the unit's forward may write to unsharded parameters."""
        engine = self.engine
        for group in self.groups:
            group.is_exposed |= engine is not None and engine.exposes(group)

    def prefetch_list(self, *, in_backward: bool) -> list[int] | None:
        """Return the units to prefetch in its forward or backward, if the user has set them."""
        units = self.backward_prefetch if in_backward else self.forward_prefetch
        if units is None:
            return None
        return [unit.index for unit in units if unit.engine is self.engine]

    def tell_writes_apart(self) -> None:
        """Call when users get the sharded parameters in a forward (see `Group`)."""
        for group in self.groups:
            group.tell_writes_apart()

    def copy_gathered(self, state_dict: dict[str, Any]) -> None:
        """Replace the tensors of ``state_dict`` that are views of full buffers by copies."""
        storages = {each for group in self.groups for each in group.gathered_storages()}
        for key, value in state_dict.items():
            if isinstance(value, torch.Tensor) and compat.storages_of(value) & storages:
                state_dict[key] = value.clone()

    def write_back(self) -> None:
        """Copy changes of unsharded parameters to the shards."""
        with plain_tensors():
            for group in self.groups:
                group.write_back_by_hand()

    def take_writes(self) -> None:
        """Keep writes of a forward that no backward follows."""
        for group in self.groups:
            group.take_writes()

    def refuse_if_pinned(self, what: str) -> None:
        """Raise if the parameters are unsharded by `unsharded`, because changes would be lost."""
        if self.num_pins:
            raise RuntimeError(
                f"{what} inside of `unsharded(...)` would change the gathered parameters only, "
                "which are dropped at its end; do it outside"
            )

    @property
    def has_streams(self) -> bool:
        """Whether work on the unsharded parameters is queued on streams."""
        return any(group.has_streams for group in self.groups)

    # Forward

    def end_forward(self, keep: bool, comes_back: bool) -> None:
        """Reshard after a forward, unless ``keep``."""
        super().end_forward(keep, comes_back)
        if keep and Lease.AHEAD not in self.leases:
            self.expose()

    @property
    def module_class(self) -> type[nn.Module] | None:
        """The class of its first module, if that exists."""
        module = self.module_refs[0]()
        return None if module is None else type(module)

    @property
    def kind(self) -> str:
        """The name of the class of its first module."""
        return "" if self.module_class is None else self.module_class.__qualname__

    @property
    def is_idle(self) -> bool:
        """Whether no forward or backward runs and the user has not unsharded parameters."""
        is_used = self.running.depth or self.num_pins or Lease.USER in self.leases
        return not (self._is_running or is_used)

    @property
    def shows_shards(self) -> bool:
        """Whether ``parameters()`` yields the sharded ones, although others are registered.

        That is between passes, and where a backward has ended inside of a forward (manual
        optimization in ``training_step``): the sharded ones have the gradients.
        """
        if self.num_pins or Lease.USER in self.leases:
            return False
        return self.is_idle or (self.engine is not None and self.engine.is_after_backward)

    @property
    def trainable(self) -> bool:
        """Whether any parameter of the unit requires a gradient now."""
        return any(group.trainable for group in self.groups)

    @property
    def all_trainable(self) -> bool:
        """Whether each of its groups has a parameter that requires a gradient."""
        return all(group.trainable for group in self.groups)

    # Backward

    @property
    def sets_gradients(self) -> bool:
        """Whether the backward sets ``.grad``. A partial sum waits for the other replicas."""
        return self.requires_gradient_sync and (
            self.requires_all_reduce or any(g.axes.num_replicas == 1 for g in self.groups)
        )

    def gradient_callback(self) -> Callable[[int], None]:
        """Return a function to call after each gradient. It has no reference to the unit."""
        self_ref = weakref.ref(self)

        def on_gradient(num_elements: int) -> None:
            unit = self_ref()
            if unit is not None and unit.engine is not None:
                unit.engine.gradient_arrived(unit, num_elements)

        return on_gradient

    def end_backward(self) -> None:
        """Called at the end of the whole backward."""
        self.running.modules_left.clear()
        super().end_backward()

    def end_modules(self) -> bool:
        """Called after the outermost forward. Returns whether other modules have yet to run."""
        had_more = bool(self.running.modules_left)
        self.running.modules_left.clear()
        return had_more

    def give_back(self, param: nn.Parameter) -> list[Site]:
        """Release an original parameter, unsharded, because other units use it too. Collective.

        Raises:
            RuntimeError: a forward has run, so an optimizer may have changed the shards.
        """
        (slot,) = (each for each in self.slots() if each.original() is param)
        self.give_up(slot)
        carry(slot.sharded, param)
        slot.register(param)
        return slot.sites

    def give_up(self, slot: Slot) -> None:
        """Remove a parameter, which stays as it is registered. As `give_back`."""
        if self.engine is not None:
            raise RuntimeError(
                "fully_shard met a parameter that is tied to one in a unit that has run before; "
                "call fully_shard on all modules before the first forward"
            )
        self.reshard()
        for group in self.groups:
            if slot in group.slots:
                group.give_back(group.slots.index(slot))
        self.groups = [each for each in self.groups if each.slots]

    def forget_running(self) -> None:
        """Discard the state of a forward that KeyboardInterrupt has ended, which no hook sees."""
        self.running.depth, self.running.handled = 0, None
        self.running.lent.clear()
        if self.running.call is not None and self.running.call.kept is not None:
            self.running.call.kept.leave()

    def forget(self) -> None:
        """Discard the state of an interrupted step. Waits for its collectives."""
        self.forget_calls()
        for group in self.groups:
            group.reset()

    def forget_calls(self) -> None:
        """Discard what is known of forwards and backwards that were interrupted."""
        super().forget()
        self.running.modules_left.clear()
        self.running.call, self.running.has_begun = None, False


def unit_of(module: nn.Module) -> Unit | None:
    """Return the unit of this module, if ``fully_shard`` was called on it."""
    unit = module.__dict__.get(UNIT_ATTRIBUTE)
    return unit if isinstance(unit, Unit) else None


def units_in(module: nn.Module) -> dict[str, Unit]:
    """Return the units of a module and its descendants by module name, outermost first."""
    found: dict[int, tuple[str, Unit]] = {}
    for name, child in module.named_modules():
        unit = unit_of(child)
        if unit is not None:
            found.setdefault(id(unit), (name, unit))
    return dict(found.values())

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
from vescale_fsdp.engine.fsdp_param import FSDPParam, Site, carry
from vescale_fsdp.engine.group import Fetched, Group, together
from vescale_fsdp.engine.substitutes import Place
from vescale_fsdp.engine.unfilled import check_materialized
from vescale_fsdp.program import Lease, Residency, Row, State

UNIT_ATTRIBUTE = "_vescale_fsdp_unit"


class Owner(Protocol):
    """The methods of the engine (`engine.Engine`) that a unit calls."""

    number: int

    @property
    def is_running(self) -> bool:
        """Whether a forward or a backward runs."""

    def comm(self, group: Group) -> Comm:
        """Return the communicators of a group's mesh."""

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
        aside: a context around one that a checkpoint runs again (`activations.Offload`).
        shared: the call of modules of the unit that have run in this pass, if it has several.
        modules_left: ids of modules of the unit that are still to run in this pass.
        substitutes: what each has made of tensors that stand in for parameters, by depth.
        copies: of containers that each was given, by depth.
        left: while hooks of users run, what the outermost has returned, and whether a backward can
            reach it.
    """

    depth: int = 0
    handled: BaseException | None = None
    has_begun: bool = False
    is_in_pass: bool = False
    range: AbstractContextManager[object] | None = None
    call: Any = None
    aside: Any = None
    shared: Any = None
    modules_left: set[int] = field(default_factory=set)
    substitutes: dict[int, list[Place]] = field(default_factory=dict)
    copies: dict[int, Copies] = field(default_factory=dict)
    left: tuple[Any, bool] | None = None


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
        self.finalizes_by_hand = False  # whether the user does (`Engine.finalize`); on a root
        self.fqn = ""
        self.forward_methods: set[str] = set()  # that gather, as forward does
        self.offloads_activations = False
        self.recomputes = False  # `fully_shard` has put torch's composable checkpoint on it
        self.has_ignored = False  # whether ``ignored_params`` were passed with it
        self.follows_grad_dtypes = True  # until the first forward
        self.is_in_whole = False  # whether all in the model around it was found to be reduced
        self.before_pass: Callable[[Unit], None] | None = None  # that begins with this unit
        self.groups: list[Group] = []
        self.engine: Owner | None = None
        self.running = Running()
        self.trained: Any = None  # `gather.Trained` of the last forward
        # Nodes at the end of forwards; those by ``id`` that the backward of this number will run.
        self.ends: weakref.WeakSet[Any] = weakref.WeakSet()
        self.expected: set[int] = set()
        self._expected_in = 0
        self.hooked: dict[tuple[Group, int], torch.Tensor] = {}  # gradients that hooks are to get
        for module in modules:
            object.__setattr__(module, UNIT_ATTRIBUTE, self)

    def modules(self) -> list[nn.Module]:
        """The modules that still exist."""
        return [module for ref in self.module_refs if (module := ref()) is not None]

    def fsdp_params(self) -> Iterator[FSDPParam]:
        """The parameters of all its groups."""
        return (fsdp_param for group in self.groups for fsdp_param in group.fsdp_params)

    # Parameters

    def unshard(self) -> None:
        """Unshard the parameters, and wait for it. Works outside of a pass too."""
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
        for group in self.groups:  # noqa: SIM110  # asked often, and a generator takes longer
            if group.state is not State.SHARDED:
                return False
        return True

    @property
    def is_stale(self) -> bool:
        """Whether unsharded parameters are out of date and not pinned."""
        return not self.num_pins and any(group.is_stale for group in self.groups)

    @property
    def version(self) -> list[list[int]]:
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
        """Cast the parameters of norms with running statistics, or do not, as these are now.

        They may be cast after ``fully_shard``, as FSDP2's documentation says for training BatchNorm
        in 16 bits. So parameters of such norms are in groups of their own, and the first forward
        decides their dtype of compute.

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
                any(
                    follows_statistics(module(), fsdp_param.sharded)
                    for module, _ in fsdp_param.sites
                )
                for fsdp_param in group.fsdp_params
            ]
            asked = group.asked_dtype
            parts = {group: None if any(follows) else asked}
            # A move would replace what ``functional_call`` has registered.
            if any(follows) and not all(follows) and not group.shadows.finds_substitutes:
                self.reshard()
                cast = group.parted([index for index, keeps in enumerate(follows) if not keeps])
                self.groups.insert(self.groups.index(group) + 1, cast)
                parts[cast] = asked
            for part, dtype in parts.items():
                if part.compute_dtype != dtype:
                    self.reshard()
                    part.compute_in(dtype)

    def follow_grad_dtypes(self, *, is_final: bool = False) -> None:
        """Take the ``grad_dtype`` that users have set on sharded parameters, until a first forward.

        A group has one dtype of gradients. So if its parameters differ now, it is parted, as are
        norms by `follow_statistics`; set before ``fully_shard``, they are laid out apart.

        Args:
            is_final: whether a forward is about to run.
        """
        if not self.follows_grad_dtypes or self.num_pins:
            return
        self.follows_grad_dtypes = not is_final
        for group in list(self.groups):
            wanted: dict[compat.GradDtype, list[FSDPParam]] = {}
            for fsdp_param in group.fsdp_params:
                found = compat.grad_dtype_of(fsdp_param.sharded)
                kind = found if found.is_set else fsdp_param.grad_dtype
                wanted.setdefault(kind, []).append(fsdp_param)
            if [*wanted] == [group.fsdp_params[0].grad_dtype]:
                continue
            if len(wanted) > 1 and group.shadows.finds_substitutes:
                continue
            self.reshard()
            first, *others = wanted.items()
            for dtype, fsdp_params in others:
                indices = [group.fsdp_params.index(fsdp_param) for fsdp_param in fsdp_params]
                part = group.parted(indices)
                self.groups.insert(self.groups.index(group) + 1, part)
                part.sum_for(dtype)
            group.sum_for(first[0])

    @property
    def may_follow_statistics(self) -> bool:
        """Whether no forward has decided yet about norms (`follow_statistics`)."""
        return any(group.follows_statistics for group in self.groups)

    def start_unshard(self, *, in_backward: bool = False) -> None:
        """Start the all-gathers of all groups. Call it within `plain_tensors`."""
        engine = self.engine
        if engine is None:  # before the first forward: somebody wants to look inside
            check_materialized(self.modules(), self.fsdp_params())
            if self.is_sharded:
                self.follow_grad_dtypes()
                self.follow_statistics()
        sharded = [group for group in self.groups if group.state is State.SHARDED]
        if not sharded:  # it was prefetched, or has stayed
            return
        is_whole = len(sharded) == len(self.groups)
        fetched = engine.fetch(self) if engine is not None and is_whole else None
        if engine is not None and fetched is not None:
            for group, each in zip(self.groups, fetched, strict=True):
                group.expect(each, engine.comm(group))
            return
        comms = [engine.comm(g) if engine else comm_for(g.axes) for g in sharded]
        with together(sharded, comms):
            for group, comm in zip(sharded, comms, strict=True):
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
        """Wait for the all-gathers."""
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
        """Keep what is unsharded, but hide it."""
        for group in self.groups:
            group.set_aside()

    def keeps_no_message(self) -> None:
        """Drop encoded messages, because no backward will send them again."""
        for group in self.groups:
            group.drop_message()

    def prefetch_list(self, *, in_backward: bool) -> list[int] | None:
        """Return the units to prefetch in its forward or backward, if the user has set them."""
        units = self.backward_prefetch if in_backward else self.forward_prefetch
        if units is None:
            return None
        return [unit.index for unit in units if unit.engine is self.engine]

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

    def show(self) -> None:
        """Show the unsharded parameters that all passes share (`Group.show`)."""
        for group in self.groups:
            group.show()

    def show_again(self) -> None:
        """Show the unsharded parameters to the forward that runs, if they were hidden in it."""
        if all(group.shadows.is_shown for group in self.groups):
            return
        if self.running.call is None:
            self.show()
        else:
            with torch.enable_grad():
                self.running.call.show()
            self.open_calls.add(self.running.call)

    def hide(self) -> None:
        """Show the sharded parameters, which are registered, but leave the others unsharded."""
        for group in self.groups:
            group.shadows.hide()

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

    def expect(self, backward: int) -> None:
        """Find out, when a backward comes to the unit first, which forwards of it will end in it.

        A forward may never: its loss is another one, or was dropped.
        """
        if self._expected_in != backward:
            self._expected_in = backward
            self.expected = {id(each) for each in self.ends if compat.will_run(each)}

    def leave_backward(self, call: Any) -> bool:
        """As `Residency.leave_backward`. Where nodes end a forward, those decide."""
        is_last = super().leave_backward(call)
        if not self.ends or call.takes_gradients:
            return is_last
        if self.expected:
            self.leases.add(Lease.BACKWARD)
            return False
        if not is_last:
            self.leases.discard(Lease.BACKWARD)
            self.leases.add(Lease.KEPT)
        return True

    def take_hooked(self) -> None:
        """Let hooks on parameters change the gradients of this backward, and take these."""
        while self.hooked:
            (group, index), gradient = self.hooked.popitem()
            group.add_gradient(index, gradient)

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
        (fsdp_param,) = (each for each in self.fsdp_params() if each.original() is param)
        self.give_up(fsdp_param)
        carry(fsdp_param.sharded, param)
        fsdp_param.register(param)
        return fsdp_param.sites

    def give_up(self, fsdp_param: FSDPParam) -> None:
        """Remove a parameter, which stays as it is registered. As `give_back`."""
        if self.engine is not None:
            raise RuntimeError(
                "fully_shard met a parameter that is tied to one in a unit that has run before; "
                "call fully_shard on all modules before the first forward"
            )
        self.reshard()
        for group in self.groups:
            if fsdp_param in group.fsdp_params:
                group.give_back(group.fsdp_params.index(fsdp_param))
        self.groups = [each for each in self.groups if each.fsdp_params]

    def forget_running(self) -> None:
        """Discard the state of a forward that KeyboardInterrupt has ended, which no hook sees."""
        self.running.depth, self.running.handled, self.running.left = 0, None, None
        self.running.substitutes.clear()
        if self.running.call is not None and self.running.call.kept is not None:
            self.running.call.kept.leave()

    def forget(self) -> None:
        """Discard the state of an interrupted step. Waits for its collectives."""
        self.forget_calls()
        self.hooked.clear()
        self.expected.clear()
        for group in self.groups:
            group.reset()

    def forget_calls(self) -> None:
        """Discard what is known of forwards and backwards that were interrupted."""
        super().forget()
        self.running.modules_left.clear()
        self.running.call, self.running.has_begun, self.running.left = None, False, None


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


def unreduced_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The trainable parameters with gradients of earlier backwards that are not reduced yet."""
    groups = [group for unit in units_in(module).values() for group in unit.groups]
    fsdp_params = [
        fsdp_param
        for group in groups
        if group.gradients.are_waiting
        for fsdp_param in group.fsdp_params
    ]
    return [fsdp_param.sharded for fsdp_param in fsdp_params if fsdp_param.sharded.requires_grad]


def has_statistics(module: nn.Module | None) -> bool:
    """Whether a module is a norm with running statistics."""
    return isinstance(getattr(module, "running_mean", None), torch.Tensor)


def follows_statistics(module: nn.Module | None, param: torch.Tensor) -> bool:
    """Whether a parameter must have the dtype of its module's running statistics.

    ``torch.batch_norm`` takes an input of 16 bits with parameters and statistics in float32, as
    under autocast. It raises if only the parameters have 16 bits. Buffers are not cast, so in
    modules with a ``running_mean`` (BatchNorm, InstanceNorm) parameters are not cast either. FSDP2
    casts them (torch 2.13), and the forward raises.
    """
    return has_statistics(module) and module.running_mean.dtype == param.dtype  # type: ignore[union-attr]

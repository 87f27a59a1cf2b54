"""Engine: the state that the units of one root share.

Hooks call it. `program.passes` decides what to do, and the engine does it: units unshard and
reshard, groups reduce gradients, and the ranks agree through the store.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial

import torch.distributed as dist
from torch.autograd.graph import get_gradient_edge

from vescale_fsdp import compat, devices
from vescale_fsdp.dbuffer import Comm, hand_back, plain_tensors
from vescale_fsdp.engine.agreement import fingerprint_of
from vescale_fsdp.engine.axes import Axes, comm_for
from vescale_fsdp.engine.first_backward import check_replaced, note_root
from vescale_fsdp.engine.fsdp_param import FSDPParam
from vescale_fsdp.engine.group import Fetched, Group
from vescale_fsdp.engine.reducing import Reducing, SmallGathers
from vescale_fsdp.engine.settling import (
    MEETING_TIMEOUT_S,
    is_elsewhere,
    is_stalled,
    meet,
    settle,
    stall,
)
from vescale_fsdp.engine.unit import Unit
from vescale_fsdp.errors import RankMismatchError
from vescale_fsdp.program import (
    Executor,
    Lease,
    Names,
    Passes,
    Policy,
    Program,
    Record,
    Reduction,
    Residency,
    policy_of,
)
from vescale_fsdp.ranks import limit_s, notes, over

_SAME_MODEL = "Build the same model, with the same mesh and arguments of fully_shard, on every rank"
_SAME_ORDER = (
    "Run units in the same order on every rank. A rank may leave out units that others run if all "
    "units of the model are on one mesh; if not, make what it leaves out part of a larger unit"
)
_NONE = -1  # the number of the backward that runs, if none does
_SMALL_BYTES = "VESCALE_FSDP_SMALL_BYTES"  # of units that share messages, for each rank
# Models that ran so far in a world, by the ranks they are on.
_NUM_MODELS: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[object, ...]]] = (
    weakref.WeakKeyDictionary()
)


class Engine(Executor):
    """The state that the units of one root share: communicators, programs, running collectives.

    Args:
        units: the model's units, outermost first (``named_modules`` order); weak references.
        unused: "auto" or "zeros", as in ``fully_shard``.
        in_flight: number of units that may be unsharded at a time, as in ``fully_shard``.

    Raises:
        RankMismatchError: other ranks have another model or other arguments.
    """

    def __init__(self, units: list[Unit], *, unused: str, in_flight: int) -> None:
        self._units = [weakref.ref(unit) for unit in units]
        self.in_flight = in_flight
        groups = [group for unit in units for group in unit.groups]
        # By the ranks they are over, in one order on every rank.
        self._axes = {(g.axes.shard_ranks, g.axes.replica_ranks): g.axes for g in groups}
        self._agree_on_model(units)
        for unit in units:
            unit.sizes = [size for group in unit.groups for size in group.sizes]
            for each in unit.groups:
                each.unit_name = each.gradients.unit_name = (
                    repr(unit.fqn) if unit.fqn else "the root"
                )
        self._comms = {id(group): comm_for(group.axes) for group in groups}
        self._always_settles = os.environ.get("VESCALE_FSDP_CHECK_ORDER", "0") == "1"
        can_settle = len(self._axes) == 1
        self.sends_gathers = any(axes.shard is not None for axes in self._axes.values())
        is_bundled = can_settle and not self._always_settles
        self._small_bytes = float(os.environ.get(_SMALL_BYTES, 1 << 13)) if is_bundled else 0
        empty = {index for index, unit in enumerate(units) if not unit.groups}
        self.passes = Passes(
            units,
            Names([unit.fqn for unit in units], [unit.kind for unit in units], empty),
            self,
            self._policy(),
            can_settle=can_settle,
            predicts=not self._always_settles,
        )
        self.passes.rank = dist.get_rank()
        self.passes.title = f"model {self.number}"
        if any(unit.offloads_activations for unit in units):
            from vescale_fsdp.engine.activations import Offload

            self.activations = Offload()
        self._end: weakref.ref[partial[None]] | None = None  # of the backward that is running
        self.num_backwards = 0
        self._leaves_out = False  # all parameters, in the backward that runs
        self._had_backward = False  # that gave gradients to parameters
        self.num_calls = 0  # of ``fully_shard``, when it has last looked for units (`late`)
        self._small_gathers: SmallGathers | None = None  # of the pass that runs
        self._has_left = False  # a step, by an exception on this rank
        # The reductions that `finalize` has issued, and nobody has waited for yet.
        self.finalization: object | None = None
        # Whether a backward has run since then that the user is to finalize.
        self.awaits_finalization = False
        self._begun_in = _NONE  # the backward, perhaps of another model, that the last pass ran in
        axes = [*self._axes.values()]
        self._reducing = Reducing(groups, axes, self.comm, self.is_stalled, asks=unused != "zeros")

    def _agree_on_model(self, units: list[Unit]) -> None:
        described = fingerprint_of(units)
        for axes in self._axes.values():
            late = limit_s(may_be_late=True)
            entries = [repr(axes), *described]
            over(axes.ranks).agree("model", entries, _SAME_MODEL, timeout_s=late)
        # Counted by those alone that agree: the others may have counted another mesh.
        world = dist.group.WORLD
        assert world is not None, "a device mesh has initialised torch.distributed"
        models = _NUM_MODELS.setdefault(world, Counter())
        models[tuple(self._axes)] += 1
        self.number = models[tuple(self._axes)]

    def units(self) -> list[Unit]:
        """The units that still exist, outermost first."""
        return [unit for ref in self._units if (unit := ref()) is not None]

    def comm(self, group: Group) -> Comm:
        """Return the communicators of a group's mesh."""
        return self._comms[id(group)]

    def _policy(self) -> Policy:
        units = self.units()
        told = [unit.max_reductions for unit in units]
        has_streams = any(unit.has_streams for unit in units)
        return policy_of(
            self.in_flight, told, has_streams=has_streams, small_bytes=self._small_bytes
        )

    @property
    def is_running(self) -> bool:
        """Whether a forward or a backward runs."""
        return self.passes.is_in_forward or (self._end is not None and self._end() is not None)

    @property
    def _has_broken_off(self) -> bool:
        """Whether a backward raised before its end."""
        return self._end is not None and self._end() is None

    # Forward. All within `plain_tensors`.

    def before_forward(self, unit: Unit, method: str, wants_gradients: bool) -> bool:
        """Unshard ``unit`` before its ``method``, and prefetch the units after it.

        Returns whether it is part of a pass. Else it is a recomputation in a backward.
        """
        current = compat.current_backward()
        if current not in (_NONE, self._begun_in) and self._has_backward:
            self.begin_backward()
            self.passes.recompute(unit)
            return False
        if self._has_broken_off:
            self._drop_step(MEETING_TIMEOUT_S)
        if not self.passes.is_in_forward:
            self._begun_in = current
            # A reentrant checkpoint has run it without gradients. Else a hook trains a model.
            runs_again = self.passes.num_passes and not self.passes.wants_gradients
            if current != _NONE and wants_gradients and runs_again:
                self._note_root()
            if self._has_left:
                self._meet(MEETING_TIMEOUT_S)
        self.passes.before_forward(unit, method, wants_gradients)
        return True

    @property
    def _has_backward(self) -> bool:
        """Whether a backward of this model runs, or is to come to a forward that has run.

        A forward in the backward of another model, in a hook or a custom function, is no
        recomputation if it has not.
        """
        if self._end is not None:
            return self._end() is not None
        return self.passes.is_open and any(unit.open_calls for unit in self.units())

    def after_forward(self, unit: Unit, **how: bool) -> None:
        """Called after a forward that is part of a pass, also after an exception (see `Passes`)."""
        passes = self.passes
        try:
            passes.after_forward(unit, **how)
        finally:
            if not passes.is_in_forward:
                self._has_left = how["has_failed"] and passes.wants_gradients

    def begin_pass(self, first: Residency) -> None:
        """Wait for the user's events before all-gathers, and start those of outer axes."""
        unit = self._units[first.index]()
        assert unit is not None, "it runs"
        groups = [group for each in self.units() for group in each.groups]
        if groups and groups[0].has_streams:
            self._follow_stream(groups)
        event, unit.post_optim_event = unit.post_optim_event, None
        if event is not None:
            for device in {group.pool.device for group in groups}:
                devices.wait_event(device, event)
        for group in groups:
            if group.axes.cuts_outside:
                group.start_outer_gather(self.comm(group))

    def _follow_stream(self, groups: Sequence[Group]) -> None:
        """Move the lanes to the stream on which the forward of the root begins.

        Only if nothing is under way: no backward, and no all-gather that a user has started.
        """
        if self.is_running or any(group.is_gathering for group in groups):
            return
        lanes = [group.gradients.lane for group in groups]
        for group, has_moved in zip(groups, devices.follow(lanes), strict=True):
            for tensor in group.held() if has_moved else ():
                tensor.record_stream(group.gradients.lane.stream)

    def end_pass(self) -> None:
        """After a forward without gradients: keep what it wrote, and free its memory."""
        for unit in self.units():
            unit.take_writes()
            unit.hide()
        hand_back()

    def enter(self, where: str) -> None:
        """Set the current place, for errors."""
        notes.enter(where)

    # Small all-gathers, several in a message

    def begin_walk(self, program: Program, *, in_backward: bool) -> None:
        """Begin a pass along a confirmed ``program``, with small all-gathers in joint messages."""
        small_bytes = self.passes.window.policy.small_bytes
        if small_bytes and self._comms:
            self._small_gathers = SmallGathers(
                program,
                self._units,
                next(iter(self._comms.values())),
                self._is_sent_again,
                small_bytes=small_bytes,
                in_backward=in_backward,
            )

    def fetch(self, unit: Unit) -> list[Fetched] | None:
        """Start the all-gathers of ``unit`` with others. None: it must be gathered alone."""
        return None if self._small_gathers is None else self._small_gathers.fetch(unit)

    def end_walk(self) -> None:
        """Wait for messages that were not used."""
        small_gathers, self._small_gathers = self._small_gathers, None
        if small_gathers is not None:
            small_gathers.close()

    def _is_sent_again(self, unit: Unit) -> None:
        name = unit.fqn or "the root"
        self.compare([f"another gather of {name}, which was written to in the pass"], unit)

    # Agreement

    def settle(self, mine: Record, timeout_s: float | None) -> Record:
        """One round through the store over all ranks of the model."""
        axes = self._only_axes
        if axes.shard is not None:
            (comm,) = {id(comm): comm for comm in self._comms.values()}.values()
            mine.issued = comm.issued.as_list()[0]
        return settle(mine, axes, timeout_s)

    def compare(self, entries: Sequence[str], unit: Residency | None) -> None:
        """Compare the next collectives with the other ranks, through the store."""
        mine = None if unit is None else self._units[unit.index]()
        for axes in self._axes.values() if mine is None else (mine.groups[0].axes,):
            over(axes.groups[0]).agree("order of units", list(entries), _SAME_ORDER)

    def stall(self) -> None:
        """Tell the other ranks that this one is behind with its reductions."""
        stall(self._only_axes, self._backward_key)

    def is_stalled(self) -> bool:
        """Whether a rank is behind in this backward, or runs another pass."""
        is_behind = is_stalled(self._only_axes, self._backward_key)
        return is_behind or self.is_elsewhere(self.passes.step_of_backward)

    def is_elsewhere(self, step: str) -> bool:
        """Whether another rank waits in the next round, in another pass."""
        return is_elsewhere(self._only_axes, step)

    @property
    def _only_axes(self) -> Axes:
        (axes,) = self._axes.values()
        return axes

    @property
    def _backward_key(self) -> str:
        return f"{self.number}/{self.num_backwards}"

    # Backward. All within `plain_tensors`, but for `gradient_arrived`.

    def begin_backward(self, is_plain: bool | None = None, *, makes_graph: bool = False) -> None:
        """Arrange that `end_backward` is called at the end of the current backward."""
        if self._end is not None and self._end() is not None:
            return
        if self.finalization is not None:
            self.refuse_unfinished("backward")
        if self._end is not None:  # another one has raised before its end
            self._drop_step(MEETING_TIMEOUT_S)
        # Autograd alone holds it, until the backward has ended or raised an error. No frame
        # does: who keeps an exception keeps its frames.
        end = partial(self._end_backward)
        self._end = weakref.ref(end)
        compat.queue_backward_callback(end)
        del end
        self._leaves_out = self._finds_no_parameters(is_plain)
        root = self._units[0]()
        self.awaits_finalization |= root is not None and root.finalizes_by_hand
        for unit in self.units():
            unit.lasts &= makes_graph  # the last backward frees them
        self.num_backwards += 1
        self.passes.window.policy = self._policy()
        self.passes.begin_backward()
        if self._begun_in == _NONE:  # else its forward has told
            self._note_root()

    def _finds_no_parameters(self, is_plain: bool | None) -> bool:
        """Whether the backward that begins accumulates no gradient of a parameter."""
        if is_plain:
            return False
        calls = [call for unit in self.units() for call in (*unit.open_calls, *unit.done_calls)]
        nodes = [node() for call in calls for node in call.nodes]
        leaves = [each for node in nodes if node for each, _ in node.next_functions]
        if any(map(compat.will_run, leaves)):
            return False
        # Gradients that wait are reduced also if this one comes to parameters past all nodes:
        # `functional_call` had what other code has made of them.
        groups = (group for unit in self.units() for group in unit.groups)
        waiting = (
            fsdp_param for g in groups if g.gradients.may_wait for fsdp_param in g.fsdp_params
        )
        # One that gathers itself need not have the view that tells its node.
        shards = (each.sharded for each in waiting if each.counts_writes)
        trained = (shard for shard in shards if shard.requires_grad)
        if any(compat.will_run(get_gradient_edge(shard).node) for shard in trained):
            return False
        # Of what a reentrant checkpoint has run, the nodes are in no graph before it runs again.
        return is_plain is False or not compat.runs_all()

    def _note_root(self) -> None:
        root = self._units[0]()
        if not (self._had_backward or self._leaves_out or root is None):
            note_root(root)

    def fsdp_params(self) -> Iterator[FSDPParam]:
        """The parameters of all units."""
        return (fsdp_param for unit in self.units() for fsdp_param in unit.fsdp_params())

    def due(self) -> Sequence[Reduction]:
        """Return the groups to reduce in this backward, the last defined first."""
        if self._leaves_out:
            return []
        return self._reducing.due(self.units(), self.passes.window.policy.small_bytes)

    def start_reductions(self, batch: Sequence[Reduction]) -> None:
        """Start these reductions: of one unit, or of several in one message."""
        self._reducing.start(batch)

    def before_backward(self, unit: Unit) -> None:
        """Unshard ``unit``, and prefetch the units whose backward comes next."""
        for group in unit.groups:
            group.frees_before_backward = not unit.unshard_in_backward
            if not unit.unshard_in_backward:
                group.follow_flags()
        self.passes.before_backward(unit)

    def gradient_arrived(self, unit: Unit, num_elements: int) -> None:
        """Called after a gradient of ``unit`` with ``num_elements`` elements was taken."""
        if self._end is None or self._end() is None:
            self.begin_backward()
        if self.passes.window.gradient_arrived(unit, num_elements):
            with plain_tensors():
                self.passes.take_turn()

    def half_of_backward(self, unit: Unit) -> None:
        """The gradients of half of the parameters of ``unit`` are there."""
        if self.passes.window.gradient_arrived(unit, sum(unit.sizes)):
            self.passes.take_turn()

    def after_backward(self, unit: Unit) -> None:
        """Reshard ``unit``, and reduce its gradients."""
        self.passes.after_backward(unit)

    def _end_backward(self) -> None:
        """Called by autograd at the end of a backward, if none of its nodes has raised an error."""
        self.finish_backward()
        self.look_back()  # all that this rank owes to others is sent

    def finish_backward(self) -> None:
        """End the backward: reshard, reduce the remaining gradients, set ``.grad``."""
        with plain_tensors():
            for unit in [unit for unit in self.units() if unit.hooked]:
                unit.take_hooked()
            self.passes.end_backward()
            for unit in self.units():
                if Lease.FORWARD in unit.leases:  # a step may come, and read what the shards have
                    unit.take_writes()
        self._end = None

    def look_back(self) -> None:
        """After the first backward that gives gradients: look for what it did not reduce.

        Raises:
            RuntimeError: forward has computed with a parameter from before ``fully_shard``.
        """
        if self._had_backward or self._leaves_out:
            return
        check_replaced(self.fsdp_params())
        self._had_backward = True

    def all_issued(self) -> None:
        """Start to exchange which parameters were used, for the groups to publish."""
        due = self.passes.reductions.due
        self._reducing.ask(due, gives_zeros=self.units()[0].gives_zeros)

    def end_backward(self) -> None:
        """Set the gradients of the sharded parameters."""
        self._reducing.publish(self.passes.reductions.due, self.units())

    # Reductions of what backwards without synchronization have left, outside of a backward

    def reduce_waiting(self) -> None:
        """Reduce them, set ``.grad``, and reshard."""
        self._issue_waiting()
        with plain_tensors():
            self.passes.finish_reductions()

    def _issue_waiting(self) -> None:
        self.num_backwards += 1
        policy = self.passes.window.policy = self._policy()
        with plain_tensors():
            due = self._reducing.due(self.units(), policy.small_bytes, only_waiting=True)
            self.passes.begin_finalization(due)
            self.passes.issue_reductions()

    def finalize(self) -> object:
        """Issue them, and reshard. Returns what `finish_finalization` asks for.

        Raises:
            RuntimeError: the user does not finalize backwards of this model, or not now; or a
                setting keeps gradients from being reduced over replicas.
        """
        units = self.units()
        self.refuse_unfinished("finalizing backward again")
        if not units[0].finalizes_by_hand:
            raise RuntimeError(
                "FSDP finalize_backward requires manual backward finalization. Call "
                "set_manual_backward_finalization(True) before forward"
            )
        if self._end is not None or self.passes.is_in_forward:
            raise RuntimeError(
                "FSDP finalize_backward must be called after backward completes, not in a forward "
                "or backward. If one has raised an error, call reset_iter_state() first"
            )
        for unit in units:
            for group in unit.groups if unit.requires_gradient_sync else ():
                is_partial = group.axes.num_replicas > 1 and not unit.requires_all_reduce
                if is_partial and group.gradients.may_wait:
                    raise RuntimeError(
                        "FSDP manual backward finalization requires all-reduce for parameter group "
                        f"{unit.fqn or '<root>'!r}. Call set_requires_all_reduce(True) before "
                        "finalization"
                    )
        self._issue_waiting()
        self.finalization = object()
        return self.finalization

    def finish_finalization(self, finalization: object) -> None:
        """Wait for them, and set ``.grad``.

        Raises:
            RuntimeError: `reset` has dropped them.
        """
        if self.finalization is not finalization:
            raise RuntimeError(
                "This gradient reduction handle was invalidated, by reset_iter_state: the "
                "gradients are lost. Run the step again"
            )
        with plain_tensors():
            self.passes.finish_reductions()
        self.finalization, self.awaits_finalization = None, False

    def refuse_unfinished(self, what: str) -> None:
        """Raise while reductions are under way that the user is to wait for."""
        if self.finalization is not None:
            raise RuntimeError(
                f"The previous gradient reduction must be waited on before {what}: call wait() of "
                "what finalize_backward(async_op=True) has returned"
            )

    # Steps that were broken off

    def reset(self) -> None:
        """Discard a step that an exception has interrupted. Its gradients are lost."""
        with plain_tensors():
            for unit in self.units():
                unit.forget()
            self.passes.forget()
            self._reducing.forget()
        self._end = self.finalization = None
        self.awaits_finalization = False

    def leave(self, timeout_s: float) -> None:
        """Discard the current step, together with all ranks. Does nothing between steps.

        Raises:
            RankMismatchError: a rank did not leave the step in time.
        """
        is_under_way = self.passes.is_open or self.is_running or self._has_broken_off
        is_under_way = is_under_way or self.finalization is not None
        self._has_left = self._has_left or is_under_way
        if self._has_left:
            self._drop_step(timeout_s)
        else:
            self.reset()

    def _drop_step(self, timeout_s: float) -> None:
        """Discard an interrupted step, after all ranks have left it with the same collectives."""
        self._has_left = True
        try:
            if self._has_broken_off:
                # Others may have come to units before the exception that this rank leaves out.
                with plain_tensors():
                    self.passes.catch_up_backward(timeout_s)
            self._meet(timeout_s)
        except RankMismatchError:
            with contextlib.suppress(RankMismatchError):  # of what is under way
                self.reset()
            raise
        self.reset()

    def _meet(self, timeout_s: float) -> None:
        """Wait, through the store, until all ranks have left the step that this one has left.

        Then running collectives end on all ranks, or connections are closed.
        """
        # Where each all-gather is compared, the next one is, and says more.
        if not self._always_settles:
            meet([(axes, comm_for(axes)) for axes in self._axes.values()], timeout_s)
        self._has_left = False


def engine_of(unit: Unit) -> Engine | None:
    """Return the engine of a unit's model. None: before the first forward."""
    engine = unit.engine
    assert engine is None or isinstance(engine, Engine), "`make_root` alone makes it"
    return engine

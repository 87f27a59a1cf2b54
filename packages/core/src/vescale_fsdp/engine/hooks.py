"""The hooks before and after the forward and the backward of a unit.

For a unit in the middle of the model::

    pre_forward    wait for the all-gather, show the unsharded parameters, prefetch another unit
    post_forward   reshard (unless the unit stays unsharded), wrap the outputs in the boundary
    pre_backward   unshard again, prefetch the unit before this one
    post_backward  all gradients of the unit are there: reshard, reduce

The first unit whose forward is called is the root. It makes an engine for itself and all units
below it, which leave the engines that they were in: of another model, or of their own. If a unit is
called while it runs (``training_step`` calls ``self(x)``), the inner call is part of the outer one.
A unit may be called several times before a backward, and also within a backward: in the
recomputation of an activation checkpoint, or as another model.

Module hooks call these functions, and so do methods that are registered as forward methods. They
find the unit through the module, and so have no reference to either. Dynamo does not trace the
hooks around a forward: as with FSDP2, its graphs end where a unit begins and where it ends.
"""

from __future__ import annotations

import functools
import inspect
import sys
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from vescale_fsdp import compat
from vescale_fsdp.dbuffer import plain_tensors
from vescale_fsdp.engine import boundary
from vescale_fsdp.engine.arguments import warn_of_settings_below
from vescale_fsdp.engine.containers import Copies, map_tensors, tensors_requiring_grad
from vescale_fsdp.engine.engine import Engine, engine_of
from vescale_fsdp.engine.gather import Gathered
from vescale_fsdp.engine.late import num_calls, release, with_late_units
from vescale_fsdp.engine.ownership import follow_ties, refuse_data_parallel, refuse_waiting
from vescale_fsdp.engine.substitutes import Place, gather_substitutes, put_back
from vescale_fsdp.engine.unfilled import broadcast_buffers, check_materialized
from vescale_fsdp.engine.unit import Unit, unit_of, units_in
from vescale_fsdp.program import Lease
from vescale_fsdp.ragged import NAME, hear_of_writes

if TYPE_CHECKING:
    from vescale_fsdp.engine.activations import Kept


def register_hooks(module: nn.Module) -> None:
    """Register the module's hooks. They find the unit through the module, without references."""

    def before_state_dict(module: nn.Module, *_: Any) -> None:
        unit = unit_of(module)
        if unit is None:
            return
        if Lease.USER in unit.leases:
            unit.rest()
        else:
            unit.drop_copies()  # the sharded parameters are registered

    def after_state_dict(module: nn.Module, state_dict: Any, *_: Any) -> None:
        unit = unit_of(module)
        if unit is not None and unit.num_pins:  # gathered: they must outlive the context
            unit.copy_gathered(state_dict)

    def before_load(module: nn.Module, *_: Any) -> None:
        unit = unit_of(module)
        if unit is not None:
            unit.refuse_if_pinned("load_state_dict")
            if not unit.is_busy:
                unit.rest()

    def after_load(module: nn.Module, _: Any) -> None:
        unit = unit_of(module)
        if unit is not None and unit.is_sharded:
            for group in unit.groups:
                group.rebind(may_wait=len(unit.module_refs) > 1)

    before_forward, at_end, after_forward = _around_forward()
    module.register_forward_pre_hook(before_forward, prepend=True, with_kwargs=True)
    compat.register_first_forward_hook(module, at_end)
    module.register_forward_hook(after_forward, always_call=True)
    module.register_state_dict_pre_hook(before_state_dict)
    module.register_state_dict_post_hook(after_state_dict)
    module.register_load_state_dict_pre_hook(before_load)
    module.register_load_state_dict_post_hook(after_load)


def _pre_forward(
    module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], method: str = "forward"
) -> Any:
    unit = unit_of(module)
    assert unit is not None, "the hook is only on sharded modules"
    return pre_forward(unit, module, args, kwargs, method)


def _at_end(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    unit = unit_of(module)
    assert unit is not None, "the hook is only on sharded modules"
    return leave_forward(unit, output)


def _post_forward(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
    unit = unit_of(module)
    assert unit is not None, "the hook is only on sharded modules"
    return post_forward(unit, output)


@functools.cache
def _around_forward() -> tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]:
    """The hooks before a forward, at its end, and after the hooks of users.

    Not made at import: Dynamo takes a second to load.
    """
    disable: Callable[..., Any] = torch.compiler.disable
    return disable(_pre_forward), disable(_at_end), disable(_post_forward)


def register_fsdp_forward_method(module: nn.Module, method_name: str) -> None:
    """Let a method other than ``forward`` unshard the module's parameters while it runs.

    For example ``generate``, or a Lightning module's ``training_step``. Calls of the module
    inside the method are part of the same pass. Does nothing on a module that is not sharded.

    Raises:
        ValueError: the module has no such method.
    """
    if unit_of(module) is None:
        return
    if not callable(getattr(module, method_name, None)):
        raise ValueError(f"{type(module)} does not have a method {method_name}")
    method = getattr(module, method_name)
    module_ref = weakref.ref(module)
    function = getattr(method, "__func__", method)  # bound anew: the module owns no cycle
    before_forward, _, after_forward = _around_forward()

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        owner = module_ref()
        assert owner is not None, "its method is being called"
        output = None
        try:
            args, kwargs = before_forward(owner, args, kwargs, method_name)
            if function is method:
                output = function(*args, **kwargs)
            else:
                output = function(owner, *args, **kwargs)
        finally:
            output = after_forward(owner, args, output)
        return output

    # What a caller has to pass: that of the function would have ``self`` too.
    wrapped.__signature__ = inspect.signature(method)  # type: ignore[attr-defined]
    module.__dict__[method_name] = wrapped
    unit = unit_of(module)
    assert unit is not None, "checked above"
    unit.forward_methods.add(method_name)


class _Call(boundary.Call):
    """One forward of a unit that a backward may come back to."""

    def __init__(self, unit: Unit, engine: Engine) -> None:
        super().__init__(unit.fqn)
        self.pass_number = engine.passes.num_passes
        self.unit, self._engine = unit, engine
        self._range: AbstractContextManager[object] | None = None  # of profilers
        self.kept: Kept | None = None  # activations that are offloaded
        self._begun_in = 0  # the number of the backward

    @property
    def has_end(self) -> bool:
        """Whether a node tells that its backward has ended."""
        return self.takes_gradients or bool(self.nodes)

    def show(self) -> None:
        """Show the unsharded parameters to the forward, as results of nodes if they train."""
        unit, engine = self.unit, self._engine
        self.nodes = []
        Gathered(unit, engine, self, lambda: _Call(unit, engine)).show(self.nodes)

    def pre_backward(self, is_plain: bool | None = None) -> None:
        if self.unit.engine is not self._engine:
            raise RuntimeError(
                f"backward has come to a forward of {self.where} that ran before the module became "
                "a part of another model, or its model got new modules. Call backward before the "
                "next model is called, or call the whole model instead of its parts"
            )
        with plain_tensors():
            self._engine.begin_backward(is_plain, makes_graph=self.makes_graph)
        if self._begun_in == self._engine.num_backwards:  # hooks of users have made other outputs
            return
        self._begun_in = self._engine.num_backwards
        self.unit.expect(self._begun_in)
        self.unit.lasts |= self.makes_graph
        self.unit.enter_backward(self)
        if self.kept is not None:
            self.kept.prefetch()
            if not self.has_end:  # there will be no `post_backward`
                compat.queue_backward_callback(self.kept.finish)
        with plain_tensors():
            self._engine.before_backward(self.unit)
            if not (self.unit.running.depth or self.unit.is_sharded):
                self.unit.show()
        self._range = compat.recorded("backward", [self.unit.fqn])
        self._range.__enter__()

    def post_backward(self) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
            self._range = None
        if self.kept is not None:
            self.kept.finish()
        self._begun_in = 0  # a function in this backward may come to the call again
        if self.unit.leave_backward(self):  # else another call is to come, and adds to gradients
            if self.unit.hooked:
                self.unit.take_hooked()
            with plain_tensors():
                self._engine.after_backward(self.unit)


def pre_forward(
    unit: Unit,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    method: str = "forward",
) -> Any:
    """Run before the forward of one of the unit's modules. Returns the forward's arguments."""
    running = unit.running
    running.depth += 1
    copies = running.copies[running.depth] = Copies()
    if running.depth == 1:
        running.handled = sys.exception()
    engine = engine_of(unit)
    if engine is not None and running.depth == 1:
        if engine.finalization is not None:
            engine.refuse_unfinished("forward")
        if engine.num_calls != num_calls():
            engine = with_late_units(unit, engine)
    if engine is None:  # who is called first becomes the root
        with plain_tensors():
            engine = make_root(unit)
    is_first = running.depth == 1 and not engine.is_running
    if is_first:
        args, kwargs = _moved_inputs(unit, (args, kwargs), copies)
    if is_first and unit.before_pass is not None:
        if unit.num_pins and method != "forward":  # the forwards in it are passes
            running.depth = 0
            running.copies.clear()  # nothing is known of its end
            return _cast_inputs(unit, (args, kwargs), copies)
        method = "forward"  # for those that join it
        unit.before_pass(unit)
    if len(unit.module_refs) > 1 and running.depth == 1:
        if not running.modules_left:
            running.shared = None
            running.modules_left = {id(ref()) for ref in unit.module_refs}
        running.modules_left.discard(id(module))
    if running.depth > 1:
        _unshard_again(unit)
        _use_substitutes(unit)
        return _cast_inputs(unit, (args, kwargs), copies)
    if Lease.BACKWARD in unit.leases and compat.current_backward() != -1:
        # An activation checkpoint runs the forward again.
        if unit.offloads_activations:
            running.aside = engine.activations.aside(module)
            running.aside.__enter__()
        if unit.is_stale:  # it has stayed, and was written to: as in one process
            unit.refresh()
        unit.unshard()
        unit.show()
        _mark_read(unit, is_read=True)
        _use_substitutes(unit)
        return _cast_inputs(unit, (args, kwargs), copies)
    wants_gradients = torch.is_grad_enabled()
    if unit.broadcasts_buffers and unit.is_root:
        send_buffers(unit, module)
        unit.buffers_are_due = wants_gradients and unit.requires_gradient_sync
    if not wants_gradients and not engine.is_running and _is_pinned(unit, module):
        running.modules_left.clear()
        unit.show()
        _use_substitutes(unit)
        return _cast_inputs(unit, (args, kwargs), copies)  # no pass: ranks may run what they like
    with plain_tensors():
        running.is_in_pass = engine.before_forward(unit, method, wants_gradients)
    if not wants_gradients:
        unit.show()
        _use_substitutes(unit)
    running.has_begun = True
    _mark_running(unit)
    if Lease.USER in unit.leases:
        unit.leases.discard(Lease.USER)
        for group in unit.groups if not unit.num_pins else ():
            group.register_sharded()
    unit.leases.add(Lease.FORWARD)
    running.range = compat.recorded("forward", [unit.fqn])
    running.range.__enter__()
    args, kwargs = _cast_inputs(unit, (args, kwargs), copies)
    if not torch.is_grad_enabled():
        return args, kwargs
    # Whether a backward comes back is known from the outputs: frozen parameters too are needed
    # again, for the gradients of the inputs and of what comes before them in the unit.
    # Modules of one unit share the nodes: each parameter then gets one gradient, for its hooks.
    call = running.call = running.shared or _Call(unit, engine)
    if compat.is_transforming() and tensors_requiring_grad((args, kwargs)):
        boundary.refuse_functional(call)
    if call is not running.shared:
        call.show()
        is_list = len(unit.module_refs) > 1 and not unit.offloads_activations
        # Without nodes the boundary of each module ends a call of its own.
        running.shared = call if is_list and call.nodes else None
    _use_substitutes(unit)
    if not call.nodes:
        args, kwargs = boundary.enter(call, (args, kwargs), copies)
    else:
        call.inputs = args, kwargs
    unit.open_calls.add(call)
    if unit.offloads_activations:
        call.kept = engine.activations.begin(unit, engine.units(), call.pass_number)
    return args, kwargs


def leave_forward(unit: Unit, output: Any) -> Any:
    """Run at the end of a forward, before hooks of users keep what it returns.

    Feature maps of transformers are such: a loss on them has to pass the boundary.
    """
    running = unit.running
    if running.depth != 1 or running.call is None:
        return output
    copies = running.copies.get(running.depth)
    running.left = boundary.leave(running.call, output, copies)
    return running.left[0]


def post_forward(unit: Unit, output: Any) -> Any:
    """Run after the forward, also if it raised (then ``output`` is None)."""
    running = unit.running
    if (error := sys.exception()) is not None:
        from vescale_fsdp.engine.uncalled import explain_uncalled

        explain_uncalled(unit, error)
    if running.substitutes:
        put_back(running.substitutes.pop(running.depth, ()))
    copies = running.copies.pop(running.depth, None) or Copies()
    running.depth = max(running.depth - 1, 0)
    if running.depth:
        copies.carry_back()
        return _cast_output(unit, output)
    torch.clear_autocast_cache()  # it has casts of parameters that may be freed now
    if running.range is not None:
        running.range.__exit__(None, None, None)
        running.range = None
    call, running.call = running.call, None
    if running.aside is not None:
        running.aside.__exit__(None, None, None)
        running.aside = None
    if call is not None and call.kept is not None:
        call.kept.end()
    has_begun, running.has_begun = running.has_begun, False
    if has_begun:
        try:
            reachable = True
            if call is not None:
                left, running.left = running.left, None
                output, reachable = boundary.leave_again(call, output, copies, left)
            if sys.exception() is running.handled:
                for group in unit.groups:
                    group.check_forward()
            if running.is_in_pass:
                _end_forward(unit, call, reachable=reachable)
        finally:
            _mark_ended(unit)
    else:
        _mark_read(unit, is_read=False)
    if copies.made:
        copies.carry_back()
    unit.leases.discard(Lease.FORWARD)
    running.handled = None
    return _cast_output(unit, output)


def _end_forward(unit: Unit, call: _Call | None, *, reachable: bool) -> None:
    """Tell the engine that a forward has ended, and how a backward can come back to it."""
    engine = engine_of(unit)
    assert engine is not None, "pre_forward made it"
    # Without a tensor to come back through, a backward could not unshard them again.
    strays = call is not None and not reachable and _may_get_gradients(unit, call)
    with plain_tensors():
        engine.after_forward(
            unit,
            has_more=bool(unit.running.modules_left),
            strays=strays,
            # Hooks that run after an exception see it as the one that is being handled.
            has_failed=sys.exception() is not unit.running.handled,
            is_closed=call is not None and not call.has_end,
            is_visited=call is not None and reachable,
            is_hidden=call is None or strays,
        )


def _use_substitutes(unit: Unit) -> None:
    """Gather what `functional_call` has put in the place of parameters, in the user's grad mode."""
    places: list[Place] = []
    for group in unit.groups:
        if group.shadows.has_substitutes:
            places += gather_substitutes(group.fsdp_params)
    if places:
        unit.running.substitutes[unit.running.depth] = places


# Writes to shards while a forward runs: by a manual step, or the update of a teacher


_running: list[weakref.ref[Unit]] = []  # units whose forward runs, outermost first


def _mark_running(unit: Unit) -> None:
    """The forward of ``unit`` begins, outside of a backward."""
    _running.append(weakref.ref(unit))
    for group in unit.groups:
        group.is_in_forward = group.shadows.is_read = True
    hear_of_writes(_hear)


def _mark_read(unit: Unit, *, is_read: bool) -> None:
    """A forward of ``unit`` runs again in a backward, or has ended."""
    for group in unit.groups:
        group.shadows.is_read = is_read


def _mark_ended(unit: Unit) -> None:
    """It has ended, perhaps by an exception."""
    _running[:] = [ref for ref in _running if ref() is not unit]
    for group in unit.groups:
        group.is_in_forward = group.shadows.is_read = False
    if not _running:
        hear_of_writes(None)


def _hear(written: Iterable[Any]) -> None:
    """Let forwards that run see a write to their shards, by their next read. No communication."""
    tensors = [compat.local_tensor(each) for each in written if isinstance(each, DTensor)]
    storages = {each for tensor in tensors for each in compat.storages_of(tensor)}
    for unit in [each for ref in _running if (each := ref()) is not None]:
        if unit.running.has_begun and any(group.is_in(storages) for group in unit.groups):
            for group in unit.groups:
                group.outdate(tensors if group.is_in(storages) else ())
                group.shadows.hide()
                group.shadows.renew = partial(_untraced(), unit)


@functools.cache
def _untraced() -> Callable[[Unit], None]:
    """`_unshard_again`, which Dynamo does not trace. Not made at import: it takes a second."""
    disable: Callable[..., Any] = torch.compiler.disable
    found: Callable[[Unit], None] = disable(_unshard_again)
    return found


def _unshard_again(unit: Unit) -> None:
    """Unshard, in its forward, what a write to the shards has outdated. Collective."""
    if unit.is_stale:
        unit.refresh()
    unit.unshard()
    unit.show_again()
    unit.leases.add(Lease.FORWARD)


def send_buffers(root: Unit, module: nn.Module) -> None:
    """Give all ranks the first one's buffers, if a step may have changed them. Collective."""
    engine = engine_of(root)
    assert engine is not None, "make_root made it"
    if root.buffers_are_due:
        broadcast_buffers(module, [g.axes for u in engine.units() for g in u.groups])
    root.buffers_are_due = False


def _is_pinned(unit: Unit, module: nn.Module) -> bool:
    """Whether all parameters in a module stay unsharded within a context, on all ranks."""
    return unit.num_pins > 0 and all(each.num_pins for each in units_in(module).values())


def _may_get_gradients(unit: Unit, call: boundary.Call) -> bool:
    """Whether a backward may reach a call, through its inputs or through parameters in the unit."""
    below = (each for module in unit.modules() for each in units_in(module).values())
    return call.takes_gradients or any(each.trainable for each in below)


def _moved_inputs(unit: Unit, value: Any, copies: Copies) -> Any:
    """Move tensors to the device of an accelerator, as FSDP2 does for the outermost unit."""
    device = unit.device
    if device.type == "cpu":
        return value
    return map_tensors(lambda tensor: tensor.to(device), value, copies)


def _cast_inputs(unit: Unit, value: Any, copies: Copies) -> Any:
    dtype = unit.mp_policy.param_dtype
    if dtype is None or not unit.mp_policy.cast_forward_inputs:
        return value
    return map_tensors(lambda tensor: _cast(tensor, dtype), value, copies)


def _cast_output(unit: Unit, output: Any) -> Any:
    dtype = unit.mp_policy.output_dtype
    return output if dtype is None else map_tensors(lambda tensor: _cast(tensor, dtype), output)


def _cast(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def make_root(unit: Unit) -> Engine:
    """Make ``unit`` the root of an engine for all units below it. Call it within `plain_tensors`.

    Raises:
        RuntimeError: it has several modules; a unit below it runs on its own, or in another model;
            or parameters are on the meta device, or in DistributedDataParallel.
        RankMismatchError: other ranks have another model.
    """
    module = _sole_module(unit)
    units = units_in(module)
    refuse_waiting(module)
    for name, below in units.items():
        former = engine_of(below)
        if former is not None and former.is_running:
            raise RuntimeError(
                f"FSDP state has already been lazily initialized for {name}\n"
                "FSDP requires running forward through the root module first. A pass of it alone, "
                "or of another model that it is in, has not ended: call this model after it"
            )
        if former is not None:
            former.refuse_unfinished("forward of another model")
            release(former)
        if below.finalizes_by_hand and below is not unit:
            raise RuntimeError(
                "set_manual_backward_finalization must be called on the root FSDP module, which "
                f"is not {name!r} but the {unit.kind} around it"
            )
    refuse_data_parallel(units.values())
    names = {id(param): name for name, param in module.named_parameters()}
    for name, below in units.items():
        below.fqn = name
        for fsdp_param in below.fsdp_params():
            fsdp_param.fqn = names.get(id(fsdp_param.registered()), fsdp_param.fqn)
        check_materialized(below.modules(), below.fsdp_params())
        for group in below.groups:
            if group.is_sharded:
                group.rebind()
        below.follow_grad_dtypes(is_final=True)
        below.follow_statistics(is_final=True)
        for group in below.groups:
            group.forget_shadows()  # ties may have changed the places
            for fsdp_param in group.fsdp_params:
                setattr(fsdp_param.sharded, NAME, fsdp_param.fqn)
    follow_ties(list(units.values()))
    warn_of_settings_below(unit, units)
    engine = Engine(list(units.values()), unused=unit.unused, in_flight=unit.in_flight)
    if any(below.has_streams for below in units.values()):
        from vescale_fsdp.engine.connecting import connect  # not loaded on a CPU

        connect(units.values(), engine.comm, asks=unit.unused != "zeros")
    for group in (group for below in units.values() for group in below.groups):
        group.equalize_replicas()
    unit.is_root = True
    is_open = any(below.may_follow_statistics for below in units.values())
    engine.num_calls = 0 if is_open else num_calls()  # 0: the next pass looks again
    for below in units.values():
        below.engine = engine
    return engine


def _sole_module(unit: Unit) -> nn.Module:
    if len(unit.module_refs) > 1:
        raise RuntimeError(
            "FSDP requires a single root module but got "
            f"{tuple(type(ref()).__name__ for ref in unit.module_refs)}; call fully_shard on the "
            "module around them as well"
        )
    (module,) = unit.modules()
    return module

"""FSDPModule: the methods that ``fully_shard`` adds to a module, with the names of FSDP2.

A copy of a sharded module (``copy.deepcopy``) has units of its own; in `unsharded` it is plain.
"""

from __future__ import annotations

import copy
import weakref
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule as TorchFSDPModule
from torch.distributed.fsdp import UnshardHandle as TorchUnshardHandle

from vescale_fsdp import compat
from vescale_fsdp.dbuffer import plain_tensors
from vescale_fsdp.engine import unfilled
from vescale_fsdp.engine.engine import Engine, engine_of
from vescale_fsdp.engine.fsdp2_state import State, register_state
from vescale_fsdp.engine.hooks import register_fsdp_forward_method, register_hooks
from vescale_fsdp.engine.late import mark_copies
from vescale_fsdp.engine.reduce import drop_waiting
from vescale_fsdp.engine.settling import MEETING_TIMEOUT_S
from vescale_fsdp.engine.tuning import TuningMethods, units_of
from vescale_fsdp.engine.unit import UNIT_ATTRIBUTE, Unit, units_in
from vescale_fsdp.program import Lease


class UnshardHandle(TorchUnshardHandle):
    """The result of ``unshard(async_op=True)``."""

    def __init__(self, unit: Unit) -> None:
        self._unit: Unit | None = unit

    def wait(self) -> None:
        """Wait until the parameters are unsharded and registered. Idempotent."""
        if self._unit is not None:
            self._unit.take_by_hand()
            self._unit = None


class GradientReductionHandle(compat.GradientReductionHandle):  # type: ignore[misc]
    """The result of ``finalize_backward(async_op=True)``."""

    def __init__(self, engine: Engine | None, finalization: object) -> None:
        self._engine, self._finalization = engine, finalization

    def wait(self) -> None:
        """Wait for the reductions, and set ``.grad``. Idempotent.

        On HSDP, it also sums over the replicas. On an accelerator the current stream waits.

        Raises:
            RuntimeError: ``reset_iter_state()`` was called since then.
        """
        if self._engine is not None:
            self._engine.finish_finalization(self._finalization)
            self._engine = None


class FSDPModule(TuningMethods, TorchFSDPModule):
    """A module whose parameters are sharded by ``vescale_fsdp.fully_shard``.

    It is a subclass of torch's ``FSDPModule``, so that tools which look for FSDP2 modules find
    it. A sharded ``Linear`` is an instance of a class with the bases ``(FSDPModule, Linear)``. The
    class keeps the name of ``Linear``, because libraries look models up by the names of their
    classes. Its ``repr`` begins with ``FSDPLinear``.
    """

    _orig_cls_mro_index = 4  # [the sharded class, this one, one of methods, torch's, <Class>, ...]

    def __repr__(self) -> str:
        return f"FSDP{super().__repr__()}"

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all parameters, as of any module.

        Also those of backwards without synchronization, which are in no ``.grad`` yet. That of an
        optimizer, or of a module that is not sharded, leaves them, as in FSDP2.
        """
        drop_waiting(self.parameters())  # type: ignore[attr-defined]
        super().zero_grad(set_to_none)  # type: ignore[misc]

    def unshard(self, async_op: bool = False) -> UnshardHandle | None:
        """Unshard this module's own parameters (not those of nested units).

        With ``async_op`` the all-gather is still under way when this returns. Wait for it by the
        handle; otherwise the next forward waits.
        """
        unit = self._unit()
        unit.drop_stale()
        unit.leases.add(Lease.USER)
        handle = UnshardHandle(unit)
        if async_op:
            with plain_tensors():
                unit.start_unshard()
            return handle
        handle.wait()
        return None

    def reshard(self) -> None:
        """Free this module's unsharded parameters and register the sharded ones."""
        self._unit().rest()

    def reset_iter_state(self, timeout_s: float = MEETING_TIMEOUT_S) -> None:
        """Drop the incomplete step after an exception in forward or backward. Collective.

        It waits for collectives under way, frees unsharded parameters, and drops gradients that are
        not in ``.grad`` yet. Call it on the root, on every rank. If only one rank raised, the
        others wait in collectives that this rank will not join.

        Args:
            timeout_s: how long to wait for the other ranks to call it. Collectives under way are
                waited for only if all ranks have issued the same ones.

        Raises:
            RuntimeError: this is not the root.
            RankMismatchError: a rank did not call it in time, or ranks have left the step at
                different places. Then no rank can continue.
        """
        unit = self._unit()
        engine = engine_of(unit)
        if engine is not None and not unit.is_root:
            raise RuntimeError("reset_iter_state must be called on the root FSDP module")
        if engine is not None:
            for below in engine.units():
                below.forget_running()
            engine.leave(timeout_s)

    def set_manual_backward_finalization(self, enabled: bool) -> None:
        """Set whether the caller reduces what backwards have left, by `finalize_backward`.

        A backward with synchronization still reduces its gradients at its end.

        Raises:
            RuntimeError: this is not the root; or the mode changes in a backward, or after one
                that was not finalized or reset.
        """
        unit = self._unit()
        engine = _engine_of_root(unit, "set_manual_backward_finalization")
        if enabled == unit.finalizes_by_hand:
            return
        if compat.current_backward() != -1:
            raise RuntimeError(
                "set_manual_backward_finalization cannot change mode during backward; call it "
                "between steps"
            )
        if engine is not None and engine.awaits_finalization:
            raise RuntimeError(
                "set_manual_backward_finalization cannot change mode after backward starts; call "
                "finalize_backward() before, and wait for its handle"
            )
        unit.finalizes_by_hand = enabled

    def finalize_backward(self, *, async_op: bool = False) -> GradientReductionHandle | None:
        """Reduce gradients of backwards without synchronization, and set ``.grad``. Collective.

        For schedules of pipelines, where a reduction is an action of its own. Switch on
        `set_manual_backward_finalization` before, and ``set_requires_gradient_sync(True)`` after
        the backwards. Then it also reshards, as every backward does that sets ``.grad``. Does
        nothing before the first forward of the model. Between a forward and its backward it keeps
        that forward's gradients for the next time.

        Args:
            async_op: return a handle. Until its ``wait()`` returns, gradients are not in ``.grad``,
                and the model refuses forwards and backwards. On the CPU, and with replicas, some of
                the work is left to ``wait()``: as many reductions are under way at a time as in a
                backward.

        Cost: one reduction for each group of parameters with gradients that wait on any rank.

        Raises:
            RuntimeError: this is not the root; `set_manual_backward_finalization` is off; a forward
                or backward runs, or an earlier handle was not waited for; or gradients wait for
                ``set_requires_all_reduce(True)``.
            RankMismatchError: a rank did not call it in time.
        """
        engine = _engine_of_root(self._unit(), "finalize_backward")
        handle = GradientReductionHandle(engine, None if engine is None else engine.finalize())
        if async_op:
            return handle
        handle.wait()
        return None

    def set_requires_gradient_sync(
        self, requires_gradient_sync: bool, *, recurse: bool = True
    ) -> None:
        """Switch the reduction of gradients on or off, for accumulation over micro-batches.

        While it is off, gradients are summed on this rank, unsharded and in the reduce dtype,
        without communication (``fully_shard(accumulate=...)`` can change this). It also switches
        the all-reduce over replicas (`set_requires_all_reduce`).
        """
        for unit in units_of(self, recurse):
            unit.requires_gradient_sync = requires_gradient_sync
            unit.requires_all_reduce = requires_gradient_sync

    def set_reshard_after_forward(self, reshard_after_forward: bool, recurse: bool = True) -> None:
        """Set whether to reshard after forward and all-gather again in backward.

        With ``in_flight`` of 3 or more, the units with which backward begins are not resharded in
        any case (`fully_shard`). It replaces an int passed to ``fully_shard``: from now on no part
        of the parameters is kept.

        Raises:
            ValueError: not a bool.
        """
        if not isinstance(reshard_after_forward, bool):
            raise ValueError(
                f"reshard_after_forward should be a bool, got {type(reshard_after_forward)}"
            )
        for unit in units_of(self, recurse):
            unit.reshard_after_forward, unit.num_parts = reshard_after_forward, 1

    def set_reshard_after_backward(
        self, reshard_after_backward: bool, *, recurse: bool = True
    ) -> None:
        """Set whether to reshard after backward. Off saves all-gathers between micro-batches."""
        for unit in units_of(self, recurse):
            unit.reshard_after_backward = reshard_after_backward

    def _apply(self, fn: Any, *args: Any, **kwargs: Any) -> Any:
        """Convert the shards (``to``, ``cuda``, ``to_empty``) and bind them to the buffer again."""
        unit = self._unit()
        unit.refuse_if_pinned("converting or moving the module")
        unit.reshard()
        with plain_tensors():
            unit.follow_grad_dtypes()  # torch drops it from what it converts
        # A ``grad_dtype`` that was set holds after a conversion too: torch would convert gradients.
        kept = [
            (fsdp_param, fsdp_param.sharded.grad)
            for fsdp_param in unit.fsdp_params()
            if fsdp_param.grad_dtype.is_set
        ]
        for fsdp_param, _ in kept:
            fsdp_param.sharded.grad = None
        from_meta = unfilled.on_meta(self)  # type: ignore[arg-type]
        # Skips torch's FSDPModule, whose version needs FSDP2's parameter groups.
        module = super(TorchFSDPModule, self)._apply(fn, *args, **kwargs)  # type: ignore[misc]
        for group in unit.groups:
            group.rebind(may_wait=len(unit.module_refs) > 1)
        for fsdp_param, gradient in kept:
            if gradient is not None:
                fsdp_param.sharded.grad = gradient.to(fsdp_param.sharded.device)
        unfilled.mark_blank(getattr(owner, name) for owner, name in from_meta)
        return module

    def __deepcopy__(self, memo: dict[int, Any]) -> FSDPModule:
        """Copy a sharded module and its data, for averages of weights (EMA) for example.

        No communication. The copy has its own root. Optimizers do not update it. In a context
        (`unsharded`) the copy is a plain module, with what the context shows: whole parameters, in
        the dtype of compute.
        """
        if id(self) in memo:  # met again, through a weak proxy
            known: FSDPModule = memo[id(self)]
            return known
        unit = self._unit()
        twin_unit: Unit | None = None
        if not unit.num_pins:
            twin_unit = memo.get(id(unit)) or copied(unit, memo)
        cls: Any = type(self) if twin_unit else type(self).__mro__[self._orig_cls_mro_index]
        twin: FSDPModule = object.__new__(cls)  # FSDPModule.__new__ makes the original class
        memo[id(self)] = twin
        # Without what is compiled for this module, and without the Trainer of a LightningModule.
        state: Any = self.__getstate__()
        is_dict = isinstance(state, dict)  # a class may give other states, which name nothing
        state = state if is_dict else self.__dict__
        left_out = {*_OF_THIS_MODULE, *unit.forward_methods}
        own = {key: copy.deepcopy(state[key], memo) for key in state if key not in left_out}
        (twin.__setstate__ if is_dict else twin.__dict__.update)(own)  # type: ignore[attr-defined]
        states = self.__dict__[compat.COMPOSABLE_STATE]
        twin.__dict__[compat.COMPOSABLE_STATE] = {  # of torch's other composable functions
            of: copy.deepcopy(state, memo)
            for of, state in states.items()
            if not isinstance(state, State)
        }
        if twin_unit is None:
            compat.unregister(twin, "fully_shard", register_hooks.__module__)  # type: ignore[arg-type]
            if unit.recomputes:
                compat.unregister_recompute(twin)  # type: ignore[arg-type]
            return twin
        join(twin_unit, twin, unit, memo)  # type: ignore[arg-type]
        register_state(twin, twin_unit)  # type: ignore[arg-type]
        for name in unit.forward_methods & self.__dict__.keys():
            register_fsdp_forward_method(twin, name)  # type: ignore[arg-type]
        mark_copies(self, memo)  # type: ignore[arg-type]
        return twin

    def _get_fsdp_state(self) -> Any:
        return State(self._unit())


# Attributes that say to which unit a module belongs. A copy has its own.
_OF_THIS_MODULE = (UNIT_ATTRIBUTE, compat.COMPOSABLE_STATE)

_CLASSES: dict[type, type] = {}


def swap_class(module: nn.Module) -> None:
    """Change the class of ``module`` to a sharded one with the same name, made once per class."""
    cls = type(module)
    if cls not in _CLASSES:
        # Not FSDP<Class> as in FSDP2: transformers chooses losses by the name, for example.
        same = ("__module__", "__qualname__", "__doc__")
        namespace = {attribute: getattr(cls, attribute) for attribute in same}
        _CLASSES[cls] = type(cls.__name__, (FSDPModule, cls), namespace)
    module.__class__ = _CLASSES[cls]


class _Pinned(AbstractContextManager[None]):
    """A context in which the parameters of units stay unsharded."""

    def __init__(self, units: list[Unit], writeback: bool) -> None:
        self._units, self._writeback = units, writeback
        self._before: list[tuple[nn.Module, set[str]]] = []

    def __enter__(self) -> None:
        if self._writeback:
            modules = (each for u in self._units for m in u.modules() for each in m.modules())
            self._before = [(each, set(each._parameters)) for each in modules]
        for unit in self._units:
            unit.take_by_hand()
            unit.pin()

    def __exit__(self, *exc_info: object) -> None:
        for unit in self._units:
            unit.unpin()
        try:
            if self._writeback:
                for unit in self._units:
                    unit.write_back()
                self._refuse_new()
        finally:
            for unit in self._units:
                unit.reshard()

    def _refuse_new(self) -> None:
        """Raise for parameters that modules did not have: each rank would train its own."""
        for module, names in self._before:
            new = sorted(name for name in module._parameters if name not in names)
            if new:
                raise RuntimeError(
                    f"{type(module).__name__} got the parameters {new} inside of `unsharded(...)`. "
                    "Each rank would train its own. Remove or add parametrizations (torch.nn.utils."
                    "parametrize, parametrizations or prune) before fully_shard, or on a copy: "
                    "`copy.deepcopy` inside of `unsharded(model)` gives a plain module"
                )


def unsharded(
    *modules: nn.Module, writeback: bool = False, recurse: bool = True
) -> AbstractContextManager[None]:
    """Context with unsharded, plain parameters, for example for ``generate`` or summaries.

    Collective over the ranks that share the parameters: all of them must enter it. Forwards inside
    do not all-gather again.

    Args:
        modules: the modules to unshard, with all units inside of them.
        writeback: whether to keep changes of the unsharded parameters. If so, each rank
            copies its own part of them into its shard at the end. All ranks have to make the same
            changes, in place or by ``p.data = ...``. Elements that were not changed keep the
            precision of the shard.
        recurse: whether to unshard the units inside of the modules too. If not, all modules have to
            be sharded ones.

    Memory: the full parameters of all modules at the same time.

    Raises:
        RuntimeError: with ``writeback``, at the end: a module has got another parameter, which
            would be dropped, or trained on each rank alone.
    """
    found = {
        id(unit): unit
        for module in modules
        for unit in (units_in(module).values() if recurse else units_of(module, recurse=False))
    }
    return _Pinned(list(found.values()), writeback)


def share_comm_ctx(modules: list[TorchFSDPModule]) -> None:
    """No effect: models on the same ranks always share communicators.

    Raises:
        ValueError: one of them is not sharded.
    """
    for module in modules:
        if not isinstance(module, TorchFSDPModule):
            raise ValueError(f"Expects list of FSDPModules but got {module}")


def _engine_of_root(unit: Unit, method: str) -> Engine | None:
    """The engine of a model, of which ``unit`` must be the root. None: before the first forward."""
    engine = engine_of(unit)
    if engine is not None and not unit.is_root:
        raise RuntimeError(
            f"{method} must be called on the root FSDP module, not on {unit.fqn!r} in it"
        )
    return engine


def copied(unit: Unit, memo: dict[int, Any]) -> Unit:
    """A new unit with copies of the parameters, for ``copy.deepcopy``. It has no module yet.

    Raises:
        RuntimeError: a forward or backward runs, or the parameters of a part are unsharded.
    """
    below = [each for module in unit.modules() for each in units_in(module).values()]
    if not unit.is_idle or any(each.num_pins for each in below):
        raise RuntimeError(
            f"copy.deepcopy of the sharded module {unit.fqn!r} while a forward or backward runs or "
            "parameters of it are unsharded; copy it between steps, or inside of `with "
            "unsharded(model):` on the whole model, where the copy is a plain module"
        )
    unit.reshard()
    twin = Unit(
        [],
        unit.device,
        unit.mp_policy,
        unit.reshard_after_forward,
        unit.unused,
        unit.in_flight,
        unit.row,
        broadcasts_buffers=unit.broadcasts_buffers,
    )
    for name in _SET_BY_USERS:
        setattr(twin, name, getattr(unit, name))
    with plain_tensors():
        twin.groups = [g.copied(memo, twin.gradient_callback()) for g in unit.groups]
    memo[id(unit)] = twin
    twin.forward_prefetch = _copies(unit.forward_prefetch, memo)
    twin.backward_prefetch = _copies(unit.backward_prefetch, memo)
    return twin


_SET_BY_USERS = (
    "num_parts",
    "reshard_after_backward",
    "requires_gradient_sync",
    "requires_all_reduce",
    "unshard_in_backward",
    "gives_zeros",
    "max_reductions",
    "offloads_activations",
    "recomputes",
    "finalizes_by_hand",
    "has_ignored",
)


def join(unit: Unit, module: nn.Module, original: Unit, memo: dict[int, Any]) -> None:
    """Make ``unit`` the unit of ``module``, the copy of a module of ``original``."""
    object.__setattr__(module, UNIT_ATTRIBUTE, unit)
    unit.module_refs.append(weakref.ref(module))
    for group, former in zip(unit.groups, original.groups, strict=True):
        for fsdp_param, old in zip(group.fsdp_params, former.fsdp_params, strict=True):
            copies = [(memo.get(id(ref())), name) for ref, name in old.sites]
            fsdp_param.sites = [(weakref.ref(m), name) for m, name in copies if m is not None]


def _copies(units: list[Unit] | None, memo: dict[int, Any]) -> list[Unit] | None:
    return None if units is None else [memo.get(id(u)) or copied(u, memo) for u in units]

"""Modules that are added to a model after ``fully_shard``: a new head, another adapter.

Their parameters are plain, so each rank would train its own, without an error. DDP would take them
in when the model is wrapped again. `late_modules` finds them for whoever prepares a model, and
``fully_shard`` may be called on them::

    fully_shard(model); train(model)
    model.head = nn.Linear(...)        plain
    fully_shard(model.head)            a unit
    train(model)                       the next forward of the root makes its engine anew, with it

So are those of a model that is no unit itself, around blocks that are. `check_reduced` finds both.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from vescale_fsdp import compat
from vescale_fsdp.engine.engine import Engine
from vescale_fsdp.engine.fsdp_param import fsdp_param_of, is_unsharded, listed, was_sharded
from vescale_fsdp.engine.unit import Unit, unit_of, units_in

_MARK = "_is_fsdp_managed_module"  # on a module: a `_Mark`. Others read it as a bool
_IGNORED = "_vescale_fsdp_ignored"  # on a parameter that was ignored: its id. A copy has another
_num_calls = 0


class _Mark:
    """What calls of ``fully_shard`` have left on one module.

    A copy of the module, or a pickle, has False in its place: it belongs to no unit. Attributes:

        is_managed  its parameters belong to a unit
        ignored     names of those that a call was told to ignore
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = weakref.ref(module)
        self.is_managed = False
        self.ignored: set[str] = set()

    def __bool__(self) -> bool:
        return self.is_managed

    def __reduce__(self) -> tuple[type[bool], tuple[()]]:
        return bool, ()


def _mark_of(module: nn.Module) -> _Mark | None:
    """Return the mark of a module. ``copy.copy`` gives another module the same one."""
    mark = module.__dict__.get(_MARK)
    return mark if isinstance(mark, _Mark) and mark.module() is module else None


def mark_managed(modules: Sequence[nn.Module], ignored: set[nn.Parameter]) -> None:
    """Mark the modules of a unit, also for Dynamo and transformers, which read the attributes."""
    global _num_calls
    _num_calls += 1
    for param in ignored:
        setattr(param, _IGNORED, id(param))
    for module in modules:
        for below in module.modules():
            names = {name for name, param in below._parameters.items() if param in ignored}
            is_managed = not _is_left_alone(below, ignored)
            if names or is_managed:
                _put(below, is_managed=is_managed, ignored=names)


def mark_copies(module: nn.Module, memo: Mapping[int, Any]) -> None:
    """Mark the copies of a sharded module and of those below it, as these are.

    Args:
        memo: of ``copy.deepcopy``, which has copied them.
    """
    for below in module.modules():
        mark, twin = _mark_of(below), memo.get(id(below))
        if mark is not None and isinstance(twin, nn.Module):
            _put(twin, is_managed=mark.is_managed, ignored=mark.ignored)


def _put(module: nn.Module, *, is_managed: bool, ignored: set[str]) -> None:
    mark = _mark_of(module) or _Mark(module)
    mark.is_managed |= is_managed
    mark.ignored |= ignored
    module.__dict__[_MARK] = mark
    if is_managed:
        module.__dict__["_fsdp_use_orig_params"] = True


def is_managed(module: nn.Module) -> bool:
    """Whether a call of ``fully_shard`` was on this module, or on one around it."""
    return bool(_mark_of(module))


def num_calls() -> int:
    """Return how often ``fully_shard`` was called. It tells an engine that there may be units."""
    return _num_calls


def late_modules(root: nn.Module) -> list[list[nn.Module]]:
    """Return the modules that were added below a sharded one, in a list for each unit around them.

    Args:
        root: a model, between passes.

    Raises:
        ValueError: a parameter was added to a module that is sharded already.
    """
    late: dict[int, list[nn.Module]] = {}
    strays: list[str] = []
    _find(root, "", None, late, strays)
    if strays:
        raise ValueError(
            f"the parameters {strays} were added to modules that are sharded already, and each "
            "rank would train its own. Put them in a module of their own (nn.ParameterList, for "
            "example), or add them before the model is sharded"
        )
    return list(late.values())


def check_reduced(root: nn.Module, caller: str) -> None:
    """Raise if a module that contains units has trainable parameters that nothing reduces.

    Parameters that DDP reduces, or that were ignored on purpose (``ignored_params``), are none.

    Args:
        caller: names the function in the message.

    Raises:
        ValueError: names the parameters.
    """
    names: list[str] = []
    _find_unreduced(root, "", names)
    units = units_in(root).values()
    for unit in units:  # the first backward asks no more whether they are parts of a model
        unit.is_in_whole = not names
    if names and units:
        raise ValueError(
            f"{caller}: {listed(names)} of {type(root).__name__} are trainable and belong to no "
            "unit, so each rank trains its own. Call fully_shard on the whole model last, after "
            "its blocks, and on modules that are added later. If their gradients are reduced in "
            "another way, pass them in ignored_params of fully_shard, or pass reduced_by_hand=True "
            "here; with DistributedDataParallel around the model, which was told to ignore the "
            "sharded parameters, pass that"
        )


def _find_unreduced(module: nn.Module, name: str, found: list[str]) -> None:
    if compat.is_reduced_by_ddp(module):
        return
    mark = _mark_of(module)
    ignored = set() if mark is None else mark.ignored
    for key, param in module._parameters.items():
        if param is None or not param.requires_grad or isinstance(param, DTensor):
            continue
        is_ignored = key in ignored or vars(param).get(_IGNORED) == id(param)
        if not (is_ignored or is_unsharded(param)):
            found.append(f"{name}.{key}" if name else key)
    for key, child in module.named_children():
        _find_unreduced(child, f"{name}.{key}" if name else key, found)


def with_late_units(root: Unit, engine: Engine) -> Engine | None:
    """Return the engine of a root before a pass. None: it has to be made again, with more units.

    Or with other groups, if it was made in a context, where norms cannot be cast or not
    (`Unit.follow_statistics`). The same on all ranks, which call ``fully_shard`` alike.
    """
    if not root.is_root or engine.is_running:
        return engine
    (module,) = root.modules()
    units = units_in(module).values()
    is_known = all(unit.engine is engine for unit in units)
    undecided = [unit for unit in units if unit.may_follow_statistics]
    if is_known and all(unit.num_pins for unit in undecided):
        engine.num_calls = 0 if undecided else _num_calls
        return engine
    release(engine)
    return None


def release(engine: Engine) -> None:
    """Let its units join another engine. Nothing of it may be under way. No communication."""
    for unit in engine.units():
        unit.rest()
        unit.forget_calls()
        unit.engine, unit.is_root = None, False


def _find(
    module: nn.Module,
    name: str,
    around: Unit | None,
    late: dict[int, list[nn.Module]],
    strays: list[str],
) -> None:
    unit = unit_of(module) or around
    if unit is not None:
        if _is_late(module):
            late.setdefault(id(unit), []).append(module)
            return
        known = {
            id(fsdp_param.gathered) for fsdp_param in unit.fsdp_params()
        }  # of one that stays unsharded
        mark = _mark_of(module)
        strays += [
            f"{name}.{key}" if name else key
            for key, param in module._parameters.items()
            if param is not None
            and not isinstance(param, DTensor)
            and id(param) not in known
            and (mark is None or key not in mark.ignored)
        ]
    for key, child in module.named_children():
        _find(child, f"{name}.{key}" if name else key, unit, late, strays)


def _is_late(module: nn.Module) -> bool:
    """Whether a module is new, with all that it contains, and has parameters to shard."""
    is_new = all(_mark_of(below) is None for below in module.modules())
    return is_new and any(
        not isinstance(param, DTensor) or (was_sharded(param) and fsdp_param_of(param) is None)
        for param in module.parameters()
    )


def _is_left_alone(module: nn.Module, ignored: set[nn.Parameter]) -> bool:
    """Whether all parameters of a module are ignored, and it has no buffers."""
    has_buffers = next(module.buffers(), None) is not None
    return bool(ignored) and ignored.issuperset(module.parameters()) and not has_buffers

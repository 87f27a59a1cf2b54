"""Decides which parameters belong to the unit of a call of ``fully_shard``.

A call takes the parameters of its modules that no earlier call has taken. A parameter that is used
in several units (a head tied to an embedding in another block) belongs to the innermost unit that
contains all of its uses, because that unit stays unsharded for all of them. So if a unit has taken
a parameter, and a later call finds it in another unit, the first unit releases it. The parameter
then waits, not sharded, for a call whose modules contain all of its uses.

A module may also stand below several units. The last of them takes its parameters, because it may
be of another model, until a call on a module around two or more of them takes them instead.

Code may also tie sharded parameters (``head.weight = embedding.weight``), as it does where weights
are loaded into a model that was made on meta. Nothing moves then, because an optimizer may have
states for the layout: `follow_ties` adds the use to the unit that has the parameter, if that
contains it. If not, each use gathers it for itself (`substitutes`).
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from vescale_fsdp import compat
from vescale_fsdp.engine.axes import Axes
from vescale_fsdp.engine.fsdp_param import (
    FSDPParam,
    ParamToShard,
    Site,
    carry,
    fsdp_param_of,
    holder_of,
    was_sharded,
)
from vescale_fsdp.engine.late import is_managed
from vescale_fsdp.engine.placement import gathers_itself, local_data, placement_of
from vescale_fsdp.engine.unit import Unit, unit_of, units_in
from vescale_fsdp.errors import warn_user
from vescale_fsdp.ragged import RaggedTensor, holding_of

if TYPE_CHECKING:
    from vescale_fsdp.dbuffer import Coding
    from vescale_fsdp.engine.granularity import Granularity, GranularityPolicy
    from vescale_fsdp.engine.quantized import Choice

_WAITING = "_vescale_fsdp_waiting"  # on such a parameter: the sites where it was met so far


def _waiting_sites(param: nn.Parameter) -> list[Site] | None:
    """Return the uses found so far of a waiting parameter. None: it does not wait."""
    sites: list[Site] | None = param.__dict__.get(_WAITING)
    return sites


def refuse_data_parallel(units: Iterable[Unit]) -> None:
    """Raise if a DistributedDataParallel around these units has their parameters, too.

    Raises:
        RuntimeError: it would reduce their gradients a second time.
    """
    reduced = {id(param) for param in compat.parameters_of_running_ddp()}
    for unit in units if reduced else ():
        for fsdp_param in unit.fsdp_params():
            if fsdp_param.sharded.requires_grad and id(fsdp_param.sharded) in reduced:
                raise RuntimeError(
                    "DistributedDataParallel is around a module whose parameters fully_shard has "
                    f"sharded, such as {fsdp_param.fqn!r}. fully_shard averages their gradients "
                    "already, also with sharding='ddp': remove DistributedDataParallel, and wrap "
                    "the modules alone that are not sharded"
                )


def refuse_waiting(root: nn.Module) -> None:
    """Raise if a parameter below ``root`` is tied across units and no unit contains all uses.

    Raises:
        ValueError: names the parameter.
    """
    for fqn, param in root.named_parameters():
        if _waiting_sites(param) is not None:
            raise ValueError(
                f"Parameter '{fqn}' is shared between units, and no unit contains all of them: "
                "call fully_shard on a module around all of its uses, or on these modules "
                "together: fully_shard([module_a, module_b])"
            )


_OWNER = "_vescale_fsdp_owner"  # on an original parameter: a weak reference to its unit


class _Found(NamedTuple):
    fqn: str
    param: nn.Parameter
    sites: list[Site]


def params_to_shard(
    modules: Sequence[nn.Module],
    ignored: set[nn.Parameter],
    granularity: Granularity | GranularityPolicy | None,
    axes: Axes,
    choose: Callable[[nn.Parameter], Any] | None,
    travel: Choice | None = None,
) -> list[ParamToShard]:
    """Return the parameters that this call takes, each once, with all of its uses.

    Collective if units release a parameter that several of them use: it may be gathered, and the
    other parameters of its group are copied to a new layout.

    Raises:
        ValueError: a call on an outer module has already sharded a parameter; or a parameter is a
            DTensor on a mesh of another device type.
        ValueError: it belongs to a scripted or traced module.
        AssertionError, ValueError, NotImplementedError: a parameter is a tensor subclass that
            cannot be sharded (see `gathers_itself`).
    """
    inside = {id(child) for module in modules for child in module.modules()}
    _release_shared(modules, ignored)
    found = _parameters_of(own_modules(modules), ignored)
    for item in _waiting_below(modules):
        if item.param in ignored:
            item.param.__dict__.pop(_WAITING, None)
        else:
            found.setdefault(id(item.param), item)
    taken = []
    for fqn, param, sites in found.values():
        if was_sharded(param):
            is_inside = any(map(is_managed, modules))
            _refuse_within_model(fqn, param, sites, None if is_inside else inside)
            param = _taken_over(fqn, param, sites)
        _check_param(fqn, param, sites, axes)
        owner = getattr(param, _OWNER, None)
        unit: Unit | None = owner() if owner is not None else None
        if unit is not None:
            sites = unit.give_back(param) + sites
            delattr(param, _OWNER)
        sites = _merged(_waiting_sites(param) or [], sites)
        if all(id(module()) in inside for module, _ in sites):
            param.__dict__.pop(_WAITING, None)
            placed_on, dim = placement_of(choose, param, axes, fqn)
            extends = gathers_itself(param, dim, fqn)
            dim = 0 if extends else dim
            whole = ParamToShard(fqn, param, sites, 1, placed_on, dim, extends)
            taken.append(_with_blocks(whole, granularity, travel))
        else:
            setattr(param, _WAITING, sites)
    return taken


def _with_blocks(
    item: ParamToShard,
    granularity: Granularity | GranularityPolicy | None,
    travel: Choice | None,
) -> ParamToShard:
    """Return the item with its blocks and with the codecs for its messages."""
    fqn, param = item.fqn, item.param

    @cache  # one part, if all are alike
    def codings(shape: tuple[int, ...]) -> tuple[Coding | None, Coding | None]:
        if travel is None:
            return None, None
        return travel.codings(fqn, param, item.sites, shape, item.inner)

    def block_in(shape: tuple[int, ...]) -> int:
        if granularity is None and travel is None:
            return 1
        from vescale_fsdp.dbuffer import checked_block
        from vescale_fsdp.engine.granularity import asked_block

        asked = asked_block(granularity, fqn, param, shape)
        return checked_block(fqn, shape, asked, *codings(shape))

    gather, reduce = codings(tuple(local_data(param).shape))
    if (gather or reduce) and item.dim is not None:
        why = "gathers itself" if item.extends else f"shard_placement_fn wants as Shard({item.dim})"
        raise ValueError(
            f"fully_shard: {item.fqn!r}, which {why}, cannot be sent in blocks of 8 bits; let the "
            "policy of gather_codec= and reduce_codec= return False for it"
        )
    largest, *smaller = item.parts
    block = block_in(largest)
    if any(block < math.prod(part) and block % block_in(part) for part in smaller):
        block = math.prod(largest)  # no other place is between blocks of all parts
    return replace(item, block=block, gather=gather, reduce=reduce)


def mark_taken(params: Sequence[ParamToShard], unit: Unit) -> None:
    """Store on the original parameters which unit has taken them."""
    for item in params:
        setattr(item.param, _OWNER, weakref.ref(unit))


def follow_ties(units: Sequence[Unit]) -> None:
    """Add uses to parameters that were tied to others since they were sharded. No communication.

    Warns, because what was in the place of such a parameter is still gathered with its unit.
    """
    unit_of_slot = {id(fsdp_param): unit for unit in units for fsdp_param in unit.fsdp_params()}
    inside: dict[int, set[int]] = {}  # ids of the modules below a unit
    tied: dict[str, str] = {}
    for home, fsdp_param in [
        (unit, fsdp_param) for unit in units for fsdp_param in unit.fsdp_params()
    ]:
        for site in list(fsdp_param.sites):
            module, name = site[0](), site[1]
            if module is None or not fsdp_param.is_tied_away(module, name):
                continue
            holder = holder_of(module._parameters[name])  # type: ignore[arg-type]
            assert holder is not None, "it is tied to it"
            unit = unit_of_slot.get(id(holder))
            if unit is None:  # of another model: ``functional_call`` may have put it there
                continue
            tied[_join(home.fqn, fsdp_param.fqn)] = holder.fqn
            if id(unit) not in inside:
                inside[id(unit)] = {id(m) for each in unit.modules() for m in each.modules()}
            if inside[id(unit)].issuperset(id(each) for each in (module, *home.modules())):
                fsdp_param.sites.remove(site)
                holder.sites.append(site)
    if tied:
        warn_user(
            f"parameters were tied after fully_shard: {tied}. They train as one, but what was in "
            "the place of the former is still gathered with its unit. Tie them before fully_shard, "
            "and call it on a module around all units that share a module"
        )


def replaced_parameters(params: Iterable[torch.Tensor], *, followed: bool = False) -> list[str]:
    """Return the names of parameters in ``params`` that ``fully_shard`` has replaced.

    A list or an optimizer that was made before the call has these. They are not trained.

    Args:
        followed: the optimizer that had them got the sharded ones instead. Then the first backward
            does not warn of lists that still hold them.
    """
    fsdp_params = [
        fsdp_param for param in params if (fsdp_param := _replacement_of(param)) is not None
    ]
    for fsdp_param in fsdp_params:
        fsdp_param.is_followed |= followed
    return [fsdp_param.fqn for fsdp_param in fsdp_params]


def _replacement_of(param: torch.Tensor) -> FSDPParam | None:
    owner = vars(param).get(_OWNER)
    unit: Unit | None = None if owner is None else owner()
    fsdp_params = () if unit is None else unit.fsdp_params()
    return next((fsdp_param for fsdp_param in fsdp_params if fsdp_param.replaced() is param), None)


def own_modules(modules: Sequence[nn.Module]) -> list[tuple[str, nn.Module]]:
    """Return modules and their descendants by name, in order, without those of nested units.

    Names are relative to the module. If there are several modules, they begin with its index.
    """
    found: dict[int, tuple[str, nn.Module]] = {}
    for place, module in enumerate(modules):
        _collect_own(module, f"{place}" if len(modules) > 1 else "", found)
    return list(found.values())


def _collect_own(module: nn.Module, prefix: str, found: dict[int, tuple[str, nn.Module]]) -> None:
    # No function within the caller: its closure would be a cycle that keeps the modules alive.
    if id(module) in found or unit_of(module) is not None:
        return
    found[id(module)] = (prefix, module)
    for name, child in module.named_children():
        _collect_own(child, _join(prefix, name), found)


def _parameters_of(
    modules: list[tuple[str, nn.Module]], ignored: set[nn.Parameter]
) -> dict[int, _Found]:
    found: dict[int, _Found] = {}
    for prefix, child in modules:
        for name, param in child._parameters.items():
            if param is None or param in ignored:
                continue
            entry = found.setdefault(id(param), _Found(_join(prefix, name), param, []))
            entry.sites.append((weakref.ref(child), name))
    return found


def _release_shared(modules: Sequence[nn.Module], ignored: set[nn.Parameter]) -> None:
    """Let nested units release parameters of modules that stand elsewhere below ``modules`` too.

    Collective: an all-gather of each, and what `Unit.give_up` sends. Units that have run keep them:
    an optimizer may have states for their layout. Then each use gathers them (`substitutes`).
    """
    nested = {id(unit): unit for module in modules for unit in units_in(module).values()}
    homes = {
        fsdp_param: unit
        for unit in nested.values()
        if unit.engine is None
        for fsdp_param in unit.fsdp_params()
    }
    own = {id(child) for _, child in own_modules(modules)}
    users: dict[
        FSDPParam, list[FSDPParam]
    ] = {}  # of the one that has the parameter: all that have had it
    for fsdp_param in homes:
        for module_ref, name in fsdp_param.sites:
            module = module_ref()
            param = None if module is None else module._parameters.get(name)
            holder = None if param is None else holder_of(param)
            if holder is None or holder not in homes or not _is_site(holder, module, name):
                continue  # of another model, or tied by code
            if holder is not fsdp_param or id(module) in own:
                users.setdefault(holder, [holder]).append(fsdp_param)
    for holder, fsdp_params in users.items():
        if holder.sharded not in ignored:
            whole = _taken_over(holder.fqn, holder.sharded, holder.sites)
            for fsdp_param in dict.fromkeys(fsdp_params):
                if (original := fsdp_param.original()) is not None:
                    whole = _revived(original, whole, holder.sites)
                homes[fsdp_param].give_up(fsdp_param)
            setattr(whole, _WAITING, holder.sites)  # for this call, which contains all of them


def _revived(original: nn.Parameter, whole: nn.Parameter, sites: list[Site]) -> nn.Parameter:
    """Register the original parameter again, with these values: others may be tied to it."""
    original.__dict__.pop(_OWNER, None)
    original.data = whole.data
    original.requires_grad_(whole.requires_grad)
    carry(whole, original)
    for module_ref, name in sites:
        if (module := module_ref()) is not None:
            module._parameters[name] = original
    return original


def _is_site(fsdp_param: FSDPParam, module: nn.Module | None, name: str) -> bool:
    return any(ref() is module and name == known for ref, known in fsdp_param.sites)


def _waiting_below(modules: Sequence[nn.Module]) -> list[_Found]:
    """Return the waiting parameters in nested units."""
    return [
        _Found(name, param, [])
        for module in modules
        for name, param in module.named_parameters()
        if _waiting_sites(param) is not None
    ]


def _merged(known: list[Site], new: list[Site]) -> list[Site]:
    keys = {(id(module()), name) for module, name in known}
    return known + [(m, name) for m, name in new if (id(m()), name) not in keys]


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name


def _refuse_within_model(
    fqn: str, param: nn.Parameter, sites: list[Site], inside: set[int] | None
) -> None:
    """Raise if a sharded parameter is one of the model that this call is for.

    Args:
        sites: where the call has found it.
        inside: ids of the modules of the call. None: a call on a module around them came before.

    Raises:
        ValueError: the unit that has it is around the modules of this call, or inside of them.
    """
    fsdp_param = fsdp_param_of(param)
    if fsdp_param is None:  # a copy
        return
    known = {(id(module), name) for ref, name in fsdp_param.sites if (module := ref()) is not None}
    here = {(id(module()), name) for module, name in sites}
    if inside is None or here != {site for site in known if site[0] in inside}:
        raise ValueError(
            f"fully_shard: parameter {fqn!r} is sharded already, by an earlier call. Call "
            "fully_shard on the inner modules first, and on the whole model last; once on modules "
            "that share a module, as fully_shard([encoder, decoder]); and tie parameters before. "
            "To train a part of a trained model without the rest (also what merge_and_unload of "
            "peft returns), shard a copy of it: copy.deepcopy(part)"
        )


def _taken_over(fqn: str, former: nn.Parameter, sites: list[Site]) -> nn.Parameter:
    """Register the whole of a parameter that another model has sharded, to shard it anew.

    Collective: an all-gather. The other model then finds a parameter of this one in its modules, as
    with plain modules that are in two models; it gathers that for itself (`substitutes`).

    Raises:
        ValueError: an inner parallelism shards it too.
    """
    fsdp_param = fsdp_param_of(former)
    sharded = cast(DTensor, former if fsdp_param is None else fsdp_param.sharded)
    if isinstance(sharded, RaggedTensor) and any(type(p) is Shard for p in sharded.placements):
        raise ValueError(
            f"fully_shard: parameter {fqn!r} is sharded by an earlier call, and by an inner "
            f"parallelism ({sharded.placements}), which is not known here. If its module stands in "
            "two units of this model, make one of both, fully_shard([a, b]), or only a unit around "
            "both. If the call was for another model, save the weights with "
            "vescale_fsdp.checkpoint, and load them into a new one"
        )
    if sharded.is_meta:
        data = torch.empty(sharded.shape, dtype=sharded.dtype, device="meta")
    else:
        data = cast(DTensor, sharded.detach()).full_tensor()
    whole = nn.Parameter(data, requires_grad=sharded.requires_grad)
    carry(cast(nn.Parameter, sharded), whole)
    for module_ref, name in sites:
        if (module := module_ref()) is not None:
            module._parameters[name] = whole
    return whole


def _check_param(fqn: str, param: nn.Parameter, sites: list[Site], axes: Axes) -> None:
    if any(isinstance(module(), torch.jit.ScriptModule) for module, _ in sites):
        raise ValueError(
            f"the parameter {fqn!r} belongs to a module of torch.jit, which keeps its parameters "
            "in C++; shard the module that it was made from, or pass the parameter in "
            "ignored_params (it is then not averaged)"
        )
    if isinstance(param, DTensor) and not param.is_meta:
        theirs, ours = param.device_mesh.device_type, axes.mesh.device_type
        if theirs != ours:
            raise ValueError(
                "Requires DTensor to have mesh of the same type as the FSDP mesh but got "
                f"{theirs} for DTensor and {ours} for FSDP; found for parameter {fqn!r}"
            )
    if isinstance(param, DTensor):
        spec, here = param._spec, param.device_mesh.get_coordinate()
        is_plain = all(type(p) is Shard or p.is_replicate() for p in spec.placements)
        if here is None or not is_plain:
            return
        expected = holding_of(spec.shape, spec.placements, spec.mesh.shape, here).local_shape
        if param._local_tensor.shape != expected:
            raise ValueError(
                f"fully_shard: parameter {fqn!r} is a DTensor of shape {tuple(spec.shape)} with "
                f"{spec.placements}, of which this rank should have a part of shape {expected}, "
                f"but has {tuple(param._local_tensor.shape)}. Make it by distribute_tensor, or "
                "give from_local parts as torch.chunk makes them"
            )

"""Describes a module for the cost model: its units, their groups, and the tensors in them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from torch import nn
from torch.nn.parameter import is_lazy

from vescale_fsdp.errors import PlanError
from vescale_fsdp.spi import Roles
from vescale_fsdp_tune.costs.model import Dtype, Group, Model, Tensor, make_model

_ROOT = -1  # stands for the root where others have the index of a block


def describe(
    module: nn.Module,
    blocks: Sequence[nn.Module],
    name: str,
    param_dtype: Dtype | None = None,
    ignored: frozenset[int] = frozenset(),
) -> Model:
    """Describe a module whose ``blocks`` are units. The root has all other parameters.

    A parameter that several units use belongs to the root.

    Args:
        blocks: modules inside of it, in forward order, none inside of another.
        name: of the model.
        param_dtype: replaces the dtype of floating-point parameters, as ``module.to(dtype)`` would.
        ignored: ``id(param)`` of parameters that are not sharded.

    Raises:
        PlanError: there are no parameters, or one has no shape yet.
    """
    owner = owners(module, blocks)
    names = {id(child): child_name for child_name, child in module.named_modules()}

    def groups_of(unit: nn.Module, index: int) -> list[Group]:
        roles = Roles([unit], has_blocks=unit is module and bool(blocks))
        users: dict[int, list[nn.Module]] = {}
        for child in unit.modules():
            for param in child._parameters.values():
                users.setdefault(id(param), []).append(child)
        return _groups(
            (
                (name, param, roles.is_hidden(name, param, users[id(param)]))
                for name, param in unit.named_parameters()
                if owner[id(param)] == index and id(param) not in ignored
            ),
            param_dtype,
        )

    others = [(names[id(block)], groups_of(block, i)) for i, block in enumerate(blocks)]
    model = make_model(name, groups_of(module, _ROOT), others)
    if not model.num_parameters:
        raise PlanError(f"{name} has no parameters to shard")
    return dataclasses.replace(model, module=module)


def owners(module: nn.Module, blocks: Sequence[nn.Module]) -> dict[int, int]:
    """Return for each ``id(param)`` the index of its block; -1 if in none or several.

    Raises:
        PlanError: a parameter has no shape yet.
    """
    homes: dict[int, set[int]] = {}  # blocks of each module; a shared module is in several
    for index, block in enumerate(blocks):
        for child in block.modules():
            homes.setdefault(id(child), set()).add(index)
    found: dict[int, set[int]] = {}
    for child_name, child in module.named_modules():
        for name, param in child._parameters.items():
            if param is None:
                continue
            if is_lazy(param):
                full = f"{child_name}.{name}".lstrip(".")
                raise PlanError(f"parameter {full} is lazy, it has no shape yet")
            found.setdefault(id(param), set()).update(homes.get(id(child), {_ROOT}))
    return {
        key: next(iter(found_in)) if len(found_in) == 1 else _ROOT
        for key, found_in in found.items()
    }


def _groups(
    params: Iterable[tuple[str, nn.Parameter, bool]], param_dtype: Dtype | None
) -> list[Group]:
    """Return one group for each dtype and ``requires_grad``, in order of first appearance.

    Args:
        params: for each its name, the parameter, and whether it is a matrix of a hidden layer.
    """
    found: dict[tuple[Dtype, bool], list[Tensor]] = {}
    for name, param, is_hidden in params:
        own = param.dtype
        dtype = Dtype(str(own).removeprefix("torch."), own.itemsize, floating=own.is_floating_point)
        if param_dtype is not None and dtype.floating:
            dtype = param_dtype
        key = (dtype, param.requires_grad)
        found.setdefault(key, []).append(Tensor(name, tuple(param.shape), is_hidden))
    return [Group(tuple(tensors), *key) for key, tensors in found.items()]

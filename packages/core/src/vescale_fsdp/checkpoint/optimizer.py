"""An optimizer's states and options by the names of its parameters.

torch identifies parameters by their position in the optimizer. Another rank or run may have other
positions, so a checkpoint uses names::

    {"state": {"layers.0.weight": {"step": ..., "exp_avg": ...}, ...},
     "param_groups": [{"lr": 0.1, ..., "params": ["layers.0.weight", ...]}]}

A parameter that never had a gradient has no states and is not in "state".
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from vescale_fsdp import compat
from vescale_fsdp.errors import CheckpointIncompleteError, CheckpointMismatchError

State = dict[str, Any]


class NamedOptimizer:
    """An optimizer whose parameters have names. Make it after ``model.state_dict()`` was called:
    that replaces unsharded parameters by shards.
    """

    def __init__(self, name: str, optimizer: Optimizer, model: nn.Module) -> None:
        self.name, self.optimizer = name, optimizer
        found: dict[int, str] = {}
        for path, param in model.named_parameters():
            found.setdefault(id(param), compat.fqn_of(model, path))
        self.of_model = set(found.values())
        self.params: dict[str, torch.Tensor] = {}
        for index, group in enumerate(optimizer.param_groups):
            for position, param in enumerate(group["params"]):
                if id(param) not in found:
                    raise CheckpointMismatchError(
                        f"optimizer {name!r} has a parameter of shape {tuple(param.shape)} "
                        f"(number {position} of group {index}) that the model does not have; save "
                        "and load it with the model whose parameters it was made for"
                    )
                self.params[found[id(param)]] = param

    # Save

    def tree(self) -> dict[str, Any]:
        """Return states and options in this form. Tensors are not copied."""
        saved = self.optimizer.state_dict()
        names = self._names_by_key(saved["param_groups"])
        state = {names.get(key, str(key)): value for key, value in saved["state"].items() if value}
        groups = [
            {
                **{key: value for key, value in group.items() if key != "param_names"},
                "params": [names[key] for key in group["params"]],
            }
            for group in saved["param_groups"]
        ]
        return {"state": state, "param_groups": groups}

    def _names_by_key(self, groups: list[dict[str, Any]]) -> dict[Any, str]:
        keys = [key for group in groups for key in group["params"]]
        return dict(zip(keys, self.params, strict=True))

    # Load

    def by_number(self, groups: list[dict[str, Any]]) -> dict[Any, str]:
        """Return the name of each parameter that saved groups list by number.

        Numbers count an optimizer's parameters, in the order of its groups.

        Raises:
            CheckpointMismatchError: the groups do not have as many parameters as these.
        """
        listed = [key for group in groups for key in group["params"]]
        if len(listed) != len(self.params):
            raise CheckpointMismatchError(
                f"the checkpoint has an optimizer with {len(listed)} parameters, and {self.name} "
                f"has {len(self.params)}; make it as it was when it was saved"
            )
        sizes, own_sizes = (
            [len(group["params"]) for group in each]
            for each in (groups, self.optimizer.param_groups)
        )
        if sizes != own_sizes:
            raise CheckpointMismatchError(
                f"the checkpoint has groups of {sizes} parameters, and {self.name} has "
                f"{own_sizes}; make it as it was when it was saved"
            )
        return self._names_by_key(groups)

    def make_states(self, saved: Mapping[str, State]) -> list[tuple[str, str]]:
        """Make the saved states that the optimizer lacks. Returns (parameter, state) names.

        The optimizer makes them in a step on temporary parameters and gradients of zeros. So each
        state has the form that this optimizer uses, and the real parameters, gradients and states
        do not change.
        """
        lacking = [
            fqn
            for fqn, param in self.params.items()
            if fqn in saved and saved[fqn].keys() - self.optimizer.state.get(param, {}).keys()
        ]
        made = []
        for fqn, states in self._states_of_stand_ins(lacking).items():
            own = self.optimizer.state.get(self.params[fqn], {})
            new = {key: value for key, value in states.items() if key not in own}
            made += [(fqn, key) for key in new]
            self.optimizer.state[self.params[fqn]] = {**own, **new}
        return made

    def _states_of_stand_ins(self, names: list[str]) -> dict[str, State]:
        wanted = {id(self.params[fqn]): fqn for fqn in names}
        found: dict[str, State] = {}
        for member in members_of(self.optimizer):
            params = [param for group in member.param_groups for param in group["params"]]
            mine = {id(param): wanted[id(param)] for param in params if id(param) in wanted}
            if mine:
                found |= _step_of_zeros(member, mine)
        return found

    def load(self, state: Mapping[str, State], groups: list[dict[str, Any]], strict: bool) -> None:
        """Set states and options with the optimizer's ``load_state_dict``.

        Args:
            state: states by parameter. Tensors are the optimizer's own, already filled.
            groups: the saved options, each with its ``params``.
            strict: raise if a parameter of the optimizer is in no saved group.
        """
        own = self.optimizer.state_dict()
        names = self._names_by_key(own["param_groups"])
        keys = {fqn: key for key, fqn in names.items()}
        loaded = {keys.get(fqn, fqn): dict(each) for fqn, each in state.items()}
        merged = []
        for index, group in enumerate(own["param_groups"]):
            params = [names[key] for key in group["params"]]
            options = self._options(index, params, groups, strict)
            for key, value in options.items():  # a learning rate for CUDA's graphs
                if torch.is_tensor(value) and torch.is_tensor(group.get(key)):
                    options = {**options, key: value.to(group[key].device)}
            merged.append({**group, **options})
        self.optimizer.load_state_dict({"state": loaded, "param_groups": merged})
        for fqn, each in state.items():  # torch casts states to the dtype of their parameter
            if fqn in self.params:
                kept = self.optimizer.state[self.params[fqn]]
                kept.update({k: v for k, v in each.items() if isinstance(v, torch.Tensor)})

    def check(self, groups: list[dict[str, Any]], strict: bool) -> None:
        """Raise the errors that `load` would raise about groups."""
        for index, group in enumerate(self.optimizer.param_groups):
            ids = {id(param) for param in group["params"]}
            params = [fqn for fqn, param in self.params.items() if id(param) in ids]
            self._options(index, params, groups, strict)

    def _options(
        self, index: int, params: list[str], groups: list[dict[str, Any]], strict: bool
    ) -> dict[str, Any]:
        """Return the saved options of one group, found by its parameters."""
        found: list[dict[str, Any]] = []
        unknown = set(params)
        for group in groups:
            shared = unknown.intersection(group["params"])
            if shared or (not params and not group["params"] and not found):
                unknown -= shared
                found.append({k: v for k, v in group.items() if k not in ("params", "param_names")})
        where = f"optimizer.{self.name}: group {index}"
        if unknown and strict:
            raise CheckpointIncompleteError(
                f"the checkpoint lacks options for {sorted(unknown)[:5]} of {where}. Load it into "
                "the optimizers it was saved from, or pass strict=False"
            )
        first = found[0] if found else {}
        if any(_differ(first, other) for other in found[1:]) and strict:
            raise CheckpointMismatchError(
                f"{where} has parameters of several saved groups, with different options; build "
                "the optimizer with the groups that were saved, or pass strict=False"
            )
        return first


def _step_of_zeros(optimizer: Optimizer, wanted: dict[int, str]) -> dict[str, State]:
    """Return the states that one step makes for parameters of zeros with gradients of zeros.

    Args:
        wanted: the parameters to make states for: name by ``id(param)``.
    """
    stand_ins: dict[str, torch.Tensor] = {}
    before = [dict(group) for group in optimizer.param_groups]
    try:
        for group in optimizer.param_groups:
            names = [wanted[id(param)] for param in group["params"] if id(param) in wanted]
            params = [param for param in group["params"] if id(param) in wanted]
            for fqn, param in zip(names, params, strict=True):
                stand_ins[fqn] = nn.Parameter(torch.zeros_like(param))
                stand_ins[fqn].grad = torch.zeros_like(param)
            group["params"] = [stand_ins[fqn] for fqn in names]
            if "param_names" in group:
                group["param_names"] = names
            if "lr" in group:
                lr = group["lr"]
                group["lr"] = torch.zeros_like(lr) if isinstance(lr, torch.Tensor) else 0.0
        try:
            with compat.without_step_hooks(optimizer, functools.partial(_is_own, optimizer)):
                type(optimizer).step(optimizer)  # schedulers replace `step`; do not call theirs
        except TypeError as error:
            raise CheckpointMismatchError(
                f"{type(optimizer).__name__} lacks states that were saved, and cannot make them "
                f"without a loss ({error}): take a step with it before the load"
            ) from error
        return {fqn: optimizer.state.get(each, {}) for fqn, each in stand_ins.items()}
    finally:
        for each in stand_ins.values():
            optimizer.state.pop(each, None)
        for group, options in zip(optimizer.param_groups, before, strict=True):
            group.clear()
            group.update(options)


def _is_own(optimizer: Optimizer, hook: Any) -> bool:
    """Whether a hook is a part of the optimizer. Users' hooks know the real parameters only."""
    module = getattr(hook, "__module__", None) or ""
    is_ours = module == type(optimizer).__module__ or module.startswith("vescale_fsdp.optim.")
    return is_ours or getattr(hook, "__self__", None) is optimizer


def _differ(a: dict[str, Any], b: dict[str, Any]) -> bool:
    if a.keys() != b.keys():
        return True
    return any(
        not (torch.is_tensor(b[key]) and torch.equal(value, b[key]))
        if torch.is_tensor(value)
        else value != b[key]
        for key, value in a.items()
    )


class Snapshot:
    """A copy of an optimizer's states and options, without the elements of its tensors."""

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
        self._state = {key: _copied(each) for key, each in optimizer.state.items()}
        self._groups = [dict(group) for group in optimizer.param_groups]

    def restore(self) -> None:
        """Undo `NamedOptimizer.make_states` and `NamedOptimizer.load`."""
        state = self._optimizer.state
        for key in [key for key in state if key not in self._state]:
            del state[key]
        for key, each in self._state.items():
            state[key] = each
        for group, before in zip(self._optimizer.param_groups, self._groups, strict=True):
            group.clear()
            group.update(before)


def _copied(state: Any) -> Any:
    return dict(state) if isinstance(state, dict) else state


def members_of(optimizer: Optimizer) -> list[Optimizer]:
    """The members of an `OptimizerGroup`, or the optimizer itself."""
    members = getattr(optimizer, "members", None)
    return members() if callable(members) else [optimizer]

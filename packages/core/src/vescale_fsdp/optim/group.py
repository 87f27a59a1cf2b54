"""OptimizerGroup: several optimizers as one object; and which parameters go to which.

Trainers, schedulers and checkpoints expect one optimizer. Its parameter groups are those of its
members (the same dicts), so a scheduler that sets a learning rate sets the member's.

`split_named_params` separates the matrices of hidden layers from all other parameters. Optimizers
such as Muon are for matrices that map one hidden vector to another. Embeddings and heads have one
row per token, and element-wise optimizers suit them better.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from typing import Any, NamedTuple, overload

import torch
from torch import nn
from torch.optim import Optimizer

from vescale_fsdp.engine import HEADS, may_be_hidden


class OptimizerGroup(Optimizer):
    """Several optimizers that step together, each on its own parameters.

    ::

        hidden, rest = split_named_params(model)
        optimizer = OptimizerGroup(muon=Muon(hidden, lr=0.02), adamw=AdamW(rest, lr=3e-4))

    ``param_groups`` are those of the members, one after the other, and ``state`` shows their
    states. State dicts have the form of torch's, with parameters numbered in that order, and so
    ``torch.distributed.checkpoint`` saves and reshards them by name. Hooks that are registered
    here run around the step of all members; the members' own run as well.

    ``defaults`` are the options that all members have, with the first one's values. ``OneCycleLR``
    reads the momentum there: if members name it differently, pass ``cycle_momentum=False``.

    Args:
        optimizers: a mapping of names, or the members in order, which are named "0", "1", ...
        named: more members, by name.

    Raises:
        TypeError: a member is not a ``torch.optim.Optimizer``.
        ValueError: there is no optimizer, or a parameter is in two of them.
    """

    def __init__(
        self,
        optimizers: Mapping[str, Optimizer] | Iterable[Optimizer] = (),
        /,
        **named: Optimizer,
    ) -> None:
        if isinstance(optimizers, Optimizer):
            raise TypeError(
                f"OptimizerGroup got {type(optimizers).__name__}, expected a list or a mapping of "
                "names or keywords; write OptimizerGroup(muon=Muon(...), adamw=AdamW(...))"
            )
        if not isinstance(optimizers, Mapping):
            optimizers = {str(index): each for index, each in enumerate(optimizers)}
        self.optimizers = {**optimizers, **named}
        _check(self.optimizers)
        # Makes the hooks that Optimizer's constructor would make.
        super().__setstate__({})

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizers": self.optimizers}

    def members(self) -> list[Optimizer]:
        """The optimizers, in order; of a group in this one its members."""
        return [
            member
            for each in self.optimizers.values()
            for member in (each.members() if isinstance(each, OptimizerGroup) else [each])
        ]

    # Attributes of an optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all members. The list is new, the groups are the members' own."""
        return [group for each in self.optimizers.values() for group in each.param_groups]

    @property
    def state(self) -> MutableMapping[Any, Any]:  # type: ignore[override]
        """The states of all members by parameter; writes change the member's state.

        It is false while a member has none, and those of the others are new. Then torch's
        ``get_optimizer_state_dict`` makes them, in a step on zeros, as for one optimizer: ours have
        theirs from the beginning, and it would take the group for one that has all.
        """
        return _States(self.optimizers)

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The options that all members have."""
        first, *others = (each.defaults for each in self.optimizers.values())
        shared = {key: v for key, v in first.items() if all(key in each for each in others)}
        return {"differentiable": False, **shared}

    # Steps

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step with each member. ``closure``, if given, is called once, before the first.

        Returns:
            The result of the closure.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for each in self.optimizers.values():
            each.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters, as in torch."""
        for each in self.optimizers.values():
            each.zero_grad(set_to_none=set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused, because the call does not name a member.

        Raises:
            ValueError: always.
        """
        names = ", ".join(map(repr, self.optimizers))
        raise ValueError(
            "OptimizerGroup.add_param_group does not know which optimizer the parameters are for; "
            f"call group.optimizers[name].add_param_group(...) with one of {names}"
        )

    # State dicts

    def state_dict(self) -> dict[str, Any]:
        """One state dict for all members."""
        for pre_hook in self._optimizer_state_dict_pre_hooks.values():
            pre_hook(self)
        state: dict[Any, Any] = {}
        groups: list[dict[str, Any]] = []
        num_params = 0
        for each in self.optimizers.values():
            part = each.state_dict()
            keys = [key for group in part["param_groups"] for key in group["params"]]
            number = {key: num_params + index for index, key in enumerate(keys)}
            state |= {number.get(key, key): value for key, value in part["state"].items()}
            for group in part["param_groups"]:
                groups.append({**group, "params": [number[key] for key in group["params"]]})
            num_params += len(keys)
        state_dict: dict[str, Any] = {"state": state, "param_groups": groups}
        for post_hook in self._optimizer_state_dict_post_hooks.values():
            changed = post_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        return state_dict

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load each member's part, by the order of the groups.

        Raises:
            ValueError: the number of groups differs.
        """
        state_dict = state_dict.copy()
        for pre_hook in self._optimizer_load_state_dict_pre_hooks.values():
            changed = pre_hook(self, state_dict)
            state_dict = state_dict if changed is None else changed
        groups, state = state_dict["param_groups"], state_dict["state"]
        expected = {name: len(each.param_groups) for name, each in self.optimizers.items()}
        if len(groups) != sum(expected.values()):
            raise ValueError(
                f"the loaded state dict has {len(groups)} parameter groups, the OptimizerGroup has "
                f"{sum(expected.values())}, by optimizer: {expected}"
            )
        start = 0
        for each in self.optimizers.values():
            part = groups[start : start + len(each.param_groups)]
            start += len(part)
            keys = [key for group in part for key in group["params"]]
            mine = {key: state[key] for key in keys if key in state}
            each.load_state_dict({"state": mine, "param_groups": part})
        for post_hook in self._optimizer_load_state_dict_post_hooks.values():
            post_hook(self)


class _States(MutableMapping[Any, Any]):
    """The states of several optimizers as one mapping."""

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        self._members = list(optimizers.values())

    def __bool__(self) -> bool:
        have = [each for each in self._members if each.state]
        are_new = all(getattr(each, "is_fresh", False) for each in have)
        return bool(have) and not (are_new and len(have) < len(self._members))

    def _states_with(self, key: Any) -> MutableMapping[Any, Any]:
        for each in self._members:
            if key in each.state:
                return each.state
        for each in self._members:
            if any(key is param for group in each.param_groups for param in group["params"]):
                return each.state
        raise KeyError(key)

    def __getitem__(self, key: Any) -> Any:
        return self._states_with(key)[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        self._states_with(key)[key] = value

    def __delitem__(self, key: Any) -> None:
        del self._states_with(key)[key]

    def __contains__(self, key: object) -> bool:
        return any(key in each.state for each in self._members)

    def __iter__(self) -> Iterator[Any]:
        return (key for each in self._members for key in list(each.state))

    def __len__(self) -> int:
        return sum(len(each.state) for each in self._members)


def _check(optimizers: Mapping[str, Optimizer]) -> None:
    if not optimizers:
        raise ValueError("OptimizerGroup got no optimizer; pass a mapping of names to optimizers")
    owners: dict[int, str] = {}
    for name, each in optimizers.items():
        if not isinstance(each, Optimizer):
            raise TypeError(
                f"OptimizerGroup: {name!r} is {type(each).__name__}, expected a torch.optim."
                "Optimizer"
            )
        for index, group in enumerate(each.param_groups):
            names = group.get("param_names") or [""] * len(group["params"])
            for position, param in enumerate(group["params"]):
                if id(param) in owners:
                    title = repr(names[position]) if names[position] else f"parameter {position}"
                    raise ValueError(
                        f"OptimizerGroup: {title} of shape {tuple(param.shape)}, in group {index} "
                        f"of {name!r}, is in {owners[id(param)]!r} already; give each parameter to "
                        "one optimizer"
                    )
                owners[id(param)] = name


NamedParams = list[tuple[str, nn.Parameter]]


def split_named_params(
    model: nn.Module, *, is_hidden: Callable[[str, nn.Parameter], bool | None] | None = None
) -> tuple[NamedParams, NamedParams]:
    """The usual split for Muon: matrices of hidden layers, and all other parameters.

    ::

        hidden, rest = split_named_params(model)
        optimizer = OptimizerGroup(muon=Muon(hidden), adamw=AdamW(rest))

    The rest has, in this order of rules:

    1. parameters without two dimensions of more than one element: biases, norms, scales, tokens;
    2. parameters that are not floating-point;
    3. parameters of embeddings, convolutions and norms, also if another module uses them too
       (a head that is tied to an embedding);
    4. parameters with a word in their name that begins with ``emb`` or ``position``, or is ``wte``
       or ``wpe``;
    5. heads outside of repeated blocks: linear layers with one row for each entry of an
       embedding, and parameters in a module named classifier, head, lm_head, logits, output, score
       or unembed;
    6. if these rules find no head: the last ``nn.Linear``, if outside of repeated blocks.

    All others are hidden: matrices, fused or not, and stacks of them, such as weights of experts.
    A repeated block is a member of a ``ModuleList``, ``ModuleDict`` or ``Sequential`` that has
    several of its class, other than ``nn.Linear``.

    Args:
        model: before or after `fully_shard`; the result has the same names in it.
        is_hidden: decides by name and parameter, before the rules; if it returns None, the rules
            decide.

    Returns:
        (name, parameter) pairs of the hidden matrices and of the rest, together those of
        ``model.named_parameters()``: tied parameters once, frozen ones too.
    """
    sites = list(_sites(model))
    heads = {id(site.param) for site in _heads(model, sites)}
    by_param: dict[int, list[_Site]] = {}
    for site in sites:
        by_param.setdefault(id(site.param), []).append(site)
    hidden: NamedParams = []
    rest: NamedParams = []
    for name, param in model.named_parameters():
        answer = None if is_hidden is None else is_hidden(name, param)
        if answer is None:
            answer = id(param) not in heads and all(map(_may_be_hidden, by_param[id(param)]))
        (hidden if answer else rest).append((name, param))
    return hidden, rest


class _Site(NamedTuple):
    """A use of a parameter. Tied ones have several."""

    parts: list[str]  # of its name in this module
    param: nn.Parameter
    module: nn.Module
    is_in_block: bool


def _sites(
    module: nn.Module, parts: tuple[str, ...] = (), in_block: bool = False
) -> Iterator[_Site]:
    for name, param in module.named_parameters(recurse=False, remove_duplicate=False):
        yield _Site([*parts, name], param, module, in_block)
    counts = Counter(map(type, module.children()))
    is_container = isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential)
    for name, child in module._modules.items():
        if child is not None:
            is_alike = is_container and counts[type(child)] > 1 and not isinstance(child, nn.Linear)
            yield from _sites(child, (*parts, name), in_block or is_alike)


def _may_be_hidden(site: _Site) -> bool:
    return may_be_hidden(site.parts, site.param, site.module)


def _heads(model: nn.Module, sites: list[_Site]) -> list[_Site]:
    vocabularies = {
        module.num_embeddings
        for module in model.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag)
    }
    outside = [site for site in sites if not site.is_in_block]
    found = [site for site in outside if not HEADS.isdisjoint(site.parts)]
    linear = [site for site in outside if isinstance(site.module, nn.Linear)]
    found += [site for site in linear if site.param.shape[0] in vocabularies]
    if found:
        return found
    modules = [module for module in model.modules() if isinstance(module, nn.Linear)]
    return [site for site in linear if site.module is modules[-1]]

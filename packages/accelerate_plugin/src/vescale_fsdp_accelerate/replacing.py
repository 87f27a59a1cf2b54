"""``fsdp_vescale_optimizer``: replaces the optimizer of an unchanged script.

The script makes its AdamW with groups, learning rates and a schedule. `Replacement` has the same
groups for schedulers and trainers, but steps with other optimizers: hidden matrices with the
optimizer of the yaml, all other parameters with ``torch.optim.AdamW``; or all parameters with
``adamw8bit``. Each step uses the current learning rates of the script.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import AdamW, Optimizer

from vescale_fsdp.optim import SOAP, AdamW8bit, Muon, OptimizerGroup, Shampoo, split_named_params
from vescale_fsdp_accelerate.options import PREFIX

__all__ = ["Replacement", "granularity_for", "refuse_whole", "replacement_for"]

_log = logging.getLogger(__name__)

_MATRIX: dict[str, type[Optimizer]] = {"muon": Muon, "shampoo": Shampoo, "soap": SOAP}
# With this option steps have the length of AdamW's, so the script's learning rates fit.
_DEFAULTS: dict[str, dict[str, Any]] = {"muon": {"adjust_lr_fn": "match_rms_adamw"}}
_TAKEN_OVER = ("betas", "eps", "weight_decay")

# Optimizers that need full tensors, by package and class: why, and which of ours to use instead.
_BITSANDBYTES = "its kernels take plain tensors"
_FACTORS = "it takes means over the rows and columns of whole matrices"
_PROJECTS = "it projects the gradients of whole matrices to a lower rank"
_IN_BACKWARD = "it changes whole parameters in the middle of backward, by hooks on them"
_NEED_WHOLE: dict[tuple[str, str | None], tuple[str, str, str]] = {
    ("bitsandbytes", None): (_BITSANDBYTES, "adamw8bit", "AdamW8bit"),
    ("transformers", "Adafactor"): (_FACTORS, "adamw8bit", "AdamW8bit"),
    # Of TrainingArguments(optim=...): apollo_adamw, galore_adamw and the like, lomo and adalomo.
    ("apollo_torch", None): (_PROJECTS, "adamw8bit", "AdamW8bit"),
    ("galore_torch", None): (_PROJECTS, "adamw8bit", "AdamW8bit"),
    ("lomo_optim", None): (_IN_BACKWARD, "adamw8bit", "AdamW8bit"),
}


class Replacement(Optimizer):
    """An optimizer with the groups of ``theirs`` that steps with ``inner``.

    Args:
        theirs: the script's optimizer.
        inner: the optimizer that steps.
        links: for each group of ``inner`` the group of ``theirs`` that sets its learning rate, and
            the ratio of the two learning rates.
    """

    def __init__(
        self, theirs: Optimizer, inner: Optimizer, links: Sequence[tuple[dict[str, Any], float]]
    ) -> None:
        self.theirs, self.inner, self._links = theirs, inner, list(links)
        super().__setstate__({})  # makes the hooks that Optimizer's constructor would make

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The script's groups, whose options schedulers change."""
        return self.theirs.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The states of ``inner``."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The defaults of the script's optimizer."""
        return self.theirs.defaults

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step with the current learning rates of the script's groups."""
        self.follow()
        self.theirs._opt_called = True  # type: ignore[attr-defined]  # schedulers look at it
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients."""
        self.inner.zero_grad(set_to_none)

    def follow(self) -> None:
        """Copy the learning rates of the script's groups to ``inner``."""
        for group, (theirs, ratio) in zip(self.inner.param_groups, self._links, strict=True):
            group["lr"] = theirs["lr"] * ratio

    def lead(self) -> None:
        """Copy the learning rates of ``inner`` to the script's groups."""
        for group, (theirs, ratio) in zip(self.inner.param_groups, self._links, strict=True):
            theirs["lr"] = group["lr"] / ratio

    def state_dict(self) -> dict[str, Any]:
        """Return the state dict of ``inner``."""
        self.follow()
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self.inner.load_state_dict(state_dict)
        self.lead()


def granularity_for(name: str | None, args: Mapping[str, Any]) -> Any:
    """Return the granularity that an optimizer of the yaml needs. None: it needs none."""
    if name == "adamw8bit":
        known = {key: args[key] for key in ("block_size", "min_8bit_size") if key in args}
        return AdamW8bit.granularity(**known)
    if name == "shampoo" and args.get("mode", "local") == "local":
        known = {key: args[key] for key in ("block_size",) if key in args}
        return Shampoo.granularity(**known)
    return None


def replacement_for(
    theirs: Optimizer, models: Sequence[nn.Module], name: str, args: Mapping[str, Any]
) -> Replacement:
    """Make the replacement of the script's optimizer, whose parameters are sharded.

    Raises:
        ValueError: a parameter belongs to no prepared model, or the optimizer does not accept an
            argument.
    """
    hidden, names = _split(models)
    given = dict(args)
    own_rate = given.pop("lr", None)
    matrices: list[dict[str, Any]] = []
    rest: list[dict[str, Any]] = []
    links: dict[str, list[tuple[dict[str, Any], float]]] = {"matrices": [], "rest": []}
    for group in theirs.param_groups:
        strangers = sum(id(param) not in names for param in group["params"])
        if strangers:
            raise ValueError(
                f"{PREFIX}optimizer: {strangers} parameters of {type(theirs).__name__} belong to "
                "no prepared model; prepare the model with its optimizer, or before it"
            )
        base = group.get("initial_lr", group["lr"])
        ratio = 1.0 if own_rate is None else own_rate / base
        parts: tuple[list[Any], list[Any]] = ([], [])
        for param in group["params"]:
            is_rest = name != "adamw8bit" and id(param) not in hidden
            parts[is_rest].append((names[id(param)], param))
        for params, made, key in zip(parts, (matrices, rest), links, strict=True):
            if params:
                scale = ratio if key == "matrices" else 1.0
                made.append(
                    {"params": params, "lr": group["lr"] * scale, **_options(group, name, key)}
                )
                links[key].append((group, scale))
    members: dict[str, Optimizer] = {}
    if matrices:
        members[name] = _make(name, matrices, given)
    if rest:
        members["adamw"] = AdamW(rest)
    if dist.get_rank() == 0:
        counts = [sum(len(group["params"]) for group in made) for made in (matrices, rest)]
        _log.warning(
            "%soptimizer: %s trains %d parameters instead of %s, AdamW the other %d",
            *(PREFIX, name, counts[0], type(theirs).__name__, counts[1]),
        )
    return Replacement(theirs, OptimizerGroup(members), [*links["matrices"], *links["rest"]])


def refuse_whole(optimizer: Optimizer) -> None:
    """Raise for optimizers that cannot step on sharded parameters.

    Raises:
        ValueError: names the optimizer, and one of ours to use instead.
    """
    cls = type(optimizer)
    package = cls.__module__.partition(".")[0]
    reason = _NEED_WHOLE.get((package, cls.__name__)) or _NEED_WHOLE.get((package, None))
    params = [param for group in optimizer.param_groups for param in group["params"]]
    placements = {p for param in params if isinstance(param, DTensor) for p in param.placements}
    takes_whole = package != "bitsandbytes"  # of which each rank has all
    if reason is None or all(takes_whole and p.is_replicate() for p in placements):
        return
    why, name, ours = reason
    raise ValueError(
        f"prepare got {cls.__name__} of {package}, which does not step on sharded parameters: "
        f"{why}. Set fsdp_vescale_optimizer: {name} in the yaml, or "
        f"VeScaleFSDPPlugin(optimizer={name!r}), which replaces the script's optimizer; or make a "
        f"vescale_fsdp.optim.{ours}"
    )


def _split(models: Sequence[nn.Module]) -> tuple[set[int], dict[int, str]]:
    hidden: set[int] = set()
    names: dict[int, str] = {}
    for model in models:
        for part, is_hidden in zip(split_named_params(model), (True, False), strict=True):
            for name, param in part:
                names.setdefault(id(param), name)
                if is_hidden:
                    hidden.add(id(param))
    return hidden, names


def _options(group: Mapping[str, Any], name: str, key: str) -> dict[str, Any]:
    """Return the options of a script's group that the other optimizer also has."""
    if key == "matrices" and name != "adamw8bit":
        return {"weight_decay": group["weight_decay"]} if "weight_decay" in group else {}
    taken = {option: group[option] for option in _TAKEN_OVER if option in group}
    if isinstance(taken.get("eps"), tuple):  # Adafactor's eps has another meaning
        del taken["eps"]
    return taken


def _make(name: str, groups: list[dict[str, Any]], args: Mapping[str, Any]) -> Optimizer:
    cls: Any = _MATRIX.get(name, AdamW8bit)
    args = {**_DEFAULTS.get(name, {}), **args}
    if "weight_decay" in args:
        groups = [{k: v for k, v in group.items() if k != "weight_decay"} for group in groups]
    if "betas" in args:
        args["betas"] = tuple(args["betas"])
        groups = [{k: v for k, v in group.items() if k != "betas"} for group in groups]
    try:
        made: Optimizer = cls(groups, **args)
    except TypeError as error:
        raise ValueError(f"{PREFIX}optimizer_args: {name} refuses them: {error}") from error
    return made

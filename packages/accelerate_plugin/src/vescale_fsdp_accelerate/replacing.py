"""``fsdp_vescale_optimizer``: another optimizer in the place of the script's, unknown to it.

The script makes its AdamW, with its groups, rates and schedule. `Replacement` shows schedulers and
trainers those groups, and steps with others: the hidden matrices with the optimizer of the yaml,
the rest with ``torch.optim.AdamW``, or all with ``adamw8bit``. At each step they follow the
script's learning rates.
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
# Learning rates of AdamW fit: a step has the length of one of AdamW's.
_DEFAULTS: dict[str, dict[str, Any]] = {"muon": {"adjust_lr_fn": "match_rms_adamw"}}
_TAKEN_OVER = ("betas", "eps", "weight_decay")

# Optimizers that need whole tensors, by package and class: why, and which of ours to take instead.
_BITSANDBYTES = "its kernels take plain tensors"
_FACTORS = "it takes means over the rows and columns of whole matrices"
_NEED_WHOLE: dict[tuple[str, str | None], tuple[str, str, str]] = {
    ("bitsandbytes", None): (_BITSANDBYTES, "adamw8bit", "AdamW8bit"),
    ("torch", "Adafactor"): (_FACTORS, "adamw8bit", "AdamW8bit"),
    ("transformers", "Adafactor"): (_FACTORS, "adamw8bit", "AdamW8bit"),
    ("torch", "Muon"): ("it orthogonalizes whole matrices", "muon", "Muon"),
}


class Replacement(Optimizer):
    """Steps with ``inner``, and shows the groups of ``theirs``.

    Args:
        theirs: the script's optimizer.
        inner: what steps.
        links: of each group of ``inner``: the group of ``theirs`` that it follows, and its learning
            rate in parts of that one's.
    """

    def __init__(
        self, theirs: Optimizer, inner: Optimizer, links: Sequence[tuple[dict[str, Any], float]]
    ) -> None:
        self.theirs, self.inner, self._links = theirs, inner, list(links)
        super().__setstate__({})  # what Optimizer's own constructor makes besides groups: hooks

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The script's groups, whose options schedulers change."""
        return self.theirs.param_groups

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The states of what steps."""
        return self.inner.state

    @property
    def defaults(self) -> dict[str, Any]:  # type: ignore[override]
        """The script's."""
        return self.theirs.defaults

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Step, with the learning rates that the script's groups have now."""
        self.follow()
        self.theirs._opt_called = True  # type: ignore[attr-defined]  # schedulers look at it
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset all gradients."""
        self.inner.zero_grad(set_to_none)

    def follow(self) -> None:
        """Take over the learning rates of the script's groups."""
        for group, (theirs, ratio) in zip(self.inner.param_groups, self._links, strict=True):
            group["lr"] = theirs["lr"] * ratio

    def lead(self) -> None:
        """Give the script's groups the learning rates that were loaded."""
        for group, (theirs, ratio) in zip(self.inner.param_groups, self._links, strict=True):
            theirs["lr"] = group["lr"] / ratio

    def state_dict(self) -> dict[str, Any]:
        """That of what steps."""
        self.follow()
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned."""
        self.inner.load_state_dict(state_dict)
        self.lead()


def granularity_for(name: str | None, args: Mapping[str, Any]) -> Any:
    """What must not be cut for an optimizer of the yaml."""
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
    """An optimizer by its name, for the parameters of the script's, which are sharded.

    Raises:
        ValueError: a parameter is of no prepared model, or an argument is not one of that
        optimizer.
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
    """Raise for optimizers that do not step on sharded parameters.

    Raises:
        ValueError: names the optimizer, and the one of ours for its place.
    """
    cls = type(optimizer)
    package = cls.__module__.partition(".")[0]
    reason = _NEED_WHOLE.get((package, cls.__name__)) or _NEED_WHOLE.get((package, None))
    params = (param for group in optimizer.param_groups for param in group["params"])
    if reason is None or not any(isinstance(param, DTensor) for param in params):
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
    """Of a script's group, what means the same in the other optimizer."""
    if key == "matrices" and name != "adamw8bit":
        return {"weight_decay": group["weight_decay"]} if "weight_decay" in group else {}
    taken = {option: group[option] for option in _TAKEN_OVER if option in group}
    if isinstance(taken.get("eps"), tuple):  # Adafactor's, which mean something else
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

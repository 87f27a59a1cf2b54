"""What a process has that no saved state contains: modes of modules, and gradients that wait.

A process that goes on after a loss keeps its modules. The step that failed may have left them in
another mode, for example in the middle of an evaluation, or between ``requires_grad_(False)`` and
``requires_grad_(True)``.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import nn

from vescale_fsdp.spi import unreduced_parameters
from vescale_fsdp_elastic.counting import StepCounter

__all__ = ["ModesBySteps", "gradients_wait", "put"]


class _Modes:
    """``training`` of modules and ``requires_grad`` of parameters, as they are now.

    Args:
        roots: of the modules.
    """

    def __init__(self, roots: Iterable[nn.Module]) -> None:
        self._roots = list(roots)
        self._training = {m: m.training for root in self._roots for m in root.modules()}
        # By module and name: others are registered while parameters are unsharded by hand.
        self._flags = {
            (root, name): param.requires_grad
            for root in self._roots
            for name, param in root.named_parameters()
        }

    def is_as(self, other: _Modes) -> bool:
        """Whether nothing differs."""
        return self._training == other._training and self._flags == other._flags

    def restore(self) -> None:
        """Set them again. Modules and parameters that are new since are left alone."""
        for module, training in self._training.items():
            module.training = training
        for root in self._roots:
            for name, param in root.named_parameters():
                if param.requires_grad != self._flags.get((root, name), param.requires_grad):
                    param.requires_grad_(not param.requires_grad)


class ModesBySteps:
    """The modes after each step whose state was saved. Memory: those that differ.

    Args:
        roots: of the modules.
        step: the one that they are at now.
    """

    def __init__(self, roots: Sequence[nn.Module], step: int) -> None:
        self._roots = roots
        self._changes = [(step, _Modes(roots))]

    def note(self, step: int) -> None:
        """Remember the modes after ``step`` steps."""
        now = _Modes(self._roots)
        if not now.is_as(self._changes[-1][1]):
            self._changes.append((step, now))

    def restore(self, step: int) -> None:
        """Set the modes that were noted last, up to ``step``."""
        while len(self._changes) > 1 and self._changes[-1][0] > step:
            del self._changes[-1]
        self._changes[-1][1].restore()


def gradients_wait(roots: Sequence[nn.Module], counter: StepCounter, since: Sequence[int]) -> bool:
    """Whether gradients wait for a step of an optimizer that comes later.

    Args:
        since: the `counts` of the optimizers' steps when the last step of the loop began.
    """
    if all(now != before for now, before in zip(counter.counts, since, strict=True)):
        return False
    unreduced = {id(param) for root in roots for param in unreduced_parameters(root)}
    if counter.counts != since:
        return counter.is_one_awaited(since, unreduced)
    # None has made one. With `flatten_` an optimizer has other parameters than the modules.
    params = [param for root in roots for param in root.parameters()]
    return bool(unreduced) or any(param.grad is not None for param in params)


def put(target: dict[str, Any], values: Mapping[str, Any]) -> None:
    """Give a dict these entries. Dicts and lists in it stay the same objects, as a loop holds them.

    ::

        losses = run.extra.setdefault("losses", [])     before the loop; appended to in each step
    """
    for key in target.keys() - values.keys():
        del target[key]
    for key, value in values.items():
        held = target.get(key)
        if isinstance(held, dict) and isinstance(value, Mapping):
            put(held, value)
        elif isinstance(held, list) and isinstance(value, list):
            held[:] = value
        else:
            target[key] = value

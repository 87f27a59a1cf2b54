"""What rounding has taken from the gradients of this rank, for checkpoints.

With ``QuantizedReduce(error_feedback=True)`` each rank adds it to its next gradients, so a run goes
on with the same bits only if it is kept. It is about this rank's own gradients, in the shapes of
whole parameters: no other rank has it, and another number of ranks has no use for it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from vescale_fsdp import compat
from vescale_fsdp.engine.reduce import Gradients
from vescale_fsdp.engine.residuals import Residuals
from vescale_fsdp.engine.slot import Slot
from vescale_fsdp.engine.unit import units_in


class ErrorFeedback:
    """That of one model on this rank.

    Args:
        model: of which some modules are sharded.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = {id(module): name for name, module in model.named_modules()}

        def name_of(slot: Slot) -> str:
            names = [(modules.get(id(ref())), name) for ref, name in slot.sites]
            module, name = next(pair for pair in names if pair[0] is not None)
            return compat.fqn_of(model, f"{module}.{name}" if module else name)

        groups = [group for unit in units_in(model).values() for group in unit.groups]
        self._named: list[tuple[Gradients, dict[str, torch.Size]]] = [
            (group.gradients, {name_of(slot): slot.shape for slot in group.slots})
            for group in groups
            if group.gradients.has_feedback
        ]

    def __bool__(self) -> bool:
        """Whether any parameter has it."""
        return bool(self._named)

    def tensors(self) -> dict[str, torch.Tensor]:
        """By parameter, float32, [its shape]: what there is. None before a reduction.

        Views where nothing is frozen, else perhaps copies; none of frozen parameters.
        """
        return {
            list(names)[index]: error
            for gradients, names in self._named
            for index, error in gradients.residual_of().items()
        }

    def fits(self, shapes: Mapping[str, torch.Size]) -> bool:
        """Whether these are shapes that its parameters have."""
        own = {name: shape for _, named in self._named for name, shape in named.items()}
        return all(own.get(name, shape) == shape for name, shape in shapes.items())

    def replace(self, saved: Mapping[str, torch.Tensor]) -> list[Residuals]:
        """Go on with other values; zero for parameters that have none.

        Returns:
            What there was, for `restore`.

        Cost: memory for as much as there is already.
        """
        return [
            gradients.replace_residuals([saved.get(name) for name in names])
            for gradients, names in self._named
        ]

    def restore(self, before: list[Residuals]) -> None:
        """Undo `replace`."""
        for (gradients, _), residuals in zip(self._named, before, strict=True):
            gradients.residuals = residuals

"""One process that rounds its own weights: what quantized gathers and reductions must equal."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_fsdp.ragged.blocks import BlockSize

from ..dbuffer.rounding import rounded

Rounds = Callable[[str, nn.Parameter], tuple[str, BlockSize] | None]  # how a parameter is rounded


def hidden_matrices(dtype: str, size: BlockSize) -> Rounds:
    """Those of `TinyGPT` and `MLP` that are rounded if nobody says otherwise."""

    def rounds(name: str, param: nn.Parameter) -> tuple[str, BlockSize] | None:
        is_hidden = name.startswith(("blocks.", "layers.")) and param.dim() > 1
        return (dtype, size) if is_hidden else None

    return rounds


class StraightThrough:
    """A plain model of which copies with rounded weights are run.

    Args:
        model: has the exact weights, and gets the gradients.
        rounds: says which weights are rounded, and how.
        dtype: of forward and backward.
        reduces: says which gradients are rounded before they are summed; they are rounded on
            each rank.
        corrects: whether what that takes is added to the next gradients.
    """

    def __init__(
        self,
        model: nn.Module,
        rounds: Rounds,
        dtype: torch.dtype = torch.float32,
        reduces: Rounds | None = None,
        corrects: bool = False,
    ) -> None:
        self.model, self._rounds, self._dtype = model, rounds, dtype
        self._reduces, self._corrects = reduces, corrects
        self._errors: dict[str, Tensor] = {}

    def rounded(self) -> nn.Module:
        """The copy that computes."""
        twin = copy.deepcopy(self.model)
        with torch.no_grad():
            for name, param in twin.named_parameters():
                how = self._rounds(name, param)
                if how is not None:
                    param.copy_(rounded(param, *how))
                param.data = param.data.to(self._dtype)
        return twin

    def backward(self, losses: Sequence[Callable[[nn.Module], Tensor]]) -> float:
        """The gradients of the sum of some losses, averaged over ranks; returns the last loss."""
        twin = self.rounded()
        own: dict[str, Tensor] = {}
        for loss_of in losses:
            twin.zero_grad()
            loss = loss_of(twin)
            loss.backward()
            for name, param in twin.named_parameters():
                if param.grad is not None:
                    grad = param.grad.float()
                    own[name] = own[name] + grad if name in own else grad
        for name, param in self.model.named_parameters():
            if name in own:
                param.grad = self._averaged(name, param, own[name])
        return loss.item()

    def _averaged(self, name: str, param: nn.Parameter, grad: Tensor) -> Tensor:
        how = None if self._reduces is None else self._reduces(name, param)
        if how is not None and dist.get_world_size() > 1:
            corrected = grad + self._errors.get(name, torch.zeros(()))
            grad = rounded(corrected, *how)
            if self._corrects:
                self._errors[name] = (corrected - grad).nan_to_num(0.0, 0.0, 0.0)
        parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, grad.contiguous())
        total = parts[0]
        for part in parts[1:]:  # in the order of ranks, as ours
            total = total + part
        return total * (1.0 / len(parts))

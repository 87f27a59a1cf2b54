"""The least memory of a step in which a whole unit is there while it runs.

An engine from a dream: it gathers a unit at once and from nowhere, before the unit's forward and
when a gradient has reached its outputs, and lets it go at once, the root too; each gradient is
reduced the moment that autograd has made it, and is gone. What is left is what no engine can be
without that gathers whole units, in forward and backward, into memory of their own: activations,
the unit that runs, the gradient that is being made, and the shards of parameters and of AdamW's
two states. (It keeps values where torch does not count them, and leaves out the batch.)

Where this is more than a target allows, the target cannot be met with these units.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from benchmarks.engines import Training
from benchmarks.inspection import inspect
from benchmarks.models import Batches, Preset
from torch import Tensor, nn

__all__ = ["NUM_SHARDS", "least_bytes", "units_of"]

NUM_SHARDS = 3  # that rest: of the parameters, and of AdamW's states


class _Fleeting:
    """A unit whose parameters are there while it runs."""

    def __init__(self, module: nn.Module, params: list[nn.Parameter]) -> None:
        self._params = params
        # Of clones: a storage that numpy has seen cannot be resized.
        self._values = [param.detach().clone().numpy().copy() for param in params]
        self._is_there = True
        self._num_awaited = 0
        self.release()
        for param in params:
            param.register_post_accumulate_grad_hook(self._drop)
        module.register_forward_pre_hook(lambda *_: self.gather())
        module.register_forward_hook(self._after_forward)

    def gather(self) -> None:
        if not self._is_there:
            for param, values in zip(self._params, self._values, strict=True):
                param.data.untyped_storage().resize_(param.nbytes)
                param.data.copy_(torch.from_numpy(values))
            self._is_there, self._num_awaited = True, len(self._params)

    def release(self) -> None:
        for param in self._params:
            param.data.untyped_storage().resize_(0)
        self._is_there = False

    def _after_forward(self, module: nn.Module, args: Any, output: Tensor) -> None:
        output.register_hook(lambda gradient: self.gather())
        self.release()

    def _drop(self, param: Tensor) -> None:
        param.grad = None
        self._num_awaited -= 1
        if not self._num_awaited:
            self.release()


def units_of(model: nn.Module) -> Iterator[tuple[nn.Module, list[nn.Parameter]]]:
    """The units that `engines` makes: each block, and the root with what is in none."""
    blocks: Any = model.blocks
    inner = {id(param) for param in blocks.parameters()}
    yield from ((block, list(block.parameters())) for block in blocks)
    yield model, [param for param in model.parameters() if id(param) not in inner]


def least_bytes(preset: Preset, num_ranks: int) -> tuple[int, int]:
    """Tensors at most in a step of this rank, and what rests of them between steps."""

    def make() -> Training:
        torch.manual_seed(0)
        model = preset.make()
        for module, params in units_of(model):
            _Fleeting(module, params)
        training = Training(model, [nn.Parameter(torch.zeros(1))], Batches(preset, rank=0))
        training.update = lambda: None  # type: ignore[method-assign]
        training.step()
        return training

    training, found = inspect(make)
    assert isinstance(training, Training), "it is what was made"
    size = sum(param.nbytes for param in training.model.parameters())
    resting = -(-NUM_SHARDS * size // num_ranks)
    return found.peak_bytes - found.resting_bytes + resting, resting

"""A lower bound for the memory of a step of any engine that unshards whole units.

It simulates an ideal engine: a unit is unsharded immediately before its forward and its backward,
and resharded immediately after, also the root. Each gradient is reduced and freed as soon as
autograd has computed it. What remains is needed by every engine that unshards whole units into
separate memory: activations, the current unit, the current gradient, and the shards of parameters
and of AdamW's two states. (It stores other values where torch does not count them, and the batch is
not counted.)

If this bound is above a target, the target cannot be met with these units.
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

NUM_SHARDS = 3  # between steps: of the parameters and of AdamW's two states


class _Fleeting:
    """A unit that is unsharded only while it runs."""

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
    """Yield the same units as in `engines`: each block, and the root with all other parameters."""
    blocks: Any = model.blocks
    inner = {id(param) for param in blocks.parameters()}
    yield from ((block, list(block.parameters())) for block in blocks)
    yield model, [param for param in model.parameters() if id(param) not in inner]


def least_bytes(preset: Preset, num_ranks: int) -> tuple[int, int]:
    """Return the peak of tensors in a step on this rank, and the bytes between steps."""

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

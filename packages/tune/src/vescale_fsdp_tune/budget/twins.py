"""Copies of modules to try things on: without values (meta), or on a device.

A forward may change a module: buffers, caches, counters. So a model is traced and timed on copies.
The module itself, its gradients, hooks and random generators do not change.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from vescale_fsdp.errors import PlanError
from vescale_fsdp.spi import devices, follows_statistics, map_tensors, pytree

_PATTERN = 1 << 20  # random elements, which are repeated
_STD = 0.02  # of weights without values
_DENSE = torch.contiguous_format


def meta_twin(module: nn.Module) -> nn.Module:
    """Return a copy on the meta device, in training mode. Cost: no memory for tensors."""
    return twin_of(module, lambda tensor: torch.empty_like(tensor, device="meta"))


def real_twin(
    module: nn.Module, device: torch.device, values: Values, left_out: Iterable[nn.Module] = ()
) -> nn.Module:
    """Return a copy on ``device``, in training mode. Tensors on meta get values of a usual size.

    Args:
        left_out: modules inside of it. Tensors that only they have are on meta in the copy.

    Cost: memory for all other tensors of the module.
    """
    there = {id(tensor) for tensor in tensors_of(module, left_out)}

    def make(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in there:
            return torch.empty_like(tensor, device="meta")
        return values.like(tensor, device)

    return twin_of(module, make)


def cast_parameters(module: nn.Module, dtype: torch.dtype | None) -> None:
    """Convert floating-point parameters to the dtype of compute, as an all-gather does."""
    for child in module.modules():
        for param in child.parameters(recurse=False):
            is_cast = param.is_floating_point() and not follows_statistics(child, param)
            if dtype is not None and is_cast:
                param.data = param.data.to(dtype)


def twin_of(module: nn.Module, make: Callable[[torch.Tensor], torch.Tensor]) -> nn.Module:
    """Return a copy whose tensors ``make`` has made, in training mode. Ties stay.

    Raises:
        PlanError: the module cannot be copied.
    """
    memo: dict[int, Any] = {}
    for tensor in tensors_of(module):
        memo[id(tensor)] = _in_place_of(tensor, make(tensor))
    try:
        twin = copy.deepcopy(module, memo)
    except Exception as error:  # of a __deepcopy__ or __getstate__ of the user's
        raise PlanError(
            f"fully_shard(budget=...) tries the model on a copy, and copy.deepcopy of "
            f"{type(module).__name__} raised {type(error).__name__}: {error}; leave Budget(inputs="
            ") out, or pass a written choice"
        ) from error
    return twin.train()


def tensors_of(module: nn.Module, left_out: Iterable[nn.Module] = ()) -> Iterator[torch.Tensor]:
    """Yield parameters, buffers, and tensors that are plain attributes, each once.

    Args:
        left_out: modules that are not looked into.
    """
    seen: set[int] = set()
    for each in _modules(module, {id(other) for other in left_out}):
        own = {key: value for key, value in vars(each).items() if key not in _SEEN_ANYWAY}
        for leaf in (
            *each._parameters.values(),
            *each._buffers.values(),
            *pytree.tree_leaves(own),
        ):
            if isinstance(leaf, torch.Tensor) and id(leaf) not in seen:
                seen.add(id(leaf))
                yield leaf


def _modules(module: nn.Module, seen: set[int]) -> Iterator[nn.Module]:
    if id(module) not in seen:
        seen.add(id(module))
        yield module
        for child in module.children():
            yield from _modules(child, seen)


_SEEN_ANYWAY = ("_parameters", "_buffers", "_modules")


def _in_place_of(tensor: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(made, requires_grad=tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad)


def cast(value: Any, dtype: torch.dtype | None) -> Any:
    """Convert the floating-point tensors in a value, as the engine does around units."""
    if dtype is None:
        return value
    return map_tensors(
        lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, value
    )


class Values:
    """Makes tensors on a device: copies, or plausible values for what is on the meta device.

    Weights are small normal numbers, vectors are ones, integers are within every embedding. It has
    a generator of its own.

    Args:
        limit: integers are below.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._patterns: dict[torch.device, torch.Tensor] = {}

    def like(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return a new tensor on ``device`` with the values of ``tensor``, or plausible ones."""
        if not tensor.is_meta:
            return tensor.detach().to(device, copy=True)
        made = torch.empty_like(tensor, device=device)
        if made.dim() < 2 and made.is_floating_point():
            return made.fill_(1)
        return self.fill(made, _STD)

    def fill(self, made: torch.Tensor, std: float = 1.0) -> torch.Tensor:
        """Fill a tensor without history."""
        if not made.is_contiguous():
            return made.copy_(self.fill(torch.empty_like(made, memory_format=_DENSE), std))
        if made.dtype == torch.bool:
            return made.fill_(True)
        if not (made.is_floating_point() or made.is_complex()):
            return made.random_(0, self._limit, generator=_generator(made.device))
        pattern = self._patterns.get(made.device)
        if pattern is None:
            pattern = torch.empty(_PATTERN, device=made.device)
            pattern.normal_(generator=_generator(made.device))
            self._patterns[made.device] = pattern
        flat = made.view(-1)
        whole = flat.numel() // _PATTERN * _PATTERN
        flat[:whole].view(-1, _PATTERN).copy_(pattern * std)
        flat[whole:].copy_(pattern[: flat.numel() - whole] * std)
        return made


def _generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(0)


def limit_of_integers(module: nn.Module) -> int:
    """Return the size of the smallest embedding or layer: integers below fit as any index."""
    sizes = [
        each.num_embeddings
        if isinstance(each, nn.Embedding | nn.EmbeddingBag)
        else each.out_features
        for each in module.modules()
        if isinstance(each, nn.Embedding | nn.EmbeddingBag | nn.Linear)
    ]
    return max(1, min(sizes, default=1))


@contextmanager
def untouched_generators(device: torch.device) -> Iterator[None]:
    """A context at whose end the random generators are as at its beginning."""
    numpy = sys.modules.get("numpy")
    states = random.getstate(), torch.get_rng_state(), devices.generator_state()
    of_numpy = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        if states[2] is not None:
            devices.set_generator_state(states[2])
        if numpy is not None:
            numpy.random.set_state(of_numpy)


def seed_generators() -> None:
    """Seed the host's generators, so that a model leaves out the same layers in all runs.

    On all ranks, too. Use it within `untouched_generators`.
    """
    random.seed(0)
    torch.default_generator.manual_seed(0)
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed(0)

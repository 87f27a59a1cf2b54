"""The budget of a model, with the inputs of a step from a data loader."""

from __future__ import annotations

import inspect
import random
import sys
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

if TYPE_CHECKING:
    from vescale_fsdp_tune import Budget

__all__ = ["budget_for", "inputs_from"]


def budget_for(
    value: Any, model: nn.Module, loaders: Iterable[Any], parts: int, micro_batches: int
) -> Budget | None:
    """Return the budget for a value of ``fsdp_vescale_budget``, or None.

    What a `Budget` of the user's has stays.

    Args:
        loaders: data loaders of the script; the first that has a batch for the model is used.
        parts: into which a batch is split for processes.
        micro_batches: forwards and backwards for each step of the optimizer.
    """
    if value is None:
        return None
    from vescale_fsdp_tune import Budget

    budget = Budget.of(value)
    if not isinstance(value, Budget):
        budget = replace(budget, micro_batches=micro_batches)
    if budget.inputs is None and budget.path is None:
        found = (inputs_from(loader, model, parts) for loader in loaders)
        budget = replace(budget, inputs=next((each for each in found if each is not None), None))
    return budget


def inputs_from(loader: Any, model: nn.Module, parts: int) -> Any:
    """Return the arguments of forward for a batch of a data loader, or None.

    The first elements of the data set are collated. The loader is not iterated, and random
    generators do not change. A mapping is keywords if forward takes all of them, and one argument
    if forward requires one. Of a sequence (inputs, targets), the first elements are those that
    forward requires.
    """
    if not isinstance(loader, DataLoader) or isinstance(loader.dataset, IterableDataset):
        return None
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if not size:
        return None
    indices = range(min(max(size // parts, 1), len(loader.dataset)))  # type: ignore[arg-type]
    with _untouched_generators():
        batch = loader.collate_fn([loader.dataset[index] for index in indices])
    return _arguments(batch, model)


def _arguments(batch: Any, model: nn.Module) -> Any:
    known = inspect.signature(model.forward).parameters.values()
    places = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    required = [each for each in known if each.kind in places and each.default is each.empty]
    if isinstance(batch, torch.Tensor):
        return batch
    if isinstance(batch, Mapping):
        takes_all = any(each.kind is each.VAR_KEYWORD for each in known)
        if takes_all or {each.name for each in known}.issuperset(batch):
            return dict(batch)
        return (batch,) if len(required) == 1 else None
    if isinstance(batch, list | tuple):
        return tuple(batch[: len(required)]) if 0 < len(required) <= len(batch) else None
    return None


@contextmanager
def _untouched_generators() -> Iterator[None]:
    numpy = sys.modules.get("numpy")
    states = random.getstate(), torch.get_rng_state()
    of_numpy = None if numpy is None else numpy.random.get_state()
    try:
        yield
    finally:
        random.setstate(states[0])
        torch.set_rng_state(states[1])
        if numpy is not None:
            numpy.random.set_state(of_numpy)

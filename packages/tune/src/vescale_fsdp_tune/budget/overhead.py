"""Measures the engine's own time on the processor, with small models that it trains.

The time of a step, without that of the same model unsharded, is linear in the numbers of forwards
and backwards of units, of collectives, and of gradients of parameters. Three models give the three
rates::

    4 units of 2 parameters    8 passes   12 collectives    8 gradients
    4 units of 16 parameters   8 passes   12 collectives   64 gradients
    4 units of 2, unsharded    8 passes    8 collectives    8 gradients

In a step of training, compute replaces what the processor's caches hold of the engine. So on CPUs
the models write to a large tensor before each unit, in forward and in backward.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from vescale_fsdp.spi import devices

_UNITS, _FEW, _MANY = 4, 2, 16
_PART = 1 << 13  # elements of a unit on each rank: more than what small units share messages for
_WARMUPS, _RUNS = 4, 12
_CACHE_BYTES = 4 << 20  # at least as much as one core has for itself


class EngineTimes(NamedTuple):
    """Seconds of the processor: see `vescale_fsdp_tune.costs.Machine`."""

    unit_s: float
    collective_s: float
    parameter_s: float


class _Product(nn.Module):
    def __init__(self, num_parameters: int, num_elements: int, device: torch.device) -> None:
        super().__init__()
        size = num_elements // num_parameters
        self.weights = nn.ParameterList(
            nn.Parameter(torch.ones(size, device=device)) for _ in range(num_parameters)
        )
        has_cache = not devices.has_streams(device)
        self._large = torch.zeros(_CACHE_BYTES if has_cache else 0, dtype=torch.uint8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:  # [1] -> [1]
        self._large.zero_()
        x.register_hook(self._after_backward)
        for weight in self.weights:
            x = x + weight[:1]
        return x

    def _after_backward(self, gradient: torch.Tensor) -> None:
        self._large.zero_()


def engine_times(shard: Callable[..., Any], num_ranks: int, device: torch.device) -> EngineTimes:
    """Measure. Collective.

    Args:
        shard: ``fully_shard`` on the job's mesh.
        num_ranks: of the mesh.
    """

    def made(num_parameters: int, **settings: Any) -> list[nn.Sequential]:
        """Two equal models: unsharded and sharded."""
        plain, sharded = (_model(num_parameters, num_ranks * _PART, device) for _ in range(2))
        for unit in sharded:
            shard(unit, **settings)
        shard(sharded)
        return [plain, sharded]

    kinds = [made(_FEW), made(_MANY), made(_FEW, reshard_after_forward=False)]
    few, many, kept = _extra_s(kinds, device)
    parameter_s = max(many - few, 0.0) / (_UNITS * (_MANY - _FEW))
    collective_s = max(few - kept, 0.0) / _UNITS
    unit_s = max(few / _UNITS - 3 * collective_s - _FEW * parameter_s, 0.0) / 2
    return EngineTimes(unit_s, collective_s, parameter_s)


def _extra_s(pairs: Sequence[Sequence[nn.Sequential]], device: torch.device) -> list[float]:
    """Return for each pair how much longer a step of the second takes. They run in turns."""
    models = [model for pair in pairs for model in pair]
    rounds = [[_step_s(model, device) for model in models] for _ in range(_WARMUPS + _RUNS)]
    times = [statistics.median(column) for column in zip(*rounds[_WARMUPS:], strict=True)]
    return [sharded - plain for plain, sharded in zip(times[::2], times[1::2], strict=True)]


def _model(num_parameters: int, num_elements: int, device: torch.device) -> nn.Sequential:
    return nn.Sequential(*(_Product(num_parameters, num_elements, device) for _ in range(_UNITS)))


def _step_s(model: nn.Module, device: torch.device) -> float:
    """Return the seconds of a forward and backward: of this thread, or until all is queued."""
    clock = time.perf_counter if devices.has_streams(device) else time.thread_time
    x = torch.ones(1, device=device, requires_grad=True)
    start = clock()
    model(x).sum().backward()
    seconds = clock() - start
    model.zero_grad(set_to_none=True)
    devices.synchronize(device)
    return seconds

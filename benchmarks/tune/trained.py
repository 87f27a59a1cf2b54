"""Trains with the settings of one candidate, as an engine for `benchmarks.team`."""

from __future__ import annotations

from functools import cache

import torch
from benchmarks.engines import NUM_WARM, POLICIES, Training
from benchmarks.models import Batches, Preset
from benchmarks.tune.candidates import parse
from torch.distributed.device_mesh import init_device_mesh

from vescale_fsdp import fully_shard
from vescale_fsdp_tune.budget.apply import apply

__all__ = ["make_engine"]


@cache
def _batches(preset: Preset, rank: int) -> Batches:
    """The data, made once: the peak of a step, counted with a second engine, has none of it."""
    return Batches(preset, rank)


def make_engine(name: str, preset: Preset, precision: str, rank: int, num_ranks: int) -> Training:
    """Shard as the candidate ``name`` says (`candidates.text_of`), and run the first steps."""
    torch.manual_seed(0)
    model = preset.make()
    mesh = init_device_mesh("cpu", (num_ranks,))
    apply(model, parse(name), fully_shard, mesh, POLICIES[precision])
    training = Training(model, list(model.parameters()), _batches(preset, rank))
    for _ in range(NUM_WARM):
        training.step()
    return training

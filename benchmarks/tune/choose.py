"""Asks ``fully_shard(model, budget=...)`` for each budget, as one rank of a job.

    torchrun --nproc-per-node 2 --module benchmarks.tune.choose gpt-7m choices.json

Before that, the candidates of the grid are predicted, with measurements of their own. The budgets
are computed from these predictions: *tight* is 2% above the smallest peak, *ample* 10% above the
largest, *middle* the geometric mean of the two. Each budget is then a call on a new model, which
measures again.
"""

from __future__ import annotations

import argparse
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.engines import POLICIES
from benchmarks.models import PRESETS, loss_of
from benchmarks.optimizers.results import write
from benchmarks.tune.candidates import grid, text_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from vescale_fsdp_tune import Budget, fully_shard, tuning_of
from vescale_fsdp_tune.budget.choose import choose as choose_settings
from vescale_fsdp_tune.budget.trials import Subject
from vescale_fsdp_tune.costs import Prediction, Tuning
from vescale_fsdp_tune.costs.predicting import Predictor

__all__ = ["BUDGETS"]

BUDGETS = ("tight", "middle", "ample")
ENOUGH = 1 << 36  # bytes


def choose(model_name: str, memory: int) -> tuple[Tuning, float]:
    """Shard a new model. Returns what was chosen, and the seconds that it took."""
    model, budget = _job(model_name, memory)
    dist.barrier()
    started = time.perf_counter()
    fully_shard(model, budget=budget)
    seconds = time.perf_counter() - started
    tuning = tuning_of(model)
    assert tuning is not None, "it has just chosen"
    return tuning, seconds


def predicted_grid(model_name: str) -> list[Prediction]:
    """Predict the candidates of the grid."""
    model, budget = _job(model_name, ENOUGH)
    subject = Subject(model, torch.device("cpu"), POLICIES["fp32"], budget)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    problem, _ = choose_settings(subject, mesh, fully_shard, lambda tensor: None, is_given=False)
    predictor = Predictor(problem)
    blocks: Any = model.blocks
    return [predictor.predict(each) for each in grid(len(blocks))]


def _job(model_name: str, memory: int) -> tuple[nn.Module, Budget]:
    preset = PRESETS[model_name]
    torch.manual_seed(0)
    model = preset.make()
    inputs, targets = preset.draw(torch.Generator().manual_seed(dist.get_rank()))
    loss = partial(_loss, targets)
    return model, Budget(memory=memory, inputs=inputs, loss=loss, optimizer="adamw_fused")


def _loss(targets: torch.Tensor, outputs: torch.Tensor) -> torch.Tensor:
    return loss_of(outputs, targets)


def budgets_of(predictions: list[Prediction]) -> dict[str, int]:
    """Bytes of each budget."""
    peaks = [each.peak_bytes for each in predictions]
    tight, ample = math.ceil(1.02 * min(peaks)), math.ceil(1.1 * max(peaks))
    return dict(zip(BUDGETS, (tight, round(math.sqrt(tight * ample)), ample), strict=True))


def _said(each: Prediction) -> dict[str, Any]:
    return {
        "candidate": text_of(each.candidate),
        "step_s": each.step_s,
        "peak_bytes": each.peak_bytes,
    }


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="What budgets choose, as one rank.")
    parser.add_argument("model", choices=PRESETS)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    predictions = predicted_grid(args.model)
    choices = {}
    for name, memory in budgets_of(predictions).items():
        tuning, seconds = choose(args.model, memory)
        choices[name] = {
            "budget_bytes": memory,
            "seconds": seconds,
            "chosen": _said(tuning.chosen),
            "predicted": len(tuning.predictions),
            "pruned": tuning.num_pruned,
        }
    if dist.get_rank() == 0:
        grid_said = [_said(each) for each in predictions]
        write(args.out, {"choices": choices, "predictions": grid_said})
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""A small training that goes on in its process, for `test_regroup`: run it with torchrun.

It has a moving average of the model, which is sharded too. With a last argument ``accelerate`` it
is a script for Accelerate, with ``lightning`` or ``transformers`` the same training by a trainer.
With ``twice`` another training comes before.

The folder of the run gets ``losses-PROCESS.jsonl``, a line for each step of that process. A step
takes a while, until that folder has a file ``hurry``.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from elastic_run import GLOBAL_BATCH, WIDTH, Numbers
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import vescale_fsdp_elastic as elastic
from vescale_fsdp import fully_shard


def first(out: Path) -> None:
    """Three steps of another model, whose first weights are those of rank 0."""
    model = nn.Linear(WIDTH, 1)
    for param in model.parameters():
        dist.broadcast(param.data, 0)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    with elastic.training(out, model, optimizer, every=2) as run:
        for step in run.batches(Numbers(), global_batch=GLOBAL_BATCH, micro_batch=3, until=3):
            with step:
                for x, y in step:
                    step.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()


def main(out: Path, until: int, pause_s: float, accelerator: Any) -> None:
    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
    )
    optimizer: Any
    schedule: Any
    if accelerator is None:
        for layer in (model[0], model[2]):
            fully_shard(layer)
        fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.8)
    met: list[int] = []  # the numbers of ranks of the worlds that this process has joined
    options: Any = {"every": 2, "every_on_disk": None}
    options["after_regroup"] = lambda: met.append(dist.get_world_size())
    if accelerator is not None:
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    if accelerator is None:
        options["stateful"] = {"schedule": schedule, "average": average}
        training = elastic.training(out, model, optimizer, **options)
    else:
        accelerator.register_for_checkpointing(average)
        training = accelerator.elastic_training(out, **options)
    out.mkdir(parents=True, exist_ok=True)
    log = open(out / f"losses-{os.getpid()}.jsonl", "a")  # noqa: SIM115
    with training as run:
        for step in run.batches(Numbers(), global_batch=GLOBAL_BATCH, micro_batch=3, until=until):
            with step:
                weighted, num_main = torch.zeros(1, dtype=torch.float64), 1
                for x, y in step:
                    loss = nn.functional.mse_loss(model(x), y)
                    if accelerator is None:
                        step.backward(loss)
                    else:
                        accelerator.backward(loss * step.weight)
                        weighted += loss.detach().double() * step.weight
                if accelerator is None:
                    mean = step.mean_loss()
                else:  # each rank also says whether it is the main one
                    is_main = float(accelerator.is_main_process)
                    told = accelerator.gather(torch.stack([weighted, torch.tensor([is_main])], 1))
                    mean, num_main = float(told[:, 0].mean()), int(told[:, 1].sum())
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                average.update_parameters(model)
                with torch.no_grad():
                    of_average = float(average(torch.ones(1, WIDTH)))
                time.sleep(0 if (out / "hurry").exists() else pause_s)
                line = {"step": step.number, "loss": mean, "average": of_average, "met": [*met]}
                line |= {"ranks": dist.get_world_size(), "num_main": num_main}
                line |= {"attempt": run.attempt, "source": run.source, "time": time.time()}
                print(json.dumps(line), file=log, flush=True)


if __name__ == "__main__":
    by_trainer = {"lightning", "transformers"} & {*sys.argv}
    logging.basicConfig(
        level=logging.INFO, format=f"%(relativeCreated)d {os.getpid()}: %(message)s"
    )
    torch.set_num_threads(1)
    if by_trainer:
        import regroup_trainers

        train = getattr(regroup_trainers, f"with_{by_trainer.pop()}")
        train(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
        dist.destroy_process_group()
        sys.exit()
    elastic.init_process_group("gloo")
    accelerator = None
    if "twice" in sys.argv:
        first(Path(sys.argv[1]).with_name("first"))
    if "accelerate" in sys.argv:
        os.environ["ACCELERATE_USE_CPU"] = "true"
        from vescale_fsdp_accelerate import VeScaleAccelerator

        accelerator = VeScaleAccelerator()
    try:
        main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), accelerator)
    finally:
        dist.destroy_process_group()

"""A small training that goes on in its process, for `test_regroup`: run it with torchrun.

It has a moving average of the model, which is sharded too.

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

import torch
import torch.distributed as dist
from elastic_run import GLOBAL_BATCH, WIDTH, Numbers
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from vescale_fsdp import elastic, fully_shard


def main(out: Path, until: int, pause_s: float) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
    )
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.8)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    out.mkdir(parents=True, exist_ok=True)
    log = open(out / f"losses-{os.getpid()}.jsonl", "a")  # noqa: SIM115
    stateful = {"schedule": schedule, "average": average}
    with elastic.training(
        out, model, optimizer, stateful=stateful, every=2, every_on_disk=None
    ) as run:
        for step in run.batches(Numbers(), global_batch=GLOBAL_BATCH, micro_batch=3, until=until):
            with step:
                for x, y in step:
                    step.backward(nn.functional.mse_loss(model(x), y))
                loss = step.mean_loss()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                average.update_parameters(model)
                with torch.no_grad():
                    of_average = float(average(torch.ones(1, WIDTH)))
                time.sleep(0 if (out / "hurry").exists() else pause_s)
                line = {"step": step.number, "loss": loss, "ranks": dist.get_world_size()}
                line |= {"average": of_average}
                line |= {"attempt": run.attempt, "source": run.source, "time": time.time()}
                print(json.dumps(line), file=log, flush=True)


if __name__ == "__main__":
    logging.basicConfig(
        level=logging.INFO, format=f"%(relativeCreated)d {os.getpid()}: %(message)s"
    )
    torch.set_num_threads(1)
    elastic.init_process_group("gloo")
    try:
        main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
    finally:
        dist.destroy_process_group()

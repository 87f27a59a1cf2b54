"""Trains the small GPT with `vescale_fsdp_elastic`: run it with torchrun.

    train.py FOLDER STEPS STEP_S

A step takes at least STEP_S seconds, until there is a file ``hurry``. The folder gets ``events``
and ``weights.pt``, which `watch` and `trial` read.
"""

from __future__ import annotations

import logging
import os
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
from model import (
    GLOBAL_BATCH,
    MICRO_BATCH,
    Events,
    Text,
    again,
    begin,
    loss_of,
    new_model,
)
from torch.distributed.tensor import DTensor

import vescale_fsdp_elastic as elastic
from vescale_fsdp import fully_shard

LEARNING_RATE = 2e-3


def main(folder: Path, until: int, step_s: float, events: Events) -> None:
    model = new_model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=until)
    events.tell("connected")
    with elastic.training(
        folder / "run",
        model,
        optimizer,
        stateful={"schedule": schedule},
        every=int(os.environ["EVERY"]),
        every_on_disk=int(os.environ["EVERY_ON_DISK"]),
        replicas=int(os.environ.get("REPLICAS", "1")),
    ) as run:
        size = dist.get_world_size()  # a host that joins had a world of its own until now
        events.tell("restored", attempt=run.attempt, source=run.source, step=run.step, size=size)
        batches = run.batches(
            Text(), global_batch=GLOBAL_BATCH, micro_batch=MICRO_BATCH, until=until
        )
        began, hurry = time.monotonic(), folder / "hurry"
        attempt = run.attempt
        for step in batches:
            if run.attempt != attempt:
                attempt, size, events = run.attempt, dist.get_world_size(), again(folder)
                events.tell(
                    "restored", attempt=attempt, source=run.source, step=run.step, size=size
                )
            with step:
                for x, y in step:
                    step.backward(loss_of(model(x), y))
                loss = step.mean_loss()
                optimizer.step()
                optimizer.zero_grad()
                schedule.step()
                events.tell("step", step=step.number, loss=loss, size=size, attempt=run.attempt)
            if not hurry.exists():
                time.sleep(max(0.0, began + step_s - time.monotonic()))
            began = time.monotonic()
        weights = {
            name: each.full_tensor() if isinstance(each, DTensor) else each.detach()
            for name, each in model.named_parameters()
        }
        if dist.get_rank() == 0:
            torch.save(weights, folder / "weights.pt.new")
            os.replace(folder / "weights.pt.new", folder / "weights.pt")
    events.tell("done")


if __name__ == "__main__":
    root = Path(sys.argv[1])
    own = begin(root)
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s rank {os.environ['RANK']}: %(message)s"
    )
    elastic.init_process_group("gloo", connect_timeout_s=float(os.environ.get("CONNECT_S", "60")))
    code = 0
    try:
        main(root, int(sys.argv[2]), float(sys.argv[3]), own)
        dist.destroy_process_group()
    except Exception as error:  # noqa: BLE001  it ends the process
        own.tell("error", text=f"{type(error).__name__}: {error}")
        traceback.print_exc()
        code = 1
    except SystemExit as error:
        code = int(error.code or 0)
    own.tell("left")
    sys.stdout.flush()
    sys.stderr.flush()
    # Python takes seconds to leave on a busy machine, which the next attempt would wait for.
    os._exit(code)

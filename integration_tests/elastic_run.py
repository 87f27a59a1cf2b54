"""A small training with `vescale_fsdp_elastic`, for `test_elastic`: run it with torchrun.

The folder of the run gets ``losses-ATTEMPT.jsonl``, a line for each step. The environment variable
FAULTS has lines ``attempt step rank signal``: that rank sends itself this signal in that step. With
KILLS=n, in each of the first n attempts a random rank is killed at a random time. With
RANKS_PER_HOST each so many ranks have a memory folder of their own. A step takes a while, until the
folder has a file ``hurry``.
"""

from __future__ import annotations

import json
import logging
import os
import random
import signal
import sys
import threading
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import vescale_fsdp_elastic as elastic
from vescale_fsdp import fully_shard

WIDTH, GLOBAL_BATCH = 6, 12


class Numbers(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """100 samples that depend on their index only."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return x, x.sin().sum().reshape(1)


def faults() -> dict[tuple[int, int, int], int]:
    lines = [line.split() for line in os.environ.get("FAULTS", "").splitlines()]
    return {(int(a), int(s), int(r)): signal.Signals[name] for a, s, r, name in lines}


def kill_at_random(attempt: int) -> None:
    """Start a timer that may kill this process, while it trains or makes a memory checkpoint."""
    chance = random.Random(attempt)
    victim, delay_s = chance.randrange(dist.get_world_size()), chance.uniform(0.0, 1.5)
    if attempt <= int(os.environ.get("KILLS", "0")) and victim == dist.get_rank():
        timer = threading.Timer(delay_s, os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()


def memory_directory() -> str | None:
    each = int(os.environ.get("RANKS_PER_HOST", "0"))
    root = os.environ["VESCALE_FSDP_MEMORY_DIR"]
    return f"{root}-{dist.get_rank() // each}" if each else None


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
    planned, rank = faults(), dist.get_rank()
    with elastic.training(
        out,
        model,
        optimizer,
        stateful={"schedule": schedule},
        every=int(os.environ.get("EVERY", "2")),
        every_on_disk=None,
        memory_directory=memory_directory(),
    ) as run:
        kill_at_random(run.attempt)
        log = open(out / f"losses-{run.attempt}.jsonl", "a") if rank == 0 else None  # noqa: SIM115
        for step in run.batches(Numbers(), global_batch=GLOBAL_BATCH, micro_batch=3, until=until):
            for x, y in step:
                step.backward(nn.functional.mse_loss(model(x), y))
            fault = planned.get((run.attempt, step.number, rank))
            if fault is not None:
                os.kill(os.getpid(), fault)
            loss = step.mean_loss()
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
            time.sleep(0 if (out / "hurry").exists() else pause_s)
            if log is not None:
                line = {"step": step.number, "loss": loss, "ranks": dist.get_world_size()}
                line |= {"source": run.source, "time": time.time()}
                print(json.dumps(line), file=log, flush=True)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format=f"rank {os.environ['RANK']}: %(message)s")
    torch.set_num_threads(1)
    elastic.init_process_group("gloo")
    try:
        main(Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]))
    finally:
        dist.destroy_process_group()

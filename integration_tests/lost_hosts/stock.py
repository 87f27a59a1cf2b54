"""The same training with stock torch: FSDP2, and DCP into a folder on disk for each checkpoint.

As in torch's tutorials for torchrun: a restarted job loads the last checkpoint that is whole. The
samples of a step are the same on any number of ranks, as in `train`.
"""

from __future__ import annotations

import datetime
import os
import sys
import time
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from model import GLOBAL_BATCH, Events, Text, begin, loss_of, new_model
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

LEARNING_RATE = 2e-3


def last_checkpoint(folder: Path) -> tuple[int, Path] | None:
    """The newest one that has its metadata."""
    found = [
        (int(each.parent.name.partition("-")[2]), each.parent)
        for each in folder.glob("step-*/.metadata")
    ]
    return max(found, default=None)


def main(folder: Path, until: int, step_s: float, events: Events) -> None:
    model = new_model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=until)
    size, rank = dist.get_world_size(), dist.get_rank()
    events.tell("connected")
    step, source = 0, "start"
    told: list[tuple[int, str] | None] = [None]
    if rank == 0 and (found := last_checkpoint(folder / "run")) is not None:
        told = [(found[0], str(found[1]))]
    dist.broadcast_object_list(told, 0)
    if told[0] is not None:
        step, source = told[0][0], "disk"
        # Not without a checkpoint: it makes a step of the optimizer, which Adam counts.
        state, optimizer_state = get_state_dict(model, optimizer)
        whole = {"model": state, "optimizer": optimizer_state, "schedule": schedule.state_dict()}
        dcp.load(whole, checkpoint_id=told[0][1])
        set_state_dict(model, optimizer, model_state_dict=state, optim_state_dict=optimizer_state)
        schedule.load_state_dict(whole["schedule"])
    # Each start of torchrun is an attempt; the time orders them.
    attempt = [time.time_ns()]
    dist.broadcast_object_list(attempt, 0)
    events.tell("restored", attempt=attempt[0], source=source, step=step, size=size)
    text, hurry = Text(), folder / "hurry"
    for number in range(step, until):
        began = time.monotonic()
        first = number * GLOBAL_BATCH % (len(text) - GLOBAL_BATCH) + rank * GLOBAL_BATCH // size
        samples = [text[first + i] for i in range(GLOBAL_BATCH // size)]
        x, y = (torch.stack(each) for each in zip(*samples, strict=True))
        loss = loss_of(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        events.tell("step", step=number, loss=float(mean) / size, size=size, attempt=attempt[0])
        if (number + 1) % int(os.environ["EVERY_ON_DISK"]) == 0:
            state, optimizer_state = get_state_dict(model, optimizer)
            whole = {
                "model": state, "optimizer": optimizer_state, "schedule": schedule.state_dict(),
            }  # fmt: skip
            dcp.save(whole, checkpoint_id=str(folder / "run" / f"step-{number + 1}"))
        if not hurry.exists():
            time.sleep(max(0.0, began + step_s - time.monotonic()))
    weights = {
        name: each.full_tensor() if isinstance(each, DTensor) else each.detach()
        for name, each in model.named_parameters()
    }
    if rank == 0:
        torch.save(weights, folder / "weights.pt.new")
        os.replace(folder / "weights.pt.new", folder / "weights.pt")
    events.tell("done")


if __name__ == "__main__":
    root = Path(sys.argv[1])
    own = begin(root)
    limit = datetime.timedelta(seconds=float(os.environ["VESCALE_FSDP_TIMEOUT_S"]))
    dist.init_process_group("gloo", timeout=limit)
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

"""The same training with torchft and FSDP2: each host is a replica of two ranks that shard a model.

As torchft is meant to be used: a replica that dies leaves the quorum, and the others go on with its
samples too; one that comes gets its state from another. If none is left, all load the last
checkpoint on disk, which one of the replicas writes. The samples of a step are the same for any
number of replicas, as in `stock`. Needs ``pip install torchft``, and a lighthouse (`hosts`).
"""

from __future__ import annotations

import datetime
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from model import GLOBAL_BATCH, Events, Text, begin, loss_of, new_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torchft import Manager, ProcessGroupGloo  # type: ignore[import-not-found]

LEARNING_RATE = 2e-3


def local(tensor: Any) -> torch.Tensor:
    """The part of a tensor that this rank holds."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class State:
    """What a replica gives to one that comes: this rank's parts of parameters and moments."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, schedule: Any) -> None:
        self._model, self._optimizer, self._schedule = model, optimizer, schedule

    def give(self) -> dict[str, Any]:
        moments = [
            {name: local(value).clone() for name, value in self._optimizer.state[param].items()}
            for param in self._model.parameters()
        ]
        params = [local(param.detach()).clone() for param in self._model.parameters()]
        rates = [group["lr"] for group in self._optimizer.param_groups]
        return {
            "params": params, "moments": moments, "rates": rates,
            "schedule": self._schedule.state_dict(),
        }  # fmt: skip

    @torch.no_grad()
    def take(self, state: dict[str, Any]) -> None:
        self._schedule.load_state_dict(state["schedule"])
        for group, rate in zip(self._optimizer.param_groups, state["rates"], strict=True):
            group["lr"] = rate
        for param, value, moments in zip(
            self._model.parameters(), state["params"], state["moments"], strict=True
        ):
            local(param).copy_(value)
            if not moments:
                self._optimizer.state.pop(param, None)
            for name, moment in moments.items():
                own = torch.zeros_like(param) if moment.dim() else moment.clone()
                if moment.dim():
                    local(own).copy_(moment)
                self._optimizer.state[param][name] = own
        self.is_taken = True

    is_taken = False


def save(folder: Path, step: int, rank: int, whole: dict[str, Any]) -> None:
    """Write this rank's file of the checkpoint of a step."""
    path = folder / f"step-{step}"
    path.mkdir(parents=True, exist_ok=True)
    torch.save(whole, path / f"new-{os.getpid()}")
    os.replace(path / f"new-{os.getpid()}", path / f"rank-{rank}")


def last_checkpoint(folder: Path, rank: int, size: int) -> dict[str, Any] | None:
    """This rank's file of the newest checkpoint that has those of all ranks."""
    found = [
        (int(each.name.partition("-")[2]), each / f"rank-{rank}")
        for each in folder.glob("step-*")
        if len(list(each.glob("rank-*"))) == size
    ]
    return torch.load(max(found)[1]) if found else None


def main(folder: Path, until: int, step_s: float, events: Events) -> None:
    limit = datetime.timedelta(seconds=float(os.environ["VESCALE_FSDP_TIMEOUT_S"]))
    model = new_model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=until)
    state, rank, size = State(model, optimizer, schedule), dist.get_rank(), dist.get_world_size()
    manager = Manager(
        pg=ProcessGroupGloo(timeout=limit),
        load_state_dict=state.take,
        state_dict=state.give,
        min_replica_size=1,
        use_async_quorum=False,  # so that the samples can be divided among those that take part
        timeout=limit,
        quorum_timeout=datetime.timedelta(minutes=5),
        rank=rank,
        world_size=size,
        replica_id=f"{os.environ['HOST_NAME']}-{os.getpid()}",
        hostname=os.environ["HOST_ADDRESS"],
    )
    events.tell("connected")
    text, hurry, attempt = Text(), folder / "hurry", -1
    every_on_disk, on_disk = (
        int(os.environ["EVERY_ON_DISK"]),
        last_checkpoint(folder / "run", rank, size),
    )
    if on_disk is not None:
        state.take(on_disk["state"])
        manager.load_state_dict(on_disk["manager"])
        state.is_taken = False
    try:
        while manager.current_step() < until:
            began = time.monotonic()
            manager.start_quorum()
            step, num, place = (
                manager.current_step(), manager.num_participants(), manager.participating_rank(),
            )  # fmt: skip
            source = "memory" if state.is_taken or step else "start"
            if on_disk is not None and not state.is_taken:
                source = "disk"
            state.is_taken, on_disk = False, None
            if manager._quorum_id != attempt:  # others have come or gone
                attempt = manager._quorum_id
                events = Events(folder / "events", os.environ["HOST_NAME"])
                events.tell("began", time.time())
                events.tell("connected")
                events.tell(
                    "restored", attempt=attempt, source=source, step=step, size=num * size,
                )  # fmt: skip
            each = GLOBAL_BATCH // (num * size)
            first = step * GLOBAL_BATCH % (len(text) - GLOBAL_BATCH)
            first += ((place or 0) * size + rank) * each
            x, y = (
                torch.stack(several)
                for several in zip(*(text[first + i] for i in range(each)), strict=True)
            )
            loss = loss_of(model(x), y)
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            mean /= size
            works = [manager.allreduce(local(param.grad)) for param in model.parameters()]
            works.append(manager.allreduce(mean))
            for work in works:
                work.wait()
            if manager.should_commit():
                optimizer.step()
                schedule.step()
                events.tell(
                    "step", step=step, loss=float(mean), size=num * size, attempt=attempt,
                    rank=(place or 0) * size + rank,
                )  # fmt: skip
                if (step + 1) % every_on_disk == 0 and place == 0:
                    whole = {"state": state.give(), "manager": manager.state_dict()}
                    save(folder / "run", step + 1, rank, whole)
            optimizer.zero_grad()
            if not hurry.exists():
                time.sleep(max(0.0, began + step_s - time.monotonic()))
        weights = {
            name: each.full_tensor() if isinstance(each, DTensor) else each.detach()
            for name, each in model.named_parameters()
        }
        if rank == 0:
            torch.save(weights, folder / f"weights.pt.{os.getpid()}")
            os.replace(folder / f"weights.pt.{os.getpid()}", folder / "weights.pt")
        events.tell("done")
    finally:
        manager.shutdown(wait=False)


if __name__ == "__main__":
    root = Path(sys.argv[1])
    own = begin(root)
    dist.init_process_group("gloo")
    code = 0
    try:
        main(root, int(sys.argv[2]), float(sys.argv[3]), own)
    except Exception as error:  # noqa: BLE001  it ends the process
        own.tell("error", text=f"{type(error).__name__}: {error}")
        traceback.print_exc()
        code = 1
    own.tell("left")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)

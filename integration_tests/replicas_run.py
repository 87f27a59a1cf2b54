"""One replica of a small training with `elastic.replicas`, for `test_replicas`: run by torchrun.

The folder of the run gets ``steps-REPLICA.jsonl``, a line for each step that a first rank has made,
and at the end ``end-REPLICA-RANK``, a digest of that rank's parameters and optimizer states. The
environment variable FAULT, ``step rank``, says where a rank of the first start kills itself.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import vescale_fsdp_elastic as elastic
from vescale_fsdp import fully_shard

WIDTH, GLOBAL_BATCH, TIMEOUT_S = 6, 16, 10.0


class Numbers(torch.utils.data.Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """100 samples that depend on their index only."""

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = torch.randn(WIDTH, generator=torch.Generator().manual_seed(index))
        return x, x.sin().sum().reshape(1)


def make() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
    )


def digest(model: nn.Module, optimizer: torch.optim.Optimizer) -> str:
    total = hashlib.sha256()
    for param in model.parameters():
        states = [each for each in optimizer.state[param].values() if torch.is_tensor(each)]
        for each in (param, *states):
            local = each.to_local() if hasattr(each, "to_local") else each
            total.update(local.detach().numpy().tobytes())
    return total.hexdigest()


def main(out: Path, replica: int, until: int) -> None:
    model, rank = make(), dist.get_rank()
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    fault = tuple(map(int, os.environ.get("FAULT", "-1 -1").split()))
    with elastic.replicas(
        out, model, optimizer, replica=replica, num_replicas=2, timeout_s=TIMEOUT_S,
        every_on_disk=None, memory_directory=out / f"memory-{replica}",
    ) as run:  # fmt: skip
        log = open(out / f"steps-{replica}.jsonl", "a") if rank == 0 else None  # noqa: SIM115
        for step in run.batches(Numbers(), global_batch=GLOBAL_BATCH, until=until):
            for x, y in step:
                step.backward(nn.functional.mse_loss(model(x), y))
                if fault == (step.number, rank) and run.member.start == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            optimizer.step()
            optimizer.zero_grad()
            if log is not None:
                line = {"step": step.number, "loss": step.mean_loss(), "present": run.present}
                line |= {"pid": os.getpid(), "time": time.time(), "source": run.source}
                print(json.dumps(line), file=log, flush=True)
            # Slow while alone, so that the other comes back before the end.
            time.sleep(0.05 if len(run.present) == 2 else 1.0)
    (out / f"end-{replica}-{rank}").write_text(digest(model, optimizer))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format=f"rank {os.environ['RANK']}: %(message)s")
    torch.set_num_threads(1)
    elastic.init_process_group("gloo")
    try:
        main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    finally:
        dist.destroy_process_group()

"""`elastic_run`'s training with Lightning or with Accelerate, for `test_elastic_adapters`.

Arguments: ``lightning`` or ``accelerate``, the folder of the run, the number of steps. The folder
gets ``losses-ATTEMPT.jsonl``, as from `elastic_run`. FAULTS is as there.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))

from elastic_run import GLOBAL_BATCH, WIDTH, Numbers, faults  # noqa: E402

import vescale_fsdp_elastic as elastic  # noqa: E402
from vescale_fsdp.ranks import collectives  # noqa: E402


def make() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(WIDTH, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
    )


def schedule_of(optimizer: Any) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.8)


class Log:
    """Writes the mean loss of each step, and does what the faults say."""

    def __init__(self, out: Path, run: elastic.Run) -> None:
        self._run, self._faults, self._sums = run, faults(), torch.zeros((), dtype=torch.float64)
        self._file = open(out / f"losses-{run.attempt}.jsonl", "a")  # noqa: SIM115

    def add(self, loss: torch.Tensor, num_samples: int) -> None:
        self._sums += loss.detach().double() * num_samples

    def step(self, number: int) -> None:
        fault = self._faults.get((self._run.attempt, number, dist.get_rank()))
        if fault is not None:
            os.kill(os.getpid(), fault)
        total, self._sums = self._sums, torch.zeros((), dtype=torch.float64)
        group = dist.group.WORLD
        assert group is not None
        collectives.all_reduce(total, group).wait()
        if dist.get_rank() == 0:
            loss = float(total) / GLOBAL_BATCH
            line = {"step": number, "loss": loss, "source": self._run.source}
            print(json.dumps(line), file=self._file, flush=True)


def fit(module: Any, out: Path, until: int) -> None:
    """An elastic ``Trainer.fit`` on the samples of `elastic_run`."""
    import lightning.pytorch as pl

    from vescale_fsdp_lightning import VeScaleFSDPStrategy

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        max_steps=until,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        strategy=VeScaleFSDPStrategy(
            wrap=["Linear"],
            elastic={
                "directory": out,
                "global_batch": GLOBAL_BATCH,
                "every": 2,
                "every_on_disk": None,
            },
        ),
    )
    trainer.fit(module, torch.utils.data.DataLoader(Numbers(), batch_size=3, shuffle=True))


def with_lightning(out: Path, until: int) -> None:
    import lightning.pytorch as pl

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make()
            self.log_: Log | None = None

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            if self.log_ is None:
                self.log_ = Log(out, self.trainer.strategy.elastic_run)  # type: ignore[attr-defined]
            x, y = batch
            loss = nn.functional.mse_loss(self.net(x), y)
            self.log_.add(loss, len(x))
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            if self.log_ is not None and not self.trainer.fit_loop._should_accumulate():
                self.log_.step(self.global_step - 1)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
            schedule = {"scheduler": schedule_of(optimizer), "interval": "step"}
            return {"optimizer": optimizer, "lr_scheduler": schedule}

    fit(Lit(), out, until)


def with_accelerate(out: Path, until: int) -> None:
    os.environ["ACCELERATE_USE_CPU"] = "true"
    elastic.init_process_group("gloo")

    from vescale_fsdp_accelerate import VeScaleAccelerator

    accelerator = VeScaleAccelerator()
    model: Any = make()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
    model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule_of(optimizer))
    with accelerator.elastic_training(out, every=2, every_on_disk=None) as run:
        log = Log(out, run)
        steps = run.batches(Numbers(), global_batch=GLOBAL_BATCH, micro_batch=3, until=until)
        for step in steps:
            for x, y in step:
                loss = nn.functional.mse_loss(model(x), y)
                accelerator.backward(loss * step.weight)
                log.add(loss, len(x))
            log.step(step.number)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, format=f"rank {os.environ['RANK']}: %(message)s")
    torch.set_num_threads(1)
    train = {"lightning": with_lightning, "accelerate": with_accelerate}[sys.argv[1]]
    train(Path(sys.argv[2]), int(sys.argv[3]))
    if dist.is_initialized():
        dist.destroy_process_group()

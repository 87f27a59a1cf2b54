"""The training of `regroup_run` by trainers: they own their loop, and are called again."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from elastic_adapters_run import fit, make, schedule_of
from elastic_run import GLOBAL_BATCH, Numbers
from torch import nn

from vescale_fsdp.ranks import collectives


class Log:
    """Writes the lines of `regroup_run`, and lets a step take a while."""

    def __init__(self, out: Path, pause_s: float) -> None:
        out.mkdir(parents=True, exist_ok=True)
        self._file = open(out / f"losses-{os.getpid()}.jsonl", "a")  # noqa: SIM115
        self._out, self._pause_s = out, pause_s
        self.forget()

    def forget(self) -> None:
        """A step was broken off."""
        self._sum = torch.zeros((), dtype=torch.float64)

    def add(self, loss: torch.Tensor, num_samples: int) -> None:
        self._sum += loss.detach().double() * num_samples

    def step(self, number: int, run: Any, **more: Any) -> None:
        total = self._sum
        self.forget()
        group = dist.group.WORLD
        assert group is not None
        collectives.all_reduce(total, group).wait()
        time.sleep(0 if (self._out / "hurry").exists() else self._pause_s)
        line = {"step": number, "loss": float(total) / GLOBAL_BATCH, "ranks": dist.get_world_size()}
        line |= {"attempt": run.attempt, "source": run.source, "time": time.time(), **more}
        print(json.dumps(line), file=self._file, flush=True)


def with_lightning(out: Path, until: int, pause_s: float) -> None:
    import lightning.pytorch as pl

    log = Log(out, pause_s)

    class Lit(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = make()

        def on_train_start(self) -> None:
            log.forget()

        def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
            x, y = batch
            loss = nn.functional.mse_loss(self.net(x), y)
            log.add(loss, len(x))
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            if not self.trainer.fit_loop._should_accumulate():
                num_main = float(
                    self.trainer.strategy.reduce(
                        torch.tensor(float(self.trainer.is_global_zero)), reduce_op="sum"
                    )
                )
                run = self.trainer.strategy.elastic_run  # type: ignore[attr-defined]
                log.step(self.global_step - 1, run, num_main=num_main)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), lr=0.02)
            schedule = schedule_of(optimizer)
            return {
                "optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}
            }  # fmt: skip

    fit(Lit(), out, until)


def with_transformers(out: Path, until: int, pause_s: float) -> None:
    from vescale_fsdp_accelerate.options import Options, to_environment

    os.environ |= to_environment(Options(), {})
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "ACCELERATE_USE_CPU": "true"}
    del os.environ["FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"]  # it asks for our launcher
    import transformers

    import vescale_fsdp_elastic as elastic
    from vescale_fsdp_accelerate import ElasticCallback
    from vescale_fsdp_accelerate._autoload import take_over

    take_over()  # as after `accelerate launch`
    elastic.init_process_group("gloo")
    log = Log(out, pause_s)
    callback = ElasticCallback(out, global_batch=GLOBAL_BATCH, every=2, every_on_disk=None)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = make()

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor]:
            loss = nn.functional.mse_loss(self.net(x), labels)
            log.add(loss, len(x))
            return (loss,)

    class Steps(transformers.TrainerCallback):
        def on_train_begin(self, *_: Any, **__: Any) -> None:
            log.forget()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            is_main = torch.tensor(float(state.is_world_process_zero))
            num_main = float(trainer.accelerator.gather(is_main[None]).sum())
            log.step(state.global_step - 1, callback.run, num_main=num_main)

    def collate(samples: list[Any]) -> dict[str, torch.Tensor]:
        x, y = torch.utils.data.default_collate(samples)
        return {"x": x, "labels": y}

    class Trainer(transformers.Trainer):
        def create_optimizer(self, model: Any = None) -> Any:
            if self.optimizer is None:
                self.optimizer = torch.optim.AdamW((model or self.model).parameters(), lr=0.02)
            return self.optimizer

        def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
            if self.lr_scheduler is None:
                self.lr_scheduler = schedule_of(optimizer or self.optimizer)
                self._created_lr_scheduler = True
            return self.lr_scheduler

    trainer = Trainer(
        model=Net(),
        args=transformers.TrainingArguments(
            output_dir=str(out / "trainer"),
            max_steps=until,
            per_device_train_batch_size=3,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
            seed=0,
            max_grad_norm=0.0,
            logging_steps=1,
        ),
        train_dataset=Numbers(),
        data_collator=collate,
        callbacks=[callback, Steps()],
    )
    trainer.train()

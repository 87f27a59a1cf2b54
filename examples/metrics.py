"""A Lightning callback that measures losses, speed and memory of all processes.

It is optional (``--metrics FILE.json``). The demo uses it to compare engines.
"""

import json
import re
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from torch import Tensor


def resident_bytes() -> tuple[int, int]:
    """Return the resident memory of this process: (current, peak). Linux only; else zeros.

    PyTorch does not count allocations on CPU, so this is the kernel's count. It includes memory
    that the allocator caches.
    """
    try:
        status = Path("/proc/self/status").read_text()
    except OSError:
        return 0, 0
    kib = dict(re.findall(r"(VmRSS|VmHWM):\s+(\d+) kB", status))
    return int(kib["VmRSS"]) * 1024, int(kib["VmHWM"]) * 1024


class Metrics(Callback):
    """Make it before the model, because memory is counted from there. The first process writes.

    The file has a list over processes of:
      losses: of each training step, of this process' batch
      step_s: of each training step, seconds from its start to the next one's; null for the
        last before a pause (validation, checkpoint)
      val_losses: mean over the processes, one for each validation
      training_bytes: growth of the highest resident memory until the first checkpoint
      run_bytes: the same until the end of training
    """

    def __init__(self, path: str, tokens_per_batch: int) -> None:
        self.path = path
        self.base_bytes = resident_bytes()[0]
        self.values: dict[str, Any] = {
            "tokens_per_batch": tokens_per_batch,
            "losses": [],
            "step_s": [],
            "val_losses": [],
        }
        self._started: float | None = None

    def on_train_batch_start(self, trainer: pl.Trainer, *_: object) -> None:
        now = time.perf_counter()
        if self._started is not None:
            self.values["step_s"][-1] = now - self._started
        self._started = now

    def on_train_batch_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, outputs: Any, *_: object
    ) -> None:
        loss = outputs["loss"] if isinstance(outputs, dict) else outputs
        self.values["losses"].append(float(loss))
        self.values["step_s"].append(None)

    def on_train_epoch_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._started = None
        if "training_bytes" not in self.values:
            self.values["training_bytes"] = resident_bytes()[1] - self.base_bytes

    def on_validation_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self._started = None
        loss: Tensor = trainer.callback_metrics["val_loss"]
        self.values["val_losses"].append(float(loss))

    def on_fit_end(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        self.values["run_bytes"] = resident_bytes()[1] - self.base_bytes
        everyone: list[Any] = [None] * trainer.world_size
        dist.all_gather_object(everyone, self.values)
        if trainer.is_global_zero:
            Path(self.path).write_text(json.dumps(everyone))

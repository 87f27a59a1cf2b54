"""A step of the same training with Lightning's Trainer, with Accelerate, and with a plain loop.

``plain-*`` are the engines of `benchmarks.engines`. Lightning's loop cannot be called for a single
step, so it runs in a separate thread and waits at the start of each batch. A step is the time from
one start to the next, with all that the Trainer does between. Loggers, progress bar and checkpoints
are off.
"""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Callable, Iterator
from queue import SimpleQueue
from typing import Any

import torch
from benchmarks import engines
from benchmarks.engines import LEARNING_RATE, NUM_WARM, Engine
from benchmarks.models import Batch, Batches, Preset, loss_of
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.optim import AdamW

__all__ = ["LOOPS", "make_engine"]


def make_engine(name: str, preset: Preset, precision: str, rank: int, num_ranks: int) -> Engine:
    """Make one of `LOOPS`, and run its first steps."""
    library, _, engine = name.partition("-")
    if library == "plain":
        return engines.make_engine(engine, preset, precision, rank, num_ranks)
    assert precision == "fp32", "adapters are compared in fp32"
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    _set_environment(rank, num_ranks)
    torch.manual_seed(0)
    model = preset.make()
    blocks: Any = model.blocks
    made: Engine = LOOPS[name](model, Batches(preset, rank), num_ranks)
    for _ in range(NUM_WARM):
        made.step()
    are_units = [isinstance(block, FSDPModule) for block in blocks]
    expected = [engine != "ddp"] * len(are_units)
    assert are_units == expected, f"{name}: blocks are units: {are_units}, expected {expected}"
    return made


def _set_environment(rank: int, num_ranks: int) -> None:
    """Set the variables of a launcher. The process group already exists."""
    sizes = dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE"), str(num_ranks))
    ranks = dict.fromkeys(("RANK", "LOCAL_RANK"), str(rank))
    os.environ |= {**sizes, **ranks, "GROUP_RANK": "0", "OMP_NUM_THREADS": "1"}
    os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}


class LightningLoop:
    """``Trainer.fit``, batch by batch."""

    expected_bytes = 0.0

    def __init__(self, trainer: Any, module: Any, batches: Batches) -> None:
        self._turns: SimpleQueue[None] = SimpleQueue()
        self._done: SimpleQueue[float | BaseException] = SimpleQueue()
        self._trainer, self._module, self._batches = trainer, module, batches
        self._loss: float | None = None

    def start(self) -> None:
        """Run to the start of the first batch."""
        threading.Thread(target=self._fit, daemon=True).start()

    def step(self) -> float:
        """One batch; returns the loss."""
        self._turns.put(None)
        found = self._done.get()
        if isinstance(found, BaseException):
            raise RuntimeError(f"Lightning has ended: {found!r}") from found
        return found

    def batch_starts(self) -> None:
        """Called by the Trainer: return the last loss, and wait."""
        if self._loss is not None:
            self._done.put(self._loss)
        self._turns.get()

    def batch_ends(self, loss: Tensor) -> None:
        """Called by the Trainer."""
        self._loss = loss.item()

    def _fit(self) -> None:
        try:
            self._trainer.fit(self._module, _loader(self._batches))
            raise RuntimeError("fit is over")
        except BaseException as error:  # noqa: BLE001  # raised again by `step`
            self._done.put(error)


class _Stream(torch.utils.data.IterableDataset[Batch]):
    """Batches without end."""

    def __init__(self, batches: Batches) -> None:
        self._batches = batches

    def __iter__(self) -> Iterator[Batch]:
        while True:
            yield self._batches.next()


def _loader(batches: Batches) -> Any:
    return torch.utils.data.DataLoader(_Stream(batches), batch_size=None)


def _lightning(
    strategy: Callable[[int], Any], *, shards_by_hand: bool = False
) -> Callable[[nn.Module, Batches, int], Engine]:
    def make(model: nn.Module, batches: Batches, num_ranks: int) -> Engine:
        import lightning.pytorch as pl
        from lightning.pytorch.plugins.environments import TorchElasticEnvironment

        loop: list[LightningLoop] = []

        class Module(pl.LightningModule):
            def __init__(self) -> None:
                super().__init__()
                self.model = model

            def configure_model(self) -> None:
                if shards_by_hand:
                    mesh = self.device_mesh["data_parallel"]  # type: ignore[index]
                    for block in model.blocks:  # type: ignore[union-attr]
                        fully_shard(block, mesh=mesh)
                    fully_shard(model, mesh=mesh)

            def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
                inputs, targets = batch
                return loss_of(self.model(inputs), targets)

            def configure_optimizers(self) -> AdamW:
                return AdamW(self.parameters(), lr=LEARNING_RATE, fused=True)

        class Gate(pl.Callback):
            def on_train_batch_start(self, *args: Any) -> None:
                loop[0].batch_starts()

            def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, *_: Any) -> None:
                loop[0].batch_ends(outputs["loss"])

        trainer = pl.Trainer(
            strategy=strategy(num_ranks),
            accelerator="cpu",
            devices=num_ranks,
            plugins=[TorchElasticEnvironment()],
            callbacks=[Gate()],
            max_epochs=-1,
            logger=False,
            enable_progress_bar=False,
            enable_checkpointing=False,
            enable_model_summary=False,
        )
        loop.append(LightningLoop(trainer, Module(), batches))
        loop[0].start()
        return loop[0]

    return make


def _lightning_vescale(num_ranks: int) -> Any:
    from vescale_fsdp_lightning import VeScaleFSDPStrategy

    return VeScaleFSDPStrategy()


def _lightning_fsdp2(num_ranks: int) -> Any:
    from lightning.pytorch.strategies import ModelParallelStrategy

    return ModelParallelStrategy(data_parallel_size=num_ranks, tensor_parallel_size=1)


def _lightning_ddp(num_ranks: int) -> Any:
    from lightning.pytorch.strategies import DDPStrategy

    return DDPStrategy(gradient_as_bucket_view=True)


class AccelerateLoop:
    """The loop in Accelerate's documentation."""

    expected_bytes = 0.0

    def __init__(self, accelerator: Any, model: nn.Module, batches: Batches) -> None:
        optimizer = AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
        self._accelerator, self._batches = accelerator, batches
        self._model, self._optimizer = accelerator.prepare(model, optimizer)

    def step(self) -> float:
        """One batch; returns the loss."""
        inputs, targets = self._batches.next()
        with self._accelerator.accumulate(self._model):
            loss = loss_of(self._model(inputs), targets)
            self._accelerator.backward(loss)
            self._optimizer.step()
            self._optimizer.zero_grad()
        return loss.item()


def _accelerate(
    accelerator: Callable[[nn.Module], Any],
) -> Callable[[nn.Module, Batches, int], Engine]:
    def make(model: nn.Module, batches: Batches, num_ranks: int) -> Engine:
        os.environ["ACCELERATE_USE_CPU"] = "true"
        return AccelerateLoop(accelerator(model), model, batches)

    return make


def _accelerate_vescale(model: nn.Module) -> Any:
    from vescale_fsdp_accelerate import VeScaleAccelerator, VeScaleFSDPPlugin

    return VeScaleAccelerator(fsdp_plugin=VeScaleFSDPPlugin())


def _accelerate_fsdp2(model: nn.Module) -> Any:
    """Make an Accelerator with FSDP2 on CPU, by setting the type that it has detected."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.state import PartialState
    from accelerate.utils import DistributedType

    blocks: Any = model.blocks
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=[type(blocks[0]).__name__],
    )
    os.environ["FSDP_VERSION"] = "2"
    made = Accelerator(fsdp_plugin=plugin)
    for state in (made.state, PartialState()):
        state.distributed_type = DistributedType.FSDP
    made.state.fsdp_plugin = plugin
    return made


def _accelerate_ddp(model: nn.Module) -> Any:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    return Accelerator(
        kwargs_handlers=[DistributedDataParallelKwargs(gradient_as_bucket_view=True)]
    )


LOOPS: dict[str, Any] = {
    "plain-vescale": None,
    "plain-fsdp2": None,
    "plain-ddp": None,
    "lightning-vescale": _lightning(_lightning_vescale),
    "lightning-fsdp2": _lightning(_lightning_fsdp2, shards_by_hand=True),
    "lightning-ddp": _lightning(_lightning_ddp),
    "accelerate-vescale": _accelerate(_accelerate_vescale),
    "accelerate-fsdp2": _accelerate(_accelerate_fsdp2),
    "accelerate-ddp": _accelerate(_accelerate_ddp),
}

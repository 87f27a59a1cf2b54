"""``ElasticCallback``: elastic training with ``transformers.Trainer``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from transformers import TrainerCallback

from vescale_fsdp_elastic import ElasticOptions, Run

__all__ = ["ElasticCallback"]


class ElasticCallback(TrainerCallback):
    """Makes ``Trainer.train`` continue when ranks come and go, with the same global batch.

    ::

        callbacks = [ElasticCallback("runs/elastic", global_batch=64, every=10)]  # of the Trainer

    The state is restored in ``train()``, whichever is newer, that in memory or on disk: model,
    optimizer, schedule, random numbers, place in the data, and the states of the Trainer and of its
    callbacks. ``gradient_accumulation_steps`` follows the number of ranks: leave it out.
    ``per_device_train_batch_size`` is the most samples that a rank takes at once.

    Args:
        directory: of the run on disk, which all processes share.
        global_batch: samples of an optimizer step, of all ranks together.
        options: others of `vescale_fsdp_elastic.ElasticOptions`: ``every``, ``replicas``,
            ``every_on_disk``, ``keep_last``, ``memory_directory``.

    Attributes:
        run: the elastic training of the ``train()`` under way, or of the last one.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, global_batch: int, **options: Any
    ) -> None:
        self.options = ElasticOptions.of(
            {"directory": directory, "global_batch": global_batch, **options}
        )
        self.run: Run | None = None
        self.loop: Any = None

    def repeat(self, trainer: Any, train: Callable[[], Any]) -> Any:
        """Run the loop of a Trainer that we shard for, which calls this, until it is done."""
        from vescale_fsdp_accelerate.elastic.loop import repeated

        return repeated(trainer, self, train)

    def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Raise if the Trainer does not use this package. Else count from its step."""
        if self.loop is None:
            raise RuntimeError(
                "ElasticCallback needs a Trainer whose model veScale-FSDP shards: start the script "
                "with accelerate launch --config vescale.yaml, or see the guide to Accelerate"
            )
        self.loop.begin()

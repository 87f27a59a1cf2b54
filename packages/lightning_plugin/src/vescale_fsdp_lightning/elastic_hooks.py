"""The methods of the strategy for the Trainer that serve elastic training."""

from __future__ import annotations

from typing import Any

import torch

from vescale_fsdp import elastic
from vescale_fsdp.checkpoint import full
from vescale_fsdp_lightning.elastic import Elastic
from vescale_fsdp_lightning.progress import COUNTS
from vescale_fsdp_lightning.sharding import Sharding

__all__ = ["ElasticHooks"]


class ElasticHooks(Sharding):
    """`Sharding` that passes what the Trainer calls on to `Elastic`, if the user has asked."""

    _elastic: Elastic | None = None  # of the `fit` under way
    _last_counts: dict[str, int] | None = None  # of the last `fit`, for checkpoints after it
    lightning_module: Any
    model: Any

    @property
    def elastic_run(self) -> elastic.Run | None:
        """The elastic training of the ``fit`` under way: its attempt, source and costs."""
        return None if self._elastic is None else self._elastic.run

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return the loader of this rank's samples."""
        made = super().process_dataloader(dataloader)  # type: ignore[misc]
        is_divided = self._elastic is not None and self.lightning_module.trainer.training
        return self._elastic.divide(made) if self._elastic and is_divided else made

    def backward(self, loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Call backward, on the loss with the weight of its micro-batch."""
        weight = 1.0 if self._elastic is None else self._elastic.weight
        return super().backward(loss if weight == 1.0 else loss * weight, *args, **kwargs)  # type: ignore[misc]

    def batch_to_device(self, batch: Any, *args: Any, **kwargs: Any) -> Any:
        """Move a batch. It is the first that the Trainer calls after a step and what follows it."""
        if self._elastic is not None and self.lightning_module.trainer.training:
            self._elastic.begin_batch()
        return super().batch_to_device(batch, *args, **kwargs)  # type: ignore[misc]

    def on_train_start(self) -> None:
        """Begin where the restored state is."""
        super().on_train_start()  # type: ignore[misc]
        if self._elastic is not None:
            self._elastic.start()

    def on_train_end(self) -> None:
        """Save the last state."""
        super().on_train_end()  # type: ignore[misc]
        self._end_elastic()

    def on_exception(self, exception: BaseException) -> None:
        """Leave what is under way."""
        super().on_exception(exception)  # type: ignore[misc]
        if self._elastic is not None:
            self._elastic.close(exception)
            self._elastic = None

    def _with_counts(self, checkpoint: dict[str, Any]) -> dict[str, Any]:
        """Return a dictionary of a checkpoint with what its counters mean, for `Elastic.adopt`."""
        counts = self._last_counts if self._elastic is None else self._elastic.counts()
        return checkpoint if counts is None else {**checkpoint, COUNTS: counts}

    def _end_elastic(self) -> None:
        """End a training that has not begun, because all its steps had been made before."""
        if self._elastic is not None:
            self._last_counts = self._elastic.counts()
            self._elastic.end()
            self._elastic = None

    # While a state is taken, its tensors are sharded, whatever the format of other checkpoints.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the model's state: sharded tensors, or full ones in the first process only."""
        if self._elastic is not None and self._elastic.is_dumping:
            return full.model_state(self.model)
        return self._checkpoints.model_state(self.model)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return an optimizer's state: sharded tensors, or full ones in the first process only."""
        own = getattr(optimizer, "_optimizer", optimizer)
        if self._elastic is not None and self._elastic.is_dumping:
            return dict(own.state_dict())
        return self._checkpoints.optimizer_state(self.model, own)

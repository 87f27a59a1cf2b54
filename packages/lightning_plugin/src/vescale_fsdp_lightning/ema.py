"""ShardedEMA: a moving average of the weights, sharded as the weights.

Each process averages its own shards. This needs no communication, and memory for one more shard in
fp32. The averages are implemented as an optimizer whose step updates them. So the strategy saves
and loads them as it does optimizers: sharded, and on any number of processes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from vescale_fsdp_lightning._autoload import callback_base

__all__ = ["ShardedEMA"]

_NAME = "ema"


class Averages(torch.optim.Optimizer):
    """An optimizer whose states are the averages. ``step`` updates them from the parameters."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        super().__init__([param for param in model.parameters() if param.is_floating_point()], {})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Update the averages. The first call copies the parameters."""
        for group in self.param_groups:
            for param in group["params"]:
                state = self.state[param]
                if "average" not in state:
                    state["average"] = param.detach().float().clone()
                else:
                    state["average"].lerp_(param.detach().float(), 1 - self.decay)

    @torch.no_grad()
    def put_into_parameters(self) -> dict[torch.Tensor, torch.Tensor]:
        """Write the averages into the parameters. Returns the old values."""
        before = {}
        for param, state in self.state.items():
            before[param] = param.detach().clone()
            param.copy_(state["average"])
        return before


class ShardedEMA(callback_base()):  # type: ignore[misc]
    """Averages the weights, and validates, tests and predicts with the averages.

    For ``strategy="vescale_fsdp"``, instead of Lightning's ``WeightAveraging``, which needs
    whole weights. Buffers are not averaged. After training the model has the averages.

    Args:
        decay: factor of the old average at each update.
        update_every_n_steps: optimizer steps from one update to the next.
        start_step: optimizer steps before the first one.

    Raises:
        ValueError: an argument is out of range.
        TypeError: another strategy.
    """

    def __init__(
        self, decay: float = 0.999, update_every_n_steps: int = 1, start_step: int = 0
    ) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"ShardedEMA(decay={decay}): expected at least 0 and less than 1")
        if update_every_n_steps < 1 or start_step < 0:
            raise ValueError(
                f"ShardedEMA(update_every_n_steps={update_every_n_steps}, "
                f"start_step={start_step}): expected at least 1, and at least 0"
            )
        self.decay = decay
        self.update_every_n_steps, self.start_step = update_every_n_steps, start_step
        self._last_step = 0
        self._weights: dict[torch.Tensor, torch.Tensor] = {}  # while the averages are in place

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Make the averages with the sharded model, and save them with it."""
        if not hasattr(trainer.strategy, "save_too"):
            raise TypeError(
                f"ShardedEMA works with VeScaleFSDPStrategy, not with "
                f"{type(trainer.strategy).__name__}; use Lightning's EMAWeightAveraging there"
            )
        trainer.strategy.save_too(_NAME, lambda model: Averages(model, self.decay))

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        """Update after an optimizer step."""
        step = trainer.global_step
        if step == self._last_step:
            return
        self._last_step = step
        past = step - 1 - self.start_step
        if past >= 0 and past % self.update_every_n_steps == 0:
            trainer.strategy.saved_too(_NAME).step()

    def on_validation_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        """Replace the weights by the averages."""
        self._weights = trainer.strategy.saved_too(_NAME).put_into_parameters()

    @torch.no_grad()
    def on_validation_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Put the weights back."""
        for param, weight in self._weights.items():
            param.copy_(weight)
        self._weights = {}

    on_test_epoch_start = on_predict_epoch_start = on_validation_epoch_start
    on_test_epoch_end = on_predict_epoch_end = on_validation_epoch_end

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Restore the weights after an interrupted validation: callbacks save them after this."""
        self.on_validation_epoch_end(trainer, pl_module)

    def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
        """Leave the averages in the model; the last checkpoint has the weights."""
        trainer.strategy.saved_too(_NAME).put_into_parameters()

    def state_dict(self) -> dict[str, Any]:
        """The step of the last update; the averages are saved as an optimizer."""
        return {"last_step": self._last_step}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the saved step."""
        self._last_step = state_dict["last_step"]

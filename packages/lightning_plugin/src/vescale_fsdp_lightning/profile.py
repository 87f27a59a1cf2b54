"""ProfileSteps: where the time of a training step goes, by unit, and a trace."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from vescale_fsdp import profile
from vescale_fsdp_lightning._autoload import callback_base

__all__ = ["ProfileSteps"]


class ProfileSteps(callback_base()):  # type: ignore[misc]
    """Profiles some training batches, as `vescale_fsdp.profile` does.

    Rank 0 prints the table, and each rank writes a trace for https://ui.perfetto.dev.

    Args:
        folder: for the traces. None: no traces.
        steps: batches to profile.
        warmup: batches before, that are not.
    """

    def __init__(
        self, folder: str | Path | None = None, *, steps: int = 3, warmup: int = 3
    ) -> None:
        super().__init__()
        self._options = {"steps": steps, "warmup": warmup}
        self._folder = folder
        self._profile: profile | None = None

    @property
    def report(self) -> Any:
        """The `Report` of the profiled batches, once there is one."""
        return None if self._profile is None else self._profile.report

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start to count batches."""
        self._profile = profile(pl_module, self._folder, **self._options)
        self._profile.__enter__()

    def on_train_batch_end(self, trainer: Any, pl_module: Any, *args: Any) -> None:
        """Count a batch. After the last one, print and write."""
        if self._profile is not None and self._profile.report is None:
            self._profile.step()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Print and write what was profiled of fewer batches."""
        if self._profile is not None:
            self._profile.__exit__(None, None, None)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Stop torch's profiler."""
        self.on_train_end(trainer, pl_module)

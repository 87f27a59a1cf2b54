"""What the strategy does for Fabric, where the user owns the loop.

Models come through ``setup_module``, before optimizers are made; several of them have units of
their own each. See `lifecycle` for the Trainer.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vescale_fsdp import clip_grad_norm_
from vescale_fsdp_lightning import fabric_checkpoints
from vescale_fsdp_lightning.precision import check_precision
from vescale_fsdp_lightning.sharding import Sharding, check_optimizers, gradient_sync

__all__ = ["FabricLifecycle"]


class FabricLifecycle(Sharding):
    """`Sharding` for ``Fabric(strategy="vescale_fsdp")``; that has the arguments."""

    strategy_name = "vescale_fsdp"

    def _arguments_of_base(self) -> dict[str, Any]:
        return {**super()._arguments_of_base(), "parallelize_fn": _as_it_is}

    # Processes

    def setup_environment(self) -> None:
        """Start ``torch.distributed``, and a mesh over all processes."""
        self.accelerator.setup_device(self.root_device)  # type: ignore[attr-defined]
        self._setup_distributed()  # type: ignore[attr-defined]
        self._start_mesh()

    def teardown(self) -> None:
        """Wait for what is being saved in the background."""
        self._checkpoints.store.finish()

    # Precision

    @property
    def precision(self) -> Any:
        """Lightning's precision plug-in."""
        return super().precision  # type: ignore[misc]

    @precision.setter
    def precision(self, plugin: Any) -> None:
        if plugin is not None:
            check_precision(plugin)
        self._precision = plugin

    # Model and optimizers

    def setup_module(self, module: nn.Module) -> nn.Module:
        """Shard the module, in place."""
        self._shard(module, self.precision.precision, methods=(), roots=False)
        self._modules: list[nn.Module] = [*getattr(self, "_modules", []), module]
        return module

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Check that the optimizer has the sharded parameters.

        Raises:
            ValueError: it was made before the model was sharded.
        """
        check_optimizers([optimizer], nn.ModuleList(getattr(self, "_modules", [])))
        return optimizer

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[Any], scheduler: Any = None
    ) -> Any:
        """Refused: the optimizers would hold parameters that are no more.

        Raises:
            NotImplementedError: says what to call.
        """
        raise NotImplementedError(
            'strategy="vescale_fsdp" shards the parameters, so optimizers are made after that: '
            "model = fabric.setup_module(model), then optimizer = fabric.setup_optimizers("
            "torch.optim.AdamW(model.parameters()))"
        )

    def module_init_context(self, empty_init: bool | None = None) -> Any:
        """With ``empty_init`` on the meta device; memory comes when the module is set up."""
        return super().module_init_context(empty_init=empty_init)  # type: ignore[misc]

    @property
    def _backward_sync_control(self) -> _NoSync:
        return _NoSync()

    @_backward_sync_control.setter
    def _backward_sync_control(self, control: object) -> None:
        """Lightning's is for FSDP2's own modules."""

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """Clip by the norm of all gradients of the optimizer. Returns it, the same on all ranks."""
        self.precision.unscale_gradients(optimizer)
        params = list(self.precision.main_params(optimizer))
        return clip_grad_norm_(params, max_norm, norm_type, error_if_nonfinite)

    # Checkpoints

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save models, optimizers and other values, as the options say. Collective.

        Raises:
            TypeError: with ``storage_options``.
            NotImplementedError: with a filter, and not a full checkpoint.
            ValueError: no model is in ``state``.
        """
        if storage_options is not None:
            raise TypeError(
                "VeScaleFabricStrategy.save_checkpoint takes no storage_options; put them into the "
                "path's protocol or the environment, as fsspec reads them"
            )
        fabric_checkpoints.save(self._checkpoints, str(self.broadcast(path)), state, filter or {})  # type: ignore[attr-defined]

    def load_checkpoint(
        self,
        path: str | Path,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load into the objects of ``state``, in place; returns what was not asked for. Collective.

        Raises:
            ValueError: there is nothing to load into.
        """
        if not state:
            raise ValueError(
                "VeScaleFabricStrategy.load_checkpoint needs the objects to load into: "
                'fabric.load(path, {"model": model, ...})'
            )
        return fabric_checkpoints.load(
            self._checkpoints,
            str(self.broadcast(path)),  # type: ignore[attr-defined]
            state,
            strict=strict,
            weights_only=weights_only,
            local_rank=self.local_rank,  # type: ignore[attr-defined]
        )


class _NoSync:
    """Fabric's ``no_backward_sync``."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Accumulate gradients without communication."""
        return gradient_sync(module, False) if enabled else nullcontext()


def _as_it_is(module: nn.Module, _: Any) -> nn.Module:
    return module

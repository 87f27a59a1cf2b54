"""The strategy for Fabric, where the user writes the training loop.

Fabric calls ``setup_module`` for each model, before optimizers are made. Each model has its own
units. The strategy for the Trainer is in `lifecycle`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import nn

from vescale_fsdp import clip_grad_norm_, replaced_parameters
from vescale_fsdp.checkpoint import full
from vescale_fsdp.spi import begin_load, begin_save
from vescale_fsdp_lightning import fabric_checkpoints
from vescale_fsdp_lightning.fabric_forward import Forward
from vescale_fsdp_lightning.places import from_first
from vescale_fsdp_lightning.precision import check_precision
from vescale_fsdp_lightning.sharding import (
    Sharding,
    check_optimizers,
    gradient_sync,
    set_up_optimizers,
)

__all__ = ["FabricLifecycle"]


class FabricLifecycle(Sharding):
    """`Sharding` for ``Fabric(strategy="vescale_fsdp")``. `Sharding` documents the arguments."""

    strategy_name = "vescale_fsdp"

    # Processes

    def setup_environment(self) -> None:
        """Start ``torch.distributed``, and make a mesh of all processes."""
        if self.options.elastic is not None:
            raise ValueError(
                "VeScaleFabricStrategy(elastic=...): with Fabric the loop is yours; use "
                "vescale_fsdp_elastic.training around it, and leave elastic out here"
            )
        self.accelerator.setup_device(self.root_device)
        self._setup_distributed()
        self._start_mesh()

    def teardown(self) -> None:
        """Wait for saves in the background."""
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
        """Shard the module, in place. Returns a module around it."""
        self._shard(module, self.precision.precision, methods=(), roots=False)
        self._modules: list[nn.Module] = [*getattr(self, "_modules", []), module]
        return Forward(module)

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Check that the optimizer has the sharded parameters.

        Raises:
            ValueError: it was made before the model was sharded.
        """
        check_optimizers([optimizer], nn.ModuleList(getattr(self, "_modules", [])))
        set_up_optimizers([optimizer], self.options)
        return optimizer

    def setup_module_and_optimizers(
        self, module: nn.Module, optimizers: list[torch.optim.Optimizer], scheduler: Any = None
    ) -> tuple[nn.Module, list[torch.optim.Optimizer], Any]:
        """Shard the module in place, and replace the parameters of its optimizers by the shards.

        Raises:
            NotImplementedError: an optimizer is one of ``vescale_fsdp.optim``, which need sharded
                parameters when they are made.
            ValueError: an optimizer has parameters that are not the module's.
        """
        for optimizer in optimizers:
            if type(optimizer).__module__.startswith("vescale_fsdp."):
                raise NotImplementedError(
                    f"{type(optimizer).__name__} needs sharded parameters when it is made, so "
                    "make it afterwards: model = fabric.setup_module(model), then "
                    f"optimizer = fabric.setup_optimizers({type(optimizer).__name__}(...))"
                )
        check_optimizers(optimizers, module)
        before = dict(module.named_parameters(remove_duplicate=False))
        around = self.setup_module(module)
        replace_parameters(optimizers, before, module)
        set_up_optimizers(optimizers, self.options)
        return around, optimizers, scheduler

    def module_to_device(self, module: nn.Module) -> None:
        """Do nothing: ``fully_shard`` has moved shards and buffers to the device."""

    @contextmanager
    def module_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """With ``empty_init``, make modules on the meta device. `setup_module` allocates memory."""
        device = torch.device("meta") if empty_init else nullcontext()
        with device, self.precision.module_init_context():
            yield

    @property
    def _backward_sync_control(self) -> _NoSync:
        return _NoSync()

    @_backward_sync_control.setter
    def _backward_sync_control(self, control: object) -> None:
        """Ignore Lightning's own control, which supports only FSDP2's modules."""

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

    @property
    def checkpoint_io(self) -> Any:
        """Not supported: `fabric_checkpoints` saves and loads.

        Raises:
            NotImplementedError: always.
        """
        raise NotImplementedError(
            f"{type(self).__name__} does not use a CheckpointIO; leave the plug-in out"
        )

    @checkpoint_io.setter
    def checkpoint_io(self, plugin: Any) -> None:
        raise NotImplementedError(
            f"{type(self).__name__} does not use a CheckpointIO; leave the "
            f"{type(plugin).__name__} out of plugins"
        )

    def save_checkpoint(
        self,
        path: str | Path,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        """Save models, optimizers and other values in the format of the options. Collective.

        Raises:
            TypeError: ``storage_options`` was passed.
            NotImplementedError: a filter was passed, and the format is not "full".
            ValueError: there is no model in ``state``.
        """
        if storage_options is not None:
            raise TypeError(
                "VeScaleFabricStrategy.save_checkpoint takes no storage_options; set them by the "
                "path's protocol or the environment, as for fsspec"
            )
        begin_save()
        fabric_checkpoints.save(
            self._checkpoints, from_first(lambda: str(path)), state, filter or {}
        )

    def load_checkpoint(
        self,
        path: str | Path,
        state: Any = None,
        strict: bool = True,
        weights_only: bool | None = None,
    ) -> dict[str, Any]:
        """Load into the objects of ``state`` in place. Returns the other values. Collective.

        Raises:
            ValueError: ``state`` has no object to load into.
        """
        if not state:
            raise ValueError(
                "VeScaleFabricStrategy.load_checkpoint needs the objects to load into: "
                'fabric.load(path, {"model": model, ...})'
            )
        begin_load()
        return fabric_checkpoints.load(
            self._checkpoints,
            from_first(lambda: str(path)),
            state,
            strict=strict,
            weights_only=weights_only,
            local_rank=self.local_rank,
        )


def replace_parameters(
    optimizers: list[torch.optim.Optimizer], before: dict[str, nn.Parameter], module: nn.Module
) -> None:
    """Replace the old parameters in optimizers by the module's sharded ones of the same names.

    Full states, which Adagrad makes in its constructor, are sharded as well. No communication.
    """
    now = dict(module.named_parameters(remove_duplicate=False))
    known = {id(param): now[name] for name, param in before.items()}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            replaced_parameters(group["params"], followed=True)
            replaced = [known[id(param)] for param in group["params"]]
            for old, new in zip(group["params"], replaced, strict=True):
                if old in optimizer.state:
                    optimizer.state[new] = {
                        key: full.part_of(value, new, key)
                        if isinstance(value, torch.Tensor) and value.shape == new.shape
                        else value
                        for key, value in optimizer.state.pop(old).items()
                    }
            group["params"] = replaced


class _NoSync:
    """Fabric's ``no_backward_sync``."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """Accumulate gradients without communication."""
        return gradient_sync(module, False) if enabled else nullcontext()

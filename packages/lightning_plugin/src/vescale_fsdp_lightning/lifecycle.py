"""What the strategy does at each point of Lightning's life cycle.

`Lifecycle` is mixed into Lightning's ``ModelParallelStrategy`` (once per namespace of Lightning,
see `_autoload`): launching, process groups and sharded checkpoints are Lightning's own, and the
methods here replace what is wrong or missing there for fully-sharded data parallel.

It holds no engine logic. The LightningModule itself is the root unit, and its steps are forward
methods of it: ``training_step`` gathers what the module owns, and a ``self(x)`` inside of it is
part of the same pass.
"""

from __future__ import annotations

import atexit
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from vescale_fsdp import (
    FSDPModule,
    Granularity,
    MixedPrecisionPolicy,
    clip_grad_norm_,
    fully_shard,
    register_fsdp_forward_method,
    repeated_blocks,
)

__all__ = ["Lifecycle"]

_STEPS = ("training_step", "validation_step", "test_step", "predict_step")
_PRECISIONS = ("32-true", "bf16-mixed", "bf16-true", "16-true")
_DEFAULT_TIMEOUT = timedelta(minutes=30)

WrapPolicy = Callable[[nn.Module], list[nn.Module]]


class Lifecycle:
    """Fully-sharded data parallel by veScale-FSDP: ``Trainer(strategy="vescale_fsdp")``.

    Args:
        wrap: which submodules become units, inner ones first: a function from the model to a
            list. Default: its repeated blocks. What ``configure_model`` has sharded stays so.
        granularity: what must not be cut, as of ``vescale_fsdp.fully_shard``.
        reshard_after_forward: as of ``fully_shard``.
        mp_policy: dtypes. Default: what the Trainer's ``precision`` asks for: ``bf16-mixed``
            gathers and computes in bf16 and reduces gradients in fp32, under autocast;
            ``bf16-true`` and ``16-true`` keep everything in that dtype.
        unused: as of ``fully_shard``.
        in_flight: as of ``fully_shard``.
        save_distributed_checkpoint: each rank saves its shards, into a directory. False (one
            file with everything) is not there yet.
        process_group_backend, timeout: of ``torch.distributed``.

    Raises:
        ValueError: a precision that does not work with sharded parameters, or optimizers that
            were made before the model was sharded.
    """

    strategy_name = "vescale_fsdp"

    def __init__(
        self,
        *,
        wrap: WrapPolicy | None = None,
        granularity: Granularity | Callable[..., Granularity | None] | None = None,
        reshard_after_forward: bool | None = None,
        mp_policy: MixedPrecisionPolicy | None = None,
        unused: str = "auto",
        in_flight: int = 2,
        save_distributed_checkpoint: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = _DEFAULT_TIMEOUT,
    ) -> None:
        if not save_distributed_checkpoint:
            raise NotImplementedError(
                "VeScaleFSDPStrategy(save_distributed_checkpoint=False) is not there yet; keep "
                "the default, which saves a directory"
            )
        super().__init__(  # type: ignore[call-arg]  # of ModelParallelStrategy
            save_distributed_checkpoint=True,
            process_group_backend=process_group_backend,
            timeout=timeout,
        )
        self._wrap = wrap or repeated_blocks
        self._mp_policy = mp_policy
        self._shard_options: dict[str, Any] = {
            "granularity": granularity,
            "reshard_after_forward": reshard_after_forward,
            "unused": unused,
            "in_flight": in_flight,
        }

    # Processes

    def setup_environment(self) -> None:
        """Start ``torch.distributed``, and one mesh axis over all processes."""
        self._setup_distributed()  # type: ignore[attr-defined]
        # gloo sometimes aborts at exit when a group is left to the interpreter's shutdown.
        atexit.register(_destroy_process_group)
        self._device_mesh: DeviceMesh = init_device_mesh(
            self.root_device.type,  # type: ignore[attr-defined]
            (self.world_size,),  # type: ignore[attr-defined]
            mesh_dim_names=("data_parallel",),
        )
        self.lightning_module._device_mesh = self._device_mesh  # type: ignore[attr-defined]

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Every process gets its own part of the data."""
        return {"num_replicas": self.world_size, "rank": self.global_rank}  # type: ignore[attr-defined]

    # Precision

    @property
    def precision_plugin(self) -> Any:
        """Lightning's precision plug-in; its clipping by norm is replaced by the engine's."""
        return super().precision_plugin  # type: ignore[misc]

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        if plugin is not None:
            if plugin.precision not in _PRECISIONS:
                raise ValueError(
                    f'Trainer(strategy="vescale_fsdp", precision={plugin.precision!r}) does not '
                    f"work; choose one of {', '.join(_PRECISIONS)}"
                )

            def clip_grad_by_norm(optimizer: torch.optim.Optimizer, clip_val: float) -> None:
                clip_grad_norm_(plugin.main_params(optimizer), clip_val)

            plugin.clip_grad_by_norm = clip_grad_by_norm
        self._precision_plugin = plugin

    def _policy(self, *, root: bool) -> MixedPrecisionPolicy:
        """The dtypes that the precision means. The root's inputs are the user's batch."""
        if self._mp_policy is not None:
            return self._mp_policy
        if self.precision_plugin.precision != "bf16-mixed":
            return MixedPrecisionPolicy()
        return MixedPrecisionPolicy(
            param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=not root
        )

    # Model and optimizers

    def setup(self, trainer: Any) -> None:
        """Shard the model, then let the user make optimizers on the sharded parameters."""
        self.accelerator.setup(trainer)  # type: ignore[attr-defined]
        self.model: nn.Module = self.lightning_module  # type: ignore[attr-defined]
        if not isinstance(self.model, FSDPModule):  # a second fit finds it sharded
            self.model = self.precision_plugin.convert_module(self.model)
            self._shard(self.model)
        self.barrier()  # type: ignore[attr-defined]
        fitting = trainer.state.fn.value == "fit"
        if fitting:
            self.setup_optimizers(trainer)  # type: ignore[attr-defined]
            self._check_optimizers()
        self.setup_precision_plugin()  # type: ignore[attr-defined]

    def _shard(self, module: nn.Module) -> None:
        mesh = self._device_mesh
        if not any(isinstance(child, FSDPModule) for child in module.modules()):
            for block in self._wrap(module):
                fully_shard(
                    block, mesh=mesh, mp_policy=self._policy(root=False), **self._shard_options
                )
        fully_shard(module, mesh=mesh, mp_policy=self._policy(root=True), **self._shard_options)
        for step in _STEPS:
            register_fsdp_forward_method(module, step)

    def _check_optimizers(self) -> None:
        known = {id(param) for param in self.lightning_module.parameters()}  # type: ignore[attr-defined]
        for optimizer in self.optimizers:  # type: ignore[attr-defined]
            params = [param for group in optimizer.param_groups for param in group["params"]]
            strangers = sum(id(param) not in known for param in params)
            if strangers:
                raise ValueError(
                    f"{type(optimizer).__name__} holds {strangers} of {len(params)} parameters "
                    "that are not the model's: it was made before the model was sharded, and "
                    "would train nothing. Make it in configure_optimizers, from self.parameters()"
                )

    def model_to_device(self) -> None:
        """``fully_shard`` has put the shards and buffers on the device."""

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication."""
        module = cast(FSDPModule, self.model)
        module.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            module.set_requires_gradient_sync(True)

    # Checkpoints

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: str | Path, storage_options: Any = None
    ) -> None:
        """Save beside the target, then put it in its place: never over what is there.

        Lightning saves ``last.ckpt`` again and again; written in place, a process killed on the
        way would leave a mix of two steps.
        """
        target = Path(self.broadcast(filepath))  # type: ignore[attr-defined]
        partial, old = (target.with_name(target.name + end) for end in (".partial", ".old"))
        if self.is_global_zero:  # type: ignore[attr-defined]
            _remove(partial)
            if target.exists():
                _remove(old)
            elif old.exists():  # killed between the two renames: it is the last one there is
                old.rename(target)
        self.barrier()  # type: ignore[attr-defined]
        super().save_checkpoint(checkpoint, partial, storage_options)  # type: ignore[misc]
        self.barrier()  # type: ignore[attr-defined]
        if self.is_global_zero:  # type: ignore[attr-defined]
            if target.exists():
                target.rename(old)
            partial.rename(target)
            _remove(old)
        self.barrier()  # type: ignore[attr-defined]

    def load_checkpoint(
        self, checkpoint_path: str | Path, weights_only: bool | None = None
    ) -> dict[str, Any]:
        """Load the shards of this process from a directory that this strategy has saved."""
        if Path(checkpoint_path).is_file():
            raise NotImplementedError(
                f"{checkpoint_path} is a single file, as DDPStrategy saves it; loading one is not "
                "there yet. Load its state_dict in configure_model, before the model is sharded"
            )
        loaded: dict[str, Any] = super().load_checkpoint(checkpoint_path, weights_only)  # type: ignore[misc]
        return loaded


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _destroy_process_group() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()

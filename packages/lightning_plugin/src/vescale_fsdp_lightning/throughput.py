"""Throughput: tokens per second, memory, padding, communication; in progress bar and logger."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from vescale_fsdp import FSDPModule, MixedPrecisionPolicy
from vescale_fsdp_lightning._autoload import callback_base
from vescale_fsdp_lightning.precision import policy_for
from vescale_fsdp_lightning.sharding import Sharding

__all__ = ["Throughput", "Traffic", "traffic_of"]


class Traffic(NamedTuple):
    """Padding and communication of one process, computed from the layout."""

    padding_percent: float  # of the shards' elements
    gather_bytes: int  # received for one forward and one backward
    reduce_bytes: int  # received for one reduction of gradients


def traffic_of(
    module: nn.Module,
    policy: MixedPrecisionPolicy | None = None,
    reshard_after_forward: bool | int | None = None,
) -> Traffic:
    """Compute padding and communication of a sharded model for one process.

    A process receives the shards of all others in each all-gather, and as many elements in a
    reduce-scatter. Sums over replicas (HSDP) count twice, as in a ring all-reduce.

    Args:
        policy: dtypes of all-gather and reduce-scatter. Default: those of the shards. Its
            ``param_dtype_override_fn`` is not asked.
        reshard_after_forward: as in ``fully_shard``. A unit that is not resharded is gathered once
            for forward and backward; with None that is the root. An int counts as True.
    """
    policy = policy or MixedPrecisionPolicy()
    gathered_dtype, reduced_dtype = policy.param_dtype, policy.reduce_dtype or policy.param_dtype
    shards: dict[int, tuple[int, int, bool, DTensor]] = {}
    used: dict[int, int] = {}
    root = {id(param) for param in _own_parameters(module)}
    for param in module.parameters():
        if not isinstance(param, DTensor):
            continue
        local = param.to_local()
        storage = local.untyped_storage()
        key = storage.data_ptr()
        elements = storage.nbytes() // local.element_size()
        used[key] = used.get(key, 0) + local.numel()
        shards[key] = (elements, local.element_size(), id(param) in root, param)
    held = sum(elements for elements, *_ in shards.values())
    gathered = reduced = 0
    for elements, size, is_root, cut in shards.values():
        axes = [cut.device_mesh.size(axis) for axis in range(cut.device_mesh.ndim)]
        others = axes[-1] - 1
        replicas = axes[0] if len(axes) > 1 else 1
        is_kept = is_root if reshard_after_forward is None else reshard_after_forward is False
        size_gathered = gathered_dtype.itemsize if gathered_dtype else size
        gathered += (1 if is_kept else 2) * others * elements * size_gathered
        if cut.requires_grad:
            size_reduced = reduced_dtype.itemsize if reduced_dtype else size
            reduced += others * elements * size_reduced
            reduced += 2 * (replicas - 1) * elements * size_reduced // replicas
    empty = held - sum(used.values())
    return Traffic(100 * empty / max(held, 1), gathered, reduced)


def _own_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters of a unit, without those of inner units."""
    below = {
        id(param)
        for child in module.modules()
        if isinstance(child, FSDPModule) and child is not module
        for param in child.parameters()
    }
    return [param for param in module.parameters() if id(param) not in below]


class Throughput(callback_base()):  # type: ignore[misc]
    """Logs speed and memory of a step, measured in the same way for every strategy.

    ``tokens_per_s`` of all processes: wall time from the end of one optimizer step to the end of
    another, including data loading and logging, without validation.
    ``peak_memory_gb``: on CUDA the peak of torch's allocations, on CPU the peak of the process.
    With ``vescale_fsdp`` also ``padding_percent`` of the shards, and ``comm_gb_per_step``, the
    bytes that a process receives in a step, computed from the layout; not with ``gather_codec`` or
    ``reduce_codec``, because the layout does not contain the codes.

    Args:
        tokens_of: how many tokens (or samples) are in a batch. Default: the elements of the first
            tensor of integers in it, or else the length of the first tensor.
        every_n_steps: how many steps are measured together.
        skip_steps: steps at the beginning, when kernels are compiled and memory is allocated.
    """

    def __init__(
        self,
        tokens_of: Callable[[Any], int] | None = None,
        every_n_steps: int = 10,
        skip_steps: int = 2,
    ) -> None:
        if every_n_steps < 1 or skip_steps < 0:
            raise ValueError(
                f"Throughput(every_n_steps={every_n_steps}, skip_steps={skip_steps}): expected at "
                "least 1, and at least 0"
            )
        self.tokens_of = tokens_of or count_tokens
        self.every_n_steps, self.skip_steps = every_n_steps, skip_steps
        self._tokens = self._steps = self._skipped = self._micro_batches = self._last_step = 0
        self._seconds, self._since = 0.0, 0.0
        self._traffic: Traffic | None = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Compute padding and communication from the layout, once."""
        self._last_step = trainer.global_step
        self._traffic = None
        if isinstance(trainer.strategy, Sharding):
            precision = trainer.strategy.precision_plugin.precision  # type: ignore[attr-defined]
            options = trainer.strategy.options
            policy = options.mp_policy or policy_for(precision, is_root=False)
            self._traffic = traffic_of(pl_module, policy, options.reshard_after_forward)
        self._restart(trainer)

    def on_train_batch_end(
        self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        """Count tokens, and log every ``every_n_steps``."""
        self._tokens += self.tokens_of(batch)
        self._micro_batches += 1
        if trainer.global_step == self._last_step:
            return
        self._last_step = trainer.global_step
        self._steps += 1
        if self._skipped < self.skip_steps:
            self._skipped += 1
            self._restart(trainer)
        elif self._steps == self.every_n_steps:
            self._log(trainer, pl_module)
            self._restart(trainer)

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        """Pause the measurement of time."""
        self._seconds += self._now(trainer) - self._since

    def on_validation_end(self, trainer: Any, pl_module: Any) -> None:
        """Continue the measurement of time."""
        self._since = self._now(trainer)

    def _restart(self, trainer: Any) -> None:
        self._tokens = self._steps = self._micro_batches = 0
        self._seconds, self._since = 0.0, self._now(trainer)

    def _now(self, trainer: Any) -> float:
        if trainer.strategy.root_device.type == "cuda":
            torch.cuda.synchronize()
        return time.perf_counter()

    def _log(self, trainer: Any, pl_module: Any) -> None:
        seconds = self._seconds + self._now(trainer) - self._since
        device = trainer.strategy.root_device
        figures = torch.tensor([self._tokens, _peak_bytes(device)], dtype=torch.float64)
        if dist.is_initialized() and dist.get_world_size() > 1:
            figures = figures.to(device)
            dist.all_reduce(figures[:1])
            dist.all_reduce(figures[1:], op=dist.ReduceOp.MAX)
            # Tensor-parallel processes have the same tokens.
            replicas = trainer.strategy.distributed_sampler_kwargs["num_replicas"]
            figures[0] *= replicas / dist.get_world_size()
        logged = {
            "tokens_per_s": figures[0].item() / seconds,
            "peak_memory_gb": figures[1].item() / 1e9,
        }
        if self._traffic is not None:
            gathers = self._micro_batches / self._steps
            moved = gathers * self._traffic.gather_bytes + self._traffic.reduce_bytes
            logged["padding_percent"] = self._traffic.padding_percent
            options = trainer.strategy.options
            if options.gather_codec is None and options.reduce_codec is None:
                logged["comm_gb_per_step"] = moved / 1e9
        has_logger = bool(trainer.loggers)
        pl_module.log_dict(logged, prog_bar=True, logger=has_logger, on_step=True, on_epoch=False)


def count_tokens(batch: Any) -> int:
    """Return the number of elements of the first integer tensor in a batch.

    If there is none, return the length of the first tensor.
    """
    tensors = list(_tensors(batch))
    if not tensors:
        return 0
    integers = [each for each in tensors if not each.is_floating_point()]
    return integers[0].numel() if integers else len(tensors[0])


def _tensors(batch: Any) -> Any:
    if isinstance(batch, torch.Tensor):
        yield batch
    elif isinstance(batch, dict):
        for each in batch.values():
            yield from _tensors(each)
    elif isinstance(batch, list | tuple):
        for each in batch:
            yield from _tensors(each)


def _peak_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

"""The methods for several processes: launcher, process group, collectives on objects and metrics.

The strategies of Trainer and Fabric share them. Lightning's own strategies each implement these
methods. Ours derives from ``ParallelStrategy``, which does not, and not from one of these
strategies: other programs look for their classes and then do what only that strategy needs.
"""

from __future__ import annotations

from datetime import timedelta
from importlib import import_module
from typing import Any

import torch
import torch.distributed as dist
from lightning_utilities.core.rank_zero import rank_zero_only
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from vescale_fsdp.checkpoint import init_process_group
from vescale_fsdp.spi import backend_name

__all__ = ["Processes"]


class Processes:
    """A mixin for ``ParallelStrategy`` of any of Lightning's namespaces."""

    namespace: str  # of the base class, such as "lightning.pytorch"
    is_distributed = True  # Lightning reads this of strategies that it does not know
    _device_mesh: DeviceMesh | None = None
    _num_nodes = 1

    # Attributes of Lightning's base class
    accelerator: Any
    cluster_environment: Any
    parallel_devices: Any
    global_rank: int
    local_rank: int
    node_rank: int
    world_size: int

    def __init__(self, *, process_group_backend: str | None, timeout: timedelta | None) -> None:
        super().__init__()
        self._process_group_backend = process_group_backend
        self._timeout = timeout

    @property
    def device_mesh(self) -> DeviceMesh:
        """The mesh of all processes.

        Raises:
            RuntimeError: processes have not been started.
        """
        if self._device_mesh is None:
            raise RuntimeError(
                "strategy.device_mesh exists only after torch.distributed has been started: in "
                "configure_model and later, or after fabric.launch()"
            )
        return self._device_mesh

    @property
    def root_device(self) -> torch.device:
        """The device of this process."""
        device: torch.device = self.parallel_devices[self.local_rank]
        return device

    @property
    def num_processes(self) -> int:
        """The number of processes on this machine."""
        return len(self.parallel_devices or ())

    @property
    def num_nodes(self) -> int:
        """The number of machines."""
        return self._num_nodes

    @num_nodes.setter
    def num_nodes(self, number: int) -> None:
        self._num_nodes = number

    @property
    def process_group_backend(self) -> str | None:
        """``"nccl"`` or ``"gloo"``. None: it follows from the device."""
        return self._process_group_backend

    # Starting

    def _configure_launcher(self) -> None:
        if not self.cluster_environment.creates_processes_externally:
            launchers = import_module(f"{self.namespace}.strategies.launchers.subprocess_script")
            self._launcher = launchers._SubprocessScriptLauncher(
                self.cluster_environment, self.num_processes, self.num_nodes
            )

    def _setup_distributed(self) -> None:
        self.accelerator.setup_device(self.root_device)
        self._utilities("seed").reset_seed()
        self._set_world_ranks()
        tools = self._utilities("distributed")
        if self._process_group_backend is None:
            find = tools._get_default_process_group_backend_for_device
            self._process_group_backend = find(self.root_device)
        device = None if self.root_device.type == "cpu" else self.root_device
        options: dict[str, Any] = {"timeout": self._timeout, "device_id": device}
        if dist.is_torchelastic_launched() and not dist.is_initialized():
            self._init_process_group(self._process_group_backend, **options)
        tools._init_dist_connection(
            self.cluster_environment, self._process_group_backend, **options
        )

    def _init_process_group(self, backend: str | None, **options: Any) -> None:
        """Make the default group under torchrun, safe for restarts. Lightning then uses it."""
        init_process_group(backend, **options)

    def _set_world_ranks(self) -> None:
        environment = self.cluster_environment
        if environment is not None:
            environment.set_global_rank(self.node_rank * self.num_processes + self.local_rank)
            environment.set_world_size(self.num_nodes * self.num_processes)
        rank_zero_only.rank = self.global_rank  # type: ignore[attr-defined]

    def _utilities(self, name: str) -> Any:
        """Return a module of Fabric, of the same namespace. It has the functions for processes."""
        is_one_package = self.namespace.startswith("lightning.")
        fabric = "lightning.fabric" if is_one_package else "lightning_fabric"
        return import_module(f"{fabric}.utilities.{name}")

    # Collectives

    def barrier(self, *_: Any, **__: Any) -> None:
        """Wait for all processes."""
        if not dist.is_initialized():
            return
        is_nccl = backend_name(None, self.root_device) == "nccl"
        dist.barrier(device_ids=[self.root_device.index] if is_nccl else None)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Send an object from one process to all."""
        if not dist.is_initialized():
            return obj
        objects = [obj]
        dist.broadcast_object_list(objects, src)
        return objects[0]

    def all_reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return the mean, or another ``reduce_op``, over processes. Only tensors are reduced."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if isinstance(tensor, DTensor):  # computed from sharded parameters: a norm of gradients
            tensor = tensor.full_tensor()
        return self._utilities("distributed")._sync_ddp_if_available(
            tensor, group, reduce_op=reduce_op
        )

"""A group of NCCL for tests, also with more ranks than GPUs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from vescale_fsdp import compat, devices

# NCCL refuses two ranks on one GPU of a host, and knows a host by NCCL_HOSTID. So each rank says
# that it is a host of its own, and messages go through sockets of the loopback.
_HOSTS = {
    "NCCL_SOCKET_IFNAME": "lo",
    "NCCL_NET": "Socket",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MAX_CTAS": "2",
}


@contextmanager
def nccl_group(timeout_s: float = 60, backend: str = "nccl") -> Iterator[torch.device]:
    """Within a rank of `run_ranks`: replace the default group of gloo by one of NCCL.

    Args:
        timeout_s: of its collectives.
        backend: of the default group; "cpu:gloo,cuda:nccl" for both.

    Yields:
        The device of this rank.
    """
    rank, world_size = dist.get_rank(), dist.get_world_size()
    store = compat.default_store()
    os.environ.update(_HOSTS, NCCL_HOSTID=f"rank-{rank}")
    device = torch.device("cuda", rank % len(devices.describe_all()["devices"]))
    dist.barrier()  # else a rank leaves while another still connects to it
    dist.destroy_process_group()
    with devices.made_current(device):
        dist.init_process_group(
            backend,
            store=PrefixStore(backend, store),
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
        yield device
        devices.synchronize(device)

"""Measures the machine: network, copies, optimizer, and the engine's own time on the processor.

All ranks measure at the same time, with the process groups and collectives of training. The figures
of a rank are merged by `agreed`: the largest times and the smallest rates of all ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import nn

from vescale_fsdp import devices
from vescale_fsdp.costs import Link, OptimizerName
from vescale_fsdp.dbuffer import Comm, pool_for

_SIZES = (1 << 14, 1 << 20, 1 << 23)  # bytes of all ranks' parts together
_LARGER = 16  # times as much on accelerators, whose caches and networks are that much larger
_RUNS = 6  # the least of them counts: others may use the machine too


class Sent(NamedTuple):
    """What collectives of one size took, at the least."""

    num_bytes: int  # that a rank sends
    seconds: float
    processor_s: float  # of all threads of this process


def link_times(comm: Comm, device: torch.device) -> list[Sent]:
    """Measure all-gathers of some sizes, and reduce-scatters. Collective.

    An all-to-all takes as long as an all-gather, and the sum after it is no time of the network.

    Cost: 24 collectives, or twice that, of at most 8 MiB in all, on accelerators 128 MiB.
    """
    found = []
    for num_bytes in _sizes(device):
        part_bytes = max(num_bytes // comm.size // 16, 1) * 16
        full = torch.zeros(comm.size * part_bytes // 4, dtype=torch.float32, device=device)
        own = full.view(comm.size, -1)[comm.rank]

        def gather(full: torch.Tensor = full, own: torch.Tensor = own) -> None:
            comm.all_gather(full, own).wait()

        def reduce(full: torch.Tensor = full) -> None:
            comm.start_reduce(full, full.dtype, pool_for(device)).finish()

        runs = [gather, reduce] if comm.reduction == "native" else [gather]
        found += [_sent(run, device, (comm.size - 1) * part_bytes) for run in runs]
    return found


def replica_times(comm: Comm, device: torch.device) -> list[Sent]:
    """Measure all-reduces over replicas. Collective."""
    found = []
    for num_bytes in _sizes(device):
        shard = torch.zeros(num_bytes // 4, dtype=torch.float32, device=device)

        def reduce(shard: torch.Tensor = shard) -> None:
            comm.start_replica_sum(shard, pool_for(device), averages=True, cuts=False).finish()

        sent = 2 * (comm.num_replicas - 1) * num_bytes // comm.num_replicas
        found.append(_sent(reduce, device, sent))
    return found


def _sent(run: Callable[[], None], device: torch.device, num_bytes: int) -> Sent:
    run()
    run()
    times, used = [], []
    for _ in range(_RUNS):
        devices.synchronize(device)
        start, processor = time.perf_counter(), time.process_time()
        run()
        devices.synchronize(device)
        times.append(time.perf_counter() - start)
        used.append(time.process_time() - processor)
    return Sent(num_bytes, min(times), min(used))


def link_of(points: Sequence[Sent]) -> Link:
    """Fit latency and bandwidth: the smallest messages, and the slope up to the largest."""
    small, large = min(point.num_bytes for point in points), max(p.num_bytes for p in points)
    latency_s = statistics.mean(p.seconds for p in points if p.num_bytes == small)
    seconds = statistics.mean(p.seconds for p in points if p.num_bytes == large)
    rate = (large - small) / max(seconds - latency_s, 1e-9)
    return Link(rate, max(latency_s - small / rate, 0.0))


def sending_s_per_byte(points: Sequence[Sent]) -> float:
    """Return the processor's seconds for each byte that a rank sends, from the largest messages."""
    large = max(point.num_bytes for point in points)
    used = statistics.mean(point.processor_s for point in points if point.num_bytes == large)
    return used / large


def copy_bytes_per_s(device: torch.device) -> float:
    """Measure copies on the device. Bytes read and written count."""
    source = torch.zeros(_times(1 << 22, device), device=device)
    target = torch.zeros_like(source)
    return 2 * source.nbytes / _least_s(lambda: target.copy_(source), device)


def host_bytes_per_s(device: torch.device) -> float:
    """Measure copies between a device and the host's pinned memory, one way."""
    there = devices.empty_pinned((1 << 24,), torch.uint8)
    here = torch.empty(1 << 24, dtype=torch.uint8, device=device)
    return here.nbytes / _least_s(lambda: here.copy_(there, non_blocking=True), device)


def optimizer_elements_per_s(
    device: torch.device, dtype: torch.dtype, optimizer: OptimizerName
) -> float:
    """Measure steps of the optimizer; of AdamW if it is not one of torch's."""
    param = nn.Parameter(torch.zeros(_times(1 << 21, device), dtype=dtype, device=device))
    param.grad = torch.zeros_like(param)
    fused = True if optimizer.endswith("_fused") else None
    if optimizer.startswith("sgd"):
        step = torch.optim.SGD([param], momentum=0.9, fused=fused).step
    else:
        step = torch.optim.AdamW([param], fused=fused).step
    return param.numel() / _least_s(step, device)


def _times(number: int, device: torch.device) -> int:
    return number * (_LARGER if devices.has_streams(device) else 1)


def _sizes(device: torch.device) -> list[int]:
    return [_times(num_bytes, device) for num_bytes in _SIZES]


def _least_s(run: Callable[[], object], device: torch.device) -> float:
    run()
    times = []
    for _ in range(_RUNS):
        devices.synchronize(device)
        start = time.perf_counter()
        run()
        devices.synchronize(device)
        times.append(time.perf_counter() - start)
    return min(times)

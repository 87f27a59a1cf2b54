"""Measures the machine: network, copies, optimizer, and the engine's own time on the processor.

All ranks measure at the same time, with the process groups and collectives of training. The figures
of a rank are merged by `agreed`: the largest times and the smallest rates of all ranks.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import nn

from vescale_fsdp.spi import (
    Comm,
    Waitable,
    all_reduce,
    devices,
    free_workspaces,
    pool_for,
    waits,
)
from vescale_fsdp_tune.costs.machine import Link
from vescale_fsdp_tune.costs.settings import OptimizerName

_SIZES = (1 << 14, 1 << 20, 1 << 23)  # bytes of all ranks' parts together
_LARGER = 16  # times as much on accelerators, whose caches and networks are that much larger
_ROUNDS, _MOST_PRODUCTS = 15, 200
_RUNS = 6  # the least of them counts: others may use the machine too


class Sent(NamedTuple):
    """What collectives of one size took, at the least."""

    num_bytes: int  # that a rank sends
    seconds: float


def link_times(comm: Comm, device: torch.device) -> list[Sent]:
    """Measure all-gathers of some sizes, and reduce-scatters. Collective.

    An all-to-all takes as long as an all-gather, and the sum after it is no time of the network.
    On the CPU this rank computes while it waits, as in a step: the threads that send and receive
    have to share the cores.

    Cost: 24 collectives, or twice that, of at most 8 MiB in all, on accelerators 128 MiB.
    """
    found = []
    for num_bytes in _sizes(device):
        part_bytes = max(num_bytes // comm.size // 16, 1) * 16
        full = torch.zeros(comm.size * part_bytes // 4, dtype=torch.float32, device=device)
        own = full.view(comm.size, -1)[comm.rank]

        def gather(full: torch.Tensor = full, own: torch.Tensor = own) -> None:
            _wait(comm.all_gather(full, own), device)

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
            pool = pool_for(device)
            pending = comm.start_replica_sum(shard, pool, averages=True, cuts=False)
            if pending.work is not None:
                _wait(pending.work, device)
                pending.work = None
            pending.finish()

        sent = 2 * (comm.num_replicas - 1) * num_bytes // comm.num_replicas
        found.append(_sent(reduce, device, sent))
    return found


def _wait(work: Waitable, device: torch.device) -> None:
    """Wait, and compute on the CPU until then."""
    if not devices.has_streams(device):
        ending = waits.Ending(work, has_streams=False)
        factor = torch.zeros(64, 64)
        while not ending.has_ended(0.0):
            torch.mm(factor, factor)
        ending.wait()
    else:
        work.wait()


def _sent(run: Callable[[], None], device: torch.device, num_bytes: int) -> Sent:
    run()
    return Sent(num_bytes, _least_s(run, device))


def link_of(points: Sequence[Sent]) -> Link:
    """Fit latency and bandwidth: the smallest messages, and the slope up to the largest.

    On a busy machine the smallest messages may take as long as the largest. Such a slope would be
    a network of any speed, so the largest messages count as sending for a quarter of their time.
    """
    small, large = min(point.num_bytes for point in points), max(p.num_bytes for p in points)
    seconds = statistics.mean(p.seconds for p in points if p.num_bytes == large)
    latency_s = statistics.mean(p.seconds for p in points if p.num_bytes == small)
    latency_s = min(latency_s, 0.75 * seconds)
    rate = (large - small) / max(seconds - latency_s, 1e-9)
    return Link(rate, max(latency_s - small / rate, 0.0))


class SendingTimes(NamedTuple):
    """Seconds of the processor for each byte that a rank sends, as in `costs.Machine`."""

    gather_s_per_byte: float
    sum_s_per_byte: float


def sending_times(comm: Comm) -> SendingTimes:
    """Measure what sending takes of the processor, on the CPU. Collective.

    They are the seconds of an all-gather or an all-reduce while this rank computes, beyond those of
    computing: twice as many as alone, because each takes caches and cores from the other.

    Cost: 16 all-gathers of at most 4 MiB from each rank, 64 MiB in all, and as many all-reduces.
    """
    part_bytes = min(4 << 20, (64 << 20) // comm.size)
    full = torch.zeros(comm.size * part_bytes // 4, dtype=torch.float32)
    own = full.view(comm.size, -1)[comm.rank]
    factors = torch.zeros(256, 256), torch.zeros(256, 1024)
    product = torch.empty(256, 1024)

    def compute(times: int) -> None:
        for _ in range(times):
            torch.mm(*factors, out=product)

    def gather() -> Waitable:
        return comm.all_gather(full, own)

    def total() -> Waitable:
        return all_reduce(full, comm.reduce_group)

    def used_s(send: Callable[[], Waitable] | None) -> float:
        start = time.process_time()
        work = None if send is None else send()
        compute(times)
        if work is not None:
            work.wait()
        return time.process_time() - start

    start = time.perf_counter()
    gather().wait()
    sending_s = time.perf_counter() - start
    product_s = _least_s(partial(compute, 1), torch.device("cpu"))
    times = min(1 + int(2 * sending_s / product_s), _MOST_PRODUCTS)
    rounds = [(used_s(None), used_s(gather), used_s(total)) for _ in range(_ROUNDS)]
    gather_s = statistics.median(gathers - alone for alone, gathers, _ in rounds)
    sum_s = statistics.median(sums - alone for alone, _, sums in rounds)
    sent_bytes = (comm.size - 1) * part_bytes  # of an all-reduce, twice as many
    return SendingTimes(max(gather_s, 0.0) / sent_bytes, max(sum_s, 0.0) / (2 * sent_bytes))


def copy_bytes_per_s(device: torch.device) -> float:
    """Measure copies on the device, of more than caches hold. Bytes read and written count."""
    source = torch.zeros(1 << (26 if devices.has_streams(device) else 24), device=device)
    target = torch.zeros_like(source)
    return 2 * source.nbytes / _least_s(lambda: target.copy_(source), device)


def host_bytes_per_s(device: torch.device) -> float:
    """Measure copies between a device and the host's pinned memory, one way."""
    there = devices.empty_pinned((1 << 24,), torch.uint8)
    here = torch.empty(1 << 24, dtype=torch.uint8, device=device)
    return here.nbytes / _least_s(lambda: here.copy_(there, non_blocking=True), device)


def workspace_bytes(device: torch.device) -> int:
    """Measure what libraries of matrix products allocate on an accelerator, beside their results.

    cuBLAS has a workspace for each thread and stream: for forward, and for backward (32 MiB each on
    Hopper). They stay allocated. The peak that torch records is reset. On other devices it is 0.
    """
    if device.type != "cuda":
        return 0
    x, weight = (torch.zeros(16, 16, device=device, requires_grad=True) for _ in range(2))

    def multiply() -> None:
        with torch.enable_grad():
            for dtype in (torch.float32, torch.bfloat16):
                matrix = weight.to(dtype)
                nn.functional.linear(x.to(dtype), matrix, matrix[0]).sum().backward()

    free_workspaces(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    multiply()
    return torch.cuda.max_memory_allocated(device) - before


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

"""Peak memory of a training step, compared with FSDP2, as counted by the CPU allocator.

    python -m benchmarks.peak_memory --ranks 2 4 --fake-ranks 64 256 1024

It uses real ranks over gloo, and rank 0 of many ranks with torch's fake process group, which sends
nothing. With the fake group both engines use reduce-scatter, as over NCCL.

``resting`` are the shards of parameters and of AdamW's states. ``beyond`` is the step's peak
without these and without reduced gradients. Its batch has one token, so that activations are
small; they are counted. It is given in multiples of the largest unit's parameters in the dtype of
the shards. ``total`` is everything, with a batch of ``--tokens``. Unused memory in our pool of
temporary memory is counted as used.
"""

from __future__ import annotations

import argparse
import gc
import os
import socket
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from multiprocessing import get_context
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.models import CONTEXT, GPT, MoE, loss_of
from packages.core.tests.allocations import Block, peak_of, through_the_allocator, traced
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from vescale_fsdp import fully_shard

VOCABULARY = 32  # so that the root is small compared with the blocks

POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16, fp32 reduction": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "bf16": MixedPrecisionPolicy(torch.bfloat16),
}
ENGINES: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "FSDP2": (torch_fully_shard, {}),
    "ours": (fully_shard, {}),
    "ours, in_flight=1": (fully_shard, {"in_flight": 1}),
}
MODELS: dict[str, Callable[[], GPT]] = {
    "gpt": lambda: GPT(VOCABULARY, CONTEXT, layers=8, width=256, heads=4),
    "moe": lambda: MoE(num_experts=32, hidden=128, layers=8, width=128, heads=2),
}


@dataclass(frozen=True)
class Reading:
    """Bytes of one engine on one rank."""

    unit: int  # of the largest unit's parameters in the dtype of the shards
    resting: int
    beyond: int
    total: int
    left: int  # still allocated after a step, without gradients

    @property
    def units(self) -> float:
        """Peak without shards and reduced gradients, in multiples of the largest unit."""
        return self.beyond / self.unit


def _storages(tensors: list[Any]) -> dict[int, int]:
    """Bytes of the memory under the local parts of sharded tensors, by address."""
    found = {}
    for tensor in tensors:
        local = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        if local.numel():
            storage = local.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def _is_one_of(block: Block, addresses: dict[int, int]) -> bool:
    return block.end is None and block.address in addresses


def read(model_name: str, precision: str, engine: str, num_tokens: int) -> Reading:
    """Train some steps on this rank. Returns the memory of one."""
    shard, options = ENGINES[engine]
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(0)
    model = MODELS[model_name]()
    units: list[nn.Module] = [*model.blocks, model]
    sizes = [sum(p.nbytes for p in block.parameters()) for block in model.blocks]
    sizes.append(sum(p.nbytes for p in model.parameters()) - sum(sizes))
    for unit in units:
        shard(unit, mesh=mesh, mp_policy=POLICIES[precision], **options)
    params = list(model.parameters())
    optimizer = torch.optim.AdamW(params, lr=1e-4)

    def backward(num_tokens: int) -> None:
        length = min(num_tokens, CONTEXT)
        tokens = torch.arange(num_tokens + num_tokens // length).view(-1, length + 1) % VOCABULARY
        loss_of(model(tokens[:, :-1]), tokens[:, 1:]).backward()
        time.sleep(0.1)  # until gloo's threads have released the last engine

    for size in (1, num_tokens):
        backward(size)
        optimizer.step()
        optimizer.zero_grad()
    states = [value for state in optimizer.state.values() for value in state.values()]
    resting = sum(_storages(params + [each for each in states if each.dim()]).values())
    peaks, left = [], 0
    for size in (1, num_tokens):
        blocks = traced(lambda size=size: backward(size))
        grads = _storages([p.grad for p in params if p.grad is not None])
        others = [block for block in blocks if not _is_one_of(block, grads)]
        peaks.append(peak_of(others if size == 1 else blocks)[0])
        left = sum(block.num_bytes for block in others if block.end is None)
        optimizer.zero_grad()
    return Reading(max(sizes), resting, peaks[0], resting + peaks[1], left)


def on_rank(
    rank: int, num_ranks: int, is_fake: bool, port: int, model: str, num_tokens: int
) -> dict[tuple[str, str], Reading]:
    """All engines and precisions, one after the other, as one rank of a group."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if is_fake:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    else:
        address = f"tcp://localhost:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=num_ranks)
    readings = {}
    with through_the_allocator():
        for precision in POLICIES:
            for engine in ENGINES:
                readings[precision, engine] = read(model, precision, engine, num_tokens)
                gc.collect()
    if not is_fake:
        dist.barrier()
    dist.destroy_process_group()
    return readings


def measure(
    num_ranks: int, is_fake: bool, model: str, num_tokens: int
) -> dict[tuple[str, str], Reading]:
    """Return the readings of rank 0. The ranks run in separate processes."""
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    started = 1 if is_fake else num_ranks
    with ProcessPoolExecutor(started, mp_context=get_context("spawn")) as pool:
        ranks = [
            pool.submit(on_rank, rank, num_ranks, is_fake, port, model, num_tokens)
            for rank in range(started)
        ]
        first, *_ = [each.result() for each in ranks]
        return first


def show(title: str, readings: dict[tuple[str, str], Reading], console: Console) -> None:
    """Print a table of the engines in one configuration."""
    table = Table(title=title, title_justify="left")
    table.add_column("precision")
    table.add_column("engine")
    for column in (
        "resting, MB", "beyond, MB", "in units", "/ FSDP2", "total, MB", "/ FSDP2", "left, bytes",
    ):  # fmt: skip
        table.add_column(column, justify="right")
    for (precision, engine), reading in readings.items():
        theirs = readings[precision, "FSDP2"]
        table.add_row(
            precision,
            engine,
            f"{reading.resting / 1e6:.2f}",
            f"{reading.beyond / 1e6:.2f}",
            f"{reading.units:.2f}",
            f"{reading.beyond / theirs.beyond:.2f}",
            f"{reading.total / 1e6:.2f}",
            f"{reading.total / theirs.total:.2f}",
            f"{reading.left}",
            end_section=engine == list(ENGINES)[-1],
        )
    console.print(table)


def main() -> None:
    """Measure all configurations asked for."""
    parser = argparse.ArgumentParser(description="Peak memory of a step, compared with FSDP2.")
    parser.add_argument("--model", nargs="+", default=["gpt"], choices=MODELS)
    parser.add_argument(
        "--ranks", nargs="*", type=int, default=[2, 4], help="real ranks, over gloo"
    )
    parser.add_argument("--fake-ranks", nargs="*", type=int, default=[64, 256, 1024])
    parser.add_argument("--tokens", type=int, default=CONTEXT, help="tokens per rank, for total")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("KINETO_LOG_LEVEL", "5")
    console = Console(width=120)
    for model in args.model:
        for is_fake in (False, True):
            for num_ranks in args.fake_ranks if is_fake else args.ranks:
                readings = measure(num_ranks, is_fake, model, args.tokens)
                unit = next(iter(readings.values())).unit / 1e6
                where = "one rank of" if is_fake else "gloo,"
                title = f"{model}, unit {unit:.2f} MB; {where} {num_ranks} ranks"
                show(title, readings, console)


if __name__ == "__main__":
    main()

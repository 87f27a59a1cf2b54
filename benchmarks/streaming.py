"""Whole parameters on every rank: ``stream_parameters`` beside ``full_tensor`` of each parameter.

    python -m benchmarks.slow_network --ranks 2 --rate 1gbit -- python -m benchmarks.streaming
    torchrun --nproc-per-node 2 --module benchmarks.streaming

With ``--keep`` the figures are written for the page of results. Each way takes all parameters once
a turn, and the ways alternate. Printed are, for each model: the calls of ``torch.distributed`` of a
rank (a send and a receive count as one each), the bytes that rank 0 sends, and the median
milliseconds.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.models import PRESETS
from benchmarks.optimizers.results import circumstances, read, write
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard
from torch.profiler import ProfilerActivity, profile

from vescale_fsdp import fully_shard, stream_parameters

FILE = Path(__file__).parent / "results" / "streaming.json"


class Small(nn.Module):
    """300 parameters of 2,048 to 4,096 elements, in 30 units."""

    def __init__(self) -> None:
        super().__init__()
        sizes = [32 + 32 * j // 9 for j in range(10)]
        self.blocks = nn.ModuleList(
            nn.ParameterList(torch.randn(64, size) for size in sizes) for _ in range(30)
        )


MODELS: dict[str, Callable[[], nn.Module]] = {
    "300 small": Small,
    "gpt-7m": PRESETS["gpt-7m"].make,
    "moe-10m": PRESETS["moe-10m"].make,
}


def full_tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The usual loop."""
    for name, param in model.named_parameters():
        yield name, param.full_tensor()  # type: ignore[operator]


def sharded(make: Callable[[], nn.Module], shard: Callable[[nn.Module], object]) -> nn.Module:
    """A model with a unit for each block."""
    torch.manual_seed(0)
    model = make()
    for block in model.blocks:  # type: ignore[union-attr]
        shard(block)
    shard(model)
    return model


def bytes_sent() -> int:
    """That this rank has sent so far, by the network's own count."""
    lines = Path("/proc/net/dev").read_text().splitlines()[2:]
    return sum(int(line.split(":")[1].split()[8]) for line in lines)


def take(stream: Iterator[tuple[str, Tensor | None]]) -> float:
    """Seconds to take all of a stream, on all ranks."""
    dist.barrier()
    start = time.perf_counter()
    for _ in stream:
        pass
    dist.barrier()
    return time.perf_counter() - start


def calls(stream: Callable[[], Iterator[tuple[str, Tensor | None]]]) -> int:
    """How often a rank calls ``torch.distributed``."""
    with profile(activities=[ProfilerActivity.CPU]) as prof:
        for _ in stream():
            pass
    names = [event.name for event in prof.events() or []]
    return sum(name.startswith("c10d::") for name in names)


def measure(name: str, turns: int) -> list[dict[str, object]]:
    """One record a way."""
    ours, theirs = sharded(MODELS[name], fully_shard), sharded(MODELS[name], fsdp2_fully_shard)
    ways: dict[str, Callable[[], Iterator[tuple[str, Tensor | None]]]] = {
        "veScale stream_parameters": lambda: stream_parameters(ours),
        "veScale stream_parameters, bf16": lambda: stream_parameters(ours, dtype=torch.bfloat16),
        "veScale full_tensor": lambda: full_tensors(ours),
        "FSDP2 full_tensor": lambda: full_tensors(theirs),
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    sent: dict[str, int] = {}
    for _ in range(turns + 1):
        for way, stream in ways.items():
            before = bytes_sent()
            seconds[way].append(take(stream()))
            sent[way] = bytes_sent() - before
    num_params = sum(1 for _ in ours.parameters())
    return [
        {
            "model": name,
            "parameters": num_params,
            "way": way,
            "calls": calls(stream),
            "megabytes": sent[way] / 1e6,
            "seconds": statistics.median(seconds[way][1:]),
        }
        for way, stream in ways.items()
    ]


def lines(found: Mapping[str, Any] | None = None) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table; the ratio is to FSDP2's loop."""
    readings = (read(FILE) if found is None else found).get("readings", [])
    theirs = {r["model"]: r["seconds"] for r in readings if r["way"] == "FSDP2 full_tensor"}
    rows = [
        [
            r["model"],
            str(r["parameters"]),
            r["way"],
            str(r["calls"]),
            f"{r['megabytes']:.2f}",
            f"{r['seconds'] * 1e3:.1f}",
            f"{theirs[r['model']] / r['seconds']:.2f}",
        ]
        for r in readings
    ]
    names = ["model", "parameters", "way", "calls", "MB sent", "ms", "speed / FSDP2's loop"]
    return names, rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="stream_parameters beside full_tensor.")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS))
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--keep", action="store_true", help="write the figures of the page")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    records = [record for name in args.models for record in measure(name, args.turns)]
    if dist.get_rank() == 0:
        found = {"circumstances": circumstances(), "readings": records}
        head, rows = lines(found)
        for row in (head, ["---"] * len(head), *rows):
            print(f"| {' | '.join(row)} |")
        if args.keep:
            write(FILE, found)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""What a memory checkpoint costs: blocks of steps with one and without, in turns.

    python -m benchmarks.slow_network --ranks 2 --rate 1gbit -- python -m benchmarks.elastic
    torchrun --standalone --nproc-per-node 2 -m benchmarks.elastic --model gpt-27m

Each rank is a host: it has a memory folder of its own, and a copy of another rank's part. A block
with a memory checkpoint begins with it, and ends when all ranks have confirmed it. Rank 0 prints a
line of JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.engines import make_engine
from benchmarks.models import PRESETS

import vescale_fsdp_elastic as elastic


def measure(args: argparse.Namespace) -> dict[str, object]:
    """Seconds of the blocks of both kinds, and what the memory checkpoints have cost."""
    rank, size = dist.get_rank(), dist.get_world_size()
    training: Any = make_engine("vescale", PRESETS[args.model], "fp32", rank, size)
    step_s: dict[str, list[float]] = {"without": [], "with": []}
    cpu_s: dict[str, list[float]] = {"without": [], "with": []}  # of all threads of this rank
    kept = []
    with elastic.training(
        args.folder,
        training.model,
        training.optimizer,
        every=10**9,
        every_on_disk=None,
        replicas=args.replicas,
        signals=(),
        memory_directory=f"{args.memory}/host{rank}",
    ) as run:
        for _ in range(4):
            training.step()
        for number in range(2 * args.rounds + 1):
            kind = "with" if number % 2 else "without"
            dist.barrier()
            began, cpu = time.perf_counter(), time.process_time()
            if kind == "with":
                run.step += 1
                run._keep()
            for _ in range(args.every):
                training.step()
            if kind == "with":
                run._keeper.finish()
                assert run.last_kept is not None
                kept.append(run.last_kept)
            dist.barrier()
            if number:  # the first block is warm-up
                step_s[kind].append((time.perf_counter() - began) / args.every)
                cpu_s[kind].append((time.process_time() - cpu) / args.every)
    ratios = [a / b for a, b in zip(step_s["with"], step_s["without"], strict=True)]
    found = {name: statistics.median(each) for name, each in step_s.items()}
    last = kept[-1]
    return {
        "model": args.model,
        "ranks": dist.get_world_size(),
        "every": args.every,
        "replicas": args.replicas,
        "step_s": found,
        "ratio": sorted(round(each, 4) for each in ratios),
        "median_ratio": statistics.median(ratios),
        "cpu_s": {name: statistics.median(each) for name, each in cpu_s.items()},
        "file_mb": last.num_bytes / 1e6,
        "sent_mb": last.sent_bytes / 1e6,
        "blocked_s": statistics.median(each.blocked_s for each in kept),
        "background_s": statistics.median(each.background_s for each in kept),
    }


def main() -> None:
    """Measure as one of the ranks."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="gpt-27m")
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--replicas", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", default=f"{tempfile.gettempdir()}/vescale-fsdp-elastic")
    parser.add_argument("--memory", default="/dev/shm/vescale-fsdp-elastic")
    args = parser.parse_args()
    torch.set_num_threads(1)
    elastic.init_process_group("gloo")
    found = measure(args)
    if dist.get_rank() == 0:
        print(json.dumps(found), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

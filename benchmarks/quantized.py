"""Loss curves of a small GPT over characters, with weights and gradients sent in 8 bits.

    python -m benchmarks.quantized
    python -m benchmarks.quantized --ways fp32 e4m3-tiles

Text, model, batches and schedule are those of `benchmarks.optimizers.curves`, with AdamW at the
learning rate that was best there for float32. Each way of communication trains on 2 ranks with
seeds 0, 1 and 2. The cost of a way is the difference of its validation loss to that of fp32 with
the same seed. The spread over seeds is given for comparison.

256 consecutive numbers share a scale, or the 128 x 128 numbers of a tile. The model's matrices are
128 wide and have 1 to 12 tiles. So scales are as coarse as in a large model, but a large model has
outliers that this one does not have.

Results are written after each run. Start the command again to continue.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.models import loss_of
from benchmarks.optimizers.curves import (
    EVALUATIONS,
    HALF_BATCH,
    RANKS,
    SEEDS,
    Text,
    make_model,
    validate,
)
from benchmarks.optimizers.results import FOLDER, circumstances, read, write
from benchmarks.wire import bytes_by_layout
from gpt import learning_rate_factor

from vescale_fsdp import MixedPrecisionPolicy, QuantizedGather, QuantizedReduce, fully_shard
from vescale_fsdp.testing import run_ranks

LEARNING_RATE = 8e-3
BETAS, WEIGHT_DECAY = (0.9, 0.95), 0.1
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
INT8, E4M3 = QuantizedGather("int8"), QuantizedGather("e4m3")
INT8_TILES, E4M3_TILES = (QuantizedGather(dtype, (128, 128)) for dtype in ("int8", "e4m3"))

# Arguments of fully_shard.
WAYS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "bf16": {"mp_policy": BF16},
    "int8": {"gather_codec": INT8},
    "e4m3": {"gather_codec": E4M3},
    "int8-and-gradients": {"gather_codec": INT8, "reduce_codec": QuantizedReduce()},
    "int8-tiles": {"gather_codec": INT8_TILES},
    "e4m3-tiles": {"gather_codec": E4M3_TILES},
    "e4m3-tiles-in-bf16": {"gather_codec": E4M3_TILES, "mp_policy": BF16},
    "int8-tiles-and-gradients": {"gather_codec": INT8_TILES, "reduce_codec": QuantizedReduce()},
    "int8-tiles-and-corrected-gradients": {
        "gather_codec": INT8_TILES,
        "reduce_codec": QuantizedReduce(error_feedback=True),
    },
}


def train(way: str, seed: int, steps: int) -> dict[str, Any]:
    """One run on this rank.

    Returns:
        ``losses`` of each step, ``validation`` as [step, loss], ``seconds`` of the steps, and the
        ``bytes`` that the rank sends in a step.
    """
    text, rank = Text(), dist.get_rank()
    torch.manual_seed(seed)
    model = make_model(text)
    for block in model.blocks:
        fully_shard(block, **WAYS[way])
    fully_shard(model, **WAYS[way])
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=LEARNING_RATE, betas=BETAS, weight_decay=WEIGHT_DECAY
    )
    random = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    validation: list[tuple[int, float]] = []
    seconds = 0.0
    for step in range(steps):
        half = text.halves(random)[rank]
        started = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * learning_rate_factor(step, steps)
        loss = loss_of(model(half[:, :-1]), half[:, 1:])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds += time.perf_counter() - started
        losses.append(loss.item())
        if (step + 1) % max(1, steps // EVALUATIONS) == 0 or step + 1 == steps:
            validation.append((step + 1, validate(model, text)))
    num_bytes = bytes_by_layout(model, dist.get_world_size())
    return {
        "losses": losses,
        "validation": validation,
        "seconds": round(seconds, 2),
        "bytes": num_bytes,
    }


def measure(way: str, steps: int, folder: Path) -> None:
    """Train the runs of a way that are missing in its file."""
    path = folder / f"{way}.json"
    values = read(path)
    if values.get("settings", {}).get("steps", steps) != steps:
        sys.exit(f"{path} is of {values['settings']['steps']} steps; name another folder")
    values["settings"] = {
        "steps": steps,
        "learning_rate": LEARNING_RATE,
        "ranks": RANKS,
        "sequences": RANKS * HALF_BATCH,
        "options": {name: str(option) for name, option in WAYS[way].items()},
    }
    values["circumstances"] = circumstances()
    runs = values.setdefault("runs", {})
    for seed in SEEDS:
        if str(seed) in runs:
            continue
        ranks = run_ranks(train, RANKS, way, seed, steps, timeout_s=3600)
        assert ranks[0]["validation"] == ranks[1]["validation"], "one model"
        losses = [sum(each) / RANKS for each in zip(*(r["losses"] for r in ranks), strict=True)]
        runs[str(seed)] = ranks[0] | {"losses": losses, "commit": circumstances()["commit"]}
        final, spent = runs[str(seed)]["validation"][-1][1], runs[str(seed)]["seconds"]
        print(f"{way}, seed {seed}: {final:.4f}, {spent:.0f} s", flush=True)
        write(path, values)


def show(folder: Path) -> None:
    """Print a table of what was measured so far."""
    exact = _finals(folder, "fp32")
    if len(exact) > 1:
        print(f"seeds of fp32 spread over {max(exact.values()) - min(exact.values()):.4f}")
    print(f"{'way':30} {'MB a step':>9}   validation loss of each seed    less that of fp32")
    for way in WAYS:
        finals = _finals(folder, way)
        if not finals:
            continue
        sent = next(iter(read(folder / f"{way}.json")["runs"].values()))["bytes"] / 1e6
        losses = "  ".join(f"{loss:.4f}" for loss in finals.values())
        shifts = [loss - exact[seed] for seed, loss in finals.items() if seed in exact]
        mean = f"{statistics.mean(shifts):+.4f}" if shifts else ""
        each = " ".join(f"{shift:+.4f}" for shift in shifts)
        print(f"{way:30} {sent:9.2f}   {losses:30} {mean} ({each})")


def _finals(folder: Path, way: str) -> dict[str, float]:
    """The last validation loss of each seed."""
    runs = read(folder / f"{way}.json").get("runs", {})
    return {seed: run["validation"][-1][1] for seed, run in runs.items()}


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Loss curves with 8-bit communication.")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", type=Path, default=FOLDER.parents[1] / "results" / "quantized")
    args = parser.parse_args()
    for way in args.ways:
        measure(way, args.steps, args.out)
    show(args.out)


if __name__ == "__main__":
    main()

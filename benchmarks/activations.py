"""Peak memory with and without ``activations="recompute"``: planned, measured, and FSDP2's.

    torchrun --nproc-per-node 2 --module benchmarks.activations

With ``--keep`` the figures are written for the page of results. Peaks are those of the third step
on rank 0, beside the sharded parameters and AdamW's states, as the profiler of torch's CPU
allocator sees them. ``vescale-fsdp plan`` finds the planned ones on meta tensors. FSDP2 recomputes
with the same function of torch.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.models import PRESETS
from benchmarks.optimizers.results import circumstances, read, write
from packages.core.tests.allocations import peak_of, through_the_allocator, traced
from torch import nn
from torch.distributed._composable.checkpoint_activation import checkpoint
from torch.distributed.fsdp import fully_shard as fsdp2_fully_shard

from vescale_fsdp import fully_shard
from vescale_fsdp_tune.commands.modules import model_of_module
from vescale_fsdp_tune.commands.report import make_report
from vescale_fsdp_tune.commands.settings import Settings, parse_dtype
from vescale_fsdp_tune.costs.settings import Activations

FILE = Path(__file__).parent / "results" / "activations.json"
MODELS = ("gpt-7m", "vit-6m")
MODES: tuple[Activations, ...] = ("keep", "recompute")
SEED = 0


def batch_of(name: str) -> Any:
    """What the forward of a model gets."""
    return PRESETS[name].draw(torch.Generator().manual_seed(SEED))[0]


def gpt_batch() -> Any:
    """The input of gpt-7m, for the plan."""
    return batch_of("gpt-7m")


def vit_batch() -> Any:
    """The input of vit-6m, for the plan."""
    return batch_of("vit-6m")


INPUTS = {"gpt-7m": f"{__name__}:gpt_batch", "vit-6m": f"{__name__}:vit_batch"}


def planned(name: str, mode: Activations) -> int:
    """The peak in bytes that ``vescale-fsdp plan`` gives."""
    settings = Settings(
        num_ranks=dist.get_world_size(),
        compute_dtype=parse_dtype("fp32", "fp32"),
        backend="gloo",
        batch=None,
        inputs=INPUTS[name].replace("__main__", "benchmarks.activations"),
        activations=mode,
    )
    with torch.device("meta"):
        model = model_of_module(PRESETS[name].make(), name, None)
    return (
        make_report(model, settings, [], lambda work: work).figures["veScale-FSDP"].peak.num_bytes
    )


def ours(block: nn.Module, mode: Activations) -> None:
    """Shard a block with our engine."""
    fully_shard(block, activations=None if mode == "keep" else "recompute")


def theirs(block: nn.Module, mode: Activations) -> None:
    """Shard a block with FSDP2."""
    fsdp2_fully_shard(block if mode == "keep" else checkpoint(block))


def measured(name: str, mode: Activations, shard: Callable[[nn.Module, Activations], None]) -> int:
    """The peak in bytes of a third step."""
    torch.manual_seed(SEED)
    model = PRESETS[name].make()
    for block in model.blocks:
        shard(block, mode)
    shard(model, "keep")
    optimizer = torch.optim.AdamW(model.parameters())
    batch = batch_of(name)

    def step() -> None:
        model(batch).sum().backward()
        time.sleep(0.1)  # until gloo's threads have let go of what they send

    for _ in range(2):
        step()
        optimizer.step()
        optimizer.zero_grad()
    peak, _ = peak_of(traced(step))
    return int(peak)


def lines(found: Mapping[str, Any] | None = None) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table."""
    readings = (read(FILE) if found is None else found).get("readings", [])
    rows = [
        [
            r["model"],
            r["activations"],
            f"{r['planned'] / 2**20:.2f}",
            f"{r['measured'] / 2**20:.2f}",
            f"{100 * (r['planned'] / r['measured'] - 1):+.2f}%",
            f"{r['fsdp2'] / 2**20:.2f}",
        ]
        for r in readings
    ]
    names = ["model", "activations", "planned, MiB", "measured", "difference", "FSDP2, measured"]
    return names, rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Peak memory with and without recomputation.")
    parser.add_argument("--keep", action="store_true", help="write the figures of the page")
    args = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    records = []
    with through_the_allocator():
        for name in MODELS:
            for mode in MODES:
                record = {"model": name, "activations": mode, "planned": planned(name, mode)}
                record["measured"] = measured(name, mode, ours)
                record["fsdp2"] = measured(name, mode, theirs)
                records.append(record)
    if dist.get_rank() == 0:
        found = {"circumstances": circumstances(), "readings": records}
        names, rows = lines(found)
        print(*(" | ".join(row) for row in (names, *rows)), sep="\n")
        if args.keep:
            write(FILE, found)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Muon's assignment of matrices to ranks for real models: balance, and elements to send.

    python -m benchmarks.optimizers.owners SHAPES.json ... --ranks 4 8 64

The files are those of ``vescale-fsdp plan`` (docs/plan.md): shapes by unit, ``root`` for
embeddings and head. The planner lays out each unit with splits anywhere, as ``Muon.granularity()``
allows. Three ways to choose owners are compared:

ours           the rank with most elements of the matrix, within 5% of the best balance
LPT            the longest job to the rank with the lowest load
holders only   the same, but only among ranks with elements of the matrix

It uses only integers: nothing is allocated or sent.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.optimizers.results import FOLDER, circumstances, write

from vescale_fsdp.optim.layout import Layout, Matrix, matrices_of
from vescale_fsdp.optim.muon_rule import newton_schulz_cost
from vescale_fsdp.optim.owners import Job, assign_owners, lower_bound_of
from vescale_fsdp.planner import TensorSpec, lay_out
from vescale_fsdp.ragged import RaggedShard

STEPS = 5  # of Newton-Schulz
_NOT_HIDDEN = ("bias", "norm")  # 3-D stacks have biases of two dimensions

Assign = Callable[[Sequence[Job], int], list[int]]


def lpt(jobs: Sequence[Job], num_ranks: int) -> list[int]:
    """Assign the longest jobs first, to the rank with the lowest load."""
    return assign_owners([job._replace(held=()) for job in jobs], num_ranks)


def holders_only(jobs: Sequence[Job], num_ranks: int) -> list[int]:
    """Assign the longest jobs first, to the holder with the lowest load."""
    loads, owners = [0] * num_ranks, [0] * len(jobs)
    for index in sorted(range(len(jobs)), key=lambda i: (-jobs[i].cost, -jobs[i].num_bytes, i)):
        owners[index] = min((rank for rank, _ in jobs[index].held), key=lambda r: (loads[r], r))
        loads[owners[index]] += jobs[index].cost
    return owners


WAYS: dict[str, Assign] = {"ours": assign_owners, "LPT": lpt, "holders only": holders_only}


def jobs_of(model: dict[str, Any], num_ranks: int) -> list[Job]:
    """Return the hidden matrices of a model, with the elements that each rank holds."""
    jobs: list[Job] = []
    for group in model["groups"]:
        if group["name"] == "root":
            continue
        specs = [TensorSpec(name, tuple(shape), 1) for name, shape in group["tensors"]]
        layout = lay_out(specs, num_ranks)
        unit = [
            _job(matrix)
            for spec, start in zip(specs, layout.offsets, strict=True)
            if _is_hidden(spec)
            for matrix in matrices_of(_layout(spec, start, layout.shard_size, num_ranks))
        ]
        jobs += unit * group.get("count", 1)
    return jobs


def _is_hidden(spec: TensorSpec) -> bool:
    return len(spec.shape) > 1 and not any(word in spec.name for word in _NOT_HIDDEN)


def _layout(spec: TensorSpec, start: int, shard_size: int, num_ranks: int) -> Layout:
    placement = RaggedShard.from_interval(start, shard_size, num_ranks, spec.shape)
    return Layout(spec.shape, (placement,), (num_ranks,), tuple(range(num_ranks)))


def _job(matrix: Matrix) -> Job:
    cost = newton_schulz_cost(matrix.rows, matrix.cols, STEPS)
    held = [(part.position, part.numel) for part in matrix.parts]
    return Job(cost, matrix.numel, "", held)


def makespan(jobs: Sequence[Job], owners: Sequence[int], num_ranks: int) -> float:
    """Return the highest load divided by the least possible one. 1 is perfect."""
    loads = [0] * num_ranks
    for job, owner in zip(jobs, owners, strict=True):
        loads[owner] += job.cost
    return max(loads) / lower_bound_of(jobs, [0] * num_ranks)


def moved(jobs: Sequence[Job], owners: Sequence[int]) -> float:
    """Return the fraction of all elements that are not on the owner."""
    total = sum(job.num_bytes for job in jobs)  # one byte an element here
    stay = sum(dict(job.held).get(owner, 0) for job, owner in zip(jobs, owners, strict=True))
    return (total - stay) / total


def measure(path: Path, ranks: Sequence[int]) -> list[dict[str, Any]]:
    """The rows of one model."""
    model = json.loads(path.read_text())
    rows = []
    for num_ranks in ranks:
        jobs = jobs_of(model, num_ranks)
        row: dict[str, Any] = {
            "model": model["model"],
            "ranks": num_ranks,
            "matrices": len(jobs),
        }
        for name, assign in WAYS.items():
            started = time.perf_counter()
            owners = assign(jobs, num_ranks)
            row[name] = {
                "makespan": round(makespan(jobs, owners, num_ranks), 3),
                "moved": round(moved(jobs, owners), 3),
                "seconds": round(time.perf_counter() - started, 3),
            }
        rows.append(row)
        cells = [f"{row[name]['makespan']:.2f} / {row[name]['moved']:.2f}" for name in WAYS]
        print(f"{row['model']:22} {num_ranks:5} {len(jobs):8}   " + "   ".join(cells), flush=True)
    return rows


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Balance of Muon's owners for real models.")
    parser.add_argument("shapes", nargs="+", type=Path, help="JSON files, see docs/plan.md")
    parser.add_argument("--ranks", nargs="+", type=int, default=[4, 8, 64])
    parser.add_argument("--out", type=Path, default=FOLDER / "owners.json")
    args = parser.parse_args()
    print("greatest load over the lower bound / fraction of elements that move")
    print(f"{'model':22} ranks matrices   " + "   ".join(WAYS))
    rows = [row for path in args.shapes for row in measure(path, args.ranks)]
    kept = circumstances()
    kept["command"] = "python -m benchmarks.optimizers.owners " + " ".join(
        argument if argument.startswith("-") else Path(argument).name for argument in sys.argv[1:]
    )
    write(args.out, {"circumstances": kept, "rows": rows})


if __name__ == "__main__":
    main()

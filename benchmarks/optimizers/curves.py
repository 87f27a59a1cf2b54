"""Loss curves of a small GPT over characters, with five optimizers.

    python -m benchmarks.optimizers.curves
    python -m benchmarks.optimizers.curves --optimizers AdamW SOAP --steps 300

The text is the documentation that comes with Python (``pydoc_data.topics``); every tenth topic is
used for validation. For each optimizer five learning rates are tried with seed 0, in a single
process. The one with the lowest validation loss is run with seeds 0, 1 and 2: in a single process
as reference, and on 2 ranks with ``fully_shard``. Gradients are not clipped.

A batch has two halves. The single process takes the mean of their gradients, and each rank has one
of them. Both add the same numbers, so the optimizer or the engine causes any difference of losses.

Results are written after each run. Start the command again to continue.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from collections.abc import Callable
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
import torch.distributed as dist
from benchmarks.models import GPT, loss_of
from benchmarks.optimizers.recipes import RECIPES, Recipe, shard
from benchmarks.optimizers.results import FOLDER, circumstances, read, write
from gpt import learning_rate_factor
from torch import Tensor

from vescale_fsdp.testing import run_ranks

# Five for each optimizer. The best is never the first or the last: the first row was used for all,
# and then replaced for optimizers whose best was at its upper end.
LEARNING_RATES = dict.fromkeys(RECIPES, (2e-3, 4e-3, 8e-3, 16e-3, 32e-3))
LEARNING_RATES["Muon"] = (4e-3, 8e-3, 16e-3, 32e-3, 64e-3)
LEARNING_RATES["SOAP"] = (8e-3, 16e-3, 32e-3, 64e-3, 128e-3)
SEEDS = (0, 1, 2)  # learning rates are tried with the first one
RANKS = 2
CONTEXT, HALF_BATCH = 64, 16  # of a rank; the batch has twice as many sequences
VALIDATION_WINDOWS, EVALUATIONS = 128, 12


class Text:
    """The text as numbers of characters, for training and validation."""

    def __init__(self) -> None:
        documents = [text for _, text in sorted(topics.topics.items())]
        whole = "\n".join(documents)
        self.characters = sorted(set(whole))
        self.sha256 = hashlib.sha256(whole.encode()).hexdigest()
        self.num_characters = len(whole)
        number = {character: index for index, character in enumerate(self.characters)}
        held_out = "\n".join(documents[::10])
        del documents[::10]
        training = "\n".join(documents)
        self.training, held = (
            torch.tensor([number[character] for character in part]) for part in (training, held_out)
        )
        step = (len(held) - CONTEXT - 1) // VALIDATION_WINDOWS
        self.validation = torch.stack(
            [held[i * step : i * step + CONTEXT + 1] for i in range(VALIDATION_WINDOWS)]
        )

    def halves(self, random: torch.Generator) -> Tensor:
        """Return the next batch: (half, sequence, time)."""
        starts = torch.randint(
            len(self.training) - CONTEXT - 1, (RANKS * HALF_BATCH,), generator=random
        )
        windows = torch.stack([self.training[i : i + CONTEXT + 1] for i in starts.tolist()])
        return windows.unflatten(0, (RANKS, HALF_BATCH))


def make_model(text: Text) -> GPT:
    """0.63 million parameters."""
    return GPT(len(text.characters), CONTEXT, layers=3, width=128, heads=4)


def train(name: str, lr: float, seed: int, steps: int, rank: int | None = None) -> dict[str, Any]:
    """One run.

    Args:
        name: one of `RECIPES`.
        lr: the highest learning rate.
        seed: of weights and batches.
        steps: of training.
        rank: the half to train on. None: both, in a single process.

    Returns:
        ``losses`` of each step, ``validation`` as [step, loss], ``seconds`` of the steps.
    """
    recipe, text = RECIPES[name], Text()
    torch.manual_seed(seed)
    model = make_model(text)
    optimizer = _optimizer(model, recipe, lr, is_sharded=rank is not None)
    random = torch.Generator().manual_seed(seed)
    losses: list[float] = []
    validation: list[tuple[int, float]] = []
    seconds = 0.0
    for step in range(steps):
        halves = text.halves(random)
        started = time.perf_counter()
        for group in optimizer.param_groups:
            group["lr"] = lr * learning_rate_factor(step, steps)
        loss = 0.0
        for half in halves if rank is None else halves[rank : rank + 1]:
            part = loss_of(model(half[:, :-1]), half[:, 1:])
            (part / RANKS if rank is None else part).backward()
            loss += part.item()
        optimizer.step()
        optimizer.zero_grad()
        seconds += time.perf_counter() - started
        losses.append(loss / (RANKS if rank is None else 1))
        if (step + 1) % max(1, steps // EVALUATIONS) == 0 or step + 1 == steps:
            validation.append((step + 1, validate(model, text)))
    return {"losses": losses, "validation": validation, "seconds": round(seconds, 2)}


def _optimizer(model: GPT, recipe: Recipe, lr: float, *, is_sharded: bool) -> torch.optim.Optimizer:
    if not is_sharded:
        return recipe.reference(model, lr)
    shard(model, recipe.granularity)
    return recipe.make(model, lr)


@torch.no_grad()
def validate(model: GPT, text: Text) -> float:
    """The mean loss over the held-out windows."""
    losses = [
        loss_of(model(part[:, :-1]), part[:, 1:]).item() for part in text.validation.split(16)
    ]
    return sum(losses) / len(losses)


def train_rank(name: str, lr: float, seed: int, steps: int) -> dict[str, Any]:
    """Train as one of the ranks."""
    return train(name, lr, seed, steps, dist.get_rank())


class Runs:
    """The runs of an optimizer. Missing ones are trained and added to its file."""

    def __init__(self, name: str, folder: Path, steps: int) -> None:
        self.name, self.path, self.steps = name, folder / f"{name}.json", steps
        path = self.path
        self.values = read(path)
        if self.values.get("settings", {}).get("steps", steps) != steps:
            sys.exit(f"{path} is of {self.values['settings']['steps']} steps; name another folder")
        self.values.setdefault("runs", {})

    def single(self, lr: float, seed: int) -> dict[str, Any]:
        """A run on a single process."""
        return self._kept(f"lr {lr}, seed {seed}", lambda: train(self.name, lr, seed, self.steps))

    def sharded(self, lr: float, seed: int) -> dict[str, Any]:
        """Return a run on ranks, with the difference of its losses to those of a single process."""

        def run() -> dict[str, Any]:
            call = (self.name, lr, seed, self.steps)
            return _compared(run_ranks(train_rank, RANKS, *call, timeout_s=1800), alone)

        alone = self.single(lr, seed)
        return self._kept(f"lr {lr}, seed {seed}, {RANKS} ranks", run)

    def _kept(self, key: str, run: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        runs = self.values["runs"]
        if key not in runs:
            runs[key] = run() | {"commit": circumstances()["commit"]}
            last = runs[key]["validation"][-1][1]
            print(f"{self.name}, {key}: {last:.4f}, {runs[key]['seconds']:.0f} s", flush=True)
            write(self.path, self.values)
        return dict(runs[key])


def _compared(ranks: list[dict[str, Any]], alone: dict[str, Any]) -> dict[str, Any]:
    """Merge the runs of the ranks. Losses are replaced by their difference to a single process."""
    assert all(rank["validation"] == ranks[0]["validation"] for rank in ranks), "one model"
    losses = [sum(each) / len(ranks) for each in zip(*(r["losses"] for r in ranks), strict=True)]
    ours, theirs = (
        [*steps, *(loss for _, loss in run["validation"])]
        for steps, run in ((losses, ranks[0]), (alone["losses"], alone))
    )
    largest = max(abs(a - b) for a, b in zip(ours, theirs, strict=True))
    kept = {key: value for key, value in ranks[0].items() if key != "losses"}
    return kept | {"largest_difference": largest}


def measure(runs: Runs, sharded_seeds: int) -> None:
    """All runs of an optimizer, and a summary."""
    text, rates = Text(), LEARNING_RATES[runs.name]
    runs.values |= {
        "circumstances": circumstances(),
        "settings": {
            "steps": runs.steps,
            "parameters": sum(p.numel() for p in make_model(text).parameters()),
            "text": {"characters": text.num_characters, "sha256": text.sha256},
            "batch": [RANKS * HALF_BATCH, CONTEXT],
            "schedule": "20 steps of warm-up, then linear to 0; no clipping",
            "tries": f"{len(rates)} for each optimizer, on seed {SEEDS[0]}",
            "learning_rates": rates,
            "seeds": SEEDS,
        },
    }
    tries = {lr: runs.single(lr, SEEDS[0]) for lr in rates}
    lr = min(rates, key=lambda rate: _final(tries[rate]))
    alone = [runs.single(lr, seed) for seed in SEEDS]
    sharded = [runs.sharded(lr, seed) for seed in SEEDS[:sharded_seeds]]
    runs.values["summary"] = {
        "reference": RECIPES[runs.name].reference_name,
        "learning_rate": lr,
        "tries": {str(rate): _final(run) for rate, run in tries.items()},
        "validation": [_final(run) for run in alone],
        "validation_sharded": [_final(run) for run in sharded],
        "largest_difference": max((run["largest_difference"] for run in sharded), default=None),
    }
    write(runs.path, runs.values)


def _final(run: dict[str, Any]) -> float:
    """Return the last validation loss; infinity if the run has diverged."""
    loss = run["validation"][-1][1]
    return loss if loss == loss else float("inf")


def show(folder: Path) -> None:
    """Print a table of what was measured so far."""
    print(f"{'optimizer':10} {'lr':>6}  validation loss of each seed   2 ranks - 1, at most")
    for name in RECIPES:
        found = read(folder / f"{name}.json").get("summary")
        if found is not None:
            losses = "  ".join(f"{loss:.4f}" for loss in found["validation"])
            difference = found["largest_difference"]
            print(f"{name:10} {found['learning_rate']:6g}  {losses:30} {difference}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Loss curves with five optimizers.")
    parser.add_argument("--optimizers", nargs="+", choices=RECIPES, default=list(RECIPES))
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument(
        "--sharded-seeds", type=int, default=len(SEEDS), help="seeds that run on ranks"
    )
    parser.add_argument("--out", type=Path, default=FOLDER / "curves", help="folder of the results")
    args = parser.parse_args()
    torch.set_num_threads(1)  # as on the ranks: the same bits
    for name in args.optimizers:
        measure(Runs(name, args.out, args.steps), args.sharded_seeds)
    show(args.out)


if __name__ == "__main__":
    main()

"""The demo: trains the example with veScale-FSDP, then with FSDP2, and compares them.

    python3 dev.py demo

Both run the same script, ``examples/train_gpt_lightning.py``: a GPT of 12 million parameters on two
CPU processes with one thread each. It saves a checkpoint, and trains the last third of the steps in
a new Trainer that resumes from it. The exit code is 1 if the losses differ or do not decrease.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[1]
SCRIPTS = {
    "veScale-FSDP": ROOT / "examples" / "train_gpt_lightning.py",
    "FSDP2": ROOT / "benchmarks" / "demo_fsdp2.py",
}
WARM_UP_STEPS = 10  # of each Trainer, left out of the speed
# Both compute the same sums in the same order. So the losses are bitwise equal, unless results of
# kernels depend on addresses. Then a difference of one rounding (1e-7) grows with the steps: in a
# test to 3e-4 after 60 steps. A wrong gradient or batch gives a much larger difference at once.
EARLY_STEPS, EARLY_TOLERANCE, TOLERANCE = 10, 1e-5, 1e-2


@dataclass(frozen=True)
class Run:
    """The results of one engine."""

    losses: list[float]  # of each step, mean over the processes
    val_losses: list[float]
    tokens_per_s: list[float]  # quartiles over the steps: 25%, 50%, 75%; all processes together
    training_mb: list[float]  # of each process; see `Metrics`
    run_mb: list[float]
    wall_s: float


def run(script: Path, steps: int, folder: Path) -> Run:
    """Run a script in separate processes."""
    metrics = folder / "metrics.json"
    # No clipping: the norm of all gradients is summed in another order by the two engines, and
    # that would be the only difference between them.
    options = ["--max-steps", str(steps), "--clip-norm", "0", "--seed", "0"]
    files = ["--out", str(folder / "checkpoints"), "--metrics", str(metrics)]
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",  # the processes share the cores
        "PYTHONWARNINGS": "ignore::FutureWarning",  # of Lightning 2.6 with torch 2.13
    }
    started = time.monotonic()
    code = subprocess.run([sys.executable, script, *options, *files], env=environ).returncode
    wall_s = time.monotonic() - started
    if code == -signal.SIGABRT and metrics.exists():
        print("gloo aborted when the process ended, as it sometimes does; the results are there")
    elif code != 0:
        sys.exit(f"{script.name} failed with exit code {code}")
    return summarize(json.loads(metrics.read_text()), wall_s)


def summarize(processes: list[dict[str, Any]], wall_s: float) -> Run:
    """From the metrics file, a list over the processes."""
    first = processes[0]
    resumed = len(first["losses"]) * 2 // 3
    steady = [
        seconds
        for step, seconds in enumerate(first["step_s"])
        if seconds and (step if step < resumed else step - resumed) >= WARM_UP_STEPS
    ]
    tokens = first["tokens_per_batch"] * len(processes)
    return Run(
        losses=[
            statistics.mean(each)
            for each in zip(*(process["losses"] for process in processes), strict=True)
        ],
        val_losses=first["val_losses"],
        tokens_per_s=statistics.quantiles([tokens / seconds for seconds in steady], n=4),
        training_mb=[process["training_bytes"] / 1e6 for process in processes],
        run_mb=[process["run_bytes"] / 1e6 for process in processes],
        wall_s=wall_s,
    )


def show(ours: Run, theirs: Run) -> None:
    """Print both in one table."""
    table = Table(title="The same model, data, seed and steps: 12 M parameters, 2 CPU processes")
    table.add_column("")
    for column in (*SCRIPTS, "difference"):
        table.add_column(column, justify="right")
    count = len(ours.losses)
    for step in sorted({*range(0, count, max(1, count // 6)), count - 1}):
        a, b = ours.losses[step], theirs.losses[step]
        table.add_row(f"training loss, step {step}", f"{a:.6f}", f"{b:.6f}", f"{a - b:.1g}")
    table.add_section()
    for i, (a, b) in enumerate(zip(ours.val_losses, theirs.val_losses, strict=True)):
        name = f"after epoch {i}" if i else "before training"
        table.add_row(f"validation loss, {name}", f"{a:.6f}", f"{b:.6f}", f"{a - b:.1g}")
    table.add_section()
    speeds = [f"{each.tokens_per_s[1]:.0f}" for each in (ours, theirs)]
    spread = [
        f"{each.tokens_per_s[0]:.0f} to {each.tokens_per_s[2]:.0f}" for each in (ours, theirs)
    ]
    change = percent(ours.tokens_per_s[1], theirs.tokens_per_s[1])
    table.add_row("tokens per second, median of the steps", *speeds, change)
    table.add_row("  half of the steps are within", *spread, "")
    for name, a, b in (
        ("peak memory in training, MB per process", max(ours.training_mb), max(theirs.training_mb)),
        ("  the same with saving and resuming", max(ours.run_mb), max(theirs.run_mb)),
    ):
        table.add_row(name, f"{a:.0f}", f"{b:.0f}", percent(a, b))
    table.add_row("whole run, seconds", f"{ours.wall_s:.0f}", f"{theirs.wall_s:.0f}", "")
    Console(width=100).print(table)
    print(
        "Peak memory: by how much the resident size of a process grew at most since before the\n"
        "model was made: parameters, activations, buffers, and what the allocator keeps; the\n"
        "larger of the two processes. (PyTorch does not count the bytes of tensors on CPU.)\n"
        "The seconds of our whole run include generating the text."
    )


def percent(a: float, b: float) -> str:
    """Return how much `a` is above `b`, in percent."""
    return f"{100 * (a / b - 1):+.0f}%" if b else ""


def verdict(ours: Run, theirs: Run) -> list[str]:
    """Print which engine is faster and smaller. Returns what is wrong, if anything."""
    differences = [abs(a - b) / abs(b) for a, b in zip(ours.losses, theirs.losses, strict=True)]
    early, largest = max(differences[:EARLY_STEPS]), max(differences)
    if largest == 0:
        print(f"Losses: equal to the last bit in all {len(differences)} steps.")
    else:
        print(f"Losses: at most {largest:.1e} apart (relative) in {len(differences)} steps.")
    a, b = ours.tokens_per_s, theirs.tokens_per_s
    if a[0] > b[2] or b[0] > a[2]:
        print(f"Speed: {winner(a[1] / b[1])}.")
    else:  # the two middle halves overlap
        print(f"Speed: no clear winner; the medians are {percent(a[1], b[1])} apart.")
    if theirs.training_mb[0]:
        print(f"Memory in training: {winner(max(theirs.training_mb) / max(ours.training_mb))}.")
    problems = []
    if early > EARLY_TOLERANCE or largest > TOLERANCE:
        problems.append(
            f"the losses of the two disagree: by {early:.1e} in the first {EARLY_STEPS} steps "
            f"(allowed: {EARLY_TOLERANCE}), by {largest:.1e} in all (allowed: {TOLERANCE})"
        )
    for name, each in zip(SCRIPTS, (ours, theirs), strict=True):
        if any(after >= before for before, after in pairwise(each.val_losses)):
            problems.append(f"the validation loss of {name} does not go down: {each.val_losses}")
    return problems


def winner(ratio: float) -> str:
    """`ratio` above 1 is in our favour."""
    if abs(ratio - 1) < 0.03:
        return "about the same"
    names = list(SCRIPTS) if ratio > 1 else list(SCRIPTS)[::-1]
    return f"{names[0]} is better than {names[1]}, by a factor of {max(ratio, 1 / ratio):.2f}"


def main() -> int:
    """Run both and compare; the result is the exit code."""
    parser = argparse.ArgumentParser(
        description="Train a small GPT with veScale-FSDP and with FSDP2, and compare them."
    )
    parser.add_argument("--steps", type=int, default=150, help="steps for each engine")
    steps = parser.parse_args().steps
    started, runs = time.monotonic(), []
    for name, script in SCRIPTS.items():
        print(f"\n{f' {name} ':=^100}\n", flush=True)
        with tempfile.TemporaryDirectory() as folder:
            runs.append(run(script, steps, Path(folder)))
    print(f"\n{' Both ':=^100}\n", flush=True)
    show(*runs)
    problems = verdict(*runs)
    for problem in problems:
        print(f"FAILED: {problem}")
    print(f"{time.monotonic() - started:.0f} s in all.")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())

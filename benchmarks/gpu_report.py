"""Tests and measures the engine on a GPU, and writes a report.

    python3 dev.py gpu

Tests on a CPU run this code in a simulator. It writes ``gpu-report.md`` to the current directory.
The exit code is 0 if all parts passed.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["PARTS", "Part", "has_gpu", "plan"]

ROOT = Path(__file__).resolve().parents[1]
PAGE = Path("gpu-report.md")
_TESTS = "packages/core/tests"
_PYTEST = ["-m", "pytest", "-q", "-rfE", "-p", "no:cacheprovider", "--no-header"]


@dataclass(frozen=True)
class Part:
    """One command, and what it proves if it passes."""

    title: str
    shows: str
    arguments: list[str]
    environ: dict[str, str] = field(default_factory=dict)


PARTS = [
    Part(
        "The engine on one GPU",
        "parity over NCCL, no wait of the host in a step, memory at rest, alignment, streams",
        [*_PYTEST, f"{_TESTS}/engine/test_cuda.py"],
    ),
    Part(
        "The simulator's scenarios on real streams",
        "no kernel reads or writes memory that another stream may still use",
        [*_PYTEST, f"{_TESTS}/simulator/test_on_cuda.py"],
        {"TORCH_CUDA_SANITIZER": "1"},
    ),
    Part(
        "Ranks over NCCL, also more than GPUs",
        "bits of FSDP2 in four rows of ZeRO's table, a budget's peak, the simulator's scenarios: "
        "no deadlock where a rank leaves out a unit, nor after a first step on another stream; "
        "an exception on one rank that ends all in 30 s",
        [
            *_PYTEST,
            f"{_TESTS}/engine/test_cuda_ranks.py",
            f"{_TESTS}/simulator/test_on_nccl.py",
            "packages/tune/tests/budget/test_cuda.py",
        ],
    ),
    Part(
        "Random models over NCCL",
        "losses, gradients and weights of one process on the CPU",
        ["-m", "packages.core.tests.engine.fuzz", "--device", "cuda", "--cases", "50"],
    ),
    Part(
        "Triton's kernels for codes",
        "messages have the bits of torch's operators",
        [*_PYTEST, f"{_TESTS}/dbuffer/test_codec_kernels.py", "-k", "gpu"],
    ),
    Part(
        "Products of codes",
        "layers of 8-bit weights multiply codes",
        [*_PYTEST, f"{_TESTS}/engine/test_quantized_weight.py"],
    ),
    Part(
        "Speed and memory beside FSDP2",
        "step time, host time, peak memory, kernels and copies of worlds of 1, 64 and 1,024 ranks",
        ["-m", "benchmarks.gpu_single"],
    ),
]


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA or AMD device. Asks no library."""
    return any(Path("/dev").glob("nvidia[0-9]*")) or Path("/dev/kfd").exists()


def plan() -> str:
    """Return the commands to run, one per line."""
    lines = [f"  {each.title}: {each.shows}\n      {_command(each)}" for each in PARTS]
    return "\n".join(lines)


def _command(part: Part) -> str:
    environ = [f"{name}={value}" for name, value in part.environ.items()]
    return " ".join([*environ, "python", *part.arguments])


def main() -> int:
    """Run all parts, also after one has failed, and write the page."""
    import torch

    if not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no GPU here. Nothing was run of:\n{plan()}")
        return 2 if has_gpu() else 0
    rows, details, failed = [], [], 0
    for part in PARTS:
        print(f"\n=== {part.title}", flush=True)
        began = time.monotonic()
        ran = subprocess.run(
            [sys.executable, *part.arguments], cwd=ROOT, env={**os.environ, **part.environ},
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace",
        )  # fmt: skip
        print(ran.stdout, flush=True)
        held = "held" if ran.returncode == 0 else f"did not hold (exit code {ran.returncode})"
        failed += ran.returncode != 0
        rows.append(f"| {part.title} | {part.shows} | {held} | {time.monotonic() - began:.0f} s |")
        tail = "\n".join(ran.stdout.splitlines()[-60:])
        details.append(f"## {part.title}: {held}\n\n    {_command(part)}\n\n```\n{tail}\n```\n")
    properties = torch.cuda.get_device_properties(0)
    page = [
        "# What held on a GPU\n",
        f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB, torch {torch.__version__}, "
        f"CUDA {torch.version.cuda}, Python {platform.python_version()}.\n",
        "| part | shows | result | time |\n|---|---|---|---|",
        *rows,
        "",
        *details,
    ]
    PAGE.write_text("\n".join(page))
    print(f"\n{len(PARTS) - failed} of {len(PARTS)} parts held; the page is {PAGE.absolute()}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Compares two checkouts: both train, and alternate after a few steps.

    git worktree add ../before COMMIT
    python -m benchmarks.in_turns ../before --models gpt-7m norms-1500 --ranks 2

The processes of both checkouts exist at the same time, and those of one run at a time. Consecutive
measurements are seconds apart, so their ratio depends little on changes of the machine's speed. It
prints the median ms of a step for each checkout, and median and quartiles of the ratios of this
checkout to the other. Both run the models of this checkout, with AdamW.
"""

from __future__ import annotations

import argparse
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist
from benchmarks.models import PRESETS, loss_of
from benchmarks.other_models import OTHER_PRESETS
from torch.distributed.fsdp import MixedPrecisionPolicy

from vescale_fsdp import fully_shard

ROOT = Path(__file__).resolve().parents[1]
MODELS = PRESETS | OTHER_PRESETS
START_LIMIT_S = 120


def train(args: argparse.Namespace) -> None:
    """Run as one rank: some steps for each line that rank 0 reads from the socket."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo")
    preset = MODELS[args.models[0]]
    model = preset.make()
    is_bf16 = args.precision == "bf16"
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if is_bf16
        else MixedPrecisionPolicy()
    )
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    batch, targets = preset.draw(torch.Generator().manual_seed(dist.get_rank()))
    stream: TextIO | None = None
    if dist.get_rank() == 0:
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(args.worker)
        stream = connection.makefile("rw")
    while True:
        goes_on = torch.tensor([stream is None or stream.readline() != ""], dtype=torch.uint8)
        dist.broadcast(goes_on, 0)
        if not goes_on:
            return
        times = []
        for _ in range(args.steps):
            start = time.perf_counter()
            loss_of(model(batch), targets).backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - start)
        if stream is not None:
            print(statistics.median(times) * 1e3, file=stream, flush=True)


@contextmanager
def started(checkout: Path, model: str, args: argparse.Namespace) -> Iterator[TextIO]:
    """Start the ranks of a checkout. Yields the stream on which rank 0 gets its orders."""
    ranks = str(args.ranks)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", ranks]
    if args.network:
        launcher = ["-m", "benchmarks.slow_network", "--ranks", ranks, "--rate", args.network, "--"]
        launcher.append(sys.executable)
    paths = [str(checkout / "packages" / "core" / "src"), str(ROOT)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as listener:
        name = f"{folder}/turns"
        listener.bind(name)
        listener.listen()
        listener.settimeout(START_LIMIT_S)
        options = ["--worker", name, "--models", model, "--precision", args.precision]
        command = [sys.executable, *launcher, "-m", "benchmarks.in_turns", *options]
        if not args.network:  # torchrun's own way to name a module
            command = [sys.executable, *launcher, "--module", "benchmarks.in_turns", *options]
        with subprocess.Popen(
            [*command, "--steps", str(args.steps)], cwd=ROOT, env=environ
        ) as process:
            connection, _ = listener.accept()
            with connection, connection.makefile("rw") as stream:
                yield stream
                connection.shutdown(socket.SHUT_WR)  # the end of the lines
            process.wait()


def turn(stream: TextIO) -> float:
    """Run some steps of a checkout. Returns ms per step."""
    print("go", file=stream, flush=True)
    return float(stream.readline())


def compare(model: str, args: argparse.Namespace) -> str:
    """Compare the checkouts for ``model``. Returns one line."""
    with ExitStack() as stack:
        both = [
            stack.enter_context(started(checkout, model, args)) for checkout in (args.other, ROOT)
        ]
        for stream in both * 2:  # the first turns make memory, and confirm the program
            turn(stream)
        pairs = []
        for number in range(args.turns):
            order = both if number % 2 else both[::-1]
            times = {id(stream): turn(stream) for stream in order}
            pairs.append([times[id(stream)] for stream in both])
    others, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
    low, middle, high = statistics.quantiles([here / there for there, here in pairs], n=4)
    network = args.network or "loopback"
    return (
        f"| {model} | {args.ranks} | {network} | {args.precision} | {others:.1f} | {ours:.1f} "
        f"| {middle:.3f} ({low:.3f} to {high:.3f}) |"
    )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="Two checkouts, alternating.")
    parser.add_argument("other", type=Path, nargs="?", help="the root of the other checkout")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=["gpt-7m"])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--network", help="a rate such as 1gbit (root, Linux); default: loopback")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--turns", type=int, default=14, help="measurements of each checkout")
    parser.add_argument("--steps", type=int, default=4, help="steps of a measurement")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.worker:
        train(args)
        return
    if args.other is None or not (args.other / "packages" / "core" / "src").is_dir():
        parser.error(f"{args.other} is no checkout of this repository")
    args.other = args.other.resolve()
    print("| model | ranks | network | precision | other, ms | this, ms | this / other |")
    print("|---|---|---|---|---|---|---|")
    for model in args.models:
        print(compare(model, args), flush=True)


if __name__ == "__main__":
    main()

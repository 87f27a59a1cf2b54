"""One GPU, compared with FSDP2: step time, host time, peak memory, kernels, copies, and targets.

    python -m benchmarks.gpu_single                       # a GPU of 80 GB; writes results/gpu.json
    python -m benchmarks.gpu_single --models gpt-tiny moe-tiny --worlds 1 64 --device cpu

World size 1 trains over NCCL. In larger worlds torch's fake process group replaces the other ranks:
the process does all that rank 0 of 64 or 1024 does, but nothing is sent or received. So buffers,
kernels, copies and host time are those of a large world. Values are not, and the overlap of
communication is not measured.

Each engine has a separate process, and they alternate after a few steps. So noise of the machine
affects both, and ratios are computed within one round. Without a CUDA device the exit code is 2.
``--device cpu`` is only a test of the script.

    step      wall time of a step, with a wait for the device before and after the steps
    host      time of the calling thread for one step, starting with an idle device, without waits
    kernels   number on the device in one step, and how many are copies (with casts and sets)
    peak      bytes since the first steps: allocated, and reserved by the caching allocator
    in place  whether the parameters in forward are views of the all-gather's output
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from benchmarks.gpu_models import PRESETS, Preset
from benchmarks.models import loss_of
from benchmarks.optimizers.results import ROOT, circumstances, read, write
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.profiler import ProfilerActivity, profile

from vescale_fsdp import fully_shard

FILE = ROOT / "benchmarks" / "results" / "gpu.json"
ENGINES: dict[str, Callable[..., Any]] = {"vescale": fully_shard, "fsdp2": torch_fully_shard}
# Of what the allocator reserves beyond the peak of what is allocated. The latter is the model's and
# its activations', so that all that is reserved can hardly become less.
SLACK_TARGET = 0.84
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
_COPIES = re.compile(r"copy|memcpy|catarray|chunk_cat", re.IGNORECASE)
_COPIES_OUT = re.compile(r"split_with_sizes_copy", re.IGNORECASE)
_NUM_WARM = 4  # steps in which engines record orders and allocators fill


def is_copy(kernel: str) -> bool:
    """Whether a kernel moves data and computes nothing (by its name)."""
    return _COPIES.search(kernel) is not None


@dataclass
class Measured:
    """Results of one engine for one model and world size. Lists have one entry per round."""

    engine: str
    step_s: list[float] = field(default_factory=list)
    host_s: list[float] = field(default_factory=list)
    kernels: int = 0
    copies: int = 0
    copies_out: int = 0
    peak_allocated: int = 0
    peak_reserved: int = 0
    is_in_place: bool | None = None  # None: nothing was gathered
    losses: list[float] = field(default_factory=list)


class Trainer:
    """One model with one engine, on rank 0 of a world, within one process."""

    def __init__(self, engine: str, preset: Preset, world_size: int, device: torch.device) -> None:
        self.device = device
        self._starts_world(world_size)
        torch.manual_seed(0)
        mesh = init_device_mesh(device.type, (world_size,))
        with torch.device(device):
            self.model = preset.make()
        for block in self.model.blocks:
            ENGINES[engine](block, mesh=mesh, mp_policy=BF16)
        ENGINES[engine](self.model, mesh=mesh, mp_policy=BF16)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self._batch = preset.batch(device)
        for _ in range(_NUM_WARM):
            self.step()
        self.synchronize()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    def _starts_world(self, world_size: int) -> None:
        backend = "nccl" if self.device.type == "cuda" else "gloo"
        store: Any = dist.HashStore()
        if world_size > 1:
            from torch.testing._internal.distributed.fake_pg import FakeStore

            backend, store = "fake", FakeStore()
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        dist.init_process_group(backend, store=store, rank=0, world_size=world_size)

    def synchronize(self) -> None:
        """Wait for the device."""
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def step(self) -> torch.Tensor:
        """Forward, backward and optimizer; the loss stays on the device."""
        tokens, targets = self._batch
        loss: torch.Tensor = loss_of(self.model(tokens), targets)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()

    def turn(self, num_steps: int) -> dict[str, float]:
        """Run some steps. Returns seconds of a step, host seconds of a step, and the last loss."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(num_steps):
            loss = self.step()
        self.synchronize()
        step_s = (time.perf_counter() - start) / num_steps
        host = []
        for _ in range(min(num_steps, 3)):
            start = time.perf_counter()
            self.step()
            host.append(time.perf_counter() - start)
            self.synchronize()
        return {"step_s": step_s, "host_s": statistics.median(host), "loss": loss.item()}

    def memory(self) -> dict[str, int]:
        """The peaks since the first steps."""
        if self.device.type != "cuda":
            return {"peak_allocated": 0, "peak_reserved": 0}
        return {
            "peak_allocated": torch.cuda.max_memory_allocated(),
            "peak_reserved": torch.cuda.max_memory_reserved(),
        }

    def kernels(self) -> dict[str, int]:
        """How many kernels one step runs, and how many of them copy. On a CPU: operators."""
        on_gpu = self.device.type == "cuda"
        activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * on_gpu
        with profile(activities=activities) as recorded:
            self.step()
            self.synchronize()
        kind = torch.autograd.DeviceType.CUDA if on_gpu else torch.autograd.DeviceType.CPU
        names = [
            event.name
            for event in recorded.events()
            if event.device_type == kind and not event.is_user_annotation
        ]
        return {
            "kernels": len(names),
            "copies": sum(map(is_copy, names)),
            "copies_out": sum(_COPIES_OUT.search(name) is not None for name in names),
        }

    def is_in_place(self) -> bool | None:
        """Whether the parameters of a block in forward are views of the all-gather's output."""
        gathered: set[int] = set()
        found: list[bool] = []
        gather = dist.all_gather_single

        def noting(output: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            gathered.add(output.untyped_storage()._cdata)
            return gather(output, *args, **kwargs)

        def look(module: nn.Module, _: Any) -> None:
            storages = {each.untyped_storage()._cdata for each in module.parameters()}
            found.append(storages <= gathered)

        # The linear layer runs after its block was gathered, and is no unit itself.
        handle = self.model.blocks[0].qkv.register_forward_pre_hook(look)
        with mock.patch.object(dist, "all_gather_single", noting):
            self.step()
        handle.remove()
        return all(found) if gathered else None


def serve(pipe: Connection, engine: str, model: str, world_size: int, device: str) -> None:
    """Run in the process of one engine: call the methods that the pipe names, until its end."""
    trainer = Trainer(engine, PRESETS[model], world_size, torch.device(device))
    pipe.send("ready")
    while (asked := pipe.recv()) is not None:
        name, *args = asked
        pipe.send(getattr(trainer, name)(*args))
    dist.destroy_process_group()


class Engine:
    """Calls methods of a `Trainer` in a separate process."""

    def __init__(self, engine: str, model: str, world_size: int, device: str) -> None:
        starts = multiprocessing.get_context("spawn")
        self._pipe, theirs = starts.Pipe()
        args = (theirs, engine, model, world_size, device)
        self._process = starts.Process(target=serve, args=args, daemon=True)
        self._process.start()
        theirs.close()
        self._name = engine
        self._answer()

    def ask(self, name: str, *args: Any) -> Any:
        """Call a method in that process, and return its result."""
        self._pipe.send((name, *args))
        return self._answer()

    def _answer(self) -> Any:
        try:
            return self._pipe.recv()
        except EOFError:
            raise RuntimeError(f"the process of {self._name} has died; see what it wrote") from None

    def close(self) -> None:
        """End the process."""
        with suppress(BrokenPipeError):  # it has died
            self._pipe.send(None)
        self._process.join(30)
        if self._process.is_alive():
            self._process.kill()


def measure(model: str, world_size: int, device: str, rounds: int, steps: int) -> list[Measured]:
    """Alternate between the engines. Returns the results in the order of `ENGINES`."""
    results = [Measured(name) for name in ENGINES]
    with ExitStack() as stack:
        engines = []
        for name in ENGINES:
            engines.append(Engine(name, model, world_size, device))
            stack.callback(engines[-1].close)
        for _ in range(rounds):
            for engine, result in zip(engines, results, strict=True):
                turn = engine.ask("turn", steps)
                result.step_s.append(turn["step_s"])
                result.host_s.append(turn["host_s"])
                result.losses.append(turn["loss"])
        for engine, result in zip(engines, results, strict=True):
            for name, value in (engine.ask("memory") | engine.ask("kernels")).items():
                setattr(result, name, value)
            result.is_in_place = engine.ask("is_in_place")
    return results


@dataclass(frozen=True)
class Verdict:
    """Whether a target is met. None: it was not measured."""

    target: str
    holds: bool | None
    found: str

    def __str__(self) -> str:
        word = {True: "PASS", False: "MISS", None: "----"}[self.holds]
        return f"{word}  {self.target}: {self.found}"


def verdicts(model: str, world_size: int, ours: Measured, theirs: Measured) -> list[Verdict]:
    """The targets of one model in one world. Speed and memory are only judged on a GPU."""
    where = f"{model}, world {world_size}"
    on_gpu = theirs.peak_reserved > 0
    target = PRESETS[model].speed_target
    speed = statistics.median(b / a for a, b in zip(ours.step_s, theirs.step_s, strict=True))
    slack, their_slack = (each.peak_reserved - each.peak_allocated for each in (ours, theirs))
    in_place = None if ours.is_in_place is None else ours.is_in_place and not ours.copies_out
    return [
        Verdict(
            f"{where}, speed at least {target} of FSDP2's",
            speed >= target if on_gpu else None,
            f"{speed:.3f}",
        ),
        Verdict(
            f"{where}, slack of the allocator at most {SLACK_TARGET} of FSDP2's",
            slack <= SLACK_TARGET * their_slack if on_gpu else None,
            f"{slack / 1e9:.2f} and {their_slack / 1e9:.2f} GB"
            if on_gpu
            else "not measured on a CPU",
        ),
        Verdict(
            f"{where}, no copy-out",
            in_place,
            "nothing is gathered" if in_place is None else f"{ours.copies_out} kernels",
        ),
    ]


HEAD = [
    "model", "rank 0 of", "engine", "ms a step", "host ms", "kernels", "copies", "copies out",
    "in place", "peak GB", "reserved GB", "loss",
]  # fmt: skip


def _columns(result: Measured, world_size: int) -> list[str]:
    return [
        result.engine,
        f"{1000 * statistics.median(result.step_s):.2f}",
        f"{1000 * statistics.median(result.host_s):.2f}",
        str(result.kernels),
        str(result.copies),
        str(result.copies_out),
        {True: "yes", False: "no", None: ""}[result.is_in_place],
        f"{result.peak_allocated / 1e9:.2f}",
        f"{result.peak_reserved / 1e9:.2f}",
        f"{result.losses[-1]:.6f}" if world_size == 1 else "",
    ]


def load(path: Path) -> dict[tuple[str, int], list[Measured]]:
    """Read stored results, by model and ranks, in the order of `ENGINES`."""
    found: dict[tuple[str, int], list[Measured]] = {}
    for key, values in read(path).get("readings", {}).items():
        model, world_size, _ = key.split(", ")
        found.setdefault((model, int(world_size)), []).append(Measured(**values))
    return found


def lines(path: Path = FILE) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table for RESULTS.md."""
    kept = load(path).items()
    return HEAD, [
        [model, str(size), *_columns(each, size)] for (model, size), pair in kept for each in pair
    ]


def show(model: str, world_size: int, results: list[Measured], console: Console) -> None:
    """Print a table of both engines."""
    table = Table(title=f"{model}, rank 0 of {world_size}", title_justify="left")
    for column in HEAD[2:]:
        table.add_column(column, justify="left" if column == "engine" else "right")
    for result in results:
        table.add_row(*_columns(result, world_size))
    console.print(table)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--models", nargs="+", default=["gpt-1.3b", "moe-1.3b"], choices=PRESETS)
    parser.add_argument("--worlds", nargs="+", type=int, default=[1, 64, 1024])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=10, help="consecutive steps of an engine")
    parser.add_argument(
        "--json", type=Path, help="file for the results (on a GPU: results/gpu.json)"
    )
    return parser.parse_args()


def main() -> int:
    """Measure, print, and say which targets are met."""
    arguments, console = _arguments(), Console(width=120)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        console.print(
            "benchmarks.gpu_single needs a CUDA device, and torch finds none here (a build for "
            "CPUs, no driver, or CUDA_VISIBLE_DEVICES hides it). Nothing was measured. "
            "--device cpu --models gpt-tiny moe-tiny shows that the script runs."
        )
        return 2
    kept = arguments.json or (FILE if arguments.device == "cuda" else None)
    found: dict[str, dict[str, Any]] = {}
    judged = []
    told = circumstances()
    if arguments.device == "cuda":
        told["machine"]["gpu"] = torch.cuda.get_device_name()
    for model in arguments.models:
        for world_size in arguments.worlds:
            device = "cpu" if arguments.device == "cpu" else "cuda:0"
            results = measure(model, world_size, device, arguments.rounds, arguments.steps)
            show(model, world_size, results, console)
            judged += verdicts(model, world_size, *results)
            found |= {f"{model}, {world_size}, {each.engine}": asdict(each) for each in results}
            if kept is not None:  # each time: an interrupted run keeps what it has
                write(kept, {"circumstances": told, "readings": found})
    for verdict in judged:
        console.print(str(verdict), highlight=False)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Rank 0 of up to 10,240 ranks, compared with real ranks: memory, copies, host time, planning.

    python -m benchmarks.scale                             # 12 minutes on two cores
    python -m benchmarks.scale --models gpt-4m --fake-ranks 64 --ranks 2

With torch's fake process group the other ranks do not exist and nothing is sent, but buffers,
copies and host work are those of the large world. Both engines use ``all_gather`` and
``reduce_scatter``, as over NCCL. The same is measured on 2 and 4 real ranks over gloo
(`VESCALE_FSDP_REDUCE=native`) and with a fake group of the same size. The difference between the
two is the error of the fake group.

``vescale-lean`` is ours with ``in_flight=1``. In addition to activations, shards and states it
needs only the current unit, and its gradients until they are reduced. ``floor`` is a lower bound
for every engine that unshards whole units (`floor`). For these two only memory is measured.

Memory is counted by `inspection`, copies by `copies`. Host time is CPU time of the process, minus
that of the model without an engine and that of the collectives alone, which alternate with the
engines. (The fake group fills an all-gather's output rank by rank.) On CPU, FSDP2's copies to a
reduce-scatter are one operator for each rank, on CUDA one kernel, so its host time in large worlds
is too high here. gloo's reduce-scatter clones its input and copies its result, which the fake group
does not do; so peak and copies of real ranks are higher for both engines.

FSDP2 pads each tensor to a full number of rows on each rank. If its buffers would need more than
``--limit-gb``, it is left out, and only the size of its all-gather is given. Each model has a file
in benchmarks/results/scale. Results of the same code are not measured again.
"""

from __future__ import annotations

import argparse
import gc
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
from benchmarks.compare.record import source_digest
from benchmarks.copies import COUNTED, copies_of
from benchmarks.engines import ENGINES, Training
from benchmarks.floor import least_bytes, units_of
from benchmarks.inspection import inspect
from benchmarks.models import CONTEXT, GPT, PRESETS, VOCABULARY, Batches, MoE, Preset, ViT
from benchmarks.optimizers.results import ROOT, circumstances, read, write
from benchmarks.other_models import OTHER_PRESETS
from benchmarks.wire import Recorder, Replay
from rich.console import Console
from rich.table import Table
from torch import nn

from vescale_fsdp.engine.unit import units_in
from vescale_fsdp.planner import TensorSpec, lay_out
from vescale_fsdp_tune.costs.layouts import fsdp2_shard_size

__all__ = ["FOLDER", "MODELS", "Reading", "checks", "lines"]

FOLDER = ROOT / "benchmarks" / "results" / "scale"
# The models of `benchmarks.models` with fewer blocks. A few units are enough here, and on CPU
# FSDP2's copies to a reduce-scatter are an operator for each rank and parameter, which makes
# profiles large.
MODELS: dict[str, Preset] = {
    "gpt-4m": replace(PRESETS["gpt-7m"], make=lambda: GPT(VOCABULARY, CONTEXT, 3, 256, heads=4)),
    "moe-6m": replace(PRESETS["moe-10m"], make=lambda: MoE(8, 512, layers=2, width=256, heads=4)),
    "vit-4m": replace(
        PRESETS["vit-6m"],
        make=lambda: ViT(112, width=288, heads=4, hidden=1076, layers=3, classes=1003),
    ),
    **OTHER_PRESETS,
}
NAMES = ("vescale", "vescale-lean", "fsdp2", "compute")
ROWS = ("vescale", "vescale-lean", "fsdp2", "floor")  # of the table
NUM_WARM = 2
BUFFERS_OF_UNIT = 4  # FSDP2: all-gather output, parameters, gradients, reduce-scatter input


@dataclass
class Reading:
    """The results of rank 0 with one engine.

    Attributes:
        peak_bytes, resting_bytes: peak of tensors in a step, and their size between steps.
        copied_bytes: written by copies in a step, with the model's, without the process group's.
        sent_bytes: in a step, if collectives send each part once.
        cpu_s: CPU time of the process in a step, a median for each round.
        group_s: the same for its collectives alone, in the real or fake process group.
        shard_s: seconds of all calls of ``fully_shard``.
        plan_s: seconds of the plans in these calls.
        gathered_bytes: of the largest unit, with padding.
        left_out: why it was not measured.
    """

    peak_bytes: int = 0
    resting_bytes: int = 0
    copied_bytes: int = 0
    sent_bytes: float = 0.0
    cpu_s: list[float] = field(default_factory=list)
    group_s: list[float] = field(default_factory=list)
    shard_s: float = 0.0
    plan_s: float = 0.0
    gathered_bytes: int = 0
    left_out: str | None = None


def fsdp2_gathered_bytes(model: nn.Module, num_ranks: int) -> int:
    """Return the bytes that FSDP2 gathers for the largest unit, in the parameters' dtype."""
    return max(
        num_ranks
        * fsdp2_shard_size([TensorSpec("", tuple(p.shape), 1) for p in unit], num_ranks)
        * unit[0].itemsize
        for _, unit in units_of(model)
        if unit
    )


def _make(name: str, preset: Preset, num_ranks: int, rank: int, reading: Reading) -> Training:
    torch.manual_seed(0)
    model = preset.make()
    started = time.perf_counter()
    model, optimized = ENGINES[name](model, "fp32", num_ranks)
    reading.shard_s = time.perf_counter() - started
    training = Training(model, optimized, Batches(preset, rank))
    for _ in range(NUM_WARM):
        training.step()
    return training


def read_all(
    preset: Preset, num_ranks: int, rank: int, rounds: int, steps: int, limit: int
) -> dict[str, Reading]:
    """Measure every engine on this rank: memory one at a time, then times alternately."""
    readings = {name: Reading() for name in NAMES}
    trainings: dict[str, Training] = {}
    replays: dict[str, Replay] = {}
    readings["fsdp2"].gathered_bytes = fsdp2_gathered_bytes(preset.make(), num_ranks)
    needed = BUFFERS_OF_UNIT * readings["fsdp2"].gathered_bytes
    for name, reading in readings.items():
        if name == "fsdp2" and needed > limit:
            reading.left_out = f"needs {needed / 1e9:.1f} GB for the padded buffers of a unit"
            continue

        def make(name: str = name, reading: Reading = reading) -> Training:
            return _make(name, preset, num_ranks, rank, reading)

        training, found = inspect(make)
        assert isinstance(training, Training), "the parts alone are not measured"
        reading.peak_bytes, reading.resting_bytes = found.peak_bytes, found.resting_bytes
        if name == "vescale-lean":
            continue  # asked for its memory alone
        copies = copies_of(training)
        reading.copied_bytes = sum(copies[part][0] for part in COUNTED)
        recorder = Recorder(keeps_calls=True)
        with recorder:
            training.step()
        replays[name] = Replay(recorder.collectives)
        whole = sum(each.num_bytes for each in recorder.collectives)
        reading.sent_bytes = whole * (num_ranks - 1) / num_ranks
        if name == "vescale":
            _plan_again(training.model, reading)
        trainings[name] = training
    readings["floor"] = Reading(*least_bytes(preset, num_ranks))
    gc.collect()
    gc.freeze()  # objects of one engine must not slow the garbage collection of another
    for _ in range(rounds):
        for name, training in trainings.items():
            readings[name].cpu_s.append(_turn(training.step, steps))
            readings[name].group_s.append(_turn(replays[name].step, steps))
    return readings


def _turn(step: Callable[[], object], steps: int) -> float:
    step()  # not timed: the caches have data of another engine
    taken = []
    for _ in range(steps):
        started = time.process_time()
        step()
        taken.append(time.process_time() - started)
    return median(taken)


def _plan_again(model: nn.Module, reading: Reading) -> None:
    """Time the plans of all units, as ``fully_shard`` has made them."""
    for unit in units_in(model).values():
        gathered = 0
        for group in unit.groups:
            layout = group.layout
            started = time.perf_counter()
            again = lay_out(layout.specs, layout.num_shards, alignment=layout.alignment)
            reading.plan_s += time.perf_counter() - started
            assert again.digest == layout.digest, "a plan is a function of its arguments"
            gathered += layout.total_size * group.buffer.full_dtype.itemsize
        reading.gathered_bytes = max(reading.gathered_bytes, gathered)


def on_rank(
    rank: int, num_ranks: int, port: int | None, model: str, rounds: int, steps: int, limit: int
) -> dict[str, Reading]:
    """Run as one rank of a group. Without a port it is a fake group."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if port is None:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=num_ranks)
    else:
        address = f"tcp://localhost:{port}"
        dist.init_process_group("gloo", init_method=address, rank=rank, world_size=num_ranks)
    readings = read_all(MODELS[model], num_ranks, rank, rounds, steps, limit)
    if port is not None:
        dist.barrier()
    dist.destroy_process_group()
    return readings


def measure(
    model: str, num_ranks: int, *, is_fake: bool, rounds: int, steps: int, limit: int
) -> dict[str, Reading]:
    """Return the readings of rank 0. The ranks run in separate processes."""
    port = None
    if not is_fake:
        with socket.socket() as probe:
            probe.bind(("localhost", 0))
            port = probe.getsockname()[1]
    started = 1 if is_fake else num_ranks
    with ProcessPoolExecutor(started, mp_context=get_context("spawn")) as pool:
        ranks = [
            pool.submit(on_rank, rank, num_ranks, port, model, rounds, steps, limit)
            for rank in range(started)
        ]
        first, *_ = [each.result() for each in ranks]
    return first


HEAD = [
    "model", "ranks", "group", "engine", "peak MB", "resting MB", "copied MB", "sent MB",
    "largest gather MB", "host ms", "plan ms",
]  # fmt: skip


def lines(folder: Path = FOLDER) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table for RESULTS.md: copies and host time beyond the model's own."""
    rows = []
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stem):
        for key, found in read(path)["readings"].items():
            group, ranks = key.split()
            readings = {name: Reading(**each) for name, each in found.items()}
            compute = readings["compute"]
            for name in ROWS:
                rows.append([path.stem, ranks, group, name, *_columns(readings[name], compute)])
    return HEAD, rows


CHECK_HEAD = ["model", "ranks", "engine", "peak", "copies", "bytes sent", "host time"]


def checks(folder: Path = FOLDER) -> tuple[list[str], list[list[str]]]:
    """Head and rows of a table of the fake group's figures divided by those of real ranks."""
    rows = []
    for path in sorted(folder.glob("*.json"), key=lambda path: path.stem):
        kept = read(path)["readings"]
        for key in [key for key in kept if key.startswith("gloo")]:
            ranks = key.split()[1]
            pair = [kept.get(f"{group} {ranks}") for group in ("fake", "gloo")]
            for name in ("vescale", "fsdp2") if all(pair) else ():
                fake, real = ([Reading(**of[n]) for n in (name, "compute")] for of in pair if of)
                rows.append([path.stem, ranks, name, *_over(fake, real)])
    return CHECK_HEAD, rows


def _over(fake: list[Reading], real: list[Reading]) -> list[str]:
    """Peak, copies, bytes and host time: an engine and ``compute`` of each group."""
    peak = fake[0].peak_bytes / real[0].peak_bytes
    copies = [own.copied_bytes - model.copied_bytes for own, model in (fake, real)]
    host = [median(_host_s(*each)) for each in (fake, real)]
    sent = fake[0].sent_bytes / real[0].sent_bytes
    ratios = (peak, copies[0] / copies[1], sent, host[0] / host[1])
    return [f"{each:.3f}" for each in ratios]


def _host_s(own: Reading, model: Reading) -> list[float]:
    """Beyond the model and what the process group does, by round."""
    rounds = zip(own.cpu_s, own.group_s, model.cpu_s, strict=True)
    return [cpu_s - group_s - model_s for cpu_s, group_s, model_s in rounds]


def _columns(reading: Reading, compute: Reading) -> list[str]:
    gathered = f"{reading.gathered_bytes / 1e6:.2f}" if reading.gathered_bytes else ""
    if reading.left_out:
        return ["left out", "", "", "", gathered, "", ""]
    memory = [f"{each / 1e6:.2f}" for each in (reading.peak_bytes, reading.resting_bytes)]
    if not reading.cpu_s:
        return [*memory, "", "", "", "", ""]
    beyond = _host_s(reading, compute)
    traffic = (reading.copied_bytes - compute.copied_bytes, reading.sent_bytes)
    host, plan_ms = f"{1000 * median(beyond):.1f}", f"{1000 * reading.plan_s:.1f}"
    return [*memory, *(f"{each / 1e6:.2f}" for each in traffic), gathered, host, plan_ms]


def main() -> int:
    """Measure what is missing, and print everything."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.scale", description="Rank 0 of many ranks."
    )
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    parser.add_argument(
        "--ranks", nargs="*", type=int, default=[2, 4], help="real ranks, over gloo"
    )
    parser.add_argument(
        "--fake-ranks", nargs="*", type=int, default=[2, 4, 64, 1024, 10240], help="rank 0 alone"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="steps of each engine per round")
    parser.add_argument("--limit-gb", type=float, default=6.0, help="limit for FSDP2's buffers")
    parser.add_argument("--out", type=Path, default=FOLDER)
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "VESCALE_FSDP_REDUCE": "native"}
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    console = Console(width=None if sys.stdout.isatty() else 150)
    source = source_digest()
    wanted = [(False, each) for each in args.ranks] + [(True, each) for each in args.fake_ranks]
    for model in args.models:
        path = args.out / f"{model}.json"
        kept = read(path)
        is_same = kept.get("source") == source and not args.fresh
        readings = kept["readings"] if is_same else {}
        for is_fake, num_ranks in wanted:
            key = f"{'fake' if is_fake else 'gloo'} {num_ranks}"
            if key not in readings:
                found = measure(
                    model,
                    num_ranks,
                    is_fake=is_fake,
                    rounds=args.rounds,
                    steps=args.steps,
                    limit=int(1e9 * args.limit_gb),
                )
                readings[key] = {name: asdict(each) for name, each in found.items()}
                told = {"circumstances": circumstances(), "source": source, "readings": readings}
                write(path, told)
            console.print(f"{model}, {key}: done", style="dim", highlight=False)
    for head, rows in (lines(args.out), checks(args.out)):
        table = Table(*head)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())

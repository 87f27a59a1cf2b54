"""Measures what ranks need to agree before and during their first step, in small and large worlds.

    python -m benchmarks.startup                     # 64 processes; 1,024 and 4,096 clients
    python -m benchmarks.startup --ranks 16 --clients 256

*Processes* train a small GPT over gloo, first with our engine, then with FSDP2. The benchmark
measures the seconds of the first and the second step, and counts the rounds of the first step and
the store operations of each rank.

*Clients* are threads that each have a connection to the same TCPStore. They run the code of
`vescale_fsdp.ranks` as ranks do, with the values of a model of ``--layers`` layers. So the store
has as many clients as in a large world. The rounds of such a model are counted on two processes
that train it.

Limits: all processes and threads share the cores of one machine, and the clients of a process share
Python's lock, which real ranks do not. Nothing crosses a network. The time of a round is that
between the ends of two rounds, each taken at the last client. Digests are computed before, because
ranks compute them on their own cores. If there are more processes than cores, a step's time is
mostly the compute of other ranks. So compare the difference between the first and the second step
with that of FSDP2.
"""

from __future__ import annotations

import argparse
import datetime
import gc
import hashlib
import json
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import pairwise
from multiprocessing import get_context
from multiprocessing.synchronize import Barrier
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from benchmarks.models import GPT
from benchmarks.optimizers.results import ROOT, circumstances, read, write
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from vescale_fsdp import compat, fully_shard
from vescale_fsdp.engine.agreement import fingerprint_of
from vescale_fsdp.engine.unit import units_in
from vescale_fsdp.program.record import Record
from vescale_fsdp.program.record import merge as merge_records
from vescale_fsdp.ranks import Ranks
from vescale_fsdp.ranks import ranks as floor
from vescale_fsdp.ranks.attempt import agree_on_name
from vescale_fsdp.ranks.ranks import FAN_IN, merge_pairs
from vescale_fsdp.testing import run_ranks

FOLDER = ROOT / "benchmarks" / "results" / "startup"
VOCABULARY, CONTEXT, WIDTH = 64, 8, 16
SHARD = {"vescale": fully_shard, "fsdp2": torch_fully_shard}
TIMEOUT_S = 600.0


class Counted:
    """A store that counts its operations by name."""

    def __init__(self, store: Any, counts: Counter[str]) -> None:
        self.store, self._counts = store, counts

    def __getattr__(self, name: str) -> Any:
        operation = getattr(self.store, name)

        def call(*args: Any) -> Any:
            self._counts[name] += 1
            return operation(*args)

        return call


# Processes


@dataclass
class Steps:
    """The results of one rank with one engine.

    Attributes:
        step_s: seconds of each step.
        rounds: of the first step, by topic.
        operations: of the store in the first step, by name, without those of the backend.
    """

    step_s: list[float]
    rounds: dict[str, int]
    operations: dict[str, int]


@contextmanager
def _counting(rounds: Counter[str], operations: Counter[str]) -> Iterator[None]:
    prefixed, exchange = floor.PrefixStore, Ranks.exchange
    default = Counted(compat.default_store(), operations)

    def counted(self: Ranks, topic: str, *args: Any, **options: Any) -> Any:
        rounds[topic] += 1
        return exchange(self, topic, *args, **options)

    def within(place: str, store: Counted) -> Counted:
        return Counted(prefixed(place, store.store), operations)

    with (
        mock.patch.object(compat, "default_store", return_value=default),
        mock.patch.object(floor, "PrefixStore", within),
        mock.patch.object(Ranks, "exchange", counted),
    ):
        yield


def _sharded(shard: Callable[..., Any], layers: int) -> nn.Module:
    torch.manual_seed(0)
    model = GPT(VOCABULARY, CONTEXT, layers, WIDTH, heads=2)
    for module in (*model.blocks, model):
        shard(module)
    return model


def train(engines: Sequence[str], layers: int, num_steps: int) -> dict[str, Steps]:
    """Train on one rank, with one engine after the other. Returns the results by engine."""
    torch.set_num_threads(1)
    found: dict[str, Steps] = {}
    for name in engines:
        model = _sharded(SHARD[name], layers)
        tokens = torch.arange(CONTEXT)[None] % VOCABULARY
        rounds: Counter[str] = Counter()
        operations: Counter[str] = Counter()
        steps = Steps([], {}, {})
        with _counting(rounds, operations):
            for _ in range(num_steps):
                dist.barrier()
                begun = time.perf_counter()
                model(tokens).sum().backward()
                dist.barrier()
                steps.step_s.append(time.perf_counter() - begun)
                if len(steps.step_s) == 1:
                    steps.rounds, steps.operations = dict(rounds), dict(operations)
        found[name] = steps
        del model
        gc.collect()
    return found


def show_processes(results: list[dict[str, Steps]], layers: int, console: Console) -> None:
    """Print a table: seconds of the slowest rank; least, median and most operations of a rank."""
    title = f"{len(results)} processes, GPT of {layers} blocks; one machine"
    table = Table(title=title, title_justify="left")
    for column in ("engine", "first step, s", "second, s", "more", "rounds", "operations a rank"):
        table.add_column(column, justify="left" if column == "engine" else "right")
    for name in results[0]:
        first, second = (max(each[name].step_s[k] for each in results) for k in (0, 1))
        rounds = sum(results[0][name].rounds.values())
        totals = [sum(each[name].operations.values()) for each in results]
        row = [f"{first:.2f}", f"{second:.2f}", f"{first - second:.2f}"]
        row += [str(rounds), _spread(totals, "{:.0f}")] if rounds else ["", ""]
        table.add_row(name, *row)
    console.print(table)


# Clients


@dataclass
class Kind:
    """The results of clients in rounds of one kind.

    Attributes:
        round_s: seconds between the ends of two rounds, each taken at the last client.
        operations: of each client per round, by rank.
    """

    round_s: list[float]
    operations: list[float]


def entries_of(layers: int) -> list[str]:
    """Return the entries that two ranks compare for a model with ``layers`` blocks."""
    return run_ranks(_entries, 2, layers)[0]


def _entries(layers: int) -> list[str]:
    return fingerprint_of(list(units_in(_sharded(fully_shard, layers)).values()))


def _payloads(entries: list[str]) -> dict[str, tuple[Callable[[int], Any], Any]]:
    """Return for each kind of round a function for a rank's value, and one that merges them."""
    layers = sum(each.startswith("unit") for each in entries)
    # Computed once: real ranks have their own cores.
    value = hashlib.sha256(json.dumps(entries).encode()).hexdigest()

    def digest(rank: int) -> list[Any]:
        return [[value, rank]]

    def said(rank: int) -> dict[str, Any]:
        units = list(range(layers))
        complete = [(unit, layers) for unit in units]
        return Record("backward of model 1", used=[(units, complete, rank)], ran=units).__dict__

    def merge(values: list[dict[str, Any]]) -> dict[str, Any]:
        return merge_records([Record(**each) for each in values]).__dict__

    return {"mesh and model": (digest, merge_pairs), "next step": (said, merge)}


def clients(
    port: int,
    ranks: range,
    size: int,
    fan_in: int,
    num_rounds: int,
    entries: list[str],
    barrier: Barrier,
    pipe: Any,
) -> None:
    """Run a client for each of ``ranks`` in one process. Sends their times and counts."""
    threading.stack_size(512 * 1024)
    timeout = datetime.timedelta(seconds=TIMEOUT_S)
    kinds = _payloads(entries)
    start = threading.Barrier(len(ranks) + 1)
    found: dict[int, dict[str, tuple[list[float], float]]] = {}

    def run(rank: int) -> None:
        mine: dict[str, tuple[list[float], float]] = {}
        counts: Counter[str] = Counter()
        # In the threads, not one after the other, because some wait for a name server.
        store = TCPStore("127.0.0.1", port, None, False, timeout, wait_for_workers=False)
        start.wait()
        start.wait()
        ends = [time.monotonic()]
        name = agree_on_name(Counted(store, counts), "name", rank, size, TIMEOUT_S)
        ends.append(time.monotonic())
        mine["name"] = ends, counts.total()
        counts.clear()
        counted: Any = Counted(PrefixStore(name, store), counts)
        rounds = Ranks(range(size), rank, counted, fan_in=fan_in)
        for kind, (payload, merge) in kinds.items():
            said = payload(rank)
            # Now all have started.
            rounds.exchange(f"begin of {kind}", said, merge, timeout_s=TIMEOUT_S)
            counts.clear()
            ends = [time.monotonic()]
            for _ in range(num_rounds):
                rounds.exchange(kind, said, merge, timeout_s=TIMEOUT_S)
                ends.append(time.monotonic())
            mine[kind] = ends, counts.total() / num_rounds
        found[rank] = mine

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    start.wait()
    barrier.wait()
    start.wait()
    for thread in threads:
        thread.join()
    barrier.wait()  # a process that ends early would use the cores of others
    pipe.send(found)


def measure_clients(
    size: int, fan_in: int, num_processes: int, num_rounds: int, entries: list[str]
) -> dict[str, Kind]:
    """Measure rounds of ``size`` clients of one store, by kind."""
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = get_context("spawn")
    barrier = context.Barrier(num_processes)
    each = math.ceil(size / num_processes)
    running = []
    for index in range(num_processes):
        receiving, sending = context.Pipe(duplex=False)
        ranks = range(index * each, min((index + 1) * each, size))
        args = (server.port, ranks, size, fan_in, num_rounds, entries, barrier, sending)
        process = context.Process(target=clients, args=args)
        process.start()
        sending.close()
        running.append((process, receiving))
    found: dict[int, dict[str, tuple[list[float], float]]] = {}
    for process, receiving in running:
        found.update(receiving.recv())
        process.join()
    kinds = {}
    for kind in found[0]:
        ends = [
            max(times) for times in zip(*(mine[kind][0] for mine in found.values()), strict=True)
        ]
        round_s = [after - before for before, after in pairwise(ends)]
        kinds[kind] = Kind(round_s, [found[rank][kind][1] for rank in range(size)])
    return kinds


def show_clients(
    results: dict[str, dict[str, Kind]], rounds: dict[str, int], console: Console
) -> None:
    """Print a table: least, median and most."""
    table = Table(title="clients of one TCPStore on one machine", title_justify="left")
    for column in ("clients", "kind", "ms a round", "operations a client", "of rank 0"):
        table.add_column(column, justify="left" if column == "kind" else "right")
    for size, kinds in results.items():
        for kind, each in kinds.items():
            row = [size, kind, _spread([1000 * s for s in each.round_s], "{:.1f}")]
            table.add_row(*row, _spread(each.operations, "{:.0f}"), f"{each.operations[0]:.0f}")
    console.print(table)
    total = sum(rounds.values())
    console.print(f"rounds of the first step of this model: {total} {rounds}")
    for size, kinds in results.items():
        seconds = median(kinds["name"].round_s) + total * median(kinds["next step"].round_s)
        console.print(f"{size} clients: {seconds:.2f} s for a name and so many rounds")


def _spread(values: Sequence[float], form: str) -> str:
    some = (min(values), median(values), max(values))
    texts = [form.format(value) for value in some]
    return texts[0] if len(set(texts)) == 1 else " / ".join(texts)


# The page of results


def figures_of_processes(results: list[dict[str, Steps]], blocks: int) -> dict[str, Any]:
    """Return the figures of one world: seconds of the slowest rank, operations of a rank."""
    found: dict[str, Any] = {}
    for name in results[0]:
        totals = [sum(each[name].operations.values()) for each in results]
        found[name] = {
            "step_s": [max(each[name].step_s[k] for each in results) for k in (0, 1)],
            "rounds": sum(results[0][name].rounds.values()),
            "operations": [min(totals), median(totals), max(totals)] if any(totals) else None,
        }
    return {"blocks": blocks, "engines": found}


def figures_of_clients(
    kinds: Mapping[str, Kind], rounds: Mapping[str, int], layers: int
) -> dict[str, Any]:
    """Return the figures of one store: least, median and most seconds of a round."""
    found = {
        kind: {
            "round_s": [min(each.round_s), median(each.round_s), max(each.round_s)],
            "operations_of_rank_0": each.operations[0],
        }
        for kind, each in kinds.items()
    }
    return {"layers": layers, "rounds": sum(rounds.values()), "kinds": found}


def keep(folder: Path, name: str, figures: Mapping[str, Any]) -> None:
    """Write the figures of one world, or of one store, with their circumstances."""
    write(folder / f"{name}.json", {"circumstances": circumstances(), **figures})


def kept(folder: Path = FOLDER) -> list[dict[str, Any]]:
    """Return all stored figures: first of processes, then of clients, each by number."""
    paths = [path for what in ("processes", "clients") for path in _paths(folder, what)]
    return [read(path) for path in paths]


def process_lines(folder: Path = FOLDER) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of processes for RESULTS.md."""
    rows = []
    for path in _paths(folder, "processes"):
        for name, each in read(path)["engines"].items():
            first, second = each["step_s"]
            row = [_number(path), "FSDP2" if name == "fsdp2" else "veScale-FSDP"]
            row += [f"{seconds:.2f}" for seconds in (first, second, first - second)]
            has_rounds = each["operations"] is not None
            row += [str(each["rounds"])] if has_rounds else [""]
            row += [" / ".join(f"{n:.0f}" for n in each["operations"])] if has_rounds else [""]
            rows.append(row)
    head = ["processes", "engine", "first step, s", "second, s", "difference", "rounds"]
    return [*head, "store operations of a rank: least, median, most"], rows


def client_lines(folder: Path = FOLDER) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of clients for RESULTS.md."""
    rows = []
    for path in _paths(folder, "clients"):
        found = read(path)
        kinds = found["kinds"]
        name_s, step_s = (kinds[kind]["round_s"][1] for kind in ("name", "next step"))
        row = [_number(path), f"{1000 * name_s:,.0f}"]
        for kind in ("mesh and model", "next step"):
            least, middle, most = (1000 * seconds for seconds in kinds[kind]["round_s"])
            row.append(f"{middle:,.0f} ({least:,.0f} to {most:,.0f})")
        row.append(f"{kinds['next step']['operations_of_rank_0']:.0f}")
        rows.append([*row, f"{name_s + found['rounds'] * step_s:.2f}"])
    head = ["clients", "name, ms", "mesh and model, ms per round", "next step, ms per round"]
    return [*head, "operations of rank 0 per round", "name and first step, s (target: 2)"], rows


def _paths(folder: Path, what: str) -> list[Path]:
    return sorted(folder.glob(f"*-{what}.json"), key=lambda path: int(path.stem.split("-")[0]))


def _number(path: Path) -> str:
    return f"{int(path.stem.split('-')[0]):,}"


def main() -> None:
    """Measure, print and store. Figures of the same sizes are replaced."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.startup",
        description="What ranks need to agree before and during their first step.",
    )
    parser.add_argument("--ranks", type=int, nargs="*", default=[64], help="numbers of processes")
    parser.add_argument("--blocks", type=int, default=4, help="of the model of processes")
    parser.add_argument(
        "--clients", type=int, nargs="*", default=[1024, 4096], help="numbers of clients"
    )
    parser.add_argument("--layers", type=int, default=61, help="of the model of clients")
    parser.add_argument("--fan-in", type=int, nargs="+", default=[FAN_IN], help="of the tree")
    parser.add_argument("--processes", type=int, default=4, help="that run the clients")
    parser.add_argument("--rounds", type=int, default=20, help="of each kind")
    parser.add_argument("--json", type=Path, help="file for all readings")
    parser.add_argument("--out", type=Path, default=FOLDER, help="folder for the page's figures")
    args = parser.parse_args()
    # Torch looks up a name for each connection. Without an answer it would wait for 10 s.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    console = Console(width=120)
    found: dict[str, Any] = {"processes": {}, "clients": {}}
    for num_ranks in args.ranks:
        steps = run_ranks(train, num_ranks, list(SHARD), args.blocks, 3, timeout_s=1800)
        show_processes(steps, args.blocks, console)
        keep(args.out, f"{num_ranks}-processes", figures_of_processes(steps, args.blocks))
        found["processes"][str(num_ranks)] = [
            {name: asdict(each) for name, each in mine.items()} for mine in steps
        ]
    if args.clients:
        rounds = run_ranks(train, 2, ["vescale"], args.layers, 1, timeout_s=600)[0][
            "vescale"
        ].rounds
        entries = entries_of(args.layers)
        results = {}
        for size in args.clients:
            for fan_in in args.fan_in:
                key = f"{size}" if len(args.fan_in) == 1 else f"{size}, fan-in {fan_in}"
                results[key] = measure_clients(size, fan_in, args.processes, args.rounds, entries)
        show_clients(results, rounds, console)
        for size in args.clients if args.fan_in == [FAN_IN] else ():
            figures = figures_of_clients(results[str(size)], rounds, args.layers)
            keep(args.out, f"{size}-clients", figures)
        found["clients"] = {
            key: {kind: asdict(each) for kind, each in kinds.items()}
            for key, kinds in results.items()
        }
        found["rounds of the first step"] = rounds
    if args.json:
        args.json.write_text(json.dumps(found | {"circumstances": circumstances()}, indent=1))


if __name__ == "__main__":
    main()

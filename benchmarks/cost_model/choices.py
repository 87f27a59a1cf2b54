"""Computed, not measured: the settings that the tuner chooses for 64 to 10,240 GPUs.

    python -m benchmarks.cost_model.choices SHAPES.json ...

Hardware is that of `vescale_fsdp_tune.costs.hardware`, times its shares; the budget is 90% of a
GPU's memory. The candidates are all that the tuner has: rows of the table of ZeRO's stages, HSDP of
every size, numbers of units that stay unsharded or recompute, units of several layers. Where
experts are modules, a layer may also be nine units: eighths of its experts, and the rest. Nothing
changes numbers (8 bits) or uses the host's memory.

A file has the tensors of each layer, without its code. So the assumptions are:

* compute of a layer: 2 operations for each parameter that a token uses in forward, twice as many in
  backward, at the hardware's share of its rate; attention's products are not counted
* activations of a layer, in bf16: the outputs of its matrices, and four times its width (inputs and
  outputs of two norms); after recomputation its input. Attention is fused. Each token uses the
  model's share of the experts.
* the root keeps the embedding's output, and logits in bf16 and fp32
* fp32 shards and AdamW, weights in bf16, gradients reduced in fp32
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any

from benchmarks.compare.targets import Verdict
from benchmarks.cost_model.large import ACTIVE_EXPERTS, read_layers
from benchmarks.optimizers.results import ROOT, circumstances, read, write

from vescale_fsdp.errors import PlanError
from vescale_fsdp_tune.costs import Candidate
from vescale_fsdp_tune.costs.hardware import COMPUTE_SHARE, published
from vescale_fsdp_tune.costs.machine import Machine
from vescale_fsdp_tune.costs.model import (
    FP32,
    Event,
    Group,
    Model,
    Moment,
    Tensor,
    Trace,
    make_model,
)
from vescale_fsdp_tune.costs.problem import BlockTimes, Division, Problem
from vescale_fsdp_tune.costs.search import tune

__all__ = ["FILE", "lines", "verdicts"]

FILE = ROOT / "benchmarks" / "results" / "cost_model" / "choices.json"
BUDGET = 0.9  # of a GPU's memory
ITEM = 2  # bytes of an activation
LOGIT_BYTES = 2 + 4
EXPERT_PARTS = 8
JUDGED_RANKS, MOST_S = 1024, 10.0


def _outputs(specs: Sequence[tuple[str, Sequence[int]]], share: float) -> float:
    """Elements that matrices give for each token."""
    total = 0.0
    for name, shape in specs:
        used = share if ".experts." in name else 1.0
        if len(shape) == 3:  # experts as a stack, of (inputs, outputs) or (outputs, inputs)
            total += used * shape[0] * max(shape[1:])
        elif len(shape) == 2:
            total += used * shape[0]
    return total


def _width(specs: Sequence[tuple[str, Sequence[int]]]) -> int:
    """Width of the residual stream: of the last norm."""
    return next(shape[0] for name, shape in reversed(specs) if "norm" in name)


def divisions_of(path: Path, machine: Machine, tokens: int) -> tuple[str, list[Division]]:
    """Name and divisions of a model: into layers, and into parts of layers with many experts."""
    content = json.loads(path.read_text())
    layers = [_Layers(group) for group in content["groups"]]
    name: str = content["model"]
    share = next((v for k, v in ACTIVE_EXPERTS.items() if name.startswith(k)), 1.0)
    halves = [part for each in layers for part in each.parts()]
    found = [_division(name, layers, share, machine, tokens)]
    if len(halves) > len(layers):
        found.append(_division(name, halves, share, machine, tokens))
    return name, found


class _Layers:
    """Equal units, which follow each other: whole layers, or the parts of each of them."""

    def __init__(self, group: dict[str, Any], names: Sequence[str] = ()) -> None:
        self.group, self.names = group, names

    @property
    def specs(self) -> list[tuple[str, list[int]]]:
        chosen: list[tuple[str, list[int]]] = self.group["tensors"]
        return chosen if not self.names else [each for each in chosen if each[0] in self.names]

    def parts(self) -> list[_Layers]:
        """The rest of a layer, then eighths of its experts; itself if these are no modules."""
        experts: dict[str, list[str]] = {}
        for name, _ in self.group["tensors"]:
            _, found, after = name.partition(".experts.")
            if found and after.split(".")[0].isdigit():
                experts.setdefault(after.split(".")[0], []).append(name)
        if len(experts) < EXPERT_PARTS:
            return [self]
        each = list(experts.values())
        size = -(-len(each) // EXPERT_PARTS)
        starts = range(0, len(each), size)
        chunks = [[*chain.from_iterable(each[start : start + size])] for start in starts]
        taken = {*chain.from_iterable(each)}
        rest = [name for name, _ in self.group["tensors"] if name not in taken]
        return [_Layers(self.group, names) for names in (rest, *chunks)]


def _division(
    name: str, layers: Sequence[_Layers], share: float, machine: Machine, tokens: int
) -> Division:
    root: list[Group] = []
    root_used = 0.0
    vocabulary = width = 0
    runs: list[tuple[str, list[Group], float, float]] = []  # of one layer after the other
    by_group: dict[int, list[_Layers]] = {}
    for each in layers:
        by_group.setdefault(id(each.group), []).append(each)
    for members in by_group.values():
        group = members[0].group
        whole = _width(group["tensors"])
        if group["name"] == "root":
            root, width = [_group(group["tensors"])], whole
            root_used = read_layers(group, share).num_used
            vocabulary = max(shape[0] for _, shape in group["tensors"])
            continue
        made = []
        for part, each in enumerate(members):
            used = read_layers(group | {"tensors": each.specs}, share).num_used
            norms = 4 * whole if part == 0 else 0
            kept = ITEM * tokens * (_outputs(each.specs, share) + norms)
            suffix = f".{part}" if len(members) > 1 else ""
            made.append((suffix, [_group(each.specs)], used, kept))
        runs += [
            (f"{group['name']}s.{number}{suffix}", *rest)
            for number in range(group["count"])
            for suffix, *rest in made
        ]
    model = make_model(name, root, [run[:2] for run in runs])
    times = [_times(root_used, tokens, machine)]
    for index in range(1, len(model.units)):
        times.append(_times(runs[model.order.index(index) - 1][2], tokens, machine))
    inputs = ITEM * tokens * width
    logits = LOGIT_BYTES * tokens * vocabulary
    kept = [run[3] for run in runs]
    again = [min(inputs, each) for each in kept]
    traces: dict[Any, Trace] = {
        "keep": _trace(model, kept, kept, inputs, logits),
        "recompute": _trace(model, again, kept, inputs, logits),
    }
    return Division(model, tuple(times), traces)


def _group(specs: Sequence[tuple[str, Sequence[int]]]) -> Group:
    return Group(tuple(Tensor(name, tuple(shape), len(shape) > 1) for name, shape in specs), FP32)


def _times(num_used: float, tokens: int, machine: Machine) -> BlockTimes:
    forward_s = 2 * num_used * tokens / machine.flops_per_s
    return BlockTimes(forward_s, 2 * forward_s, forward_s)


def _trace(
    model: Model, kept: Sequence[float], most: Sequence[float], inputs: int, logits: int
) -> Trace:
    """Layers that keep ``kept`` bytes each for backward, and have ``most`` while they run."""
    live = inputs
    moments = [Moment(Event.FORWARD, 0, 0)]
    for number in range(1, len(model.order)):
        own, highest = round(kept[number - 1]), round(most[number - 1])
        moments.append(Moment(Event.FORWARD, live, live, number, number))
        ends = Event.END_OF_FORWARD
        moments.append(Moment(ends, live + highest, live + own, number, number, True, True))
        live += own
    end = live + logits
    moments.append(Moment(Event.END_OF_FORWARD, end, end, is_reachable=True))
    moments.append(Moment(Event.BACKWARD, end + logits, end))
    for number in range(len(model.order) - 1, 0, -1):
        own, highest = round(kept[number - 1]), round(most[number - 1])
        # A layer's gradients of activations take about as much as the largest of them.
        moments.append(Moment(Event.BACKWARD, live + inputs, live, number, number))
        now = live - own + highest
        for elements in _halves(model.units[model.order[number]].groups[0]):
            moments.append(Moment(Event.GRADIENT, now, now, number, number, num_elements=elements))
        live -= own
        moments.append(Moment(Event.END_OF_BACKWARD, live + highest, live, number, number))
    for elements in _halves(model.units[0].groups[0]):
        moments.append(Moment(Event.GRADIENT, live, live, num_elements=elements))
    moments.append(Moment(Event.END, live, 0))
    return Trace(tuple(moments))


def _halves(group: Group) -> tuple[int, int]:
    """Elements of the gradients until half of a unit has its gradients, and after: between others
    nothing happens."""
    first = 0
    for tensor in reversed(group.tensors):
        first += tensor.numel
        if 2 * first >= group.numel:
            break
    return first, group.numel - first


def entries(
    path: Path, ranks: list[int], hardware: list[str], tokens: int
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Key and choice of each number of GPUs and each kind, for one model."""
    for kind, num_ranks in product(hardware, ranks):
        machine = published(kind).machine()
        name, divisions = divisions_of(path, machine, tokens)
        division = divisions[0]
        problem = Problem(
            tuple(divisions), num_ranks, machine, round(BUDGET * machine.memory_bytes)
        )
        place = {"model": name, "hardware": kind, "ranks": num_ranks, "tokens": tokens}
        started = time.process_time()
        try:
            tuning = tune(problem)
        except PlanError as error:
            least = str(error).partition("the least is ")[2].partition(";")[0]
            found: dict[str, Any] = {"nothing_fits": least}
        else:
            chosen = tuning.chosen
            compute_s = sum(
                times.forward_s + times.backward_s
                for times in (division.times[index] for index in division.model.order)
            )
            found = {
                "chosen": _text(chosen.candidate, division.model),
                "step_s": chosen.step_s,
                "seconds": dict(chosen.seconds),
                "peak_bytes": chosen.peak_bytes,
                # Of the published rate of products: what recomputation takes is no use.
                "mfu": COMPUTE_SHARE * compute_s / chosen.step_s,
                "predicted": len(tuning.predictions),
                "pruned": tuning.num_pruned,
            }
        found["choosing_s"] = time.process_time() - started
        yield ", ".join(map(str, place.values())), place | found


def _text(candidate: Candidate, model: Model) -> str:
    """Settings in a few words."""
    parts: list[str] = [candidate.sharding]
    if candidate.num_replicas > 1:
        parts.append(f"{candidate.num_replicas} replicas")
    if candidate.units != model.modules[1:]:
        parts.append(f"{len(candidate.units)} units")
    if candidate.num_unsharded:
        parts.append(f"{candidate.num_unsharded} unsharded")
    parts.append(f"in_flight {candidate.in_flight}")
    if candidate.num_changed:
        parts.append(f"{candidate.num_changed} of {len(candidate.units)} {candidate.activations}")
    return ", ".join(parts)


HEAD = [
    "model", "GPUs", "hardware", "chosen", "step s", "waiting %", "MFU %", "peak GB",
    "candidates predicted, pruned", "to choose, s",
]  # fmt: skip


def lines(path: Path = FILE) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table for RESULTS.md: to be called computed there."""
    rows = []
    for each in read(path).get("figures", {}).values():
        place = [each["model"], f"{each['ranks']:,}", each["hardware"]]
        seconds = f"{each['choosing_s']:.1f}"
        if "nothing_fits" in each:
            told = f"nothing fits; the least is {each['nothing_fits']}"
            rows.append([*place, told, "", "", "", "", "", seconds])
            continue
        waiting = 100 * each["seconds"].get("waiting", 0.0) / each["step_s"]
        rows.append(
            [
                *place, each["chosen"], f"{each['step_s']:.2f}", f"{waiting:.0f}",
                f"{100 * each['mfu']:.0f}", f"{each['peak_bytes'] / 1e9:.1f}",
                f"{each['predicted']}, {each['pruned']}", seconds,
            ]
        )  # fmt: skip
    return HEAD, rows


def verdicts(path: Path = FILE) -> Iterator[Verdict]:
    """The time to choose for a thousand GPUs, compared with what is aimed at."""
    for each in read(path).get("figures", {}).values():
        if each["ranks"] == JUDGED_RANKS:
            seconds = each["choosing_s"]
            where = f"{each['model']}, {each['ranks']:,} {each['hardware']}, computed"
            target = f"time to choose at most {MOST_S:.0f} s"
            yield Verdict(target, where, f"{seconds:.1f}", seconds <= MOST_S)


def main() -> int:
    """Choose, print and store."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cost_model.choices", description="Choices for large worlds."
    )
    parser.add_argument("shapes", nargs="+", type=Path, help="JSON files of models")
    parser.add_argument("--ranks", nargs="+", type=int, default=[64, 256, 1024, 10240])
    parser.add_argument("--hardware", nargs="+", default=["h100", "h200"])
    parser.add_argument("--tokens", type=int, default=8192, help="of a GPU in a step")
    parser.add_argument("--out", type=Path, default=FILE)
    args = parser.parse_args()
    figures = {}
    for path in args.shapes:
        for key, each in entries(path, args.ranks, args.hardware, args.tokens):
            figures[key] = each
            print(
                key, each.get("chosen", "nothing fits"), f"{each['choosing_s']:.1f} s", flush=True
            )
    told = circumstances()
    names = " ".join(path.name for path in args.shapes)
    told["command"] = f"python -m benchmarks.cost_model.choices {names}"
    kept = {"circumstances": told, "kind": "computed, not measured", "tokens": args.tokens}
    write(args.out, kept | {"figures": figures})
    head, rows = lines(args.out)
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    for row in (head, *rows):
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

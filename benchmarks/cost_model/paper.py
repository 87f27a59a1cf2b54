"""Computed, not measured: the paper's systems on its hardware, from first principles.

    python -m benchmarks.cost_model.paper SHAPES.json ...

veScale-FSDP (arXiv 2602.22437, section 6.1) compares five systems on 1,024 H800 with LLaMA-3-70B,
GPT-OSS-120B and an internal mixture of experts. It reports for LLaMA about 5% over DeepSpeed, FSDP1
and FSDP2, and slightly more than Megatron-FSDP; for the other two models 11 to 66% over all four.
The internal model is not public; DeepSeek-V3-671B stands for it.

What a system does with a unit, in the same simulation of a step (`benchmarks.cost_model.timing`):

==============  ==========================  =======================  =========================
system          shard, in elements          collectives for a        bytes that copies read and
                                            gather                   write, per element
==============  ==========================  =======================  =========================
veScale-FSDP    the planner's, aligned      1                        in: 2 + 4
DeepSpeed       each tensor, to m elements  buckets of 5e7 elements  out: 4 in buckets of several
                                                                     tensors; in: 4 + 6
FSDP1           the unit, to m elements     1                        in: 4 (concatenation) + 6
FSDP2           each tensor, to m rows      1                        out: 4; in: 2 + 4
Megatron-FSDP   least common multiple of    1                        in: 2 + 4
                all rows (v2)
==============  ==========================  =======================  =========================

All gather weights in bf16 for forward and for backward, reduce gradients in fp32, recompute
activations in backward and overlap as our scheduler does. Rates are those of
`vescale_fsdp_tune.costs.hardware` for the H800; tokens and the way to shard are assumptions,
because the paper's text has neither. A collective is *aligned* if a rank's part is a multiple of 16
bytes, as NCCL's fast path needs; no time is added if it is not. The allocator, ``record_stream``,
bubbles between streams, and the host take no time. So a ratio below the paper's is expected where
the paper names these as causes.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from benchmarks.cost_model.large import Assumptions, Layers, read_model
from benchmarks.cost_model.timing import UnitCost, run_step
from benchmarks.optimizers.results import ROOT, circumstances, read, write

from vescale_fsdp.planner import TensorSpec, lay_out
from vescale_fsdp_tune.costs.hardware import COMPUTE_SHARE, MEMORY_SHARE, NETWORK_SHARE, published
from vescale_fsdp_tune.costs.layouts import fsdp2_shard_size, megatron_shard_size

__all__ = ["FILE", "causes_lines", "lines", "table_1_lines"]

FILE = ROOT / "benchmarks" / "results" / "cost_model" / "paper.json"
HARDWARE = "h800"
PARAM_BYTES, REDUCE_BYTES = 2, 4
ALIGNMENT = 8  # elements of 2 bytes
PREFETCH_BUCKET = 50_000_000  # elements: DeepSpeed's stage3_prefetch_bucket_size
REDUCE_BUCKET = 500_000_000  # its reduce_bucket_size
OURS = "veScale-FSDP"


@dataclass(frozen=True)
class Handling:
    """What a system does with a unit.

    Attributes:
        shard: elements of a rank, with padding.
        gathers, reductions: collectives for one gather, one reduction.
        copied_out, copied_in: bytes that copies read and write, for each gather, each reduction.
    """

    shard: int
    gathers: int
    reductions: int
    copied_out: int
    copied_in: int


def _ours(specs: Sequence[TensorSpec], ranks: int) -> Handling:
    layout = lay_out(specs, ranks, alignment=ALIGNMENT)
    return Handling(layout.shard_size, 1, 1, 0, 6 * _numel(specs))


def _deepspeed(specs: Sequence[TensorSpec], ranks: int) -> Handling:
    padded = [-(-spec.numel // ranks) for spec in specs]
    buckets: list[list[int]] = [[]]
    for spec in specs:
        if sum(buckets[-1]) >= PREFETCH_BUCKET:
            buckets.append([])
        buckets[-1].append(spec.numel)
    copied = sum(sum(bucket) for bucket in buckets if len(bucket) > 1)
    reductions = math.ceil(_numel(specs) / REDUCE_BUCKET)
    return Handling(sum(padded), len(buckets), reductions, 4 * copied, 10 * _numel(specs))


def _fsdp1(specs: Sequence[TensorSpec], ranks: int) -> Handling:
    return Handling(-(-_numel(specs) // ranks), 1, 1, 0, 10 * _numel(specs))


def _fsdp2(specs: Sequence[TensorSpec], ranks: int) -> Handling:
    shard = fsdp2_shard_size(specs, ranks)
    return Handling(shard, 1, 1, 4 * shard * ranks, 6 * shard * ranks)


def _megatron(specs: Sequence[TensorSpec], ranks: int) -> Handling:
    return Handling(megatron_shard_size(specs, ranks), 1, 1, 0, 6 * _numel(specs))


def _numel(specs: Sequence[TensorSpec]) -> int:
    return sum(spec.numel for spec in specs)


SYSTEMS: dict[str, Callable[[Sequence[TensorSpec], int], Handling]] = {
    OURS: _ours,
    "DeepSpeed ZeRO-3": _deepspeed,
    "FSDP1": _fsdp1,
    "FSDP2": _fsdp2,
    "Megatron-FSDP": _megatron,
}
# The paper's speed over each system: least and most. For the mixtures of experts it has one range
# for all systems together; "slightly" is given no figure.
PAPER_DENSE = {
    "DeepSpeed ZeRO-3": (1.05, 1.05),
    "FSDP1": (1.05, 1.05),
    "FSDP2": (1.05, 1.05),
    "Megatron-FSDP": (1.0, 1.05),
}
PAPER_EXPERTS = (1.11, 1.66)
STANDS_FOR = {"deepseek-v3-671b": "deepseek-v3-671b, for the internal one"}


def _paper(model: str, system: str) -> tuple[float, float]:
    return PAPER_DENSE[system] if model.startswith("llama") else PAPER_EXPERTS


def step_of(
    layers: Sequence[Layers], root: Layers, system: str, shards: int, replicas: int, tokens: int
) -> dict[str, Any]:
    """Compute one step of a system."""
    assumed = Assumptions(published(HARDWARE).machine(), COMPUTE_SHARE, tokens)
    handle = SYSTEMS[system]
    kinds = [(kind, handle(kind.specs, shards)) for kind in (root, *layers)]
    costs = [_cost(kind, each, assumed, shards, replicas) for kind, each in kinds]
    units = [
        cost
        for (kind, _), cost in zip(kinds[1:], costs[1:], strict=True)
        for _ in range(kind.count)
    ]
    step = run_step(costs[0], units, assumed.link(shards))
    stored = sum(kind.count * each.shard * shards for kind, each in kinds)
    real = sum(kind.count * _numel(kind.specs) for kind, _ in kinds)
    collectives = sum(
        kind.count * ((2 if kind is not root else 1) * each.gathers + each.reductions)
        for kind, each in kinds
    )
    return {
        "step_s": step.step_s,
        "compute_s": step.compute_s,
        "copy_s": step.copy_s,
        "network_s": step.network_s,
        "padding": 100 * (stored / real - 1),
        "collectives": collectives,
        "is_aligned": all(each.shard * PARAM_BYTES % 16 == 0 for _, each in kinds),
    }


def _cost(
    kind: Layers, each: Handling, assumed: Assumptions, shards: int, replicas: int
) -> UnitCost:
    forward_s, link = assumed.forward_s(kind.num_used), assumed.link(shards)
    sent = (shards - 1) * each.shard
    # More collectives of the same bytes, as bytes that take as long as their latencies.
    again = link.latency_s * link.bytes_per_s
    between = assumed.replica_bytes(each.shard * REDUCE_BYTES, shards, replicas)
    return UnitCost(
        forward_s,
        3 * forward_s,  # with recomputation
        sent * PARAM_BYTES + (each.gathers - 1) * again,
        sent * REDUCE_BYTES + (each.reductions - 1) * again + between,
        assumed.copy_s(each.copied_out, 0),
        assumed.copy_s(each.copied_in, 0),
    )


def entries(path: Path, settings: list[tuple[int, int]], tokens: list[int]) -> Iterator[Any]:
    """Key and figures of each system, for one model."""
    name, layers, root = read_model(path)
    for (shards, replicas), num_tokens, system in product(settings, tokens, SYSTEMS):
        found = step_of(layers, root, system, shards, replicas, num_tokens)
        place = {"model": name, "shards": shards, "replicas": replicas, "tokens": num_tokens}
        yield ", ".join(map(str, (*place.values(), system))), place | {"system": system} | found


TIE = 5e-4  # relative: what the simulation does not tell apart
SHORT = {
    OURS: "veScale", "DeepSpeed ZeRO-3": "DeepSpeed", "FSDP1": "FSDP1", "FSDP2": "FSDP2",
    "Megatron-FSDP": "Megatron",
}  # fmt: skip


def lines(path: Path = FILE) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of ratios for RESULTS.md: to be called computed there."""
    head = ["model", "GPUs", "tokens a GPU"]
    head += [
        f"over {system}: computed, the paper, difference" for system in SHORT if system != OURS
    ]
    head += ["computed order", "as in the paper"]
    rows = []
    for group in _groups(path):
        first = next(iter(group.values()))
        ours = group[OURS]["step_s"]
        row = [STANDS_FOR.get(first["model"], first["model"]), _gpus(first), str(first["tokens"])]
        for system in SHORT:
            if system != OURS:
                row.append(_compared(group[system]["step_s"] / ours, first["model"], system))
        order = sorted(group.values(), key=lambda each: each["step_s"])
        rows.append([*row, _order(order), _verdict(first["model"], group)])
    return head, rows


def causes_lines(path: Path = FILE) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of what differs between systems."""
    head = ["model", "GPUs", *(f"{s}: padding %, collectives, copies s, aligned" for s in SHORT)]
    rows = {}
    for group in _groups(path):
        first = next(iter(group.values()))
        key = STANDS_FOR.get(first["model"], first["model"]), _gpus(first)
        rows[key] = [
            f"{each['padding']:.1f}, {each['collectives']}, {each['copy_s']:.2f}, "
            f"{'yes' if each['is_aligned'] else 'no'}"
            for each in (group[system] for system in SHORT)
        ]
    return head, [[*key, *row] for key, row in rows.items()]


def _groups(path: Path) -> list[dict[str, dict[str, Any]]]:
    """The figures by system, for each setting."""
    groups: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for each in read(path).get("figures", {}).values():
        place = each["model"], each["shards"], each["replicas"], each["tokens"]
        groups.setdefault(place, {})[each["system"]] = each
    return list(groups.values())


def _gpus(each: dict[str, Any]) -> str:
    return f"{each['shards']}" + (f" x {each['replicas']}" if each["replicas"] > 1 else "")


def _compared(speed: float, model: str, system: str) -> str:
    least, most = _paper(model, system)
    paper = f"{least:.2f}" if least == most else f"{least:.2f} to {most:.2f}"
    nearest = min(max(speed, least), most)
    return f"{speed:.2f}, {paper}, {100 * (speed / nearest - 1):+.0f}%"


def _order(order: list[dict[str, Any]]) -> str:
    """Names by speed; an equal sign between those that are not told apart."""
    text = SHORT[order[0]["system"]]
    for before, each in pairwise(order):
        is_tie = each["step_s"] < before["step_s"] * (1 + TIE)
        text += (" = " if is_tie else ", ") + SHORT[each["system"]]
    return text


def _verdict(model: str, group: dict[str, dict[str, Any]]) -> str:
    """Return whether the computed order is the paper's, as far as its text has one."""
    speeds = {system: each["step_s"] / group[OURS]["step_s"] for system, each in group.items()}
    others = {system: speed for system, speed in speeds.items() if system != OURS}
    if model.startswith("llama"):
        second = others.pop("Megatron-FSDP")
        is_second = all(second < speed * (1 - TIE) for speed in others.values())
        if not is_second or second < 1:
            return "no"
        return "yes" if second > 1 + TIE else "a tie of the first two"
    near = [SHORT[system] for system, speed in others.items() if speed < PAPER_EXPERTS[0]]
    if min(others.values()) < 1:
        return "no"
    return f"veScale first, but by less than 11%: {', '.join(near)}" if near else "yes"


def table_1_lines(path: Path = FILE) -> tuple[list[str], list[list[str]]]:
    """The paper's Table 1: a layer of GPT-OSS-120B under FSDP2 on 64 H800."""
    found = read(path).get("table_1", {})
    head = ["of a layer of GPT-OSS-120B, 64 H800, FSDP2", "the paper, ms", "computed", "error %"]
    rows = [
        [what, f"{paper:.1f}", f"{own:.1f}", f"{100 * (own / paper - 1):+.0f}"]
        for what, (paper, own) in found.items()
    ]
    return head, rows


def table_1(specs: Sequence[TensorSpec]) -> dict[str, tuple[float, float]]:
    """Milliseconds, the paper's and computed. The shares of rates are from the same table."""
    machine, ranks = published(HARDWARE).machine(), 64
    each, link = _fsdp2(specs, ranks), machine.link(ranks)
    sent = (ranks - 1) * each.shard
    seconds = {
        "all-gather": (43.7, link.seconds(sent * PARAM_BYTES, ranks)),
        "copy out": (5.2, each.copied_out / machine.copy_bytes_per_s),
        "reduce-scatter": (94.2, link.seconds(sent * REDUCE_BYTES, ranks)),
        "copy in": (12.4, each.copied_in / machine.copy_bytes_per_s),
    }
    return {what: (paper, 1e3 * own) for what, (paper, own) in seconds.items()}


def main() -> int:
    """Compute, print and store."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cost_model.paper", description="The paper's systems, computed."
    )
    parser.add_argument("shapes", nargs="+", type=Path, help="JSON files of models")
    parser.add_argument("--shards", nargs="+", type=int, default=[1024, 128])
    parser.add_argument("--gpus", type=int, default=1024)
    parser.add_argument("--tokens", nargs="+", type=int, default=[8192, 32768], help="of a GPU")
    parser.add_argument("--out", type=Path, default=FILE)
    args = parser.parse_args()
    settings = [(shards, args.gpus // shards) for shards in args.shards]
    figures = {}
    first = {}
    for path in args.shapes:
        figures |= dict(entries(path, settings, args.tokens))
        name, layers, _ = read_model(path)
        if name.startswith("gpt-oss-120b"):
            first = table_1(layers[0].specs)
    told = circumstances()
    told["command"] = " ".join(
        ["python -m benchmarks.cost_model.paper", *(path.name for path in args.shapes)]
    )
    shares = {"compute": COMPUTE_SHARE, "network": NETWORK_SHARE, "memory": MEMORY_SHARE}
    kept = {"circumstances": told, "kind": "computed, not measured", "shares": shares}
    write(args.out, kept | {"table_1": first, "figures": figures})
    for head, rows in (lines(args.out), causes_lines(args.out), table_1_lines(args.out)):
        widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
        for row in (head, *rows):
            print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)))
    return 0


if __name__ == "__main__":
    sys.exit(main())

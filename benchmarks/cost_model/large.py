"""Computed, not measured: step time on 64 to 10,240 GPUs, ours and FSDP2, under stated assumptions.

    python -m benchmarks.cost_model.large SHAPES.json ...

A file has a model's groups in the form of `vescale-fsdp plan`: the tensors of one layer, and the
number of such layers. The group named root is gathered once. The assumptions, which are stored with
the figures, are:

* each GPU sends ``--gbytes-per-s`` over the network, also if all do, over any distance
* a collective has a latency: ``--hop-us`` for each of the m - 1 hops of a ring, or for each of
  the log2(m) steps of a tree (``--latency tree``)
* compute runs at ``--mfu`` of ``--tflops``; 6 operations for each parameter that a token uses,
  attention's products and recomputation are not counted; each token uses the model's share of the
  experts
* copies read and write at ``--memory-gbytes-per-s``, without overlap with computation; our engine
  copies gradients once, FSDP2 also copies parameters from each all-gather, with padding
* weights are sent in bf16, gradients in fp32; overlap is that of
  `vescale_fsdp.costs.timing`; the optimizer, the host
  and stragglers take no time
* everything is sharded over all GPUs, or over ``--shards`` of them with an all-reduce of the
  reduced shards between replicas; whether it fits in memory is not checked
* FSDP2 shards dimension 0, as by default. Other dimensions must divide evenly, which those of
  GPT-OSS's experts do not from 256 shards on; its 128 experts fit 128 shards

`check` measures the error of the same model on a small scale. None of the rates here is measured.
``hidden from`` is the number of tokens per GPU and step from which compute takes longer than the
network, if memory holds their activations.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.cost_model.bytes_by_plan import UnitBytes, of_fsdp2, of_ours
from benchmarks.optimizers.results import ROOT, circumstances, read, write

from vescale_fsdp.costs import Link
from vescale_fsdp.costs.timing import Step, UnitCost, run_step
from vescale_fsdp.planner import TensorSpec

__all__ = ["FILE", "Assumptions", "lines", "predict", "read_layers", "with_replicas"]

FILE = ROOT / "benchmarks" / "results" / "cost_model" / "large.json"
ENGINES = {"vescale": of_ours, "fsdp2": of_fsdp2}
# The share of the experts that a token uses, from the models' configurations.
ACTIVE_EXPERTS = {"deepseek-v3": 8 / 256, "gpt-oss-120b": 4 / 128}
PARAM_BYTES, REDUCE_BYTES = 2, 4


@dataclass(frozen=True)
class Assumptions:
    """The assumptions; the module's docstring explains them."""

    gbytes_per_s: float
    hop_us: float
    latency: str
    tflops: float
    mfu: float
    memory_gbytes_per_s: float
    tokens: int

    def latency_s(self, num_ranks: int) -> float:
        """Return the latency of an all-gather or reduce-scatter over ``num_ranks`` GPUs."""
        hops = num_ranks - 1 if self.latency == "ring" else math.ceil(math.log2(num_ranks))
        return 1e-6 * self.hop_us * hops

    def link(self, num_ranks: int) -> Link:
        """Return the network of ``num_ranks`` GPUs."""
        return Link(1e9 * self.gbytes_per_s, self.latency_s(num_ranks))

    def forward_s(self, num_used: float) -> float:
        """Return the seconds of forward for parameters that each token uses."""
        return 2 * num_used * self.tokens / (1e12 * self.tflops * self.mfu)

    def copy_s(self, written: int, read_bytes: int) -> float:
        """Return the seconds of a copy, which memory limits."""
        return (written + read_bytes) / (1e9 * self.memory_gbytes_per_s)


@dataclass(frozen=True)
class Layers:
    """One kind of group of a model."""

    count: int
    specs: list[TensorSpec]
    num_used: float  # parameters by each token


def read_model(path: Path) -> tuple[str, list[Layers], Layers]:
    """Name, layers in order, and root of a model."""
    content = json.loads(path.read_text())
    name: str = content["model"]
    share = next((v for k, v in ACTIVE_EXPERTS.items() if name.startswith(k)), 1.0)
    kinds = {group["name"]: read_layers(group, share) for group in content["groups"]}
    root = kinds.pop("root")
    return name, list(kinds.values()), root


def read_layers(group: dict[str, Any], share: float) -> Layers:
    """A group of a file; ``share`` of its experts are used."""
    specs = [TensorSpec(name, tuple(shape), 1) for name, shape in group["tensors"]]
    return Layers(group["count"], specs, sum(_used(spec, share) for spec in specs))


def _used(spec: TensorSpec, share: float) -> float:
    """Return how many elements of a tensor multiply a token; 0 for embeddings."""
    is_table = "embed" in spec.name and not spec.name.startswith("unembed")
    return 0.0 if is_table else spec.numel * (share if ".experts." in spec.name else 1.0)


def predict(
    layers: list[Layers],
    root: Layers,
    num_ranks: int,
    engine: str,
    assumed: Assumptions,
    num_shards: int | None = None,
) -> Step:
    """Compute one step on ``num_ranks`` GPUs, sharded over all or over ``num_shards`` of them."""
    num_shards = num_shards or num_ranks
    num_replicas = num_ranks // num_shards
    sized = [(k, _bytes(k, num_shards, num_replicas, engine)) for k in (root, *layers)]
    # An all-reduce is a reduction and a gather: its latency, as the bytes that would take as long.
    again = 2 * 1e9 * assumed.gbytes_per_s * assumed.latency_s(num_replicas)
    costs = [_cost(kind, sent, again, assumed) for kind, sent in sized]
    units = [
        cost
        for (kind, _), cost in zip(sized[1:], costs[1:], strict=True)
        for _ in range(kind.count)
    ]
    return run_step(costs[0], units, assumed.link(num_shards))


def _bytes(kind: Layers, num_shards: int, num_replicas: int, engine: str) -> UnitBytes:
    bytes_of = ENGINES[engine]
    sent = bytes_of(kind.specs, num_shards, param_bytes=PARAM_BYTES, reduce_bytes=REDUCE_BYTES)
    return with_replicas(sent, num_shards, num_replicas)


def with_replicas(sent: UnitBytes, num_shards: int, num_replicas: int) -> UnitBytes:
    """Return the same with a ring all-reduce of the reduced shard over the replicas."""
    shard = sent.reduce // (num_shards - 1)
    return replace(sent, reduce=sent.reduce + 2 * (num_replicas - 1) * shard // num_replicas)


def _cost(kind: Layers, sent: UnitBytes, again: float, assumed: Assumptions) -> UnitCost:
    forward_s = assumed.forward_s(kind.num_used)
    return UnitCost(
        forward_s,
        2 * forward_s,
        sent.gather,
        sent.reduce + again,
        assumed.copy_s(sent.copied_out, sent.copied_out),
        assumed.copy_s(sent.copied_in, sent.copied_in * PARAM_BYTES // REDUCE_BYTES),
    )


def entries(
    path: Path, ranks: list[int], num_shards: int, assumed: Assumptions
) -> Iterator[dict[str, Any]]:
    """Yield the figures of one model. 0 shards: as many as ranks."""
    name, layers, root = read_model(path)
    num_used = root.num_used + sum(kind.count * kind.num_used for kind in layers)
    for num_ranks in ranks:
        if num_shards and (num_ranks <= num_shards or num_ranks % num_shards):
            continue
        for engine in ENGINES:
            step = predict(layers, root, num_ranks, engine, assumed, num_shards)
            useful_s = 3 * assumed.forward_s(num_used) * assumed.mfu
            yield {
                "model": name,
                "ranks": num_ranks,
                "shards": num_shards or num_ranks,
                "engine": engine,
                "step_s": step.step_s,
                "compute_s": step.compute_s,
                "copy_s": step.copy_s,
                "network_s": step.network_s,
                "exposed_s": step.exposed_s,
                "mfu": useful_s / step.step_s,
                "tokens_per_s": num_ranks * assumed.tokens / step.step_s,
                "hidden_from_tokens": assumed.tokens * step.network_s / step.compute_s,
            }


HEAD = [
    "model", "GPUs", "sharded over", "engine", "step s", "compute s", "copies s",
    "network s", "waiting s", "MFU %",
    "tokens/s", "hidden from, tokens", "speed / FSDP2",
]  # fmt: skip


def lines(path: Path = FILE) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table for RESULTS.md: to be called computed there."""
    found = list(read(path).get("figures", {}).values())
    theirs = {_place(each): each["step_s"] for each in found if each["engine"] == "fsdp2"}
    rows = []
    for each in found:
        times = [f"{each[key]:.3f}" for key in ("step_s", "compute_s", "copy_s", "network_s")]
        speed = theirs[_place(each)] / each["step_s"]
        rows.append(
            [
                each["model"], str(each["ranks"]), str(each["shards"]), each["engine"], *times,
                f"{each['exposed_s']:.3f}", f"{100 * each['mfu']:.1f}",
                f"{each['tokens_per_s']:.0f}", f"{each['hidden_from_tokens']:.0f}", f"{speed:.2f}",
            ]
        )  # fmt: skip
    return HEAD, rows


def _place(each: dict[str, Any]) -> tuple[str, int, int]:
    return each["model"], each["ranks"], each["shards"]


def main() -> int:
    """Compute, print and store."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.cost_model.large", description="Computed step times."
    )
    parser.add_argument("shapes", nargs="+", type=Path, help="JSON files of models")
    parser.add_argument("--ranks", nargs="+", type=int, default=[64, 256, 1024, 4096, 10240])
    parser.add_argument(
        "--shards",
        nargs="+",
        type=int,
        default=[0, 128],
        help="GPUs that one replica is sharded over; 0: all",
    )
    parser.add_argument("--gbytes-per-s", type=float, default=50.0, help="network rate of a GPU")
    parser.add_argument("--hop-us", type=float, default=2.0)
    parser.add_argument("--latency", choices=["ring", "tree"], default="ring")
    parser.add_argument("--tflops", type=float, default=989.0, help="peak of a GPU in dense bf16")
    parser.add_argument("--mfu", type=float, default=0.5, help="utilization while computing")
    parser.add_argument("--memory-gbytes-per-s", type=float, default=2500.0)
    parser.add_argument("--tokens", type=int, default=16384, help="tokens per GPU and step")
    parser.add_argument("--out", type=Path, default=FILE)
    args = parser.parse_args()
    given = vars(args)
    assumed = Assumptions(**{key: given[key] for key in Assumptions.__dataclass_fields__})
    figures = {}
    for path, num_shards in product(args.shapes, args.shards):
        for each in entries(path, args.ranks, num_shards, assumed):
            figures[", ".join(map(str, (*_place(each), each["engine"])))] = each
    # Only names of files are stored, not their paths on this machine.
    told = circumstances() | {"command": _command(args.shapes)}
    kept = {"circumstances": told, "kind": "computed, not measured"}
    write(args.out, kept | {"assumptions": asdict(assumed), "figures": figures})
    head, rows = lines(args.out)
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    print("computed, not measured; assumed:", asdict(assumed))
    for row in (head, *rows):
        print("  ".join(text.rjust(width) for text, width in zip(row, widths, strict=True)))
    return 0


def _command(shapes: list[Path]) -> str:
    names = {str(path): path.name for path in shapes}
    return " ".join(
        ["python -m benchmarks.cost_model.large", *(names.get(a, a) for a in sys.argv[1:])]
    )


if __name__ == "__main__":
    sys.exit(main())

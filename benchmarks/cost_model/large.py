"""Computed, not measured: step time on 64 to 10,240 GPUs, ours and FSDP2, under stated assumptions.

    python -m benchmarks.cost_model.large SHAPES.json ...

A file has a model's groups in the form of `vescale-fsdp plan`: the tensors of one layer, and the
number of such layers. The group named root is gathered once. The assumptions, which are stored with
the figures, are:

* rates are published ones times the shares that `vescale_fsdp_tune.costs.hardware` explains:
  network and NVLink, memory, and operations. A collective of several nodes uses all cards of a
  node, at most with the rate of NVLink; an all-reduce of replicas has one card for each GPU. The
  latency is that of a ring
* compute: 6 operations for each parameter that a token uses; attention's products and recomputation
  are not counted; each token uses the model's share of the experts
* copies are not overlapped with computation; our engine copies gradients once, FSDP2 also copies
  parameters from each all-gather, with padding
* weights are sent in bf16, gradients in fp32; overlap is that of `timing`; the
  optimizer, the host and stragglers take no time
* everything is sharded over all GPUs, or over ``--shards`` of them with an all-reduce of the
  reduced shards between replicas; whether it fits in memory is not checked
* FSDP2 shards dimension 0, as by default. Other dimensions must divide evenly, which those of
  GPT-OSS's experts do not from 256 shards on; its 128 experts fit 128 shards

`check` measures the error of the same model on a small scale. None of the rates is measured here.
``hidden from`` is the number of tokens per GPU and step from which compute takes longer than the
network, if memory holds their activations.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.cost_model.bytes_by_plan import of_fsdp2, of_ours
from benchmarks.cost_model.timing import Step, UnitCost, run_step
from benchmarks.optimizers.results import ROOT, circumstances, read, write

from vescale_fsdp.planner import TensorSpec
from vescale_fsdp_tune.costs import Link, Machine
from vescale_fsdp_tune.costs.hardware import (
    COMPUTE_SHARE,
    HARDWARE,
    MEMORY_SHARE,
    NETWORK_SHARE,
    published,
)

__all__ = ["FILE", "Assumptions", "lines", "predict", "read_layers", "read_model"]

FILE = ROOT / "benchmarks" / "results" / "cost_model" / "large.json"
ENGINES = {"vescale": of_ours, "fsdp2": of_fsdp2}
# The share of the experts that a token uses, from the models' configurations.
ACTIVE_EXPERTS = {"deepseek-v3": 8 / 256, "gpt-oss-120b": 4 / 128}
PARAM_BYTES, REDUCE_BYTES = 2, 4


@dataclass(frozen=True)
class Assumptions:
    """The assumptions; the module's docstring explains them.

    Attributes:
        machine: what a GPU and its networks reach.
        share: of the published operations that ``machine`` reaches.
        tokens: of a GPU in a step.
    """

    machine: Machine
    share: float
    tokens: int

    def link(self, num_ranks: int) -> Link:
        """Return the network of ``num_ranks`` GPUs, with the latency of a collective among them."""
        link = self.machine.link(num_ranks)
        return Link(link.bytes_per_s, link.latency_s + link.hop_s * (num_ranks - 1))

    def replica_bytes(self, shard_bytes: float, num_shards: int, num_replicas: int) -> float:
        """Return an all-reduce of a shard over replicas, as bytes of the network of shards."""
        if num_replicas == 1:
            return 0.0
        sent = 2 * (num_replicas - 1) * shard_bytes / num_replicas
        seconds = self.machine.link(num_replicas, num_shards).seconds(sent, num_replicas)
        return seconds * self.link(num_shards).bytes_per_s

    def forward_s(self, num_used: float) -> float:
        """Return the seconds of forward for parameters that each token uses."""
        return 2 * num_used * self.tokens / self.machine.flops_per_s

    def copy_s(self, written: int, read_bytes: int) -> float:
        """Return the seconds of a copy, which memory limits."""
        return (written + read_bytes) / self.machine.copy_bytes_per_s


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
    costs = [_cost(kind, num_shards, num_replicas, engine, assumed) for kind in (root, *layers)]
    units = [cost for kind, cost in zip(layers, costs[1:], strict=True) for _ in range(kind.count)]
    return run_step(costs[0], units, assumed.link(num_shards))


def _cost(
    kind: Layers, num_shards: int, num_replicas: int, engine: str, assumed: Assumptions
) -> UnitCost:
    bytes_of = ENGINES[engine]
    sent = bytes_of(kind.specs, num_shards, param_bytes=PARAM_BYTES, reduce_bytes=REDUCE_BYTES)
    shard_bytes = sent.reduce / (num_shards - 1)
    forward_s = assumed.forward_s(kind.num_used)
    return UnitCost(
        forward_s,
        2 * forward_s,
        sent.gather,
        sent.reduce + assumed.replica_bytes(shard_bytes, num_shards, num_replicas),
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
            useful_s = 3 * assumed.forward_s(num_used) * assumed.share
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
    parser.add_argument("--hardware", default="h100", choices=HARDWARE)
    parser.add_argument("--share", type=float, default=COMPUTE_SHARE, help="of its operations")
    parser.add_argument("--tokens", type=int, default=16384, help="tokens per GPU and step")
    parser.add_argument("--out", type=Path, default=FILE)
    args = parser.parse_args()
    machine = published(args.hardware).machine(compute_share=args.share)
    assumed = Assumptions(machine, args.share, args.tokens)
    figures = {}
    for path, num_shards in product(args.shapes, args.shards):
        for each in entries(path, args.ranks, num_shards, assumed):
            figures[", ".join(map(str, (*_place(each), each["engine"])))] = each
    # Only names of files are stored, not their paths on this machine.
    told = circumstances() | {"command": _command(args.shapes)}
    kept = {"circumstances": told, "kind": "computed, not measured"}
    told_of = {"hardware": args.hardware, "share of its operations": args.share}
    told_of |= {
        "shares of network and memory": [NETWORK_SHARE, MEMORY_SHARE],
        "tokens": args.tokens,
    }
    write(args.out, kept | {"assumptions": told_of, "figures": figures})
    head, rows = lines(args.out)
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]
    print("computed, not measured; assumed:", told_of)
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

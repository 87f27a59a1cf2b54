"""8-bit Adam without parts of the engine (Table 2 of the paper).

    python -m benchmarks.ablation                          # 6 minutes on two cores
    python -m benchmarks.ablation --models moe-10m --rounds 3

Quantization blocks are tiles of 32 by 32, so 32 rows of a matrix are never split. All variants
train the same model with the same losses, and alternate. Public functions and options replace
the parts that are left out:

    full            the whole engine
    no-dbuffer      all-gather and reduce-scatter use separate buffers (``set_custom_all_gather``,
                    ``set_custom_reduce_scatter``), with copies between them and parameters or
                    gradients: one flat copy per unit, which is the minimum. On gloo the
                    collectives are torch's
    no-planner      shards are padded to the least common multiple of the blocks of a unit, with
                    tensors in the order of their definition, each at a multiple of its block.
                    The engine has no such layout. So each unit has an additional unused parameter
                    of the size of the padding, which is sent as the padding would be
    no-raggedshard  not possible if an even ``Shard(0)`` splits a block: AdamW8bit refuses FSDP2's
                    shards, and its message is stored. Otherwise it is possible

The paper trains a GPT-OSS-style model: 92.8% without DBuffer, 65.4% without planner, of the full
speed. Its clusters, model size and layout without a planner differ from ours. The cost of that
layout depends on the widths. It is zero if all are small multiples of one number, as in
``moe-10m``; else it can be several times the model, as in ``vit-6m``. So the padding is also
computed for units of real models: with this layout, and with each tensor separately split into
equal numbers of blocks, which would also need copies.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any

import torch
from benchmarks.compare.spread import quartiles, ratios
from benchmarks.engines import LEARNING_RATE, NUM_WARM, Engine, Training
from benchmarks.models import PRESETS, Batches, Preset
from benchmarks.optimizers.results import ROOT, circumstances, read, write
from benchmarks.padding import MODELS as GROUPS
from benchmarks.padding import specs_of
from benchmarks.slow_network import counted_network, why_not
from benchmarks.team import Team
from benchmarks.wire import Recorder
from torch import nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import (
    DefaultAllGather,
    DefaultReduceScatter,
)

from vescale_fsdp import fully_shard
from vescale_fsdp.errors import PlanError
from vescale_fsdp.optim import AdamW8bit
from vescale_fsdp.planner import TensorSpec, lay_out

__all__ = ["FILE", "lcm_shard_size", "lines", "padding_lines"]

FILE = ROOT / "benchmarks" / "results" / "ablation.json"
VARIANTS = ("full", "no-dbuffer", "no-planner")
TILE = (32, 32)
ALIGNMENT = 4  # elements: 16 bytes in fp32
RANKS = (8, 64, 256, 1024)
PADDED = ("GPT-OSS-120B (HF), layer", "DeepSeek-V3-671B, MoE layer", "Llama-3-70B, layer")
PADDING = "padding"
PAPER = {"full": "100", "no-dbuffer": "92.8", "no-planner": "65.4"}


def lcm_shard_size(specs: Sequence[TensorSpec], num_shards: int) -> int:
    """Return the elements of a shard whose size is a multiple of the least common multiple."""
    end = 0
    for spec in specs:
        end = _round_up(end, math.lcm(spec.block, ALIGNMENT)) + spec.numel
    multiple = math.lcm(ALIGNMENT, *(spec.block for spec in specs))
    return _round_up(-(-end // num_shards), multiple)


def alone_shard_size(specs: Sequence[TensorSpec], num_shards: int) -> int:
    """Return the elements of a shard if each tensor is split into equal numbers of blocks."""
    blocks = (-(-spec.numel // spec.block) for spec in specs)
    return sum(-(-num // num_shards) * spec.block for num, spec in zip(blocks, specs, strict=True))


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def units_of(model: nn.Module) -> dict[str, tuple[nn.Module, list[TensorSpec]]]:
    """Module and tensors of each unit by name, the root last."""
    policy = AdamW8bit.granularity(TILE)
    blocks: Any = model.blocks
    inner = {id(param) for param in blocks.parameters()}
    named = {f"blocks.{i}": (b, dict(b.named_parameters())) for i, b in enumerate(blocks)}
    rest = {name: param for name, param in model.named_parameters() if id(param) not in inner}
    named["root"] = model, rest
    return {
        key: (module, [_spec(name, param, policy) for name, param in params.items()])
        for key, (module, params) in named.items()
    }


def _spec(name: str, param: nn.Parameter, policy: Any) -> TensorSpec:
    granularity = policy(name, param)
    block = granularity.block(tuple(param.shape)) if granularity is not None else 1
    return TensorSpec(name, tuple(param.shape), block)


def _pad(model: nn.Module, num_shards: int) -> None:
    """Add a parameter to each unit, of the size of the additional padding without a planner."""
    for module, specs in units_of(model).values():
        ours = lay_out(specs, num_shards, alignment=ALIGNMENT).shard_size
        more = num_shards * (lcm_shard_size(specs, num_shards) - ours)
        if more > 0:
            module.register_parameter(PADDING, nn.Parameter(torch.zeros(more)))


def make_engine(name: str, preset: Preset, precision: str, rank: int, num_ranks: int) -> Engine:
    """One of `VARIANTS`, after its first steps."""
    assert precision == "fp32", "the ablation is in fp32"
    torch.manual_seed(0)
    model = preset.make()
    if name == "no-planner":
        _pad(model, num_ranks)
    policy = AdamW8bit.granularity(TILE)
    for module, _ in units_of(model).values():
        fully_shard(module, granularity=policy, unused="zeros")
        if name == "no-dbuffer":
            module.set_custom_all_gather(DefaultAllGather())
            module.set_custom_reduce_scatter(DefaultReduceScatter())
    training = Training(model, list(model.parameters()), Batches(preset, rank))
    optimized = [p for n, p in model.named_parameters() if not n.endswith(PADDING)]
    training.optimizer = AdamW8bit(optimized, lr=LEARNING_RATE, block_size=TILE)
    for _ in range(NUM_WARM - 1):
        training.step()
    recorder = Recorder()
    with recorder:
        training.step()
    training.expected_bytes = sum(each.sent_bytes(num_ranks) for each in recorder.collectives)
    return training


def try_without_ragged(preset: Preset, num_ranks: int) -> str:
    """Return AdamW8bit's message about FSDP2's shards, on rank 0 of a fake process group."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        model = preset.make()
        for module, _ in units_of(model).values():
            torch_fully_shard(module)
        AdamW8bit(model.named_parameters(), block_size=TILE)
    except PlanError as error:
        return str(error)
    finally:
        dist.destroy_process_group()
    return f"accepted: Shard(0) cuts no block of this model at {num_ranks} ranks"


def measure(model: str, args: argparse.Namespace) -> dict[str, Any]:
    """Steps by round, bytes, memory and losses of each variant."""
    found: dict[str, Any] = {}
    rate = None if args.network == "loopback" else args.network
    with ExitStack() as stack:
        places = None
        if why_not() is None:
            places = stack.enter_context(counted_network(args.ranks, rate)).places
        teams = {}
        for name in VARIANTS:
            team = Team(name, model, "fp32", args.ranks, places, "benchmarks.ablation")
            teams[name] = stack.enter_context(team)
            found[name] = {"step_s": [], "losses": [], "expected_bytes": team.start()}
            print(f"{name} is ready", file=sys.stderr, flush=True)
        for _ in range(args.rounds):
            for name, team in teams.items():
                turn = team.run(args.steps)
                found[name]["step_s"].append(turn.step_s)
                found[name]["losses"] += turn.losses
        for name, team in teams.items():
            inspected = team.inspect()
            found[name]["peak_bytes"] = max(each.peak_bytes for each in inspected)
            found[name]["copied_bytes"] = max(each.copied_bytes for each in inspected)
    return found


def padding() -> dict[str, dict[str, list[float]]]:
    """Percent of the elements by `RANKS`: of our layout, and of two that need no planner."""
    found: dict[str, dict[str, list[float]]] = {}
    for group in PADDED:
        specs = specs_of(*GROUPS[group], TILE[0])
        total = sum(spec.numel for spec in specs)
        sizes = {
            "full": [lay_out(specs, n, alignment=ALIGNMENT).shard_size for n in RANKS],
            "no-planner": [lcm_shard_size(specs, n) for n in RANKS],
            "each tensor alone": [alone_shard_size(specs, n) for n in RANKS],
        }
        found[group] = {
            name: [
                round(100 * (size * n / total - 1), 3) for size, n in zip(of, RANKS, strict=True)
            ]
            for name, of in sizes.items()
        }
    return found


def padding_lines(path: Path = FILE) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table of `padding`."""
    rows = [
        [group, name, *(f"{each:.2f}" for each in percents)]
        for group, found in read(path).get("padding", {}).items()
        for name, percents in found.items()
    ]
    return ["group, blocks of 32 rows", "variant", *(f"{n} ranks, %" for n in RANKS)], rows


HEAD = [
    "model", "ranks", "network", "variant", "ms", "% of full speed", "quartiles", "the paper",
    "MB sent", "MB copied", "peak MB", "loss off full's",
]  # fmt: skip


def lines(path: Path = FILE) -> tuple[list[str], list[list[str]]]:
    """Head and rows of the table for RESULTS.md."""
    rows = []
    for key, cell in read(path).get("cells", {}).items():
        found = cell["variants"]
        full = found["full"]
        for name, own in found.items():
            speed = ratios(full["step_s"], own["step_s"])
            assert speed is not None, "each round has a step of each variant"
            low, middle, high = (100 * each for each in speed)
            pairs = zip(own["losses"], full["losses"], strict=True)
            off = max(abs(a - b) / abs(b) for a, b in pairs)
            amounts = (own["expected_bytes"], own["copied_bytes"], own["peak_bytes"])
            rows.append(
                [
                    *key.split(", "), name, f"{1000 * quartiles(own['step_s'])[1]:.0f}",
                    f"{middle:.1f}", f"{low:.1f} to {high:.1f}", PAPER[name],
                    *(f"{each / 1e6:.1f}" for each in amounts), f"{off:.0e}",
                ]
            )  # fmt: skip
        told = cell["no-raggedshard"]
        is_refused = not told.startswith("accepted")
        text = "not possible" if is_refused else "possible here"
        rows.append([*key.split(", "), "no-raggedshard", text, "", "", "not possible", *[""] * 4])
    return HEAD, rows


def main() -> int:
    """Measure, print and store."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.ablation", description="8-bit Adam without parts of the engine."
    )
    parser.add_argument("--models", nargs="+", default=["moe-10m", "vit-6m"], choices=PRESETS)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--network", default="loopback", help="loopback, or a rate such as 1gbit")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--out", type=Path, default=FILE)
    args = parser.parse_args()
    os.environ |= {"OMP_NUM_THREADS": "1", "VESCALE_FSDP_REDUCE": "native"}
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    reason = why_not()
    if reason and args.network != "loopback":
        sys.exit(f"no networks can be made here: {reason}")
    for model in args.models:
        cell = {
            "variants": measure(model, args),
            "no-raggedshard": try_without_ragged(PRESETS[model], args.ranks),
        }
        cells = read(args.out).get("cells", {})
        cells[f"{model}, {args.ranks}, {args.network}"] = cell
        kept = {"circumstances": circumstances(), "cells": cells, "padding": padding()}
        write(args.out, kept)
        print(f"{model}: {cell['no-raggedshard']}", file=sys.stderr)
        print(f"{model}: median of full {median(cell['variants']['full']['step_s']):.3f} s")
    for head, rows in (lines(args.out), padding_lines(args.out)):
        for row in (head, *rows):
            print("  ".join(row))
    return 0


if __name__ == "__main__":
    sys.exit(main())

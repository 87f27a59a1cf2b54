"""Padding and planning time for real models, compared with FSDP2 and Megatron-FSDP v2 (Figure 11).

    python -m benchmarks.padding

There is one group per layer, and the root. Shapes of the language models are those of the planner's
tests. Without blocks, tensors may be split between any two elements, as by default. Blocks are rows
of the last dimension: those of experts if there are any, else of every matrix in a layer. The other
engines have no blocks: FSDP2 does not split rows of dimension 0, and Megatron-FSDP v2 does the same
in one buffer (`vescale_fsdp_tune.costs.layouts`). Plans use only integers, so only the times depend
on the machine.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from benchmarks.compare.targets import ALIGNMENT
from benchmarks.optimizers.results import ROOT, circumstances, write

from vescale_fsdp.planner import TensorSpec, lay_out
from vescale_fsdp_tune.costs.layouts import fsdp2_shard_size, megatron_shard_size

__all__ = ["FILE", "MODELS", "RANKS", "ROWS"]

FILE = ROOT / "benchmarks" / "results" / "padding.json"
RANKS = (8, 64, 256, 512, 1024)
ROWS = (None, 1, 16, 128)
Shape = tuple[int, ...]
Group = Callable[[], Iterator[tuple[str, Shape]]]


def _shapes_of_tests() -> ModuleType:
    path = ROOT / "packages" / "core" / "tests" / "planner" / "shapes.py"
    spec = importlib.util.spec_from_file_location("planner_shapes", path)
    assert spec is not None, f"{path} is no module"
    assert spec.loader is not None, f"{path} is no module"
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


SHAPES = _shapes_of_tests()


def resnet_block() -> Iterator[tuple[str, Shape]]:
    """ResNet-50, a block of the third stage."""
    for name, shape in (
        ("conv1", (256, 1024, 1, 1)),
        ("conv2", (256, 256, 3, 3)),
        ("conv3", (1024, 256, 1, 1)),
    ):
        yield f"{name}.weight", shape
        yield f"{name}.norm.weight", shape[:1]
        yield f"{name}.norm.bias", shape[:1]


def vit_root() -> Iterator[tuple[str, Shape]]:
    """ViT-L/14: all parameters outside of blocks."""
    yield "patches.weight", (1024, 3, 14, 14)
    yield "class_token", (1, 1, 1024)
    yield "position", (257, 1024)
    yield "norm.weight", (1024,)
    yield "norm.bias", (1024,)
    yield "head.weight", (1000, 1024)
    yield "head.bias", (1000,)


def dlrm_tables() -> Iterator[tuple[str, Shape]]:
    """A recommender's tables for the 26 categories of Criteo's data of one week, width 128."""
    sizes = (
        1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27,
        14992, 5461306, 10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572,
    )  # fmt: skip
    for index, size in enumerate(sizes):
        yield f"tables.{index}.weight", (size, 128)


# Each with a function that says which tensors have blocks. None: only plans without blocks.
Blocked = Callable[[str, Shape], bool]
MODELS: dict[str, tuple[Group, Blocked | None]] = {
    "DeepSeek-V3-671B, MoE layer": (SHAPES.deepseek_v3_moe_layer, SHAPES.experts),
    "DeepSeek-V3-671B, dense layer": (SHAPES.deepseek_v3_dense_layer, None),
    "DeepSeek-V3-671B, root": (SHAPES.deepseek_v3_root, None),
    "GPT-OSS-120B (HF), layer": (SHAPES.gpt_oss_hf_layer, SHAPES.experts),
    "GPT-OSS-120B (HF), root": (SHAPES.gpt_oss_hf_root, None),
    "GPT-OSS-120B (OpenAI), layer": (SHAPES.gpt_oss_openai_layer, SHAPES.experts),
    "GPT-OSS-120B (OpenAI), root": (SHAPES.gpt_oss_openai_root, None),
    "Llama-3-70B, layer": (SHAPES.llama_3_layer, SHAPES.matrices),
    "Llama-3-70B, root": (SHAPES.llama_3_root, None),
    "ResNet-50, block": (resnet_block, SHAPES.matrices),
    "ViT-L/14, root": (vit_root, None),
    "DLRM, tables": (dlrm_tables, SHAPES.matrices),
}


def specs_of(group: Group, blocked: Blocked | None, rows: int | None) -> list[TensorSpec]:
    """Return the tensors. Those that are ``blocked`` have blocks of that many rows."""
    return [
        TensorSpec(
            name, shape, rows * shape[-1] if rows and blocked and blocked(name, shape) else 1
        )
        for name, shape in group()
    ]


def measure(name: str, group: Group, blocked: Blocked | None) -> list[dict[str, Any]]:
    """Return an entry for each block size and number of ranks. Padding is in percent."""
    found = []
    for rows in ROWS if blocked else [None]:
        specs = specs_of(group, blocked, rows)
        num_elements = sum(spec.numel for spec in specs)

        def percent(shard_size: int, num_ranks: int, num_elements: int = num_elements) -> float:
            return round(100 * (shard_size * num_ranks / num_elements - 1), 4)

        for num_ranks in RANKS:
            seconds = []
            for _ in range(3):
                started = time.perf_counter()
                layout = lay_out(specs, num_ranks, alignment=ALIGNMENT)
                seconds.append(time.perf_counter() - started)
            found.append(
                {
                    "group": name,
                    "tensors": len(specs),
                    "elements": num_elements,
                    "rows": rows,
                    "ranks": num_ranks,
                    "ours": percent(layout.shard_size, num_ranks),
                    "fsdp2": percent(fsdp2_shard_size(specs, num_ranks), num_ranks),
                    "megatron": percent(megatron_shard_size(specs, num_ranks), num_ranks),
                    "order": layout.order_name,
                    "optimal": layout.optimal,
                    "seconds": round(min(seconds), 5),
                }
            )
    return found


def main() -> int:
    """Compute all plans, print a line for each, and store them."""
    parser = argparse.ArgumentParser(description="Padding and planning time for real models.")
    parser.add_argument("--out", type=Path, default=FILE)
    args = parser.parse_args()
    entries = []
    print(f"{'group':30} rows ranks {'ours %':>8} {'FSDP2 %':>9} {'Megatron v2 %':>14} {'ms':>6}")
    for name, (group, blocked) in MODELS.items():
        for each in measure(name, group, blocked):
            entries.append(each)
            print(
                f"{name:30} {each['rows'] or '-':>4} {each['ranks']:5} {each['ours']:8.2f} "
                f"{each['fsdp2']:9.2f} {each['megatron']:14.2f} {1000 * each['seconds']:6.1f}"
            )
    named = {f"{e['group']}, {e['rows']} rows, {e['ranks']} ranks": e for e in entries}
    write(args.out, {"circumstances": circumstances(), "plans": named})
    return 0


if __name__ == "__main__":
    sys.exit(main())

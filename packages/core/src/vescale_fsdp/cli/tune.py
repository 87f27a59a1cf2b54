"""``vescale-fsdp tune``: its options."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from vescale_fsdp.cli.settings import (
    BlockRules,
    Settings,
    parse_bandwidth,
    parse_batch,
    parse_dtype,
)
from vescale_fsdp.cli.text import InputError, console
from vescale_fsdp.costs import OptimizerName

_Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        show_default=False,
        help="As for plan: a shapes file, a config.json of transformers, an architecture of it, or "
        "module:function.",
    ),
]
_Ranks = Annotated[int, typer.Option(show_default=False, help="Number of ranks.")]
_Budget = Annotated[
    str,
    typer.Option(
        metavar="SIZE",
        help="Memory of a rank for all that a step needs: 10GiB, 80% (of the GPU's), or auto: 90%.",
    ),
]
_Gpu = Annotated[
    str, typer.Option(metavar="NAME", help="Published hardware: h100, h200, b200, h800.")
]
_PerNode = Annotated[
    int | None,
    typer.Option(show_default=False, help="Ranks of a node. Default: as published, 8."),
]
_Bandwidth = Annotated[
    str | None,
    typer.Option(
        show_default=False,
        help="Network of one rank to other nodes, one way, as measured: 400Gbit (bits) or 50GB "
        "(bytes). Default: a share of what is published.",
    ),
]
_Batch = Annotated[
    str | None,
    typer.Option(
        metavar="SEQUENCESxTOKENS",
        show_default=False,
        help="Of one rank in one micro-batch: 8x1024.",
    ),
]
_Inputs = Annotated[
    str | None,
    typer.Option(
        metavar="MODULE:FUNCTION",
        show_default=False,
        help="A function that returns the arguments of forward, for models without input_ids.",
    ),
]
_MicroBatches = Annotated[int, typer.Option(help="Forwards and backwards of a step.")]
_Experts = Annotated[
    str | None,
    typer.Option(
        metavar="USED/ALL",
        show_default=False,
        help="For a shapes file: experts that a token uses, of all: 8/256.",
    ),
]
_Measure = Annotated[
    bool,
    typer.Option(
        "--measure", help="Time the blocks on this machine's device, instead of computing times."
    ),
]
_Allow = Annotated[
    str | None,
    typer.Option(
        metavar="WHAT",
        show_default=False,
        help="What may be chosen beside what keeps numbers and devices as they are: int8 (send "
        "8 bits), offload (to the host's memory), or int8,offload.",
    ),
]
_Granularity = Annotated[
    list[str] | None,
    typer.Option(
        metavar="[PATTERN=]SPEC", show_default=False, help="Blocks that are not split, as for plan."
    ),
]
_ShardDtype = Annotated[
    str | None,
    typer.Option("--param-dtype", metavar="DTYPE", show_default=False, help="Dtype of the shards."),
]
_ComputeDtype = Annotated[str, typer.Option(metavar="DTYPE", help="Dtype of compute.")]
_ReduceDtype = Annotated[str, typer.Option(metavar="DTYPE", help="Dtype of sums of gradients.")]
_Optimizer = Annotated[
    OptimizerName,
    typer.Option(help="Optimizer whose states are counted."),
]
_Out = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        show_default=False,
        help="Write the choice, for fully_shard(model, budget=FILE).",
    ),
]
_Json = Annotated[
    str | None,
    typer.Option(
        "--json", metavar="FILE", show_default=False, help="Write all figures as JSON; - is stdout."
    ),
]


def tune(
    model: _Model,
    ranks: _Ranks,
    budget: _Budget = "auto",
    batch: _Batch = None,
    inputs: _Inputs = None,
    micro_batches: _MicroBatches = 1,
    gpu: _Gpu = "h100",
    ranks_per_node: _PerNode = None,
    bandwidth: _Bandwidth = None,
    experts: _Experts = None,
    measure: _Measure = False,
    allow: _Allow = None,
    granularity: _Granularity = None,
    shard_dtype: _ShardDtype = None,
    compute_dtype: _ComputeDtype = "bf16",
    reduce_dtype: _ReduceDtype = "fp32",
    optimizer: _Optimizer = "adamw",
    out: _Out = None,
    json_file: _Json = None,
) -> None:
    """Find the fastest settings that fit the memory, and say why others lose.

    No weights are made or read, nothing is downloaded, no process group is started.

    \b
    vescale-fsdp tune llama --ranks 64 --batch 2x4096
    vescale-fsdp tune model.json --ranks 1024 --budget 60GiB --batch 1x4096 --experts 8/256
    vescale-fsdp tune llama --ranks 8 --batch 2x4096 --allow int8 --out choice.yaml
    """
    from vescale_fsdp.cli.tuning import machine_of, parse_allowed, parse_budget, parse_experts

    machine = machine_of(
        gpu, ranks_per_node, None if bandwidth is None else parse_bandwidth(bandwidth)
    )
    for option, number in (
        ("--ranks-per-node", ranks_per_node),
        ("--micro-batches", micro_batches),
    ):
        if number is not None and number < 1:
            raise InputError(f"{option} is {number}, expected at least 1")
    settings = Settings(
        num_ranks=ranks,
        compute_dtype=parse_dtype(compute_dtype, "--compute-dtype"),
        reduce_dtype=parse_dtype(reduce_dtype, "--reduce-dtype"),
        optimizer=optimizer,
        batch=None if batch is None else parse_batch(batch),
        inputs=inputs,
    )
    budget_bytes = parse_budget(budget, machine.memory_bytes)
    allowed = parse_allowed(allow)
    share = None if experts is None else parse_experts(experts)
    dtype = None if shard_dtype is None else parse_dtype(shard_dtype, "--param-dtype")
    rules = granularity or []
    BlockRules(rules)  # a mistake in a rule is found before the model is built
    # Imported here, so that --help and errors in options are fast.
    from vescale_fsdp.cli.sources import load
    from vescale_fsdp.cli.tune_report import as_json, print_tuning
    from vescale_fsdp.cli.tuning import Work, problem_of
    from vescale_fsdp.costs import choice_text
    from vescale_fsdp.costs import tune as search

    loaded = load(model, dtype)
    if out is not None and loaded.module is None:
        raise InputError(
            f"--out needs the names of modules, and {model} is a shapes file; tune the code of "
            "the model"
        )
    work = Work(settings, share, measure)
    problem, source = problem_of(loaded, work, machine, budget_bytes, micro_batches, allowed, rules)
    tuning = search(problem)
    if json_file is not None:
        _write(json_file, "--json", json.dumps(as_json(problem, tuning, source), indent=1) + "\n")
    if out is not None:
        note = f"Written by vescale-fsdp tune; times of blocks: {source}"
        _write(out, "--out", choice_text(problem, tuning, note))
    if json_file != "-" and out != "-":
        print_tuning(problem, tuning, source, console())


def _write(file: str, option: str, text: str) -> None:
    """Write an output to its file; ``-`` is stdout."""
    if file == "-":
        sys.stdout.write(text)
        return
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot write {file} ({option}): {error.strerror}") from error

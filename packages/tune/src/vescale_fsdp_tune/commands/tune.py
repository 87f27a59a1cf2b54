"""``vescale-fsdp tune``: its options."""

from __future__ import annotations

import json
from typing import Annotated

import typer

from vescale_fsdp.cli.text import InputError, console
from vescale_fsdp_tune.commands.plan import (
    ComputeDtype,
    Granularity,
    Inputs,
    Json,
    Model,
    Optimizer,
    Ranks,
    ReduceDtype,
    ShardDtype,
    write,
)
from vescale_fsdp_tune.commands.settings import (
    BlockRules,
    Settings,
    parse_bandwidth,
    parse_batch,
    parse_dtype,
)

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
_Out = Annotated[
    str | None,
    typer.Option(
        metavar="FILE",
        show_default=False,
        help="Write the choice, for fully_shard(model, budget=FILE).",
    ),
]


def tune(
    model: Model,
    ranks: Ranks,
    budget: _Budget = "auto",
    batch: _Batch = None,
    inputs: Inputs = None,
    micro_batches: _MicroBatches = 1,
    gpu: _Gpu = "h100",
    ranks_per_node: _PerNode = None,
    bandwidth: _Bandwidth = None,
    experts: _Experts = None,
    measure: _Measure = False,
    allow: _Allow = None,
    granularity: Granularity = None,
    shard_dtype: ShardDtype = None,
    compute_dtype: ComputeDtype = "bf16",
    reduce_dtype: ReduceDtype = "fp32",
    optimizer: Optimizer = "adamw",
    out: _Out = None,
    json_file: Json = None,
) -> None:
    """Find the fastest settings that fit the memory, and say why others lose.

    No weights are made or read, nothing is downloaded, no process group is started.

    \b
    vescale-fsdp tune llama --ranks 64 --batch 2x4096
    vescale-fsdp tune model.json --ranks 1024 --budget 60GiB --batch 1x4096 --experts 8/256
    vescale-fsdp tune llama --ranks 8 --batch 2x4096 --allow int8 --out choice.yaml
    """
    from vescale_fsdp_tune.commands.tuning import (
        machine_of,
        parse_allowed,
        parse_budget,
        parse_experts,
    )

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
    from vescale_fsdp_tune.commands.sources import load
    from vescale_fsdp_tune.commands.tune_report import as_json, print_tuning
    from vescale_fsdp_tune.commands.tuning import Work, problem_of
    from vescale_fsdp_tune.costs.choice_file import choice_text
    from vescale_fsdp_tune.costs.search import tune as search

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
        write("--json", json_file, json.dumps(as_json(problem, tuning, source), indent=1) + "\n")
    if out is not None:
        note = f"Written by vescale-fsdp tune; times of blocks: {source}"
        write("--out", out, choice_text(problem, tuning, note))
    if json_file != "-" and out != "-":
        print_tuning(problem, tuning, source, console())

"""The result of ``tune``, as tables that fit 80 columns, and as JSON."""

from __future__ import annotations

import dataclasses
from typing import Any

from rich.console import Console

from vescale_fsdp.cli.text import binary, count, line, several, table
from vescale_fsdp_tune.commands.text import duration
from vescale_fsdp_tune.costs.problem import Candidate, Prediction, Problem, Tuning
from vescale_fsdp_tune.costs.report import shown_of
from vescale_fsdp_tune.costs.words import described

SCHEMA_VERSION = 1  # raised if a key is removed or changes its meaning, not if one is added


def print_tuning(problem: Problem, tuning: Tuning, source: str, console: Console) -> None:
    """Print a header, the candidates, and what the chosen one takes."""
    model, machine = problem.divisions[0].model, problem.machine
    ranks, budget = f"{problem.num_ranks:,} ranks", binary(problem.budget_bytes)
    line(
        console,
        f"{model.name}: {count(model.num_parameters)} parameters in "
        f"{several(model.num_units, 'unit')}, {ranks} of {machine.name}, budget {budget}",
        "bold",
    )
    line(console, f"times of blocks: {source}", "dim")
    console.print()
    shown = shown_of(tuning, problem.budget_bytes)
    rows = [
        (described(p.candidate), duration(p.step_s), binary(p.peak_bytes), p.why or "chosen")
        for p in shown
    ]
    console.print(table(("settings", "step", "peak", "why not"), rows))
    left_out = len(tuning.predictions) - len(shown)
    line(
        console,
        f"{several(left_out, 'more candidate')} predicted, "
        f"{several(tuning.num_pruned, 'other')} could not be better.",
        "dim",
    )
    console.print()
    chosen = tuning.chosen
    parts = [("step", duration(chosen.step_s))]
    parts += [(f"  {kind}", duration(value)) for kind, value in chosen.seconds.items()]
    parts += [("peak", binary(chosen.peak_bytes))]
    parts += [(f"  {kind}", binary(value)) for kind, value in chosen.memory.items()]
    parts += [("sent in a step", binary(chosen.traffic.total_bytes))]
    if chosen.host_bytes:
        parts += [("host memory", binary(chosen.host_bytes))]
    console.print(table(("chosen", "per rank"), parts))
    line(console, f"The peak is in {chosen.when}. All figures are predictions.", "dim")
    line(console, "In code:", "bold")
    for each in code_of(chosen.candidate):
        line(console, f"  {each}")


def code_of(candidate: Candidate) -> list[str]:
    """Return the calls of ``fully_shard`` that have these settings, in lines."""
    common = [f"sharding={candidate.sharding!r}"]
    if candidate.num_replicas > 1:
        common.append("mesh=mesh")
    if candidate.int8:
        common.append("gather_codec=QuantizedGather(), reduce_codec=QuantizedReduce()")
    if candidate.offload:
        common.append("offload_policy=CPUOffloadPolicy()")
    block = list(common)
    num_units = len(candidate.units)
    cuts = candidate.sharding in ("zero3", "hsdp", "hsdp_zero1")
    if cuts and candidate.num_unsharded:
        first = num_units - candidate.num_unsharded
        block.append(
            f"reshard_after_forward=number < {first}" if first else "reshard_after_forward=False"
        )
    if candidate.activations != "keep":
        wanted = repr(candidate.activations)
        if candidate.num_changed < num_units:
            wanted = f"{wanted} if number < {candidate.num_changed} else None"
        block.append(f"activations={wanted}")
    size = max((len(unit) for unit in candidate.units), default=1)
    unit = "block" if size == 1 else f"{size} neighbouring modules, as a list"
    name = "block" if size == 1 else "modules"
    lines = []
    if candidate.num_replicas > 1:
        lines.append(f"mesh: {candidate.num_replicas} replicas, each sharded over the other ranks")
    lines.append(f"each {unit}: fully_shard({name}, {', '.join(block)})")
    common.append(f"in_flight={candidate.in_flight}")
    lines.append(f"the model: fully_shard(model, {', '.join(common)})")
    return lines


def as_json(problem: Problem, tuning: Tuning, source: str) -> dict[str, Any]:
    """Return all of it as JSON. Keys of numbers end with units."""
    model, machine = problem.divisions[0].model, problem.machine
    return {
        "schema_version": SCHEMA_VERSION,
        "model": {
            "name": model.name,
            "num_parameters": model.num_parameters,
            "num_units": model.num_units,
        },
        "num_ranks": problem.num_ranks,
        "budget_bytes": problem.budget_bytes,
        "micro_batches": problem.micro_batches,
        "optimizer": problem.optimizer,
        "compute_dtype": problem.compute_dtype.name,
        "reduce_dtype": problem.reduce_dtype.name,
        "allowed": sorted(problem.allowed),
        "machine": dataclasses.asdict(machine),
        "times_of_blocks": source,
        "chosen": _prediction(tuning.chosen),
        "candidates": [_prediction(each) for each in tuning.predictions],
        "num_pruned": tuning.num_pruned,
    }


def _prediction(prediction: Prediction) -> dict[str, Any]:
    return {
        "settings": dataclasses.asdict(prediction.candidate),
        "words": described(prediction.candidate),
        "step_s": prediction.step_s,
        "seconds": dict(prediction.seconds),
        "peak_bytes": prediction.peak_bytes,
        "peak_when": prediction.when,
        "peak_parts_bytes": dict(prediction.memory),
        "host_bytes": prediction.host_bytes,
        "sent_bytes": dataclasses.asdict(prediction.traffic)
        | {"total_bytes": prediction.traffic.total_bytes},
        "why_not": prediction.why or None,
    }

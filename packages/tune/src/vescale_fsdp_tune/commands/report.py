"""The results of ``plan``, also as JSON, with suggestions of options with less padding.

Keys of numbers in the JSON end with units.

If blocks force more than 5% padding on a group, the planner gives advice: fewer ranks or smaller
blocks. This file turns it into options of ``plan`` that hold for all groups, and plans the whole
model with them to get the costs. The user adds these options to the command: the last rule of
``--granularity`` that matches a tensor is used.
"""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vescale_fsdp.cli.text import InputError
from vescale_fsdp.errors import PlanError
from vescale_fsdp.planner import Advice
from vescale_fsdp_tune.commands.settings import BlockRules, Settings
from vescale_fsdp_tune.costs.estimate import Figures, figures_of, figures_of_others
from vescale_fsdp_tune.costs.layouts import PlannedGroup, Track, lay_out_model
from vescale_fsdp_tune.costs.model import Model, kinds
from vescale_fsdp_tune.costs.settings import Activations

# How many numbers of ranks are tried, from the largest that the advice for each group allows.
_MAX_SIZES = 8

# Smaller blocks may pad another group whose names match the same patterns. The next round makes
# rules for that group.
_MAX_ROUNDS = 3


@dataclass(frozen=True)
class Alternative:
    """Options with less padding, and the figures of the plan with them."""

    options: tuple[str, ...]  # to add to the command line
    figures: Figures
    is_enough: bool  # blocks force more than 5% padding on no group
    is_below_row: bool = False  # blocks of some tensors are smaller than a row


@dataclass(frozen=True)
class Suggestion:
    """The groups that blocks pad, those with most padding first, and options with less padding."""

    causes: tuple[tuple[str, str], ...]  # name of the group, and the planner's advice
    alternatives: tuple[Alternative, ...]


def suggest(
    model: Model, planned: Sequence[PlannedGroup], settings: Settings, rules: Sequence[str]
) -> Suggestion | None:
    """Return options with less padding. None: blocks force more than 5% padding on no group.

    Args:
        model: the model.
        planned: its groups with their layouts.
        settings: of the plan.
        rules: of ``--granularity``.
    """
    padded = [(each, each.advice) for each in planned if each.advice is not None]
    if not padded:
        return None
    padded.sort(key=lambda pair: -pair[0].unit.count * pair[0].layout.padding)
    found = (
        _fewer_ranks(model, [advice for _, advice in padded], settings, rules),
        _smaller_blocks(model, planned, settings, rules),
    )
    return Suggestion(
        tuple((each.title, str(advice)) for each, advice in padded),
        tuple(alternative for alternative in found if alternative is not None),
    )


def _fewer_ranks(
    model: Model, all_advice: Sequence[Advice], settings: Settings, rules: Sequence[str]
) -> Alternative | None:
    """Find the largest number of ranks to shard over with which blocks pad no group."""
    wanted = [advice.num_shards for advice in all_advice]
    sizes = [size for size in wanted if size is not None and settings.num_shards % size == 0]
    if len(sizes) < len(wanted):
        return None  # for one group there is no such number
    divisors = [size for size in range(min(sizes), 1, -1) if settings.num_shards % size == 0]
    for size in divisors[:_MAX_SIZES]:
        planned = lay_out_model(
            model, size, BlockRules(rules).block, settings.order, codes=settings.codes
        )
        if not any(each.is_forced for each in planned):
            replicas = settings.num_ranks // size
            changed = dataclasses.replace(settings, num_replicas=replicas)
            figures = figures_of(model, planned, changed)
            return Alternative(("--replicas", str(replicas)), figures, is_enough=True)
    return None


def _smaller_blocks(
    model: Model, planned: Sequence[PlannedGroup], settings: Settings, rules: Sequence[str]
) -> Alternative | None:
    """Find rules with smaller blocks for all padded groups."""
    specs: dict[str, tuple[str, int]] = {}
    is_below_row = False
    for _ in range(_MAX_ROUNDS):
        padded = [each for each in planned if each.is_forced]
        if not padded:
            break
        new: dict[str, tuple[str, int]] = {}
        for each in padded:
            assert each.advice is not None, "there is advice where blocks force padding"
            is_below_row |= each.advice.is_below_row
            _add_specs(new, each, each.advice)
        specs.update(new)
        added = [f"{pattern}={kind}:{number}" for pattern, (kind, number) in specs.items()]
        blocks = BlockRules([*rules, *added])
        try:
            planned = lay_out_model(
                model, settings.num_shards, blocks.block, settings.order, codes=settings.codes
            )
        except PlanError:  # they would split blocks that are sent in 8 bits
            return None
    return Alternative(
        tuple(part for rule in added for part in ("--granularity", rule)),
        figures_of(model, planned, settings),
        is_enough=not any(each.is_forced for each in planned),
        is_below_row=is_below_row,
    )


def _add_specs(specs: dict[str, tuple[str, int]], each: PlannedGroup, advice: Advice) -> None:
    """Add a rule for each kind of tensor. Names of one kind differ only in their numbers.

    If a kind has several blocks, the smallest is used; blocks in elements before those in rows.
    """
    shapes = {tensor.name: tensor.shape for tensor in each.group.tensors}
    patterns = kinds(glob.escape(name) for name, _ in advice.granularity)
    for pattern, (name, block) in zip(patterns, advice.granularity, strict=True):
        shape = shapes[name]
        row = shape[-1] if len(shape) >= 2 else 1
        spec = ("elements", block) if block % row else ("rows", block // row)
        specs[pattern] = min(specs.get(pattern, spec), spec)


OURS, FSDP2, MEGATRON = "veScale-FSDP", "FSDP2", "Megatron-FSDP v2"
SCHEMA_VERSION = 1  # raised if a key is removed or changes its meaning, not if one is added

_KEYS = {OURS: "vescale_fsdp", FSDP2: "fsdp2", MEGATRON: "megatron_fsdp_v2"}


@dataclass(frozen=True)
class Report:
    """A plan with its figures."""

    model: Model
    settings: Settings
    rules: tuple[str, ...]  # of --granularity
    unmatched_rules: tuple[str, ...]  # rules that match no tensor
    planned: tuple[PlannedGroup, ...]
    figures: dict[str, Figures]  # by layout, ours first
    suggestion: Suggestion | None
    other_activations: dict[Activations, Figures]  # ours, if they were not kept


def make_report(model: Model, settings: Settings, rules: Sequence[str], track: Track) -> Report:
    """Plan a model, and compute its costs.

    Raises:
        InputError: a rule of granularity is invalid, or the model does not run on its inputs.
        PlanError: two tensors of a group have the same name.
    """
    blocks = BlockRules(rules)
    planned = lay_out_model(
        model, settings.num_shards, blocks.block, settings.order, track, settings.codes
    )
    model = _with_trace(model, settings, settings.activations)
    figures = {
        OURS: figures_of(model, planned, settings),
        FSDP2: figures_of_others(model, planned, settings, lambda each: each.fsdp2_shard_elements),
        MEGATRON: figures_of_others(
            model, planned, settings, lambda each: each.megatron_shard_elements
        ),
    }
    return Report(
        model=model,
        settings=settings,
        rules=tuple(rules),
        unmatched_rules=tuple(blocks.unmatched()),
        planned=tuple(planned),
        figures=figures,
        suggestion=suggest(model, planned, settings, rules),
        other_activations=_other_activations(model, planned, settings),
    )


def _with_trace(model: Model, settings: Settings, activations: Activations) -> Model:
    """Run a step of the model, if its inputs are known."""
    if not settings.has_inputs:
        return model
    if model.module is None:
        raise InputError(
            f"--batch and --inputs need the code of the model, and {model.name} is a shapes file"
        )
    from vescale_fsdp_tune.commands.activations import trace_of  # loads torch

    return dataclasses.replace(model, trace=trace_of(model, settings, activations))


def _other_activations(
    model: Model, planned: Sequence[PlannedGroup], settings: Settings
) -> dict[Activations, Figures]:
    """Return the figures if activations were recomputed, or offloaded, instead of kept."""
    if settings.activations != "keep" or not settings.has_inputs or len(model.order) == 1:
        return {}
    wanted: list[Activations] = ["recompute"]
    if settings.backend == "nccl":
        wanted.append("offload")
    return {
        each: figures_of(_with_trace(model, settings, each), planned, settings) for each in wanted
    }


def as_json(report: Report) -> dict[str, Any]:
    """Return the whole report as JSON."""
    settings, model = report.settings, report.model
    gather, reduce = (
        None if code is None else str(code)
        for code in (settings.codes.gather, settings.codes.reduce)
    )
    return {
        "schema_version": SCHEMA_VERSION,
        "model": {
            "name": model.name,
            "num_parameters": model.num_parameters,
            "num_units": model.num_units,
        },
        "settings": {
            "num_ranks": settings.num_ranks,
            "num_replicas": settings.num_replicas,
            "num_shards": settings.num_shards,
            "granularity": list(report.rules),
            "granularity_that_fits_nothing": list(report.unmatched_rules),
            "compute_dtype": settings.compute_dtype.name,
            "reduce_dtype": settings.reduce_dtype.name,
            "gather_codec": gather,
            "reduce_codec": reduce,
            "optimizer": settings.optimizer,
            "reshard_after_forward": settings.reshard,
            "backend": settings.backend,
            "bandwidth_bytes_per_s": settings.bandwidth_bytes_per_s,
            "order": settings.order,
            "in_flight": settings.in_flight,
            "batch": None if settings.batch is None else list(settings.batch),
            "inputs": settings.inputs,
            "activations": settings.activations if settings.has_inputs else None,
        },
        "groups": [_group(each) for each in report.planned],
        "per_rank": {_KEYS[name]: _figures(each) for name, each in report.figures.items()},
        "activations": _activations(report),
        "memory_checkpoints": memory_checkpoints(report),
        "suggestion": _suggestion(report),
    }


def memory_checkpoints(report: Report) -> dict[str, int] | None:
    """The bytes of elastic training in host memory, for each rank: two checkpoints with copies."""
    replicas = report.settings.elastic
    if replicas is None:
        return None
    part = report.figures[OURS].resting_bytes
    return {"replicas": replicas, "part_bytes": part, "host_bytes": 2 * (1 + replicas) * part}


def _activations(report: Report) -> dict[str, Any] | None:
    trace = report.model.trace
    if trace is None:
        return None
    return {
        "highest_bytes": trace.highest_bytes,
        "host_bytes": trace.host_bytes,
        "alternatives": [
            {"options": ["--activations", name], "per_rank": _figures(figures)}
            for name, figures in report.other_activations.items()
        ],
    }


def _group(each: PlannedGroup) -> dict[str, Any]:
    layout = each.layout
    return {
        "name": each.title,
        "count": each.unit.count,
        "dtype": each.group.dtype.name,
        "trainable": each.group.trainable,
        "num_tensors": len(layout.specs),
        "num_elements": each.group.numel,
        "shard_elements": layout.shard_size,
        "padding_elements": layout.padding,
        "padding_ratio": layout.padding_ratio,
        "order": layout.order_name,
        "is_least_for_order": layout.exact,
        "is_least_for_every_order": layout.optimal,
        "forced_by": list(each.advice.forced_by) if each.advice else [],
        "digest": layout.digest,
        "fsdp2_shard_elements": each.fsdp2_shard_elements,
        "megatron_fsdp_v2_shard_elements": each.megatron_shard_elements,
        "tensors": [
            {
                "name": spec.name,
                "shape": list(spec.shape),
                "block_elements": spec.block,
                "offset_elements": offset,
            }
            for spec, offset in zip(layout.specs, layout.offsets, strict=True)
        ],
    }


def _figures(figures: Figures) -> dict[str, Any]:
    return {
        "shard_elements": figures.shard_elements,
        "padding_elements": figures.padding_elements,
        "padding_ratio": figures.padding_ratio,
        "weights_bytes": figures.weights_bytes,
        "gradients_bytes": figures.gradients_bytes,
        "optimizer_states_bytes": figures.optimizer_bytes,
        "peak_bytes": figures.peak_bytes,
        "peak_when": figures.peak.when,
        "peak_parts_bytes": {
            "weights": figures.weights_bytes,
            "optimizer states": figures.optimizer_bytes,
            **figures.peak.parts,
        },
        "sent_bytes": {
            **dataclasses.asdict(figures.traffic),
            "total_bytes": figures.traffic.total_bytes,
        },
        "communication_s": figures.communication_s,
    }


def _suggestion(report: Report) -> dict[str, Any] | None:
    suggestion = report.suggestion
    if suggestion is None:
        return None
    return {
        "groups": [{"name": name, "sentence": text} for name, text in suggestion.causes],
        "alternatives": [
            {
                "options": list(each.options),  # to be added to those of the plan
                "keeps_padding_limit": each.is_enough,
                "is_below_row": each.is_below_row,
                "per_rank": _figures(each.figures),
            }
            for each in suggestion.alternatives
        ],
    }

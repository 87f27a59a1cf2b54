"""The results of ``plan``, also as JSON. Keys of numbers end with units."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from vescale_fsdp.cli.estimate import Figures, figures_of, figures_of_others
from vescale_fsdp.cli.layouts import PlannedGroup, Track, lay_out_model
from vescale_fsdp.cli.model import Model
from vescale_fsdp.cli.settings import BlockRules, Settings
from vescale_fsdp.cli.suggest import Suggestion, suggest

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


def make_report(model: Model, settings: Settings, rules: Sequence[str], track: Track) -> Report:
    """Plan a model, and compute its costs.

    Raises:
        InputError: a rule of granularity is invalid.
        PlanError: two tensors of a group have the same name.
    """
    blocks = BlockRules(rules)
    planned = lay_out_model(
        model, settings.num_shards, blocks, settings.order, track, settings.codes
    )
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
    )


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
            "gather": gather,  # the former names of the two
            "reduce": reduce,
            "optimizer": settings.optimizer,
            "reshard_after_forward": settings.reshard,
            "backend": settings.backend,
            "bandwidth_bytes_per_s": settings.bandwidth_bytes_per_s,
            "order": settings.order,
            "in_flight": settings.in_flight,
        },
        "groups": [_group(each) for each in report.planned],
        "per_rank": {_KEYS[name]: _figures(each) for name, each in report.figures.items()},
        "suggestion": _suggestion(report),
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

"""Everything that one run of ``plan`` finds, before it is shown."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from vescale_fsdp.cli.blocks import BlockRules
from vescale_fsdp.cli.estimate import Figures, figures_of, figures_of_others
from vescale_fsdp.cli.layouts import PlannedGroup, Track, lay_out_model
from vescale_fsdp.cli.model import Model
from vescale_fsdp.cli.settings import Settings
from vescale_fsdp.cli.suggest import Suggestion, suggest

OURS, FSDP2, MEGATRON = "veScale-FSDP", "FSDP2", "Megatron-FSDP v2"


@dataclass(frozen=True)
class Report:
    """A plan with its figures."""

    model: Model
    settings: Settings
    rules: tuple[str, ...]  # texts of --granularity
    unmatched_rules: tuple[str, ...]  # those that fit no tensor
    planned: tuple[PlannedGroup, ...]
    figures: dict[str, Figures]  # by layout, ours first
    suggestion: Suggestion | None


def make_report(model: Model, settings: Settings, rules: Sequence[str], track: Track) -> Report:
    """Plan a model and count what it costs.

    Raises:
        InputError: a rule of granularity is none.
        PlanError: two tensors of a group have one name.
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

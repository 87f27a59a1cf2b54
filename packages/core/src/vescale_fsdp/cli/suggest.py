"""What would pad less, where padding is above 5%: another group size, or smaller blocks.

The planner's advice on the group that pads most, turned into options of this command, and what
they would cost for the whole model.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from vescale_fsdp.cli.blocks import BlockRules
from vescale_fsdp.cli.estimate import Figures, figures_of
from vescale_fsdp.cli.layouts import PlannedGroup, lay_out_model
from vescale_fsdp.cli.model import Model, kinds
from vescale_fsdp.cli.settings import Settings

__all__ = ["Alternative", "Suggestion", "suggest"]


@dataclass(frozen=True)
class Alternative:
    """Options that change the plan, and the figures they give."""

    options: tuple[str, ...]  # as on the command line
    figures: Figures


@dataclass(frozen=True)
class Suggestion:
    """What the planner says of the group that pads most."""

    group: str
    sentence: str
    alternatives: tuple[Alternative, ...]


def suggest(
    model: Model, planned: Sequence[PlannedGroup], settings: Settings, rules: Sequence[str]
) -> Suggestion | None:
    """Options that pad less, or None where no group pads more than 5%.

    Args:
        model: what was planned.
        planned: its groups.
        settings: of the plan.
        rules: the texts of ``--granularity``.
    """
    padded = [each for each in planned if each.advice is not None]
    if not padded:
        return None
    worst = max(padded, key=lambda each: each.unit.count * each.layout.padding)
    advice = worst.advice
    assert advice is not None, "only such groups were taken"
    found = []
    if advice.num_shards is not None and settings.num_ranks % advice.num_shards == 0:
        replicas = settings.num_ranks // advice.num_shards
        changed = dataclasses.replace(settings, num_replicas=replicas)
        found.append(_evaluate(model, changed, rules, ("--replicas", str(replicas))))
    if advice.granularity:
        shapes = {tensor.name: tensor.shape for tensor in worst.group.tensors}
        new = _rules([(name, shapes[name], block) for name, block in advice.granularity])
        options = tuple(part for rule in new for part in ("--granularity", rule))
        found.append(_evaluate(model, settings, [*rules, *new], options))
    return Suggestion(worst.title, str(advice), tuple(found))


def _evaluate(
    model: Model, settings: Settings, rules: Sequence[str], options: tuple[str, ...]
) -> Alternative:
    planned = lay_out_model(model, settings.num_shards, BlockRules(rules), settings.order)
    return Alternative(options, figures_of(model, planned, settings))


def _rules(blocks: Sequence[tuple[str, tuple[int, ...], int]]) -> list[str]:
    """One rule per kind of tensor: names that differ in their numbers only are one kind."""
    specs: dict[str, str] = {}
    for kind, (_, shape, block) in zip(kinds(name for name, *_ in blocks), blocks, strict=True):
        row = shape[-1] if len(shape) >= 2 else 1
        specs[kind] = f"elements:{block}" if block % row else f"rows:{block // row}"
    return [f"{pattern}={spec}" for pattern, spec in specs.items()]

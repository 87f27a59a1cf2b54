"""What would pad less, where padding is above 5%: another group size, or smaller blocks.

The planner's advice on all groups that blocks pad, turned into options of this command that
treat every one of them, and what they would cost for the whole model. The options are to be
added to those that were given: the last rule of ``--granularity`` that fits holds.
"""

from __future__ import annotations

import dataclasses
import glob
from collections.abc import Sequence
from dataclasses import dataclass

from vescale_fsdp.cli.estimate import Figures, figures_of
from vescale_fsdp.cli.layouts import PlannedGroup, lay_out_model
from vescale_fsdp.cli.model import Model, kinds
from vescale_fsdp.cli.settings import BlockRules, Settings
from vescale_fsdp.cli.text import InputError
from vescale_fsdp.planner import Advice

# Group sizes that are tried, from the one that suits all groups by themselves downwards.
_MAX_SIZES = 8

# Smaller blocks may pad another group, whose names fit the same patterns; then it has its turn.
_MAX_ROUNDS = 3


@dataclass(frozen=True)
class Alternative:
    """Options that change the plan, and the figures they give."""

    options: tuple[str, ...]  # as on the command line, to be added to those that were given
    figures: Figures
    is_enough: bool  # no group is padded by its blocks any more
    is_below_row: bool = False  # blocks of some tensors are smaller than a row


@dataclass(frozen=True)
class Suggestion:
    """What the planner says of the groups that blocks pad, the worst first."""

    causes: tuple[tuple[str, str], ...]  # name of the group, and a sentence
    alternatives: tuple[Alternative, ...]


def suggest(
    model: Model, planned: Sequence[PlannedGroup], settings: Settings, rules: Sequence[str]
) -> Suggestion | None:
    """Options that pad less, or None where no blocks force more than 5% on a group.

    Args:
        model: what was planned.
        planned: its groups.
        settings: of the plan.
        rules: the texts of ``--granularity``.
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
    """The largest group size found that suits all groups."""
    wanted = [advice.num_shards for advice in all_advice]
    sizes = [size for size in wanted if size is not None and settings.num_shards % size == 0]
    if len(sizes) < len(wanted):
        return None  # there is none for one of them
    divisors = [size for size in range(min(sizes), 1, -1) if settings.num_shards % size == 0]
    for size in divisors[:_MAX_SIZES]:
        planned = lay_out_model(
            model, size, BlockRules(rules), settings.order, codes=settings.codes
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
    """Rules for all groups, and for those that they pad in turn."""
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
                model, settings.num_shards, blocks, settings.order, codes=settings.codes
            )
        except InputError:  # smaller blocks would cut those that travel in 8 bits
            return None
    return Alternative(
        tuple(part for rule in added for part in ("--granularity", rule)),
        figures_of(model, planned, settings),
        is_enough=not any(each.is_forced for each in planned),
        is_below_row=is_below_row,
    )


def _add_specs(specs: dict[str, tuple[str, int]], each: PlannedGroup, advice: Advice) -> None:
    """One spec per kind of tensor: names that differ in their numbers only are one kind.

    Where a kind has several blocks, the smallest is taken, in elements before rows.
    """
    shapes = {tensor.name: tensor.shape for tensor in each.group.tensors}
    patterns = kinds(glob.escape(name) for name, _ in advice.granularity)
    for pattern, (name, block) in zip(patterns, advice.granularity, strict=True):
        shape = shapes[name]
        row = shape[-1] if len(shape) >= 2 else 1
        spec = ("elements", block) if block % row else ("rows", block // row)
        specs[pattern] = min(specs.get(pattern, spec), spec)

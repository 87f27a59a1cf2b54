"""Suggests options with less padding if blocks force more than 5%: fewer ranks or smaller blocks.

The planner gives advice for each group. This file turns it into options of ``plan`` that hold for
all groups, and plans the whole model with them to get the costs. The user adds these options to the
command: the last rule of ``--granularity`` that matches a tensor is used.
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
                model, settings.num_shards, blocks, settings.order, codes=settings.codes
            )
        except InputError:  # they would split blocks that are sent in 8 bits
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

"""The table of candidates as text."""

from __future__ import annotations

from dataclasses import replace

from vescale_fsdp_tune.costs.report import report_of, shown_of
from vescale_fsdp_tune.costs.search import tune

from .problems import MIB, division, problem


def test_the_chosen_candidate_is_first() -> None:
    this = problem(60 * MIB, divisions=(division(3),))
    tuning = tune(this)
    lines = report_of(this, tuning).splitlines()
    head = next(number for number, text in enumerate(lines) if text.startswith("settings"))
    assert lines[head].split() == ["settings", "step", "peak", "why", "not"]
    assert lines[head + 1].endswith("  chosen")
    assert "unknown" not in lines[1]
    assert lines[-2].startswith("chosen, step: ")
    assert tuning.chosen.when in lines[-1]


def test_columns_are_aligned() -> None:
    this = problem(60 * MIB, divisions=(division(3),))
    lines = report_of(this, tune(this)).splitlines()
    start = lines[1].index("why not")
    rows = lines[2 : 2 + len(shown_of(tune(this), this.budget_bytes))]
    assert all(row[start - 1] == " " and row[start] != " " for row in rows)


def test_it_says_if_activations_are_unknown() -> None:
    this = problem(60 * MIB, divisions=(division(3, has_trace=False),))
    assert "activations and the times of the model are unknown" in report_of(this, tune(this))


def test_each_row_of_the_table_of_stages_is_shown() -> None:
    this = problem(60 * MIB, divisions=(division(3),))
    tuning = tune(replace(this, budget_bytes=1 << 40))
    shown = {each.candidate.sharding for each in shown_of(tuning, 1 << 40)}
    assert {"ddp", "zero1", "zero2", "zero3"} <= shown

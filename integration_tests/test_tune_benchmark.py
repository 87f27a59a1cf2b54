"""The benchmark of choices: its candidates, and how choices are judged."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
try:
    from benchmarks.tune.candidates import grid, named, parse, text_of
    from benchmarks.tune.regret import choices_of, verdicts
finally:
    sys.path.remove(str(ROOT))

TEXTS = {named(each, grid(2)[0].units): text_of(each) for each in grid(2)}
DDP, ZERO1, ZERO3 = TEXTS["ddp"], TEXTS["zero1"], TEXTS["zero3"]
MIB = 1 << 20


def cell(budget_mib: int, chosen: str, **changed: Any) -> dict[str, Any]:
    """Three candidates of which the larger ones are faster."""
    real = {
        DDP: {"step_s": [1.0, 1.2, 1.0], "peak_bytes": 40 * MIB},
        ZERO1: {"step_s": [2.0, 2.0, 2.0], "peak_bytes": 30 * MIB},
        ZERO3: {"step_s": [3.0, 3.0, 2.2], "peak_bytes": 20 * MIB},
    }
    predicted = [
        {"candidate": text, "step_s": 1.0, "peak_bytes": 1.05 * each["peak_bytes"]}
        for text, each in real.items()
    ]
    entry = {
        "budget_bytes": budget_mib * MIB,
        "seconds": 2.0,
        "chosen": next(each for each in predicted if each["candidate"] == chosen),
    }
    place = {"model": "gpt-7m", "ranks": 2, "network": "loopback"}
    known = {"choices": {"middle": entry}, "candidates": real, "predictions": predicted}
    return place | known | changed


def test_the_grid_has_each_row_with_and_without_recomputation() -> None:
    found = grid(3)
    names = [named(each, found[0].units) for each in found]
    assert len(set(names)) == len(names) == 12
    assert names[:4] == ["ddp", "ddp, 3 recompute", "zero1", "zero1, 3 recompute"]
    assert names[-2:] == ["zero3, 3 unsharded", "zero3, 3 unsharded, 3 recompute"]
    assert [parse(text_of(each)) for each in found] == found


def test_regret_is_over_the_fastest_that_really_fits() -> None:
    (choice,) = choices_of(cell(35, ZERO3))  # DDP's peak is 40 MiB
    assert choice.fastest == ZERO1
    assert choice.regret[1] == 1.5
    (choice,) = choices_of(cell(50, ZERO1))
    assert choice.fastest == DDP
    assert choice.regret[1] == pytest.approx(2.0)
    (choice,) = choices_of(cell(50, DDP))
    assert choice.regret == (1.0, 1.0, 1.0)


def test_a_peak_that_is_predicted_too_low_is_not_met() -> None:
    given = cell(50, DDP)
    given["predictions"][1]["peak_bytes"] = 30 * MIB - 1
    judged = {each.where: each.is_met for each in verdicts({"one": given}) if "peak" in each.target}
    assert judged == {
        "gpt-7m, 2 ranks, loopback, ddp": True,
        "gpt-7m, 2 ranks, loopback, zero1": False,
        "gpt-7m, 2 ranks, loopback, zero3": True,
    }


def test_the_worst_and_the_median_are_judged_apart() -> None:
    cells = {"bad": cell(50, ZERO1), "good": cell(50, DDP), "better": cell(35, ZERO1)}
    judged = [each for each in verdicts(cells) if "real step" in each.target]
    assert [each.is_met for each in judged] == [False, True, True, True]
    assert judged[-1].found == "1.000"

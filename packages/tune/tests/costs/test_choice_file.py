"""A choice comes back as it was written, and nothing else is accepted."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from vescale_fsdp_tune.costs import Candidate
from vescale_fsdp_tune.costs.choice_file import (
    choice_of,
    choice_text,
    parse_choice,
    read_choice,
    write_choice,
)
from vescale_fsdp_tune.costs.search import tune

from .problems import MIB, problem

PROBLEM = problem(50 * MIB)
TUNING = tune(PROBLEM)
TEXT = choice_text(PROBLEM, TUNING)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"sharding": "hsdp", "num_replicas": 2, "num_unsharded": 3},
        {"units": (('a."b', "c: #"), ("ü",)), "activations": "recompute+offload", "num_changed": 2},
        {"int8": True, "offload": True, "in_flight": 4},
    ],
)
def test_it_comes_back(changed: dict[str, object], tmp_path: Path) -> None:
    candidate = replace(TUNING.chosen.candidate, **changed)  # type: ignore[arg-type]
    tuning = replace(TUNING, chosen=replace(TUNING.chosen, candidate=candidate))
    path = tmp_path / "choice.yaml"
    write_choice(path, PROBLEM, tuning, "by a test\nin two lines")
    assert read_choice(path) == choice_of(PROBLEM, tuning)
    assert path.read_text().startswith("# by a test\n# in two lines\n")


def test_it_is_yaml() -> None:
    yaml = pytest.importorskip("yaml")
    read = yaml.safe_load(TEXT)
    assert read["units"] == [list(unit) for unit in TUNING.chosen.candidate.units]
    assert read["sharding"] == TUNING.chosen.candidate.sharding


def test_what_was_predicted_is_a_comment() -> None:
    comments = [line for line in TEXT.splitlines() if line.startswith("#")]
    assert any("for a step" in line and "of 50.0 MiB" in line for line in comments)
    assert "# on a machine" in comments


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("num_ranks: 4\n", "", "lacks num_ranks"),
        ("num_ranks: 4\n", "num_ranks: 4\nnum_ranks: 4\n", "line .*: num_ranks is there twice"),
        ("num_ranks: 4\n", "ranks: 4\n", "line .*: 'ranks' is no key of a choice; they are ver"),
        ("num_ranks: 4\n", "num_ranks: four\n", "num_ranks is 'four', expected JSON"),
        ("num_ranks: 4\n", "num_ranks: 0\n", "num_ranks is 0: Expected `int` >= 1"),
        ("num_ranks: 4\n", "num_ranks: true\n", "num_ranks is true: Expected `int`, got `bool`"),
        ("version: 1\n", "version: 2\n", "version is 2: expected 1"),
        ("int8: false", "int8: 0", "int8 is 0: Expected `bool`, got `int`"),
        ('["blocks.0"]', "[]", "Expected `array` of length >= 1 - at"),
        ('["blocks.0"]', '["blocks.1"]', "units have 'blocks.1' twice"),
        ("num_unsharded: ", "num_unsharded: 9", "expected up to 4, the number of units"),
        ("num_replicas: 1", "num_replicas: 3", "does not divide num_ranks, 4"),
    ],
)
def test_what_is_no_choice_is_refused(old: str, new: str, message: str) -> None:
    assert old in TEXT
    with pytest.raises(ValueError, match=f"^choice.yaml.*{message}"):
        parse_choice(TEXT.replace(old, new), "choice.yaml")


def test_a_wrong_row_is_named() -> None:
    row = TUNING.chosen.candidate.sharding
    with pytest.raises(ValueError, match='sharding is "zero4": expected ddp, zero1'):
        parse_choice(TEXT.replace(f'"{row}"', '"zero4"'), "choice.yaml")


def test_no_file(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"cannot read the choice .*none.yaml: No such file"):
        read_choice(tmp_path / "none.yaml")


def test_all_settings_are_in_it() -> None:
    assert all(f"\n{name}: " in TEXT for name in Candidate.__dataclass_fields__)

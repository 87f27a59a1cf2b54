"""Numbers of attempts, and the end of one that others have replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from vescale_fsdp import RankMismatchError
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_elastic import attempts, memory

from .helpers import train


def test_a_number_is_given_once(tmp_path: Path) -> None:
    assert attempts.claim(tmp_path, 1) == 1
    assert attempts.claim(tmp_path, 1) == 2
    assert attempts.claim(tmp_path, 7) == 7
    assert [each.name for each in tmp_path.iterdir()] == ["attempt-7"]
    attempts.check(tmp_path, 7)
    with pytest.raises(RankMismatchError, match=r"attempt 6 of the run .* attempt 7 has begun"):
        attempts.check(tmp_path, 6)


def cut_off(root: Path) -> int:
    """In step 5, others begin an attempt. Returns the last step that was made."""
    made = []

    def before(run: object, step: int) -> None:
        made.append(step)
        if step == 5:
            attempts.claim(root / "run", 1)

    with pytest.raises(RankMismatchError, match=r"attempt [23] has begun"):
        train(root, 30, before=before)
    return made[-1]


def test_an_attempt_ends_when_another_has_begun(tmp_path: Path) -> None:
    """At the second memory checkpoint from there, at the latest: every second step here."""
    for last in run_ranks(cut_off, 2, tmp_path):
        assert 5 <= last <= 9


def test_names_are_made_once(tmp_path: Path) -> None:
    name = memory.run_name(tmp_path / "run")
    assert memory.run_name(tmp_path / "run") == name
    assert memory.run_name(tmp_path / "other") != name

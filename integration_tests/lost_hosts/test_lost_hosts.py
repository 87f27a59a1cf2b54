"""The harness itself, in a short form and without root: two faults, and the page."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
try:
    from integration_tests.lost_hosts import report, runner
    from integration_tests.lost_hosts.demo import lost
    from integration_tests.lost_hosts.faults import FAULTS
    from integration_tests.lost_hosts.plot import Panel, draw
    from integration_tests.lost_hosts.trial import Outcome
    from integration_tests.lost_hosts.watch import Parts
finally:
    sys.path.remove(str(ROOT))

STEPS = 90


@pytest.mark.nightly  # 100 s; `test_elastic` loses a rank and a host at each change
@pytest.mark.timeout(300)
def test_a_rank_and_a_host_are_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "ROOM_STEPS", 0)  # both in one training
    monkeypatch.setattr(runner, "STEP_S", 0.1)
    faults = [each for each in FAULTS if each.name.startswith(("kill -9 of a rank", "a host dies"))]
    chosen = [faults[0], faults[1]]
    assert [each.name for each in chosen] == [
        "kill -9 of a rank",
        "a host dies with its memory; later a new one joins",
    ]
    found = runner.run_training(chosen, STEPS, tmp_path, 0, with_network=False)
    assert not found.wrong
    assert [each.fault for each in found.outcomes] == ["", ""]
    first, second = found.outcomes
    # The outcomes have checked the sources: a newer state on disk is as good as one in memory.
    assert first.attempts[-1][0] == second.attempts[-1][0] == 4
    assert first.parts is not None
    assert first.parts.total == pytest.approx(first.seconds)
    assert found.num_steps >= 2 * STEPS, "at least two ranks make each step"
    assert found.farthest <= 1e-6


def outcome(name: str, sources: list[str], *, parts: bool, fault: str = "") -> Outcome:
    attempts = [(4, source, 3) for source in sources]
    split = Parts(1.0, 4.0, 0.5, 0.25) if parts else None
    return Outcome(name, attempts, 5.75, split, 3 * len(attempts), 0, [], fault)


def test_a_row_says_what_happened_how_often() -> None:
    name = FAULTS[0].name
    rows = [outcome(name, ["memory"], parts=True) for _ in range(3)]
    (row,) = report.table(rows).splitlines()[2:]
    assert row == (
        "| kill -9 of a rank | 3 | from memory | 4 ranks from memory: 3 of 3 | 3, at most 3 | "
        "5.8 (5.8 to 5.8) | 1.0 + 4.0 + 0.5 + 0.2 | met |"
    )
    bad = outcome(name, ["disk"], parts=False, fault="the state was from disk")
    (row,) = report.table([*rows, bad]).splitlines()[2:]
    assert "4 ranks from memory: 3 of 4; 4 ranks from disk: 1 of 4" in row
    assert row.endswith("**missed** |")


def test_time_is_lost_when_new_steps_come_later_than_usual() -> None:
    assert lost([0.0, 1.0, 2.0, 12.0, 13.0])[-1] == (13.0, 9.0)
    assert lost([0.0, 1.0, 2.0])[-1] == (2.0, 0.0)


def test_the_picture_has_each_panel_and_each_fault(tmp_path: Path) -> None:
    panels = [
        Panel("loss", [(0.0, 5.0), (9.0, 2.0)], "#000", is_stepped=False, from_zero=False),
        Panel("ranks <alive>", [(0.0, 4), (3.0, 2)], "#111", is_stepped=True, from_zero=True),
    ]
    draw(tmp_path / "a.svg", "title", panels, [(3.0, "a host dies")], 10.0)
    texts = [each.text for each in ElementTree.parse(tmp_path / "a.svg").iter() if each.text]
    assert {"loss", "ranks <alive>", "a host dies", "10 s"} <= set(texts)


def test_the_page_is_made_of_its_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = report.PAGE
    monkeypatch.setattr(report, "PAGE", tmp_path / page.name)
    (tmp_path / page.name).with_suffix(".json").write_text(page.with_suffix(".json").read_text())
    report.write_again()
    assert (tmp_path / page.name).read_text() == page.read_text()

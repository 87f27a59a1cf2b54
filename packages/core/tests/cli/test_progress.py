import io
import itertools

import pytest

from vescale_fsdp.cli import progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, step_s: float) -> str:
    """What appears on ``stream`` while three items take ``step_s`` seconds each."""
    ticks = itertools.count(0.0, step_s)
    monkeypatch.setattr(progress.time, "monotonic", lambda: next(ticks))
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    assert list(progress.track([1, 2, 3], "planning")) == [1, 2, 3]
    return stream.getvalue()


def test_slow_work_shows_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "planning" in shown(monkeypatch, Terminal(), 2.0)


def test_quick_work_shows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "planning" not in shown(monkeypatch, Terminal(), 0.0)


def test_nothing_is_shown_where_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, io.StringIO(), 2.0) == ""

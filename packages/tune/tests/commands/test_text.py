import io
import itertools

import pytest

from vescale_fsdp.cli import text as words
from vescale_fsdp_tune.commands.text import bits_per_s, difference, duration, percent, track


def test_bandwidth_is_in_bits() -> None:
    assert bits_per_s(50e9) == "400 Gbit/s"
    assert bits_per_s(125e6) == "1.00 Gbit/s"


def test_durations() -> None:
    assert [duration(s) for s in (0, 4.6848e-07, 0.00388, 7.35, 1234.5)] == [
        "0.00 us",
        "0.47 us",
        "3.88 ms",
        "7.35 s",
        "1,234 s",
    ]


def test_percent_and_difference() -> None:
    assert percent(0.0574) == "5.74%"
    assert [percent(ratio) for ratio in (6.87, 9.999, 77.1, 4096)] == [
        "687%",
        "1,000%",
        "77.1x",
        "4,096x",
    ]
    assert difference(12, 10) == "+20.0%"
    assert difference(9, 10) == "-10.0%"
    assert difference(10.0001, 10) == "0.0%"
    assert difference(99, 10) == "+890.0%"
    assert difference(785, 10) == "78.5x"
    assert difference(3, 0) == ""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, step_s: float) -> str:
    """What appears on ``stream`` while three items take ``step_s`` seconds each."""
    ticks = itertools.count(0.0, step_s)
    monkeypatch.setattr(words.time, "monotonic", lambda: next(ticks))
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    assert list(track([1, 2, 3], "planning")) == [1, 2, 3]
    return stream.getvalue()


def test_slow_work_shows_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "planning" in shown(monkeypatch, Terminal(), 2.0)


def test_quick_work_shows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "planning" not in shown(monkeypatch, Terminal(), 0.0)


def test_nothing_is_shown_where_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, io.StringIO(), 2.0) == ""

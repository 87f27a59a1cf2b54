import io
import itertools

import pytest

from vescale_fsdp.cli import text as words
from vescale_fsdp.cli.text import (
    binary,
    bits_per_s,
    count,
    difference,
    duration,
    percent,
    plain,
    several,
)


@pytest.mark.parametrize(
    ("number", "text"),
    [
        (0, "0"),
        (7, "7"),
        (999, "999"),
        (1000, "1.00 K"),
        (9_994, "9.99 K"),
        (9_996, "10.0 K"),
        (999_499, "999 K"),
        (999_500, "1.00 M"),
        (671_026_419_200, "671 bn"),
    ],
)
def test_counts_have_three_digits(number: int, text: str) -> None:
    assert count(number) == text


def test_bytes_are_in_powers_of_1024() -> None:
    assert [binary(n) for n in (0, 1023, 1 << 10, 3 << 29)] == [
        "0 B",
        "1.00 KiB",
        "1.00 KiB",
        "1.50 GiB",
    ]


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


def test_one_is_singular() -> None:
    assert [several(n, "unit") for n in (0, 1, 2, 1000)] == [
        "0 units",
        "1 unit",
        "2 units",
        "1,000 units",
    ]


def test_control_characters_are_shown_and_not_sent() -> None:
    assert plain("a\x1b[31mb\nc\u202e\ud800") == "a\\x1b[31mb\\nc\\u202e\\ud800"
    assert plain("h.0 \u00e4\u2500") == "h.0 \u00e4\u2500"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(monkeypatch: pytest.MonkeyPatch, stream: io.StringIO, step_s: float) -> str:
    """What appears on ``stream`` while three items take ``step_s`` seconds each."""
    ticks = itertools.count(0.0, step_s)
    monkeypatch.setattr(words.time, "monotonic", lambda: next(ticks))
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    assert list(words.track([1, 2, 3], "planning")) == [1, 2, 3]
    return stream.getvalue()


def test_slow_work_shows_a_bar_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "planning" in shown(monkeypatch, Terminal(), 2.0)


def test_quick_work_shows_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "planning" not in shown(monkeypatch, Terminal(), 0.0)


def test_nothing_is_shown_where_nobody_watches(monkeypatch: pytest.MonkeyPatch) -> None:
    assert shown(monkeypatch, io.StringIO(), 2.0) == ""

"""Formats rates, times and ratios, beside what the core's commands format (`cli.text`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeVar

from vescale_fsdp.cli.text import digits, progress_bar, scaled

T = TypeVar("T")


def bits_per_s(bytes_per_s: float) -> str:
    """Format bytes per second as bits: "400 Gbit/s" for 50e9."""
    return scaled(8 * bytes_per_s, 1000, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"))


def duration(seconds: float) -> str:
    """Format seconds; short ones as milliseconds or microseconds."""
    for scale, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * scale >= 0.9995:
            return f"{digits(seconds * scale)} {unit}"
    return f"{digits(seconds * 1e6)} us"


def percent(ratio: float) -> str:
    """Format a ratio: "5.74%" for 0.0574; from 1,000% on as a multiple, "77.1x" for 77.1."""
    return f"{digits(ratio)}x" if ratio >= 10 else f"{digits(100 * ratio)}%"


def difference(value: float, base: float) -> str:
    """Format how much ``value`` is above (+) or below (-) ``base``, in percent.

    From ten times ``base`` on it is a multiple: "78.5x" for 785 and 10.
    """
    if not base:
        return ""
    if value >= 10 * base:
        return f"{digits(value / base)}x"
    text = f"{100 * (value / base - 1):+,.1f}%"
    return "0.0%" if text[1:] == "0.0%" else text


def track(items: Sequence[T], label: str) -> Iterator[T]:
    """Yield the items. After one second, show a progress bar on stderr if it is a terminal."""
    from rich.progress import Progress

    with progress_bar(label, Progress.get_default_columns) as update:
        for done, item in enumerate(items, start=1):
            yield item
            if update is not None:
                update(done, len(items))

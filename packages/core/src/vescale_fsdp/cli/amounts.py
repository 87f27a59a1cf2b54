"""Amounts as people read them: three digits and a unit."""

from __future__ import annotations

from collections.abc import Sequence


def count(number: float) -> str:
    """Elements or parameters: 3_232_931_520 is "3.23 bn". Not B, which is bytes here."""
    return _scaled(number, 1000, ("", "K", "M", "bn", "tn"))


def several(number: int, noun: str) -> str:
    """``1 unit``, ``37 units``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def plain(text: str) -> str:
    """``text`` without what would steer a terminal, or break a line: each as ``\\x1b`` is."""
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode("ascii")
        for letter in text
    )


def bits_per_s(bytes_per_s: float) -> str:
    """50e9 is "400 Gbit/s"."""
    return _scaled(8 * bytes_per_s, 1000, ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s"))


def binary(num_bytes: float) -> str:
    """In powers of 1,024: 2**31 is "2.00 GiB"."""
    return _scaled(num_bytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"))


def duration(seconds: float) -> str:
    """In seconds, or milli- or microseconds where that reads better."""
    for scale, unit in ((1.0, "s"), (1e3, "ms")):
        if seconds * scale >= 0.9995:
            return f"{_digits(seconds * scale)} {unit}"
    return f"{_digits(seconds * 1e6)} us"


def percent(ratio: float) -> str:
    """0.0574 is "5.74%"; from 1,000% on as a multiple, 77.1 is "77.1x"."""
    return f"{_digits(ratio)}x" if ratio >= 10 else f"{_digits(100 * ratio)}%"


def difference(value: float, base: float) -> str:
    """By how much ``value`` is above (+) or below (-) ``base``; 0 where that is nothing.

    From ten times ``base`` on as a multiple: 785 and 10 are "78.5x".
    """
    if not base:
        return ""
    if value >= 10 * base:
        return f"{_digits(value / base)}x"
    text = f"{100 * (value / base - 1):+,.1f}%"
    return "0.0%" if text[1:] == "0.0%" else text


def _scaled(number: float, step: int, units: Sequence[str]) -> str:
    scale = 0
    while number >= 999.5 and scale < len(units) - 1:
        number /= step
        scale += 1
    digits = f"{number:.0f}" if scale == 0 and number == round(number) else _digits(number)
    return f"{digits} {units[scale]}".rstrip()


def _digits(number: float) -> str:
    """Three of them, where there are."""
    return f"{number:,.{2 if number < 9.995 else 1 if number < 99.95 else 0}f}"

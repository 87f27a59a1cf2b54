"""Medians and quartiles."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

__all__ = ["quartiles", "ratios"]


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """25%, 50% and 75% of the values."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return low, middle, high


def ratios(of: Sequence[float], to: Sequence[float]) -> tuple[float, float, float] | None:
    """Quartiles of the ratios within a round; None if one was not measured."""
    return quartiles([a / b for a, b in zip(of, to, strict=True)]) if of and to else None

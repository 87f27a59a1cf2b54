"""All scenarios, in the order of the table."""

from __future__ import annotations

from . import (
    costs,
    damage,
    disks,
    exceptions,
    kills,
    mismatch,
    numbers,
    restarts,
    worlds,
)
from .harness import Scenario

SCENARIOS: list[Scenario] = [
    *kills.SCENARIOS,
    *damage.SCENARIOS,
    *worlds.SCENARIOS,
    *disks.SCENARIOS,
    *mismatch.SCENARIOS,
    *numbers.SCENARIOS,
    *exceptions.SCENARIOS,
    *restarts.SCENARIOS,
    *costs.SCENARIOS,
]

"""The settings that are tried for real, and their names and texts.

The grid has each row of the table of ZeRO's stages, with and without recomputation, and for zero3
also how many units are unsharded: two, three, or all between forward and backward. Units are the
repeated blocks. A choice that is not in the grid is tried too.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import product

from vescale_fsdp_tune.costs import Candidate
from vescale_fsdp_tune.costs.problem import Sharding

__all__ = ["grid", "named", "parse", "text_of"]


def grid(num_blocks: int) -> list[Candidate]:
    """The candidates for a model with that many blocks."""
    units = tuple((f"blocks.{number}",) for number in range(num_blocks))
    kept: list[Sharding] = ["ddp", "zero1", "zero2"]
    base = [Candidate(row, units) for row in kept]
    base += [
        Candidate("zero3", units),
        Candidate("zero3", units, in_flight=3),
        Candidate("zero3", units, num_unsharded=num_blocks),
    ]
    recomputed = {"activations": "recompute", "num_changed": num_blocks}
    return [replace(each, **change) for each, change in product(base, ({}, recomputed))]  # type: ignore[arg-type]


def text_of(candidate: Candidate) -> str:
    """Return a candidate as JSON, which is also the name of its engine."""
    return json.dumps(asdict(candidate), sort_keys=True)


def parse(text: str) -> Candidate:
    """Return the candidate of a text."""
    fields = json.loads(text)
    return Candidate(**fields | {"units": tuple(tuple(unit) for unit in fields["units"])})


def named(candidate: Candidate, units: Sequence[tuple[str, ...]]) -> str:
    """Return a short name for tables.

    Args:
        units: the usual ones. Others are told by their number.
    """
    parts = [candidate.sharding]
    if candidate.num_replicas > 1:
        parts.append(f"{candidate.num_replicas} replicas")
    if candidate.units != tuple(units):
        parts.append(f"{len(candidate.units)} units")
    if candidate.num_unsharded:
        parts.append(f"{candidate.num_unsharded} unsharded")
    if candidate.in_flight != 2:
        parts.append(f"in_flight {candidate.in_flight}")
    if candidate.num_changed:
        parts.append(f"{candidate.num_changed} {candidate.activations}")
    return ", ".join(parts)

"""The figures of a cell that are shown, from its stored results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from statistics import median

from benchmarks.compare.grid import Cell
from benchmarks.compare.measure import Result
from benchmarks.compare.record import Record
from benchmarks.compare.spread import quartiles, ratios

__all__ = ["Summary", "loss_difference", "summarize"]

Quartiles = tuple[float, float, float]


@dataclass(frozen=True)
class Summary:
    """The figures of one engine in one cell. None: not measured.

    Attributes:
        step_s: quartiles over the rounds.
        tokens_per_s: of all ranks together, at the median.
        speed: divided by FSDP2's: quartiles of the ratios within a round.
        of_limit: the longer of ``compute`` and ``wire``, divided by the time of the step. 1 if all
            communication is overlapped.
        host_s: CPU time of a process beyond that of ``compute``, within a round.
        copied_bytes: beyond those of ``compute``.
        loss_difference: the largest relative difference from DDP's loss, over all steps.
    """

    engine: str
    step_s: Quartiles
    tokens_per_s: float
    speed: Quartiles | None
    of_limit: Quartiles | None
    cpu_s: float
    host_s: float | None
    sent_bytes: float | None
    resident_bytes: int
    tensor_bytes: int | None
    copied_bytes: float | None
    loss: float
    loss_difference: float | None


def summarize(records: Mapping[Cell, Record], cell: Cell) -> list[Summary]:
    """The engines of one cell; memory and copies are those counted over loopback."""
    record = records[cell]
    counted = records.get(replace(cell, network="loopback"), record).engines
    compute = record.engines.get("compute")
    found = []
    for name, result in record.engines.items():
        if result.left_out is not None:
            continue
        is_whole = name not in ("compute", "wire")
        step_s = quartiles(result.step_s)
        beyond = zip(result.cpu_s, compute.cpu_s if compute else [], strict=False)
        copied = _copied(counted, name)
        found.append(
            Summary(
                name,
                step_s,
                record.tokens * cell.ranks / step_s[1],
                ratios(record.step_s("fsdp2"), result.step_s) if is_whole else None,
                ratios(record.bound_s, result.step_s) if is_whole else None,
                median(result.cpu_s),
                median(a - b for a, b in beyond) if compute and is_whole else None,
                result.sent_bytes,
                result.resident_bytes,
                counted[name].tensor_bytes if name in counted else None,
                copied if is_whole else None,
                result.losses[-1],
                loss_difference(record, name) if is_whole else None,
            )
        )
    return found


def _copied(counted: Mapping[str, Result], name: str) -> float | None:
    if name not in counted or "compute" not in counted:
        return None
    mine, model = counted[name].copied_bytes, counted["compute"].copied_bytes
    return None if mine is None or model is None else mine - model


def loss_difference(record: Record, engine: str) -> float | None:
    """Return the largest relative difference from DDP's loss. None: one was not measured."""
    pair = record.engines.get(engine), record.engines.get("ddp")
    if any(each is None or not each.losses for each in pair):
        return None
    losses = [each.losses for each in pair if each is not None]
    return max(abs(a - b) / abs(b) for a, b in zip(*losses, strict=True))

"""The targets, and whether they are met."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from benchmarks.compare.grid import LABELS, Cell
from benchmarks.compare.record import Record
from benchmarks.compare.spread import ratios
from benchmarks.compare.summary import loss_difference, summarize

__all__ = ["PEERS", "Verdict", "busy_share", "padding_verdicts", "verdicts"]

# Our speed over FSDP2's, by ranks, network and precision, for a GPT and a mixture of experts.
OVER_FSDP2 = {
    (2, "1gbit", "fp32"): 1.8,
    (2, "1gbit", "bf16"): 1.3,
    (2, "loopback", "fp32"): 1.2,
    (2, "loopback", "bf16"): 1.1,
    (4, "1gbit", "fp32"): 1.5,
    (4, "1gbit", "bf16"): 1.2,
}
LARGE = ("gpt-7m", "moe-10m", "moe-20m")
SMALL = "norms-1500"
OF_FSDP2_HOST = 0.6  # host time with many small parameters
OF_FSDP2_BYTES = 0.75  # on the wire, with bf16 compute and fp32 reduction
OVER_DEEPSPEED = 1.5  # in fp32 on a limited network
MUCH = 0.75  # share of the cores' time above which more overlap could not help
LOSS_DIFFERENCE = 1e-5  # relative, from DDP's, in fp32


ALIGNMENT = 8  # elements: 16 bytes in bf16, below which NCCL copies one by one
PEERS = {"fsdp2": "FSDP2", "megatron": "Megatron-FSDP v2"}  # of padding


@dataclass(frozen=True)
class Verdict:
    """Whether a target is met.

    Attributes:
        where: the cell, or the plan.
        found: median, and quartiles where there are rounds.
        limit: why no engine could meet it; empty if unknown.
    """

    target: str
    where: str
    found: str
    is_met: bool
    limit: str = ""

    def __str__(self) -> str:
        word = "met    " if self.is_met else "a limit" if self.limit else "NOT met"
        why = f"; {self.limit}" if self.limit and not self.is_met else ""
        return f"{word}  {self.where}: {self.target}: {self.found}{why}"


def verdicts(records: Mapping[Cell, Record]) -> list[Verdict]:
    """Return all verdicts for which there are results."""
    judged = []
    for cell, record in records.items():
        kind = cell.ranks, cell.network, cell.precision
        least = OVER_FSDP2.get(kind, 1.0) if cell.model in LARGE else 1.0
        judged += _speed(record, "vescale", "fsdp2", least)
        judged += _speed(record, "vescale-tuned", "fsdp2-tuned", 1.0)
        if cell.precision == "fp32" and cell.rate is not None:
            judged += _speed(record, "vescale-tuned", "deepspeed", OVER_DEEPSPEED)
        if cell.precision == "fp32":
            judged += _losses(record)
        judged += _costs(records, cell)
    return judged


def padding_verdicts(padding: dict[str, Any]) -> list[Verdict]:
    """Return verdicts for the plans without blocks, because other engines have no blocks."""
    judged = []
    for each in padding.get("plans", {}).values():
        where = f"{each['group']}, {each['ranks']} ranks"
        for peer, label in PEERS.items() if each["rows"] is None else ():
            found = f"{each['ours']:.4f}%, theirs {each[peer]:.4f}%"
            least = _least_padding(each["elements"], each["ranks"])
            limit = f"shards that begin at multiples of 16 bytes need {least:.4f}%"
            target = f"padding at most {label}'s"
            is_met = each["ours"] <= each[peer]
            judged.append(
                Verdict(target, where, found, is_met, limit if each["ours"] <= least else "")
            )
    return judged


def _least_padding(num_elements: int, num_ranks: int) -> float:
    """In percent, of any layout whose shards begin at multiples of 16 bytes in bf16."""
    total = math.ceil(num_elements / (num_ranks * ALIGNMENT)) * num_ranks * ALIGNMENT
    return round(100 * (total / num_elements - 1), 4)


def _speed(record: Record, ours: str, other: str, least: float) -> list[Verdict]:
    found = ratios(record.step_s(other), record.step_s(ours))
    if found is None:
        return []
    low, middle, high = found
    text = f"{middle:.2f} ({low:.2f} to {high:.2f})"
    limit = ""
    bound = ratios(record.step_s(other), record.bound_s)
    if bound and ours == "vescale-tuned":  # whose collectives `wire` are
        why = f"{bound[1]:.2f} if nothing but the longer of compute and wire took time"
        if bound[1] < least:
            limit = why
        else:
            text += f"; {why}"
    if middle < least and (busy := busy_share(record, ours)) > MUCH:
        text += f"; the cores are busy {busy:.0%} of ours"
    target = f"at least {least} of the speed of {LABELS[other]}"
    return [Verdict(target, str(record.cell), text, middle >= least, limit)]


def busy_share(record: Record, engine: str) -> float:
    """Return the share of the cores' time that a step's processes use."""
    found, cores = record.engines[engine], record.circumstances["machine"]["cores"]
    return median(found.cpu_s) * record.cell.ranks / cores / median(found.step_s)


def _costs(records: Mapping[Cell, Record], cell: Cell) -> list[Verdict]:
    """Return verdicts for bytes sent and host time, compared with FSDP2."""
    found = {each.engine: each for each in summarize(records, cell)}
    ours, theirs = found.get("vescale"), found.get("fsdp2")
    judged = []
    if cell.precision == "bf16" and ours and theirs and ours.sent_bytes and theirs.sent_bytes:
        ratio = ours.sent_bytes / theirs.sent_bytes
        target = f"at most {OF_FSDP2_BYTES} of the bytes of FSDP2 in bf16"
        judged.append(Verdict(target, str(cell), f"{ratio:.2f}", ratio <= OF_FSDP2_BYTES))
    if cell.model == SMALL and ours and theirs and ours.host_s and theirs.host_s:
        ratio = ours.host_s / theirs.host_s
        target = f"at most {OF_FSDP2_HOST} of the host time of FSDP2"
        judged.append(Verdict(target, str(cell), f"{ratio:.2f}", ratio <= OF_FSDP2_HOST))
    return judged


def _losses(record: Record) -> list[Verdict]:
    target = f"losses within {LOSS_DIFFERENCE:g} of DDP's"
    judged = []
    for engine in ("vescale", "vescale-tuned"):
        found = loss_difference(record, engine)
        if found is not None:
            is_met = found <= LOSS_DIFFERENCE
            judged.append(Verdict(target, str(record.cell), f"{found:.1e}", is_met))
    return judged

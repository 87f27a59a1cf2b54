"""Settings and reasons in words."""

from __future__ import annotations

import math

from vescale_fsdp.program import ZERO_TABLE
from vescale_fsdp_tune.costs.account import COPIES, ENGINE, RECOMPUTATION, WAITING
from vescale_fsdp_tune.costs.problem import Candidate, Prediction

_SAME = math.log(1.001)  # steps of which the logarithms differ by less are as fast


def bucket(step_s: float) -> int:
    """Return a number that is the same for steps that are about as fast."""
    return math.floor(math.log(max(step_s, 1e-12)) / _SAME)


def described(candidate: Candidate) -> str:
    """Return the settings in words."""
    parts: list[str] = [candidate.sharding]
    if candidate.num_replicas > 1:
        parts[0] += f" in {candidate.num_replicas:,} replicas"
    size = max((len(unit) for unit in candidate.units), default=1)
    if size > 1:
        parts.append(f"{len(candidate.units):,} units of {size} modules")
    if ZERO_TABLE[candidate.sharding].cuts_parameters and candidate.num_unsharded:
        parts.append(f"{candidate.num_unsharded} of {len(candidate.units)} units kept")
    parts.append(f"in_flight={candidate.in_flight}")
    if candidate.activations != "keep":
        is_all = candidate.num_changed == len(candidate.units)
        share = "" if is_all else f" {candidate.num_changed} of {len(candidate.units)}"
        parts.append(f"{candidate.activations}{share}")
    if candidate.int8:
        parts.append("8 bits")
    if candidate.offload:
        parts.append("offload")
    return ", ".join(parts)


def why(prediction: Prediction, best: Prediction, budget_bytes: int) -> str:
    """Return why a candidate was not chosen."""
    if not prediction.fits(budget_bytes):
        return f"too large by {gib(prediction.peak_bytes - budget_bytes)}"
    if bucket(prediction.step_s) <= bucket(best.step_s):
        return f"as fast, with {gib(prediction.peak_bytes - best.peak_bytes)} more"
    slower = prediction.step_s / best.step_s - 1
    text = f"slower by {100 * slower:.{0 if slower >= 0.1 else 1}f}%"
    kinds = {*prediction.seconds, *best.seconds}
    more = {kind: prediction.seconds.get(kind, 0.0) - best.seconds.get(kind, 0.0) for kind in kinds}
    kind = max(sorted(more), key=lambda each: more[each])
    return f"{text}: {_cause(kind, prediction, best)}"


def _cause(kind: str, prediction: Prediction, best: Prediction) -> str:
    if kind != WAITING:
        names = {RECOMPUTATION: "recomputation", ENGINE: "work of the engine", COPIES: "copies"}
        return names.get(kind, f"the {kind}")
    ours, theirs = prediction.traffic, best.traffic
    more = {
        "all-gathers in backward": ours.gather_backward_bytes - theirs.gather_backward_bytes,
        "all-gathers in forward": ours.gather_forward_bytes - theirs.gather_forward_bytes,
        "reductions": ours.reduce_bytes - theirs.reduce_bytes,
        "sums over replicas": ours.replicate_bytes - theirs.replicate_bytes,
    }
    cause = max(more, key=lambda each: more[each])
    return cause if more[cause] > 0 else "less overlap with the network"


def gib(num_bytes: float) -> str:
    """Format bytes: "3.2 GiB", "512 MiB"."""
    for unit, scale in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if abs(num_bytes) >= scale:
            value = num_bytes / scale
            return f"{value:,.{1 if value < 100 else 0}f} {unit}"
    return f"{num_bytes:.0f} B"


def duration(seconds: float) -> str:
    """Format seconds: "1.24 s", "31.2 ms", "8.0 us"."""
    for unit, scale in (("s", 1.0), ("ms", 1e3)):
        if seconds * scale >= 1:
            return f"{seconds * scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"

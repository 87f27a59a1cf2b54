"""The table of candidates, as text::

settings                        step     peak     why not
zero1, in_flight=2              31.2 ms  3.1 GiB  chosen
zero3, in_flight=2, recompute   39.0 ms  1.2 GiB  slower by 25%: recomputation
"""

from __future__ import annotations

from collections.abc import Sequence

from vescale_fsdp_tune.costs.problem import Candidate, Prediction, Problem, Tuning
from vescale_fsdp_tune.costs.words import bucket, described, duration, gib

_MOST_ROWS = 14


def report_of(problem: Problem, tuning: Tuning) -> str:
    """Return the table of a search, with its problem, and what the chosen candidate takes."""
    division, chosen = problem.divisions[0], tuning.chosen
    model = division.model
    lines = [
        f"{model.name}: {model.num_parameters:,} parameters in {model.num_units} units, "
        f"{problem.num_ranks:,} ranks, {problem.machine.name}, budget {gib(problem.budget_bytes)}"
    ]
    if not division.traces:
        lines.append(
            "Without inputs, activations and the times of the model are unknown and not counted."
        )
    shown = shown_of(tuning, problem.budget_bytes)
    rows = [("settings", "step", "peak", "why not")]
    rows += [
        (described(p.candidate), duration(p.step_s), gib(p.peak_bytes), p.why or "chosen")
        for p in shown
    ]
    lines += _aligned(rows)
    left_out = len(tuning.predictions) - len(shown)
    lines.append(
        f"{left_out:,} more were predicted, {tuning.num_pruned:,} others could not be better."
    )
    parts = [f"{kind} {duration(value)}" for kind, value in chosen.seconds.items()]
    lines.append(f"chosen, step: {', '.join(parts)}")
    parts = [f"{kind} {gib(value)}" for kind, value in chosen.memory.items()]
    lines.append(f"chosen, peak in {chosen.when}: {', '.join(parts)}")
    return "\n".join(lines)


def shown_of(tuning: Tuning, budget_bytes: int) -> list[Prediction]:
    """Return the candidates of a table: the best of each row, then others that fit.

    The best of a row that does not fit at all is the one with the least memory. Of those that fit,
    of each row, and are as fast, one is enough.
    """
    rows: dict[tuple[object, ...], Prediction] = {}
    known: set[tuple[object, ...]] = set()
    others = []
    for prediction in tuning.predictions:
        row = _row(prediction.candidate)
        place = row, bucket(prediction.step_s)
        best = rows.setdefault(row, prediction)
        if prediction.fits(budget_bytes):
            if place not in known and best is not prediction:
                others.append(prediction)
            known.add(place)
        elif not best.fits(budget_bytes) and prediction.peak_bytes < best.peak_bytes:
            rows[row] = prediction
    shown = [*rows.values(), *others[: max(_MOST_ROWS - len(rows), 0)]]
    order = {id(p): number for number, p in enumerate(tuning.predictions)}
    return sorted(shown, key=lambda p: order[id(p)])


def _row(candidate: Candidate) -> tuple[object, ...]:
    return candidate.sharding, candidate.int8, candidate.offload


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    padded = [[text.ljust(width) for text, width in zip(row, widths, strict=True)] for row in rows]
    return ["  ".join(row).rstrip() for row in padded]

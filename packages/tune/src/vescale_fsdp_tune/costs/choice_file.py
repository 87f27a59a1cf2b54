"""The file of a choice: settings that were found once, to be used again without measuring.

Each line is ``key: value``, with the value in JSON, so it is YAML too::

    # predicted: 1.24 s for a step, 31.2 GiB of 40.0 GiB, in the backward of blocks.0-23
    version: 1
    model: "GPT"
    num_ranks: 64
    sharding: "zero3"
    units: [["blocks.0"], ["blocks.1"]]
    ...

Comments and empty lines have no meaning. Every key is needed, and no other is accepted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields
from os import PathLike
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import msgspec
from msgspec import Meta

from vescale_fsdp_tune.costs.problem import Candidate, Prediction, Problem, Sharding, Tuning
from vescale_fsdp_tune.costs.settings import Activations
from vescale_fsdp_tune.costs.words import described, duration, gib

VERSION = 1


@dataclass(frozen=True)
class Choice:
    """Settings for one model on one number of ranks."""

    model: str  # its name, such as the class of its module
    num_ranks: int
    candidate: Candidate


def choice_of(problem: Problem, tuning: Tuning) -> Choice:
    """Return the choice of a search."""
    return Choice(problem.divisions[0].model.name, problem.num_ranks, tuning.chosen.candidate)


def write_choice(
    path: str | PathLike[str], problem: Problem, tuning: Tuning, note: str = ""
) -> None:
    """Write the choice of a search, with what was predicted as comments.

    Args:
        note: a first comment, such as the command; several lines are several comments.

    Raises:
        OSError: the file cannot be written.
    """
    Path(path).write_text(choice_text(problem, tuning, note), encoding="utf-8")


def choice_text(problem: Problem, tuning: Tuning, note: str = "") -> str:
    """Return the content of the file."""
    chosen = tuning.chosen
    comments = [*note.splitlines(), described(chosen.candidate)]
    comments += [_predicted(chosen, problem), f"on {problem.machine.name}"]
    comments += [f"  {kind}: {duration(value)}" for kind, value in chosen.seconds.items()]
    comments += [f"  {kind}: {gib(value)}" for kind, value in chosen.memory.items()]
    choice = choice_of(problem, tuning)
    values = {"version": VERSION, "model": choice.model, "num_ranks": choice.num_ranks}
    values |= {each.name: getattr(choice.candidate, each.name) for each in fields(Candidate)}
    lines = [f"# {line}".rstrip() for line in comments]
    lines += [f"{key}: {json.dumps(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def _predicted(chosen: Prediction, problem: Problem) -> str:
    budget = gib(problem.budget_bytes)
    return (
        f"predicted: {duration(chosen.step_s)} for a step, {gib(chosen.peak_bytes)} of {budget}, "
        f"in {chosen.when}"
    )


def read_choice(path: str | PathLike[str]) -> Choice:
    """Read a file that `write_choice` has written.

    Raises:
        ValueError: it cannot be read, a key is unknown, missing or there twice, or a value is not
            one of those that are possible. The message names the line.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise ValueError(f"cannot read the choice {path}: {reason}") from error
    return parse_choice(text, str(path))


def parse_choice(text: str, path: str) -> Choice:
    """Parse the content of a file. ``path`` is for errors. Raises ValueError as `read_choice`."""
    values: dict[str, Any] = {}
    lines: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        where = f"{path}, line {number}"
        key, colon, rest = line.partition(":")
        if not colon or key not in _KEYS:
            keys = ", ".join(_KEYS)
            raise ValueError(f"{where}: {key!r} is no key of a choice; they are {keys}")
        if key in values:
            raise ValueError(f"{where}: {key} is there twice")
        try:
            values[key], lines[key] = json.loads(rest), number
        except ValueError as error:
            raise ValueError(
                f"{where}: the value of {key} is {rest.strip()!r}, expected JSON"
            ) from error
    missing = [key for key in _KEYS if key not in values]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}, so it is no choice of settings")
    for key, value in values.items():
        try:
            msgspec.convert(value, _KEYS[key])
        except msgspec.ValidationError as error:
            choices, shown = get_args(_KEYS[key]), json.dumps(value)[:60]
            why = f"expected {', '.join(map(str, choices))}" if "enum" in str(error) else error
            raise ValueError(f"{path}, line {lines[key]}: {key} is {shown}: {why}") from error
    return _choice(values, path)


def _choice(values: dict[str, Any], path: str) -> Choice:
    del values["version"]
    units = tuple(tuple(unit) for unit in values.pop("units"))
    names = [name for unit in units for name in unit]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ValueError(f"{path}: units have {twice!r} twice, expected each module once")
    for key in ("num_unsharded", "num_changed"):
        if values[key] > len(units):
            raise ValueError(
                f"{path}: {key} is {values[key]}, expected up to {len(units)}, the number of units"
            )
    model, num_ranks = values.pop("model"), values.pop("num_ranks")
    if num_ranks % values["num_replicas"]:
        raise ValueError(
            f"{path}: num_replicas is {values['num_replicas']}, which does not divide num_ranks, "
            f"{num_ranks}"
        )
    return Choice(model, num_ranks, Candidate(units=units, **values))


_Count = Annotated[int, Meta(ge=1)]
_Least0 = Annotated[int, Meta(ge=0)]
_Name = Annotated[str, Meta(min_length=1)]
_KEYS: Mapping[str, Any] = {  # with their types
    "version": Literal[1],
    "model": str,
    "num_ranks": _Count,
    "sharding": Sharding,
    "units": list[Annotated[list[_Name], Meta(min_length=1)]],
    "num_replicas": _Count,
    "num_unsharded": _Least0,
    "in_flight": _Count,
    "activations": Activations,
    "num_changed": _Least0,
    "int8": bool,
    "offload": bool,
}

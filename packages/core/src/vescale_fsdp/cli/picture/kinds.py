"""Kinds of tensors and their colours: all experts' ``gate_proj`` look alike, neighbours do not.

A kind is a name whose numbered parts are replaced: ``experts.7.up_proj.weight`` is of the kind
``experts.#.up_proj.weight``. The biggest kinds of a picture get the most different colours, and
the tensors of a kind take its two shades in turn.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from vescale_fsdp.planner import TensorSpec

_NUMBERED = re.compile(r"(?<![^.])\d+(?![^.])")


def kind_of(name: str) -> str:
    """``name`` with ``#`` for every part between dots that is a number."""
    return _NUMBERED.sub("#", name)


@dataclass
class Kind:
    """The tensors of a group that share a kind."""

    name: str
    indices: list[int] = field(default_factory=list)  # into the layout's specs
    num_elements: int = 0


def kinds_of(specs: Sequence[TensorSpec]) -> list[Kind]:
    """The kinds of a group, those with most elements first."""
    kinds: dict[str, Kind] = {}
    for index, spec in enumerate(specs):
        name = kind_of(spec.name)
        kind = kinds.setdefault(name, Kind(name))
        kind.indices.append(index)
        kind.num_elements += spec.numel
    return sorted(kinds.values(), key=lambda kind: -kind.num_elements)


def colours_of(groups: Iterable[Sequence[TensorSpec]]) -> dict[str, int]:
    """A colour, as an index into the palette, for each kind in the groups of one picture."""
    kinds = kinds_of([spec for specs in groups for spec in specs])
    return {kind.name: number % len(_PALETTE) for number, kind in enumerate(kinds)}


# Each line: two shades on a light page, two on a dark one. Hues in OKLCH at even lightness,
# ordered so that the first few are easy to tell apart; the second ten repeat the hues, darker.
_PALETTE = (
    ("#89c3ff", "#70a9e4", "#4075aa", "#295e90"),
    ("#fab780", "#df9e68", "#a56b38", "#8c541f"),
    ("#8bd19a", "#72b781", "#428252", "#296a3b"),
    ("#efa2cd", "#d489b4", "#9a587f", "#814268"),
    ("#65d9df", "#47bfc5", "#00898f", "#007177"),
    ("#e3cd7c", "#c9b462", "#937f31", "#7b6813"),
    ("#c2b0fb", "#a997e0", "#7665a6", "#5f4e8d"),
    ("#f39d95", "#d8847d", "#9e534e", "#843c38"),
    ("#b8d487", "#9fba6e", "#6d853f", "#566d27"),
    ("#d5a1e1", "#bc89c7", "#855890", "#6d4177"),
    ("#6796c7", "#5281b1", "#1f4e79", "#163b5c"),
    ("#c58e61", "#ae794c", "#70431a", "#56310f"),
    ("#69a275", "#548c60", "#225831", "#184325"),
    ("#ba7c9f", "#a46789", "#663552", "#4f2940"),
    ("#49a9ae", "#2f9398", "#005c60", "#00474a"),
    ("#b3a15e", "#9d8c48", "#605212", "#4a3f0c"),
    ("#9687c4", "#8172ad", "#4c3f73", "#3a3059"),
    ("#bd7670", "#a6625c", "#69302d", "#512422"),
    ("#8ea567", "#7a9052", "#46571f", "#354217"),
    ("#a57aae", "#8f6698", "#573561", "#43294b"),
)
_LIGHT = (
    ".bg,.bar{fill:#ffffff}.bar{stroke:#d0d7de}text{fill:#57606a}.head{fill:#1f2328}"
    ".name{fill:#1f2328}.pad{fill:#2d333b}.void{fill:#ffffff}.cut{stroke:#ffffff}"
    ".axis,.twin{stroke:#8c959f}"
)
_DARK = (
    ".bg,.bar{fill:#0d1117}.bar{stroke:#30363d}text{fill:#9da7b3}.head{fill:#f0f6fc}"
    ".name{fill:#f0f6fc}.pad{fill:#d8dee6}.void{fill:#0d1117}.cut{stroke:#0d1117}"
    ".axis,.twin{stroke:#6e7681}"
)
_SHAPES = (
    "text{font:12px system-ui,-apple-system,'Segoe UI',sans-serif}"
    ".small,.name,.void{font-size:11px}.head{font-weight:600;font-size:15px}"
    ".mid{text-anchor:middle}.end{text-anchor:end}.name,.void,.cut{pointer-events:none}"
    ".axis,.twin,.cut{fill:none}.cut{stroke-width:1.5}.block{stroke-width:.75;stroke-opacity:.7}"
)


def style(colours: Iterable[int]) -> str:
    """The style sheet of a picture that uses these colours, for light and dark mode."""
    used = sorted(set(colours))
    light = "".join(f".c{i}{{fill:{_PALETTE[i][0]}}}.d{i}{{fill:{_PALETTE[i][1]}}}" for i in used)
    dark = "".join(f".c{i}{{fill:{_PALETTE[i][2]}}}.d{i}{{fill:{_PALETTE[i][3]}}}" for i in used)
    return f"{_SHAPES}{_LIGHT}{light}@media (prefers-color-scheme:dark){{{_DARK}{dark}}}"

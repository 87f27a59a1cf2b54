"""The checks of ``vescale-fsdp doctor``. They collect facts to show and findings to act on.

* `software`: versions and environment variables
* `devices`: torch and its devices, asked in a separate process; CPUs and shared memory
* `steps`: two ranks connect and train

Only the separate process and `steps`, which starts the ranks, import torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

# "broken": something does not work. "better": it works, but could be faster or safer.
Level = Literal["broken", "better"]


@dataclass(frozen=True)
class Finding:
    """A problem in one line, and what to change in another."""

    level: Level
    what: str
    change: str


@dataclass(frozen=True)
class Fact:
    """One line of the output."""

    label: str
    text: str
    value: Any = None  # for JSON, with units in the keys; None: the text


@dataclass
class Section:
    """The facts and findings about one subject."""

    title: str
    facts: list[Fact] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def add(self, label: str, text: str, value: Any = None) -> None:
        """Add a fact."""
        self.facts.append(Fact(label, text, value))

    def broken(self, what: str, change: str) -> None:
        """Add a finding: something does not work."""
        self.findings.append(Finding("broken", what, change))

    def better(self, what: str, change: str) -> None:
        """Add a finding: something could be better."""
        self.findings.append(Finding("better", what, change))

    def as_json(self) -> dict[str, Any]:
        """The facts by name."""
        return {
            fact.label.replace(" ", "_").replace("-", "_"): (
                fact.text if fact.value is None else fact.value
            )
            for fact in self.facts
            if fact.label
        }


def look(title: str, fill: Callable[[Section], None]) -> Section:
    """Make a section and call ``fill`` on it. If ``fill`` raises, the error becomes a finding."""
    section = Section(title)
    try:
        fill(section)
    except Exception as error:  # noqa: BLE001  # an error here becomes a finding
        section.better(
            f"could not finish the check of the {title}: {type(error).__name__}: {error}",
            "nothing; or report it, with this line",
        )
    return section

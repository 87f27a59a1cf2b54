"""The look as text for a terminal of 80 columns, and as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from vescale_fsdp.cli.checkup.findings import Section

_SCHEMA_VERSION = 1


def works(sections: Sequence[Section]) -> bool:
    """Whether nothing is broken."""
    return not any(f.level == "broken" for section in sections for f in section.findings)


def as_json(sections: Sequence[Section]) -> dict[str, Any]:
    """Everything, with units in the names."""
    return {
        "schema_version": _SCHEMA_VERSION,
        "works": works(sections),
        **{section.title.replace("-", "_"): section.as_json() for section in sections},
        "findings": [
            {"about": section.title, "level": f.level, "what": f.what, "change": f.change}
            for section in sections
            for f in section.findings
        ],
    }


def show(sections: Sequence[Section], console: Console) -> None:
    """Print the facts, a table a section, then what to change, then one line that sums it up."""
    width = max(len(fact.label) for section in sections for fact in section.facts)
    for section in sections:
        if not section.facts:
            continue
        console.print(Text(section.title, "bold"))
        table = Table.grid(padding=(0, 2))
        table.add_column(min_width=width + 2)
        table.add_column(overflow="fold")
        for fact in section.facts:
            table.add_row(Text(f"  {fact.label}", "dim"), Text(fact.text))
        console.print(table)
    console.print()
    _show_findings(sections, console)


def _show_findings(sections: Sequence[Section], console: Console) -> None:
    findings = [finding for section in sections for finding in section.findings]
    ordered = sorted(findings, key=lambda each: each.level != "broken")
    for finding in ordered:
        broken = finding.level == "broken"
        mark = Text("does not work" if broken else "better", "bold red" if broken else "yellow")
        console.print(Text.assemble(mark, f": {finding.what}"))
        console.print(Padding(Text(finding.change), (0, 0, 0, 2), expand=False))
    num_broken = sum(finding.level == "broken" for finding in findings)
    num_better = len(findings) - num_broken
    tested = any(section.title == "self-test" for section in sections)
    end = "Everything works" if tested else "No fault seen, without a test"
    if num_broken:
        end = "1 thing does not work" if num_broken == 1 else f"{num_broken} things do not work"
    if num_better:
        end += f"; {num_better} thing{'s' if num_better > 1 else ''} could be better"
    console.print(Text(f"{end}.", "bold" if not num_broken else "bold red"))

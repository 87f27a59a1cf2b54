"""``vescale-fsdp doctor``: shows this machine, tests two ranks on it, and says what to change."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vescale_fsdp.cli.checkup import Section, look
from vescale_fsdp.cli.text import console

if TYPE_CHECKING:
    from rich.console import Console

_SCHEMA_VERSION = 2

_Json = Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")]
_NoSelfTest = Annotated[bool, typer.Option("--no-self-test", help="Only look.")]


def doctor(as_json: _Json = False, no_self_test: _NoSelfTest = False) -> int:
    """Show what this machine has, test it, and say what to change.

    The test starts two processes that talk to each other and train for some seconds. The exit code
    is 0 if all of it works, and 1 if something does not.
    """
    what = "looking" if no_self_test else "testing with two processes"
    with console(stderr=True).status(what) if sys.stderr.isatty() else nullcontext():
        sections = _examine(with_test=not no_self_test)
    works = not any(f.level == "broken" for section in sections for f in section.findings)
    if as_json:
        sys.stdout.write(json.dumps(_as_json(sections, works), indent=1) + "\n")
    else:
        _show(sections, console())
    return 0 if works else 1


def _examine(with_test: bool) -> list[Section]:
    # Imported here, so that --help is fast.
    from vescale_fsdp.cli.checkup import devices, software

    torch = devices.ask_torch()
    sections = [
        look("software", software.look_at_software),
        look("devices", lambda section: devices.look_at_devices(section, torch)),
        look("machine", devices.look_at_machine),
        look(
            "environment",
            lambda section: software.look_at_environment(
                section, dict(os.environ), devices.usable_cpus()
            ),
        ),
    ]
    if with_test and not isinstance(torch, str):
        sections.append(look("self-test", lambda section: _test(section, devices.LIMIT_S)))
    return sections


def _test(section: Section, limit_s: float) -> None:
    try:
        from vescale_fsdp.cli.checkup.steps import look_at_self_test
    except Exception as error:  # noqa: BLE001  # any error is a finding
        section.broken(
            f"import vescale_fsdp: {type(error).__name__}: {error}",
            "pip install --force-reinstall --no-deps vescale-fsdp",
        )
        return
    look_at_self_test(section, limit_s)


def _as_json(sections: Sequence[Section], works: bool) -> dict[str, Any]:
    """Return everything as JSON. Keys of numbers end with units."""
    return {
        "schema_version": _SCHEMA_VERSION,
        "works": works,
        **{section.title.replace("-", "_"): section.as_json() for section in sections},
        "findings": [
            {"about": section.title, "level": f.level, "what": f.what, "change": f.change}
            for section in sections
            for f in section.findings
        ],
    }


def _show(sections: Sequence[Section], console: Console) -> None:
    """Print a table of facts for each section, then what to change, then one line as a summary."""
    from rich.table import Table
    from rich.text import Text

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
    from rich.padding import Padding
    from rich.text import Text

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

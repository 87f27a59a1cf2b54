"""``vescale-fsdp doctor``: shows this machine, tests two ranks on it, and says what to change."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Annotated, Any

import typer

from vescale_fsdp.cli.checkup import Section, look
from vescale_fsdp.cli.checkup.devices import LIMIT_S, LOOK_CHANGES, Outcome
from vescale_fsdp.cli.text import console

if TYPE_CHECKING:
    from rich.console import Console

_SCHEMA_VERSION = 1

_Json = Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")]
_NoSelfTest = Annotated[bool, typer.Option("--no-self-test", help="Only look.")]


def doctor(as_json: _Json = False, no_self_test: _NoSelfTest = False) -> int:
    """Show what this machine has, test it, and say what to change.

    The test starts two processes that talk to each other, train and save for some seconds. The
    exit code is 0 if all of it works, and 1 if something does not.
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
    from vescale_fsdp.cli.checkup.devices import ask_torch, look_at_devices
    from vescale_fsdp.cli.checkup.host import look_at_host, usable_cpus
    from vescale_fsdp.cli.checkup.software import look_at_environment, look_at_software

    environ = dict(os.environ)
    # Before the self test, which loads the machine.
    machine = look("machine", look_at_host)
    outcome, loopback = ask_torch(), ""
    if with_test:
        loopback = self_test(outcome)
    sections = [
        look("software", look_at_software),
        look("devices", lambda section: look_at_devices(section, outcome)),
        machine,
        look("environment", lambda section: look_at_environment(section, environ, usable_cpus())),
    ]
    if with_test:
        test = look("self-test", lambda it: look_at_self_test(it, outcome, loopback))
        sections.append(test)
    return sections


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


_LOOPBACK_NAMES = ("lo", "lo0")  # Linux, macOS
_SLOW_MB_PER_S = 100.0  # two idle cores reach ten times that over the loopback

# The steps to show, and what each one proves.
_SHOWN = {
    "import vescale_fsdp": "done",
    "connect": "done",
    "all-gather": "right numbers",
    "all-to-all": "right numbers",
    "bandwidth": "",
    "training step": "same weights as one process",
    "checkpoint": "written and read (DCP)",
}
_REPORT = (
    "fix the other findings first; if that does not help, report it with the output of: "
    "vescale-fsdp doctor --json"
)
_CHANGES = {
    "import vescale_fsdp": "pip install --force-reinstall --no-deps vescale-fsdp",
    "connect": "name the network interface: export GLOO_SOCKET_IFNAME=..., see: ip address",
    "checkpoint": "check that the temporary folder is writable; TMPDIR=... names another",
}


def self_test(outcome: Outcome, limit_s: float = LIMIT_S) -> str:
    """Run all steps on two ranks if torch works, and add the results to ``outcome``.

    Returns:
        The name of the loopback interface if the ranks could connect only over it, else "".
    """
    if outcome.failed is not None:
        return ""
    begin, step = time.monotonic(), "import vescale_fsdp"
    try:
        from vescale_fsdp.cli.checkup.steps import run_steps
    except Exception as error:  # noqa: BLE001  # any error is a finding
        outcome.failed, outcome.error = step, " ".join(f"{type(error).__name__}: {error}".split())
        return ""
    outcome.total_s = round(time.monotonic() - begin, 3)
    outcome.values[step], outcome.seconds[step] = None, outcome.total_s
    loopback = [name for _, name in socket.if_nameindex() if name in _LOOPBACK_NAMES]
    is_told = os.environ.get("GLOO_SOCKET_IFNAME") in loopback  # a second try says nothing then
    return loopback[0] if run_steps(outcome, limit_s) and loopback and not is_told else ""


def look_at_self_test(section: Section, outcome: Outcome, loopback: str = "") -> None:
    """Add the result of each step, and findings if one failed or was slow."""
    if outcome.failed in LOOK_CHANGES:  # the section on devices reports it
        section.add("result", "not tried", {"ok": None})
        return
    for step, done in _SHOWN.items():
        if step not in outcome.values:
            failed = step == outcome.failed
            section.add(
                step, "FAILED" if failed else "not tried", {"ok": False if failed else None}
            )
            continue
        seconds = outcome.seconds[step]
        if step == "bandwidth":
            _look_at_bandwidth(section, outcome.values[step], seconds)
        else:
            section.add(step, f"{done}, {seconds:.2f} s", {"ok": True, "seconds": seconds})
    section.add("total", f"{outcome.total_s:.1f} s", {"seconds": round(outcome.total_s, 2)})
    if loopback:
        section.broken(
            "two processes on this machine find each other only over the loopback",
            f"export GLOO_SOCKET_IFNAME={loopback}; for several machines, the one they share",
        )
    if outcome.failed is not None:
        section.broken(f"{outcome.failed}: {outcome.error}", _CHANGES.get(outcome.failed, _REPORT))


def _look_at_bandwidth(section: Section, speeds: Mapping[str, Any], seconds: float) -> None:
    gather, exchange = speeds["all_gather_mb_per_s"], speeds["all_to_all_mb_per_s"]
    value: dict[str, Any] = {"ok": True, "seconds": seconds, **speeds}
    section.add(
        "bandwidth",
        f"all-gather {gather:,.0f} MB/s, all-to-all {exchange:,.0f} MB/s: what a rank "
        f"receives while it sends as much, {speeds['message_bytes'] >> 20} MiB a message",
        value,
    )
    slowest = min(gather, exchange)
    if slowest < _SLOW_MB_PER_S:
        section.better(
            f"processes exchange only {slowest:,.0f} MB/s within this machine",
            "end other jobs, or give the ranks CPUs of their own (taskset, docker run --cpus)",
        )

"""Tests whether two ranks can work together on this machine, and reports each step."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from typing import Any

from vescale_fsdp.cli.checkup import Section
from vescale_fsdp.cli.checkup.devices import LIMIT_S, LOOK_CHANGES, Outcome

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
    return loopback[0] if run_steps(outcome, limit_s) and loopback else ""


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

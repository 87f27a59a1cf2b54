"""Whether rank processes can work together: two of them over gloo, on this machine."""

from __future__ import annotations

import socket
from collections.abc import Mapping
from typing import Any

from vescale_fsdp.cli.checkup.devices import LOOK_CHANGES
from vescale_fsdp.cli.checkup.findings import Section
from vescale_fsdp.cli.checkup.processes import LIMIT_S, Outcome, run_steps
from vescale_fsdp.cli.checkup.rank import LAST, LOOKS, MESSAGE_BYTES, STEPS

_LOOPBACK_NAMES = ("lo", "lo0")  # Linux, macOS
_SLOW_MB_PER_S = 100.0  # two idle cores do ten times that over the loopback

# The steps that are shown, and what it means that they are done.
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
    "change what else is named here; if that does not help, report it with the output of: "
    "vescale-fsdp doctor --json"
)
_CHANGES = {
    "import vescale_fsdp": "pip install --force-reinstall --no-deps vescale-fsdp",
    "connect": "name the network interface: export GLOO_SOCKET_IFNAME=..., see: ip address",
    "checkpoint": "see that the temporary folder can be written to; TMPDIR=... names another",
}


def look_at_torch(environ: Mapping[str, str]) -> Outcome:
    """The steps that look at torch and the devices, in one process."""
    return run_steps(LOOKS, 1, environ)


def self_test(environ: Mapping[str, str], limit_s: float = LIMIT_S) -> tuple[Outcome, str]:
    """All steps, on two processes; again over the loopback if they do not find each other.

    Returns:
        The outcome, and the name of the loopback if only over that they have met.
    """
    outcome = _run_all(environ, limit_s)
    loopback = [name for _, name in socket.if_nameindex() if name in _LOOPBACK_NAMES]
    if outcome.failed != "connect" or not loopback:
        return outcome, ""
    again = _run_all({**environ, "GLOO_SOCKET_IFNAME": loopback[0]}, limit_s)
    if "connect" not in again.values:
        return outcome, ""
    again.total_s += outcome.total_s
    return again, loopback[0]


def _run_all(environ: Mapping[str, str], limit_s: float) -> Outcome:
    outcome = run_steps(list(STEPS), 2, environ, limit_s)
    if outcome.failed == LAST:  # gloo now and then aborts there (torch 2.13), when all is done
        outcome.failed, outcome.error = None, ""
    return outcome


def look_at_self_test(section: Section, outcome: Outcome, loopback: str = "") -> None:
    """Fill in what each step came to, and findings where one failed or was slow."""
    if outcome.failed in LOOK_CHANGES:  # it is told with the devices
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


def _look_at_bandwidth(section: Section, speeds: Mapping[str, float], seconds: float) -> None:
    gather, exchange = speeds["all_gather_mb_per_s"], speeds["all_to_all_mb_per_s"]
    value: dict[str, Any] = {"ok": True, "seconds": seconds, **speeds}
    section.add(
        "bandwidth",
        f"all-gather {gather:,.0f} MB/s, all-to-all {exchange:,.0f} MB/s: what a rank "
        f"receives while it sends as much, {MESSAGE_BYTES >> 20} MiB a message",
        {**value, "message_bytes": MESSAGE_BYTES},
    )
    slowest = min(gather, exchange)
    if slowest < _SLOW_MB_PER_S:
        section.better(
            f"processes exchange only {slowest:,.0f} MB/s within this machine",
            "end other jobs, or give the ranks CPUs of their own (taskset, docker run --cpus)",
        )

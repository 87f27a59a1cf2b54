"""Checks torch's build, its devices and its communication backends.

A separate process runs the steps of `_STEPS` with a time limit, and prints a JSON line for each::

    {"step": "import torch", "seconds": 2.1, "value": {...}}
    {"step": "devices", "error": "RuntimeError: ..."}
"""

from __future__ import annotations

import contextlib
import json
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vescale_fsdp.cli.checkup import Section
from vescale_fsdp.cli.text import binary

START = "start"  # the step that has failed if the processes could not be started
LIMIT_S = 60.0  # importing torch takes 2 s, but up to half a minute from a cold disk

# One of these exists if the NVIDIA driver is loaded, or the container has its devices.
_NVIDIA = ("proc/driver/nvidia/version", "dev/nvidia0", "dev/nvidiactl")
_TAKEN = 0.1  # share of a device's memory
_SLOW_IMPORT_S = 15.0  # from a warm local disk it takes 2 s
# It gets the sys.path of this process, so that it imports the same packages.
_CODE = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from vescale_fsdp.cli.checkup.devices import report
report()
"""
# What to change if one of these steps has failed.
LOOK_CHANGES = {
    START: "check that the temporary folder is writable; TMPDIR=... names another",
    "import torch": "do what it says; or install torch again, see pytorch.org/get-started",
    "devices": "check whether the driver answers (nvidia-smi); CUDA_VISIBLE_DEVICES= runs without "
    "GPUs",
}


@dataclass
class Outcome:
    """The results of steps that other processes run.

    Attributes:
        values: the result of each completed step.
        seconds: the time of each completed step, on the slowest rank.
        failed: the step that failed; None if all are complete.
        error: the reason, if known.
        total_s: time from start to end.
    """

    values: dict[str, Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    failed: str | None = None
    error: str = ""
    total_s: float = 0.0


def ask_torch(limit_s: float = LIMIT_S) -> Outcome:
    """Run the steps of `_STEPS` in a separate process."""
    command = [sys.executable, "-c", _CODE, json.dumps(sys.path)]
    outcome, why = Outcome(), ""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s, check=False
        )
        lines, why = done.stdout, _end(done)
    except subprocess.TimeoutExpired as error:
        lines, why = error.stdout or b"", f"no answer within {limit_s:g} s"
    except OSError as error:
        return Outcome(failed=START, error=f"{type(error).__name__}: {error}")
    for line in lines.decode(errors="replace").splitlines():
        if line.startswith('{"step"'):  # torch and its libraries may print other lines
            found = json.loads(line)
            if "error" in found:
                why = found["error"]
            else:
                outcome.values[found["step"]] = found["value"]
                outcome.seconds[found["step"]] = found["seconds"]
    outcome.failed = next((step for step in _STEPS if step not in outcome.values), None)
    outcome.error = " ".join(why.split()) if outcome.failed else ""
    return outcome


def _end(done: subprocess.CompletedProcess[bytes]) -> str:
    """Describe how a process ended that has not reported all steps."""
    how = f"exit code {done.returncode}"
    if done.returncode < 0:
        with contextlib.suppress(ValueError):
            how = f"signal {signal.Signals(-done.returncode).name}"
    said = done.stderr.decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(said) if line.strip()), "")
    return f"its process ended with {how}" + (f": {last}" if last else "")


def report() -> None:
    """Run the steps until one fails, and print the result of each."""
    for step, do in _STEPS.items():
        begin = time.perf_counter()
        found: dict[str, Any] = {"step": step}
        try:
            found |= {"value": do(), "seconds": round(time.perf_counter() - begin, 3)}
        except Exception as error:  # noqa: BLE001  # any error is a finding
            found["error"] = f"{type(error).__name__}: {error}"
        print(f"\n{json.dumps(found)}", flush=True)
        if "error" in found:
            return


def _import_torch() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    has_distributed = dist.is_available()
    return {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "debug": bool(torch.version.debug),
        "threads": torch.get_num_threads(),
        "distributed": has_distributed,
        "backends": [
            name
            for name in ("gloo", "nccl", "mpi", "ucc", "xccl")
            if has_distributed and getattr(dist, f"is_{name}_available", lambda: False)()
        ],
    }


def _find_devices() -> dict[str, Any]:
    found: dict[str, Any] = {"type": None, "devices": [], "complaint": ""}
    from vescale_fsdp import devices

    with warnings.catch_warnings(record=True) as caught:  # they may say why torch sees no device
        warnings.simplefilter("always")
        found |= devices.describe_all()
    found["complaint"] = "; ".join(str(each.message) for each in caught)
    return found


_STEPS: dict[str, Callable[[], Any]] = {"import torch": _import_torch, "devices": _find_devices}


def look_at_devices(section: Section, outcome: Outcome, root: Path = Path("/")) -> None:
    """Add facts and findings about torch and its devices.

    ``root`` is the root of the file system, for tests.
    """
    if outcome.failed in LOOK_CHANGES:
        section.broken(f"{outcome.failed}: {outcome.error}", LOOK_CHANGES[outcome.failed])
    torch = outcome.values.get("import torch")
    if torch is None:
        section.add("torch", "did not answer", {"ok": False})
        return
    section.add("torch build", _build(torch), torch)
    seconds = outcome.seconds["import torch"]
    if seconds > _SLOW_IMPORT_S:
        section.better(
            f"importing torch took {seconds:.0f} s, in each process",
            "put the environment on a local disk; or end other jobs",
        )
    found = outcome.values.get("devices")
    if found is not None:
        _add_devices(section, found)
        _look_for_unused(section, torch, found, any((root / each).exists() for each in _NVIDIA))
    _look_at_backends(section, torch, found or {})


def _build(torch: Mapping[str, Any]) -> str:
    kind = "for CPUs"
    if torch["cuda"]:
        kind = f"for CUDA {torch['cuda']}"
    elif torch["hip"]:
        kind = f"for ROCm {torch['hip']}"
    slow = ", a debug build" if torch["debug"] else ""
    threads = torch["threads"]
    return f"{kind}{slow}; {threads} thread{'s' if threads > 1 else ''} a process"


def _add_devices(section: Section, found: Mapping[str, Any]) -> None:
    devices = found["devices"]
    if not devices:
        section.add("devices", "no accelerator: training runs on the CPU", [])
        return
    lines = [_device(index, each) for index, each in enumerate(devices)]
    section.add("devices", "\n".join(lines), devices)
    for index, each in enumerate(devices):
        total, free = each.get("total_bytes", 0), each.get("free_bytes", 0)
        if total - free > _TAKEN * total:
            section.better(
                f"{binary(total - free)} of device {index}'s {binary(total)} are taken",
                "end the jobs that hold it; nvidia-smi lists them",
            )
    if found.get("peer_access") is False:
        section.better(
            "the devices cannot read each other's memory: NCCL goes through the host",
            "see: nvidia-smi topo -m; in virtual machines, turn ACS off",
        )


def _device(index: int, device: Mapping[str, Any]) -> str:
    if "total_bytes" not in device:
        return f"{index}: {device['name']}"
    memory = f"{binary(device['total_bytes'])}, {binary(device['free_bytes'])} free"
    return f"{index}: {device['name']} (sm {device['capability']}), {memory}"


def _look_for_unused(
    section: Section, torch: Mapping[str, Any], found: Mapping[str, Any], has_nvidia: bool
) -> None:
    if found["devices"]:
        return
    if torch["cuda"] and (has_nvidia or found["complaint"]):
        why = f": {found['complaint']}" if found["complaint"] else ""
        section.better(
            f"torch sees no GPU{why}",
            "check whether the driver answers (nvidia-smi) and knows this CUDA; look at "
            "CUDA_VISIBLE_DEVICES",
        )
    elif has_nvidia and not torch["hip"]:
        section.better(
            "there is an NVIDIA GPU, but this torch is built for CPUs only",
            "install a torch for CUDA, see pytorch.org/get-started",
        )


def _look_at_backends(section: Section, torch: Mapping[str, Any], found: Mapping[str, Any]) -> None:
    if not torch["distributed"]:
        section.broken(
            "this torch is built without torch.distributed", "install one of pytorch.org's builds"
        )
        return
    backends = list(torch["backends"])
    named = [f"nccl {found['nccl']}" if b == "nccl" and "nccl" in found else b for b in backends]
    section.add("backends", ", ".join(named) or "none", backends)
    if "gloo" not in backends:
        section.broken(
            "this torch is built without gloo: there is no training on CPUs",
            "install one of pytorch.org's builds",
        )
    if found.get("type") == "cuda" and not torch["hip"] and "nccl" not in backends:
        section.broken(
            "this torch is built without NCCL: its GPUs cannot work together",
            "install one of pytorch.org's builds",
        )

"""Checks torch's build, its devices and its backends, and the shared memory of the machine.

Torch is asked in a separate process with a time limit, because it may hang or crash. That process
prints what it has found as a line of JSON, which begins with ``{"version"``.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vescale_fsdp.cli.checkup import Section
from vescale_fsdp.cli.text import binary

LIMIT_S = 60.0  # importing torch takes 2 s, but up to half a minute from a cold disk

# One of these exists if the NVIDIA driver is loaded, or the container has its devices.
_NVIDIA = ("proc/driver/nvidia/version", "dev/nvidia0", "dev/nvidiactl")
_LITTLE_SHARED_BYTES = 1 << 30  # Docker's default is 64 MiB
_BUILDS = "install one of pytorch.org's builds"
# It gets the sys.path of this process, so that it imports the same packages.
_CODE = """
import json, sys
sys.path[:] = json.loads(sys.argv[1])
from vescale_fsdp.cli.checkup.devices import report
report()
"""


def ask_torch(limit_s: float = LIMIT_S) -> dict[str, Any] | str:
    """What torch says in a process of its own, as `report` prints it; or why it says nothing."""
    command = [sys.executable, "-c", _CODE, json.dumps(sys.path)]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {limit_s:g} s"
    for line in done.stdout.decode(errors="replace").splitlines():
        if line.startswith('{"version"'):  # torch and its libraries may print other lines
            found: dict[str, Any] = json.loads(line)
            return found
    how = f"exit code {done.returncode}"
    if done.returncode < 0:
        how = f"signal {signal.Signals(-done.returncode).name}"
    said = done.stderr.decode(errors="replace").split("\n")
    last = next((line.strip() for line in reversed(said) if line.strip()), "")
    return f"its process ended with {how}" + (f": {last}" if last else "")


def report() -> None:
    """Print what torch has, as JSON."""
    import torch
    import torch.distributed as dist

    from vescale_fsdp import devices

    found = {
        "version": torch.__version__,
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "backends": [
            name
            for name in ("gloo", "nccl", "mpi", "ucc", "xccl")
            if getattr(dist, f"is_{name}_available", lambda: False)()
        ],
        **devices.describe_all(),
    }
    print(f"\n{json.dumps(found)}", flush=True)


def look_at_devices(
    section: Section, torch: Mapping[str, Any] | str, root: Path = Path("/")
) -> None:
    """Add facts and findings about torch and its devices.

    Args:
        torch: what `ask_torch` returns.
        root: the root of the file system, for tests.
    """
    if isinstance(torch, str):
        section.add("torch", "did not answer", {"ok": False})
        section.broken(
            f"import torch: {torch}",
            "do what it says; or check whether the driver answers (nvidia-smi), or install torch "
            "again, see pytorch.org/get-started",
        )
        return
    kind = f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['hip']}"
    section.add("torch build", f"for {kind if torch['cuda'] or torch['hip'] else 'CPUs'}", torch)
    lines = [f"{index}: {_device(each)}" for index, each in enumerate(torch["devices"])]
    section.add("devices", "\n".join(lines) or "no accelerator: training runs on the CPU")
    section.add("backends", ", ".join(torch["backends"]) or "none")
    has_nvidia = any((root / each).exists() for each in _NVIDIA)
    if has_nvidia and not lines and not torch["hip"]:
        is_built = bool(torch["cuda"])
        section.better(
            "torch sees no GPU, but there is an NVIDIA driver"
            + ("" if is_built else ", and this torch is built for CPUs only"),
            "check whether the driver answers (nvidia-smi); look at CUDA_VISIBLE_DEVICES"
            if is_built
            else "install a torch for CUDA, see pytorch.org/get-started",
        )
    if "gloo" not in torch["backends"]:
        section.broken("this torch is built without gloo: there is no training on CPUs", _BUILDS)
    if torch["type"] == "cuda" and not torch["hip"] and "nccl" not in torch["backends"]:
        section.broken("this torch is built without NCCL: its GPUs cannot work together", _BUILDS)


def _device(device: Mapping[str, Any]) -> str:
    if "total_bytes" not in device:
        return str(device["name"])
    memory = f"{binary(device['total_bytes'])}, {binary(device['free_bytes'])} free"
    return f"{device['name']} (sm {device['capability']}), {memory}"


def usable_cpus() -> int:
    """The number of CPUs that this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def look_at_machine(section: Section, shared: Path = Path("/dev/shm")) -> None:
    """Add CPUs and shared memory, and a finding if DataLoader workers and NCCL lack the latter."""
    section.add("cpus", f"{usable_cpus()} of {os.cpu_count()}")
    size = shutil.disk_usage(shared).total if shared.exists() else 0
    section.add("shared memory", binary(size), {"total_bytes": size})
    if size < _LITTLE_SHARED_BYTES:
        section.better(
            f"/dev/shm holds {binary(size)}: DataLoader workers and NCCL run out of it",
            "docker run --shm-size=8g, or mount -o remount,size=8G /dev/shm",
        )

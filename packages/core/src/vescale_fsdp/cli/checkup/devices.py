"""torch's build, the devices that it sees, and the backends between them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vescale_fsdp.cli.amounts import binary
from vescale_fsdp.cli.checkup.findings import Section
from vescale_fsdp.cli.checkup.processes import START, Outcome

# Here if the NVIDIA driver is loaded, or its devices were given to the container.
_NVIDIA = ("proc/driver/nvidia/version", "dev/nvidia0", "dev/nvidiactl")
_TAKEN = 0.1  # of a device's memory
_SLOW_IMPORT_S = 15.0  # from a warm local disk it takes 2
# What to change if the processes could not be started, or one of these steps has failed.
LOOK_CHANGES = {
    START: "see that the temporary folder can be written to; TMPDIR=... names another",
    "import torch": "do what it says; or install torch again, see pytorch.org/get-started",
    "devices": "see whether the driver answers (nvidia-smi); CUDA_VISIBLE_DEVICES= does without",
}


def look_at_devices(section: Section, outcome: Outcome, root: Path = Path("/")) -> None:
    """Fill in what the steps "import torch" and "devices" have found.

    Args:
        root: of the file system.
    """
    if outcome.failed in LOOK_CHANGES:
        section.broken(f"{outcome.failed}: {outcome.error}", LOOK_CHANGES[outcome.failed])
    torch = outcome.values.get("import torch")
    if torch is None:
        section.add("torch", "could not be asked", {"ok": False})
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
            "see whether the driver answers (nvidia-smi) and knows this CUDA; look at "
            "CUDA_VISIBLE_DEVICES",
        )
    elif has_nvidia and not torch["hip"]:
        section.better(
            "there is an NVIDIA GPU, but this torch is built for CPUs alone",
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

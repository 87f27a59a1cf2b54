"""What ``vescale-fsdp doctor`` sees in versions, limits, variables, devices, and says of them."""

from __future__ import annotations

import os
import re
import resource
import shutil
from collections import namedtuple
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import vescale_fsdp
from vescale_fsdp.cli.checkup import Section, host, software
from vescale_fsdp.cli.checkup.devices import Outcome, look_at_devices
from vescale_fsdp.cli.checkup.host import MemoryLimit, cpu_quota, memory_limit
from vescale_fsdp.cli.checkup.software import OURS, contains, look_at_environment

GIB = 1 << 30


def says(section: Section) -> list[tuple[str, str]]:
    return [(finding.level, finding.what) for finding in section.findings]


# Versions


@pytest.mark.parametrize(
    ("range_", "version", "expected"),
    [
        ("", "1.0", True),
        (">=2.13,<2.16", "2.13.0+cpu", True),
        (">=2.13,<2.16", "2.13", True),
        (">=2.13,<2.16", "2.9.1", False),
        (">=2.13,<2.16", "2.15.0", True),
        (">=2.13,<2.16", "2.16.0", False),
        (">=2.13,<2.16", "2.16.0a0+git1234", False),
        (">2.0", "2.0.0", False),
        ("<=2.0", "2.0.0", True),
        ("==0.1.0.dev0", "0.1.0.dev0", True),
        ("==0.1.0.dev0", "0.1.0.dev1", False),
        ("!=1.5", "1.5", False),
        (">=3.11,<3.14", "3.12.3+", True),  # as a distribution of Linux names its own
    ],
)
def test_a_version_is_in_a_range(range_: str, version: str, expected: bool) -> None:
    assert contains(range_, version) is expected


def look_at_software_with(monkeypatch: pytest.MonkeyPatch, **installed: str | None) -> Section:
    """With these versions instead of those that are installed (underscores for dashes)."""
    real = metadata.version

    def version(name: str) -> str:
        found = installed.get(name.replace("-", "_"), "as it is")
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return real(name) if found == "as it is" else found

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(
        metadata, "requires", lambda name: ['torch<2.16,>=2.13; extra == "x"', "numpy>=1.26"]
    )
    section = Section("software")
    software.look_at_software(section)
    return section


OURS_ALONE = {"vescale_fsdp_lightning": None, "vescale_fsdp_accelerate": None}


def test_what_is_installed_here_is_right(monkeypatch: pytest.MonkeyPatch) -> None:
    section = look_at_software_with(monkeypatch)
    assert section.findings == []
    facts = {fact.label: fact.text for fact in section.facts}
    assert facts["vescale-fsdp"] == vescale_fsdp.__version__
    assert facts["torch"] == f"{metadata.version('torch')}  (supported: >=2.13,<2.16)"
    assert facts["python"].endswith("(supported: >=3.11,<3.14)")


def test_packages_of_ours_that_do_not_match_are_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    old = {**OURS_ALONE, "vescale_fsdp_lightning": "0.0.9"}
    section = look_at_software_with(monkeypatch, **old)
    ours = vescale_fsdp.__version__
    assert says(section) == [
        ("broken", f"vescale-fsdp-lightning 0.0.9 does not match vescale-fsdp {ours}")
    ]
    assert section.findings[0].change == f"pip install vescale-fsdp-lightning=={ours}"


def test_code_of_another_version_than_the_installed_one_is_broken(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    section = look_at_software_with(monkeypatch, **OURS_ALONE, vescale_fsdp="9.9")
    assert says(section) == [
        (
            "broken",
            "vescale-fsdp 9.9 is installed, but the code that is imported says "
            f"{vescale_fsdp.__version__}",
        )
    ]


def test_code_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    section = look_at_software_with(monkeypatch, **OURS_ALONE, vescale_fsdp=None)
    assert says(section) == [
        (
            "better",
            "vescale-fsdp is imported from a folder, not installed: no plug-in finds it",
        )
    ]


def test_an_unsupported_torch_is_named_with_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    section = look_at_software_with(monkeypatch, **OURS_ALONE, torch="2.16.1+cu130")
    assert says(section) == [
        ("better", "torch 2.16.1+cu130 is not a supported version (>=2.13,<2.16)")
    ]
    assert section.findings[0].change == "pip install 'torch>=2.13,<2.16'"


# Control groups


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_the_tightest_limit_on_the_way_up_counts(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/jobs"
    files = {
        "proc/self/cgroup": "0::/jobs/mine\n",
        f"{group}/memory.max": f"{8 * GIB}\n",
        f"{group}/memory.current": f"{7 * GIB}\n",
        f"{group}/cpu.max": "max 100000\n",
        f"{group}/mine/memory.max": f"{4 * GIB}\n",
        f"{group}/mine/memory.current": f"{2 * GIB}\n",
        f"{group}/mine/cpu.max": "150000 100000\n",
    }
    root = write(tmp_path, files)
    assert memory_limit(root) == MemoryLimit(8 * GIB, 7 * GIB)  # one GiB is left there, two below
    assert cpu_quota(root) == 1.5


def test_limits_of_version_1_are_read(tmp_path: Path) -> None:
    group = "sys/fs/cgroup"
    files = {
        "proc/self/cgroup": "9:memory:/jobs\n4:cpu,cpuacct:/\n0::/\n",
        f"{group}/memory/memory.limit_in_bytes": "9223372036854771712\n",
        f"{group}/memory/jobs/memory.limit_in_bytes": f"{GIB}\n",
        f"{group}/memory/jobs/memory.usage_in_bytes": "1024\n",
        f"{group}/cpu/cpu.cfs_quota_us": "50000\n",
        f"{group}/cpu/cpu.cfs_period_us": "100000\n",
    }
    root = write(tmp_path, files)
    assert memory_limit(root) == MemoryLimit(GIB, 1024)
    assert cpu_quota(root) == 0.5


def test_no_limit_is_none(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:memory:/\n4:cpu:/\n0::/host/path/that/is/not/here\n",
        "sys/fs/cgroup/memory.max": "max\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
        "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
        "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
    }
    root = write(tmp_path, files)
    assert memory_limit(root) is None
    assert cpu_quota(root) is None
    assert memory_limit(tmp_path / "empty") is None


# The machine

GOOD_MACHINE = {
    "proc/meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable: {32 << 20} kB\nHugePages_Total: 0\n",
    "dev/shm/here": "",
    "sys/kernel/mm/transparent_hugepage/enabled": "always [madvise] never\n",
}


def look_at_machine(
    monkeypatch: pytest.MonkeyPatch,
    root: Path,
    shared: tuple[int, int] = (16 * GIB, 16 * GIB),
    files: tuple[int, int] = (65_536, 65_536),
    load: float = 0.5,
    **changed: str,
) -> Section:
    usage = namedtuple("usage", "total used free")
    disk = usage(shared[0], shared[0] - shared[1], shared[1])
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    monkeypatch.setattr(resource, "getrlimit", lambda which: files)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, load, load))
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    section = Section("machine")
    host.look_at_host(section, write(root, {**GOOD_MACHINE, **changed}))
    return section


def test_a_good_machine_has_facts_and_no_findings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    section = look_at_machine(monkeypatch, tmp_path)
    assert section.findings == []
    assert {fact.label: fact.text for fact in section.facts} == {
        "cpus": "8, load 0.5",
        "memory": "64.0 GiB, 32.0 GiB available",
        "shared memory": "16.0 GiB, 16.0 GiB free (/dev/shm)",
        "open files": "65,536",
        "huge pages": "madvise",
    }
    assert section.as_json()["memory"] == {"total_bytes": 64 * GIB, "available_bytes": 32 * GIB}


SCARCE: dict[str, tuple[dict[str, Any], str, str]] = {
    "load": ({"load": 17.0}, "17 processes want to run on 8 CPUs", "end other jobs"),
    "memory": (
        {"proc/meminfo": f"MemTotal: {64 << 20} kB\nMemAvailable: {1 << 20} kB\n"},
        "1.00 GiB of memory are left",
        "end other jobs",
    ),
    "container": (
        {
            "proc/self/cgroup": "0::/\n",
            "sys/fs/cgroup/memory.max": f"{4 * GIB}",
            "sys/fs/cgroup/memory.current": f"{3 * GIB}",
        },
        "1.00 GiB of memory are left in this container",
        "raise its limit (docker run --memory)",
    ),
    "small shm": (
        {"shared": (64 << 20, 64 << 20)},
        "/dev/shm holds 64.0 MiB: DataLoader workers and NCCL run out of it",
        "docker run --shm-size=8g",
    ),
    "full shm": (
        {"shared": (16 * GIB, GIB)},
        "/dev/shm is full: 1.00 GiB of 16.0 GiB are free",
        "remove files that ended jobs have left there",
    ),
    "files": (
        {"files": (1024, 1_048_576)},
        "a process may open 1,024 files",
        "ulimit -n 65536",
    ),
    "files, unlimited": ({"files": (256, -1)}, "a process may open 256 files", "ulimit -n 65536"),
    "files, hard": (
        {"files": (1024, 1024)},
        "a process may open 1,024 files",
        "as root: raise the hard limit",
    ),
    "huge pages": (
        {"sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n"},
        "huge pages are off",
        "as root: echo madvise > ",
    ),
}


@pytest.mark.parametrize("name", list(SCARCE))
def test_what_is_scarce_is_found(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changed, what, change = SCARCE[name]
    (finding,) = look_at_machine(monkeypatch, tmp_path, **changed).findings
    assert finding.level == "better"
    assert finding.what.startswith(what)
    assert finding.change.startswith(change)


def test_a_quota_is_fewer_cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    quota = {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "250000 100000"}
    section = look_at_machine(monkeypatch, tmp_path, **quota)
    assert section.facts[0].text == "2.5 of 8, load 0.5"


# Variables

VARIABLES: dict[str, tuple[dict[str, str], str, str]] = {
    "value": ({"VESCALE_FSDP_REDUCE": "fast"}, "broken", "VESCALE_FSDP_REDUCE=fast"),
    "amount": ({"VESCALE_FSDP_TIMEOUT_S": "-1"}, "broken", "VESCALE_FSDP_TIMEOUT_S=-1"),
    "name": (
        {"VESCALE_FSDP_REDUSE": "auto"},
        "better",
        "VESCALE_FSDP_REDUSE is not one of our variables",
    ),
    "check": (
        {"VESCALE_FSDP_CHECK_ORDER": "1"},
        "better",
        "VESCALE_FSDP_CHECK_ORDER=1 compares every collective of every step",
    ),
    "threads": ({"OMP_NUM_THREADS": "many"}, "better", "OMP_NUM_THREADS=many is not a number"),
    "no threads": ({"OMP_NUM_THREADS": "0"}, "better", "OMP_NUM_THREADS=0 is not a number"),
    "unset threads": ({"OMP_NUM_THREADS": ""}, "better", "OMP_NUM_THREADS is not set"),
    "too many": ({"OMP_NUM_THREADS": "16"}, "better", "OMP_NUM_THREADS=16 is more than the 8 CPUs"),
    "part": (
        {"RANK": "0", "WORLD_SIZE": "2"},
        "broken",
        "RANK is set, but not MASTER_ADDR, MASTER_PORT: init_process_group needs all of them",
    ),
    "port": ({"MASTER_PORT": "http"}, "broken", "MASTER_PORT=http is not a number"),
    "rank": (
        {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"},
        "broken",
        "RANK=2 does not exist in WORLD_SIZE=2",
    ),
    "interface": (
        {"GLOO_SOCKET_IFNAME": "nothing7"},
        "broken",
        "GLOO_SOCKET_IFNAME names nothing7, which this machine does not have",
    ),
    "debug": (
        {"TORCH_DISTRIBUTED_DEBUG": "detail"},
        "better",
        "TORCH_DISTRIBUTED_DEBUG=detail compares every collective",
    ),
    "nccl": ({"NCCL_P2P_DISABLE": "1"}, "better", "NCCL_P2P_DISABLE=1 disables direct"),
}


def look_at(environ: dict[str, str], cpus: float = 8.0) -> Section:
    section = Section("environment")
    look_at_environment(section, environ, cpus)
    return section


@pytest.mark.parametrize("name", list(VARIABLES))
def test_a_variable_that_is_wrong_or_slow_is_found(name: str) -> None:
    environ, level, what = VARIABLES[name]
    section = look_at({"OMP_NUM_THREADS": "2", **environ})
    ((found_level, found),) = says(section)
    assert found_level == level
    assert found.startswith(what)
    assert set(environ) <= set(section.as_json())


def test_good_variables_are_shown_and_others_are_not() -> None:
    environ = {
        "OMP_NUM_THREADS": "4,2",
        "NCCL_DEBUG": "WARN",
        "VESCALE_FSDP_REDUCE": "native",
        "RANK": "1",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "node0",
        "MASTER_PORT": "29500",
        "CUDA_VISIBLE_DEVICES": "",
    }
    section = look_at({**environ, "HOME": "/root", "SOME_TOKEN": "secret"})
    assert section.findings == []
    assert section.as_json() == environ
    assert look_at({}, cpus=1.0).as_json() == {}


def test_every_variable_that_the_source_reads_is_known() -> None:
    read = set()
    for package in ("packages/core", "packages/lightning_plugin", "packages/accelerate_plugin"):
        for path in Path(__file__).parents[4].glob(f"{package}/src/**/*.py"):
            if path.name != "software.py":
                read |= set(re.findall(r'"(VESCALE_FSDP_[A-Z_]+)"', path.read_text()))
    between_processes = {"VESCALE_FSDP_ACCELERATE"}  # the plug-in sets it for its workers
    assert read - between_processes == set(OURS)


# Devices

TORCH = {
    "version": "2.13.0",
    "cuda": "12.8",
    "hip": None,
    "debug": False,
    "threads": 4,
    "distributed": True,
    "backends": ["gloo", "nccl"],
}
GPU = {"name": "H200", "capability": "9.0", "total_bytes": 141 * GIB, "free_bytes": 140 * GIB}
TWO = {
    "type": "cuda",
    "devices": [GPU, GPU],
    "complaint": "",
    "nccl": "2.27.5",
    "peer_access": True,
}
NONE = {"type": None, "devices": [], "complaint": ""}


def look_at_torch(
    root: Path, torch: dict[str, Any], devices: dict[str, Any], has_nvidia: bool = True
) -> Section:
    if has_nvidia:
        write(root, {"proc/driver/nvidia/version": "NVRM version: 570"})
    section = Section("devices")
    values = {"import torch": torch, "devices": devices}
    look_at_devices(section, Outcome(values, dict.fromkeys(values, 0.1)), root)
    return section


def test_devices_are_listed_with_their_memory(tmp_path: Path) -> None:
    section = look_at_torch(tmp_path, TORCH, TWO)
    assert section.findings == []
    each = "H200 (sm 9.0), 141 GiB, 140 GiB free"
    assert {fact.label: fact.text for fact in section.facts} == {
        "torch build": "for CUDA 12.8; 4 threads a process",
        "devices": f"0: {each}\n1: {each}",
        "backends": "gloo, nccl 2.27.5",
    }


def test_a_slow_import_is_found() -> None:
    section = Section("devices")
    values = {"import torch": {**TORCH, "cuda": None}, "devices": NONE}
    look_at_devices(section, Outcome(values, {"import torch": 31.4, "devices": 0.0}), Path("/none"))
    assert says(section) == [("better", "importing torch took 31 s, in each process")]


def test_a_machine_without_devices_is_fine(tmp_path: Path) -> None:
    cpu = {**TORCH, "cuda": None, "backends": ["gloo"]}
    assert look_at_torch(tmp_path, cpu, NONE, has_nvidia=False).findings == []


DEVICES: dict[str, tuple[dict[str, Any], dict[str, Any], str, str]] = {
    "cpu build": (
        {"cuda": None, "backends": ["gloo"]},
        NONE,
        "better",
        "there is an NVIDIA GPU, but this torch is built for CPUs only",
    ),
    "driver": (
        {},
        {**NONE, "complaint": "The NVIDIA driver on your system is too old"},
        "better",
        "torch sees no GPU: The NVIDIA driver on your system is too old",
    ),
    "taken": (
        {},
        {**TWO, "devices": [GPU, {**GPU, "free_bytes": 41 * GIB}]},
        "better",
        "100 GiB of device 1's 141 GiB are taken",
    ),
    "no peers": (
        {},
        {**TWO, "peer_access": False},
        "better",
        "the devices cannot read each other's memory",
    ),
    "no nccl": (
        {"backends": ["gloo"]},
        TWO,
        "broken",
        "this torch is built without NCCL",
    ),
    "no gloo": ({"backends": ["nccl"]}, TWO, "broken", "this torch is built without gloo"),
    "no distributed": (
        {"distributed": False, "backends": []},
        TWO,
        "broken",
        "this torch is built without torch.distributed",
    ),
}


@pytest.mark.parametrize("name", list(DEVICES))
def test_what_is_wrong_with_devices_is_found(name: str, tmp_path: Path) -> None:
    torch, devices, level, what = DEVICES[name]
    ((found_level, found),) = says(look_at_torch(tmp_path, {**TORCH, **torch}, devices))
    assert found_level == level
    assert found.startswith(what)

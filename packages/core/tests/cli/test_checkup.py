"""What ``vescale-fsdp doctor`` sees in versions, limits, variables, devices, and says of them."""

from __future__ import annotations

import re
import shutil
from collections import namedtuple
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import vescale_fsdp
from vescale_fsdp.cli.checkup import Section, software
from vescale_fsdp.cli.checkup.devices import look_at_devices, look_at_machine
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


# The machine


@pytest.mark.parametrize(("size", "finds"), [(64 << 20, True), (16 * GIB, False)])
def test_little_shared_memory_is_found(
    size: int, finds: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = namedtuple("usage", "total used free")(size, 0, size)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: disk)
    section = Section("machine")
    look_at_machine(section, tmp_path)
    assert section.as_json()["shared_memory"] == {"total_bytes": size}
    found = [("better", "/dev/shm holds 64.0 MiB: DataLoader workers and NCCL run out of it")]
    assert says(section) == (found if finds else [])
    nowhere = Section("machine")
    look_at_machine(nowhere, tmp_path / "absent")
    assert nowhere.findings[0].change.startswith("docker run --shm-size=8g")


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
    "debug": (
        {"TORCH_DISTRIBUTED_DEBUG": "detail"},
        "better",
        "TORCH_DISTRIBUTED_DEBUG=detail compares every collective",
    ),
    "nccl": ({"NCCL_P2P_DISABLE": "1"}, "better", "NCCL_P2P_DISABLE=1 disables direct"),
}


def look_at(environ: dict[str, str], cpus: int = 8) -> Section:
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
        "VESCALE_FSDP_HOSTS": "1:4",
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
    assert look_at({}, cpus=1).as_json() == {}


def test_every_variable_that_the_source_reads_is_known() -> None:
    read = set()
    for package in ("core", "elastic", "lightning_plugin", "accelerate_plugin"):
        for path in Path(__file__).parents[4].glob(f"packages/{package}/src/**/*.py"):
            if path.name != "software.py":
                read |= set(re.findall(r'"(VESCALE_FSDP_[A-Z_]+)"', path.read_text()))
    between_processes = {"VESCALE_FSDP_ACCELERATE"}  # the plug-in sets it for its workers
    assert read - between_processes == set(OURS)


# Devices

GPU = {"name": "H200", "capability": "9.0", "total_bytes": 141 * GIB, "free_bytes": 140 * GIB}
ON_CUDA = {
    "version": "2.13.0",
    "cuda": "12.8",
    "hip": None,
    "backends": ["gloo", "nccl"],
    "type": "cuda",
    "devices": [GPU, GPU],
}
NONE = {"type": None, "devices": []}
ON_CPU = {**ON_CUDA, **NONE, "cuda": None, "backends": ["gloo"]}


def look_at_torch(root: Path, torch: dict[str, Any], has_nvidia: bool = True) -> Section:
    if has_nvidia:
        (root / "proc/driver/nvidia").mkdir(parents=True)
        (root / "proc/driver/nvidia/version").write_text("NVRM version: 570")
    section = Section("devices")
    look_at_devices(section, torch, root)
    return section


def test_devices_are_listed_with_their_memory(tmp_path: Path) -> None:
    section = look_at_torch(tmp_path, ON_CUDA)
    assert section.findings == []
    each = "H200 (sm 9.0), 141 GiB, 140 GiB free"
    assert {fact.label: fact.text for fact in section.facts} == {
        "torch build": "for CUDA 12.8",
        "devices": f"0: {each}\n1: {each}",
        "backends": "gloo, nccl",
    }
    assert section.as_json()["torch_build"] == ON_CUDA


def test_a_machine_without_devices_is_fine(tmp_path: Path) -> None:
    assert look_at_torch(tmp_path, ON_CPU, has_nvidia=False).findings == []


DEVICES: dict[str, tuple[dict[str, Any], str, str]] = {
    "cpu build": (
        ON_CPU,
        "better",
        "torch sees no GPU, but there is an NVIDIA driver, and this torch is built for CPUs only",
    ),
    "driver": ({**ON_CUDA, **NONE}, "better", "torch sees no GPU, but there is an NVIDIA driver"),
    "no nccl": (
        {**ON_CUDA, "backends": ["gloo"]},
        "broken",
        "this torch is built without NCCL: its GPUs cannot work together",
    ),
    "no gloo": (
        {**ON_CUDA, "backends": ["nccl"]},
        "broken",
        "this torch is built without gloo: there is no training on CPUs",
    ),
}


@pytest.mark.parametrize("name", list(DEVICES))
def test_what_is_wrong_with_devices_is_found(name: str, tmp_path: Path) -> None:
    torch, *expected = DEVICES[name]
    assert says(look_at_torch(tmp_path, torch)) == [tuple(expected)]

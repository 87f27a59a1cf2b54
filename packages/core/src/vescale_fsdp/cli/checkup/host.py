"""Checks the machine: CPUs, memory, shared memory, open files, huge pages, control groups.

A limit of a control group (cgroup) also holds for all groups below it, so the smallest limit of a
process' group and its parents counts. In a container, the path in ``/proc/self/cgroup`` may be the
host's and not exist; then the root of the mount is the container's own group. ``root`` is the root
of the file system, for tests.
"""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from vescale_fsdp.cli.checkup import Section
from vescale_fsdp.cli.text import binary

_UNLIMITED = 1 << 60  # cgroup version 1 writes a number near 2**63 for "no limit"
_LITTLE_MEMORY_BYTES = 2 << 30
_LITTLE_SHARED_BYTES = 1 << 30  # Docker's default is 64 MiB
_FEW_FILES = 4096  # the usual soft limit is 1,024
_MANY_FILES = 65_536
_BUSY = 2.0  # load average per CPU


def usable_cpus(root: Path = Path("/")) -> float:
    """Return the number of CPUs that this process can use."""
    affinity = getattr(os, "sched_getaffinity", None)
    cpus = len(affinity(0)) if affinity else os.cpu_count() or 1
    return min(float(cpus), cpu_quota(root) or float(cpus))


def look_at_host(section: Section, root: Path = Path("/")) -> None:
    """Add the facts, and findings if something is scarce."""
    _look_at_cpus(section, root)
    _look_at_memory(section, root)
    _look_at_shared_memory(section, root / "dev/shm")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    _look_at_open_files(section, soft, hard)
    _look_at_huge_pages(section, root / "sys/kernel/mm/transparent_hugepage/enabled")


def _look_at_cpus(section: Section, root: Path) -> None:
    cpus, present = usable_cpus(root), os.cpu_count() or 1
    load = os.getloadavg()[0]
    text = f"{cpus:g}" if cpus == present else f"{cpus:g} of {present}"
    value = {"usable": cpus, "present": present, "load": round(load, 2)}
    section.add("cpus", f"{text}, load {load:.1f}", value)
    if load > _BUSY * present:
        section.better(
            f"{load:.0f} processes want to run on {present} CPUs: everything is slow",
            "end other jobs, or wait for them",
        )


def _look_at_memory(section: Section, root: Path) -> None:
    amounts: dict[str, int] = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        words = line.split()
        if len(words) == 3:  # in KiB
            amounts[words[0].rstrip(":")] = int(words[1]) << 10
    total, free = amounts["MemTotal"], amounts["MemAvailable"]
    value = {"total_bytes": total, "available_bytes": free}
    section.add("memory", f"{binary(total)}, {binary(free)} available", value)
    where, more = "", "end other jobs, or shard over more machines"
    limit = memory_limit(root)
    if limit is not None and limit.limit_bytes < total:
        left = max(limit.limit_bytes - limit.used_bytes, 0)
        section.add(
            "memory limit",
            f"{binary(limit.limit_bytes)} (cgroup), {binary(left)} left",
            {"limit_bytes": limit.limit_bytes, "left_bytes": left},
        )
        if left < free:
            free, where, more = left, " in this container", "raise its limit (docker run --memory)"
    if free < _LITTLE_MEMORY_BYTES:
        section.better(f"{binary(free)} of memory are left{where}", more)


def _look_at_shared_memory(section: Section, folder: Path) -> None:
    if not folder.exists():
        section.add("shared memory", "none (/dev/shm)")
        section.better(
            "there is no /dev/shm: DataLoader workers and NCCL need it",
            "mount -t tmpfs -o size=8G tmpfs /dev/shm",
        )
        return
    usage = shutil.disk_usage(folder)
    section.add(
        "shared memory",
        f"{binary(usage.total)}, {binary(usage.free)} free (/dev/shm)",
        {"total_bytes": usage.total, "free_bytes": usage.free},
    )
    if usage.total < _LITTLE_SHARED_BYTES:
        section.better(
            f"/dev/shm holds {binary(usage.total)}: DataLoader workers and NCCL run out of it",
            "docker run --shm-size=8g, or mount -o remount,size=8G /dev/shm",
        )
    elif usage.free < usage.total // 10:
        section.better(
            f"/dev/shm is full: {binary(usage.free)} of {binary(usage.total)} are free",
            "remove files that ended jobs have left there",
        )


def _look_at_open_files(section: Section, soft: int, hard: int) -> None:
    most, now = _files(hard), _files(soft)
    text = now if soft == hard else f"{now}, at most {most}"
    section.add("open files", text, {"soft": soft, "hard": hard})
    if soft != resource.RLIM_INFINITY and soft < _FEW_FILES:
        wanted = _MANY_FILES if hard == resource.RLIM_INFINITY else min(_MANY_FILES, hard)
        change = f"ulimit -n {wanted}, in the shell that starts the job"
        if wanted <= soft:
            change = f"as root: raise the hard limit (nofile {_MANY_FILES}, limits.conf)"
        section.better(f"a process may open {now} files: DataLoader workers need more", change)


def _files(limit: int) -> str:
    return "any number" if limit == resource.RLIM_INFINITY else f"{limit:,}"


def _look_at_huge_pages(section: Section, setting: Path) -> None:
    try:
        text = setting.read_text()
    except OSError:
        return
    chosen = text.partition("[")[2].partition("]")[0] or text.strip()
    section.add("huge pages", chosen)
    if chosen == "never":
        section.better(
            "huge pages are off: buffers in CPU memory take more time at their first touch",
            f"as root: echo madvise > {setting}",
        )


@dataclass(frozen=True)
class MemoryLimit:
    """The lowest limit on memory, and how much of it is in use."""

    limit_bytes: int
    used_bytes: int


def memory_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """Return the memory limit of this process. None: there is no limit."""
    found = []
    for folder in _folders(root, "memory"):
        for limit_name, used_name in (
            ("memory.max", "memory.current"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes"),
        ):
            limit = _number(folder / limit_name)
            if limit is not None and limit < _UNLIMITED:
                found.append(MemoryLimit(limit, _number(folder / used_name) or 0))
    return min(found, key=lambda each: each.limit_bytes - each.used_bytes, default=None)


def cpu_quota(root: Path = Path("/")) -> float | None:
    """Return the number of CPUs that the control group allows. None: there is no limit."""
    found = []
    for folder in _folders(root, "cpu"):
        words = _read(folder / "cpu.max").split()
        if len(words) == 2 and words[0].isdigit():
            found.append(int(words[0]) / int(words[1]))
        quota, period = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
        if quota and period and quota > 0:
            found.append(quota / period)
    return min(found, default=None)


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders of this process' control group and of its parents, for one controller."""
    mounted = root / "sys/fs/cgroup"
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, names, path = line.split(":", 2)
        if names and controller not in names.split(","):
            continue
        mount = mounted / names if names else mounted
        if names and not mount.exists():
            mount = mounted / controller
        group = mount / path.lstrip("/")
        while group != mount:
            yield group
            group = group.parent
        yield mount


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""

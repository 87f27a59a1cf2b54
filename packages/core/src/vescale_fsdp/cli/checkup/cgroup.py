"""What a container may use: limits of control groups, of version 2 and of version 1.

A limit holds for a group and all groups below it, so the smallest on the way up counts. In a
container the path in ``/proc/self/cgroup`` may be the host's and lead nowhere; the mount's root
is then the container's own group.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60  # version 1 says "no limit" with a number near 2**63


@dataclass(frozen=True)
class MemoryLimit:
    """The tightest limit on memory, and how much of it is in use."""

    limit_bytes: int
    used_bytes: int


def memory_limit(root: Path = Path("/")) -> MemoryLimit | None:
    """The memory limit of this process, or None if there is none.

    Args:
        root: of the file system.
    """
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
    """How many CPUs' worth of time this process may use, or None if there is no limit."""
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
    """The folders of this process' group and of those above it, for one controller."""
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

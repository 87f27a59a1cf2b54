"""Checks versions of Python and packages, and environment variables that change how a job runs."""

from __future__ import annotations

import difflib
import platform
import sys
from collections.abc import Mapping
from importlib import metadata

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.version import InvalidVersion, Version

import vescale_fsdp
from vescale_fsdp.cli.checkup import Section

_CORE = "vescale-fsdp"
_PLUGINS = ("vescale-fsdp-lightning", "vescale-fsdp-accelerate")
# Shown if they are installed, in addition to the requirements of our packages.
_PARTNERS = ("torch", "numpy", "lightning", "pytorch-lightning", "accelerate", "transformers")
# Our variables and their allowed values. Empty: any number that is not negative.
OURS: dict[str, tuple[str, ...]] = {
    "VESCALE_FSDP_CHECK_MEMORY": ("0", "1"),
    "VESCALE_FSDP_CHECK_ORDER": ("0", "1"),
    "VESCALE_FSDP_CODEC": ("auto", "torch", "triton"),
    "VESCALE_FSDP_HOSTS": (),
    "VESCALE_FSDP_MEETING": (),
    "VESCALE_FSDP_MEMORY_DIR": (),
    "VESCALE_FSDP_REDUCE": ("auto", "native", "all_to_all"),
    "VESCALE_FSDP_SMALL_BYTES": (),
    "VESCALE_FSDP_TIMEOUT_S": (),
    "VESCALE_FSDP_WATCHDOG_S": (),
}
_TEXTS = ("VESCALE_FSDP_HOSTS", "VESCALE_FSDP_MEETING", "VESCALE_FSDP_MEMORY_DIR")
# Variables that begin so are shown.
_SHOWN = (
    *("CUDA_", "HIP_", "GLOO_", "MKL_", "NCCL_", "OMP_", "PYTORCH_", "TORCH_", "VESCALE_FSDP_"),
    *("LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_", "RANK", "WORLD_SIZE"),
)
# Variables that slow a job down: the values, and what they do.
_SLOW = (
    ("CUDA_LAUNCH_BLOCKING", ("1",), "waits for every kernel"),
    ("TORCH_DISTRIBUTED_DEBUG", ("DETAIL",), "compares every collective between ranks"),
    ("NCCL_DEBUG", ("INFO", "TRACE"), "writes a lot"),
    ("NCCL_P2P_DISABLE", ("1",), "disables direct communication between GPUs"),
    ("NCCL_SHM_DISABLE", ("1",), "disables shared memory between GPUs"),
    ("NCCL_IB_DISABLE", ("1",), "disables InfiniBand for NCCL"),
    ("VESCALE_FSDP_CHECK_MEMORY", ("1",), "frees no memory, and fills it with NaN instead"),
    ("VESCALE_FSDP_CHECK_ORDER", ("1",), "compares every collective of every step"),
)


def look_at_software(section: Section) -> None:
    """Add versions, and findings if one is not supported or our packages do not match."""
    ours = {name: _version(name) for name in (_CORE, *_PLUGINS)}
    ranges = {
        each.name: _in_order(each.specifier)
        for name in (name for name, version in ours.items() if version)
        for each in map(Requirement, metadata.requires(name) or [])
        if each.name not in ours
    }
    section.add("python", platform.python_version())  # pip does not install us on another one
    section.add("interpreter", sys.executable or "unknown")
    section.add("system", f"{platform.system()} {platform.release()}, {platform.machine()}")
    _look_at_ours(section, ours)
    for name in [*_PARTNERS, *(each for each in ranges if each not in _PARTNERS)]:
        version, needed = _version(name), ranges.get(name, "")
        if version is None:
            continue
        section.add(name, f"{version}  (supported: {needed})" if needed else version, version)
        if not contains(needed, version):
            section.better(
                f"{name} {version} is not a supported version ({needed})",
                f"pip install '{name}{needed}'",
            )


def _look_at_ours(section: Section, ours: dict[str, str | None]) -> None:
    loaded = vescale_fsdp.__version__
    core = ours[_CORE]
    section.add(_CORE, loaded)
    if core is None:
        section.better(
            f"{_CORE} is imported from a folder, not installed: no plug-in finds it",
            "pip install -e packages/core, in a checkout",
        )
    elif core != loaded:
        section.broken(
            f"{_CORE} {core} is installed, but the code that is imported says {loaded}",
            f"pip install --force-reinstall --no-deps {_CORE}, or the checkout again with -e",
        )
    for name in _PLUGINS:
        version = ours[name]
        if version is None:
            continue
        section.add(name, version)
        if version != loaded:
            section.broken(
                f"{name} {version} does not match {_CORE} {loaded}",
                f"pip install {name}=={loaded}",
            )


def _in_order(specifiers: SpecifierSet) -> str:
    """Format a range with the lower bound first. Metadata have any order."""
    return ",".join(sorted(map(str, specifiers), key=lambda each: (each[:1] != ">", each)))


def contains(range_: str, version: str) -> bool:
    """Whether a version is in a range. True if it is not a version in the form of PEP 440."""
    try:
        return SpecifierSet(range_).contains(Version(version), prereleases=True)
    except InvalidVersion:
        return True


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def look_at_environment(section: Section, environ: Mapping[str, str], cpus: int) -> None:
    """Add the variables that are set, and findings if a value is wrong or slow.

    Args:
        environ: as ``os.environ``.
        cpus: number of CPUs that this process can use.
    """
    for name in sorted(environ):
        if name.startswith(_SHOWN):
            section.add(name, environ[name] or "(empty)", environ[name])
    if not section.facts:
        section.add("", "no relevant variable is set")
    _look_at_our_variables(section, environ)
    _look_at_threads(section, environ, cpus)
    for name, values, effect in _SLOW:
        value = environ.get(name, "")
        if value.upper() in values:
            section.better(
                f"{name}={value} {effect}", f"unset {name}, unless you search for a fault"
            )


def _look_at_our_variables(section: Section, environ: Mapping[str, str]) -> None:
    for name, value in environ.items():
        if not name.startswith("VESCALE_FSDP_"):
            continue
        if name not in OURS:
            close = difflib.get_close_matches(name, OURS, 1) or [", ".join(OURS)]
            section.better(f"{name} is not one of our variables", f"unset it; there is {close[0]}")
        elif OURS[name] and value not in OURS[name]:
            section.broken(f"{name}={value}", f"unset it, or set one of: {', '.join(OURS[name])}")
        elif not OURS[name] and name not in _TEXTS and not _is_amount(value):
            section.broken(f"{name}={value}", "unset it, or set a number that is not negative")


def _is_amount(text: str) -> bool:
    try:
        return float(text) >= 0
    except ValueError:
        return False


def _look_at_threads(section: Section, environ: Mapping[str, str], cpus: int) -> None:
    value = environ.get("OMP_NUM_THREADS")
    if not value:
        if cpus > 1:
            section.better(
                "OMP_NUM_THREADS is not set: each rank starts a thread on every CPU",
                f"export OMP_NUM_THREADS={max(1, cpus // 2)} for 2 ranks: CPUs by ranks",
            )
        return
    threads = value.split(",")[0].strip()  # it may be a list with a number per level
    if not threads.isdigit() or not int(threads):
        section.better(
            f"OMP_NUM_THREADS={value} is not a number above 0", "export OMP_NUM_THREADS=1"
        )
    elif int(threads) > cpus:
        section.better(
            f"OMP_NUM_THREADS={value} is more than the {cpus} CPUs",
            f"export OMP_NUM_THREADS={max(1, cpus // 2)} for 2 ranks: CPUs by ranks",
        )

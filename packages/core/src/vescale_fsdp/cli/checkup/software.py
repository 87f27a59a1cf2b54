"""Checks versions of Python and packages, and environment variables that change how a job runs."""

from __future__ import annotations

import difflib
import platform
import socket
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
_PATHS = ("VESCALE_FSDP_MEETING", "VESCALE_FSDP_MEMORY_DIR")
_SHOWN = (
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "MKL_NUM_THREADS",
    "OMP_NUM_THREADS",
    "PYTORCH_ALLOC_CONF",
    "PYTORCH_CUDA_ALLOC_CONF",
    "RANK",
    "TORCH_DISTRIBUTED_DEBUG",
    "WORLD_SIZE",
)
_SHOWN_FAMILIES = ("VESCALE_FSDP_", "NCCL_", "TORCH_NCCL_", "GLOO_")
_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
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
_LONGEST = 200


def look_at_software(section: Section) -> None:
    """Add versions, and findings if one is not supported or our packages do not match."""
    ours = {name: _version(name) for name in (_CORE, *_PLUGINS)}
    needs_python, ranges = _ranges([name for name, version in ours.items() if version])
    python = platform.python_version()
    section.add("python", _with_range(python, needs_python), python)
    if not contains(needs_python, python):
        section.better(
            f"Python {python} is not supported ({needs_python})",
            f"make an environment with a Python {needs_python}",
        )
    section.add("interpreter", sys.executable or "unknown")
    section.add("system", f"{platform.system()} {platform.release()}, {platform.machine()}")
    _look_at_ours(section, ours)
    for name in [*_PARTNERS, *(each for each in ranges if each not in _PARTNERS)]:
        version, needed = _version(name), ranges.get(name, "")
        if version is None:
            continue
        section.add(name, _with_range(version, needed), version)
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


def _ranges(distributions: list[str]) -> tuple[str, dict[str, str]]:
    """Return the range of Python and the ranges of packages that these distributions require."""
    python, ranges = "", {}
    for name in distributions:
        python = python or _in_order(SpecifierSet(metadata.metadata(name)["Requires-Python"]))
        for each in map(Requirement, metadata.requires(name) or []):
            if each.name not in (_CORE, *_PLUGINS):
                ranges[each.name] = _in_order(each.specifier)
    return python, ranges


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


def _with_range(version: str, needed: str) -> str:
    return f"{version}  (supported: {needed})" if needed else version


def look_at_environment(section: Section, environ: Mapping[str, str], cpus: float) -> None:
    """Add the variables that are set, and findings if a value is wrong or slow.

    Args:
        environ: as ``os.environ``.
        cpus: number of CPUs that this process can use.
    """
    for name in sorted(environ):
        if name in _SHOWN or name.startswith(_SHOWN_FAMILIES):
            text = environ[name]
            shown = text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
            section.add(name, shown or "(empty)", text)
    if not section.facts:
        section.add("", "no relevant variable is set")
    _look_at_our_variables(section, environ)
    _look_at_threads(section, environ, cpus)
    _look_at_rendezvous(section, environ)
    _look_at_interface(section, environ)
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
        elif not OURS[name] and name not in _PATHS and not _is_amount(value):
            section.broken(f"{name}={value}", "unset it, or set a number that is not negative")


def _is_amount(text: str) -> bool:
    try:
        return float(text) >= 0
    except ValueError:
        return False


def _look_at_threads(section: Section, environ: Mapping[str, str], cpus: float) -> None:
    value = environ.get("OMP_NUM_THREADS")
    if not value:
        if cpus > 1:
            section.better(
                "OMP_NUM_THREADS is not set: each rank starts a thread on every CPU",
                f"export OMP_NUM_THREADS={max(1, int(cpus) // 2)} for 2 ranks: CPUs by ranks",
            )
        return
    threads = value.split(",")[0].strip()  # it may be a list with a number per level
    if not threads.isdigit() or not int(threads):
        section.better(
            f"OMP_NUM_THREADS={value} is not a number above 0", "export OMP_NUM_THREADS=1"
        )
    elif int(threads) > cpus:
        section.better(
            f"OMP_NUM_THREADS={value} is more than the {cpus:g} CPUs",
            f"export OMP_NUM_THREADS={max(1, int(cpus) // 2)} for 2 ranks: CPUs by ranks",
        )


def _look_at_rendezvous(section: Section, environ: Mapping[str, str]) -> None:
    missing = [name for name in _RENDEZVOUS if name not in environ]
    if len(missing) == len(_RENDEZVOUS):
        return
    if missing and "RANK" in environ:
        section.broken(
            f"RANK is set, but not {', '.join(missing)}: init_process_group needs all of them",
            "start the job with torchrun, which sets them; or unset RANK",
        )
    for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"):
        if name in environ and not environ[name].isdigit():
            section.broken(f"{name}={environ[name]} is not a number", f"set {name} to one")
            return
    if {"RANK", "WORLD_SIZE"} <= set(environ) and int(environ["RANK"]) >= int(
        environ["WORLD_SIZE"]
    ):
        section.broken(
            f"RANK={environ['RANK']} does not exist in WORLD_SIZE={environ['WORLD_SIZE']}",
            "ranks count from 0: set RANK below WORLD_SIZE",
        )


def _look_at_interface(section: Section, environ: Mapping[str, str]) -> None:
    wanted = environ.get("GLOO_SOCKET_IFNAME", "")
    names = [name for _, name in socket.if_nameindex()]
    for name in filter(None, wanted.split(",")):
        if name not in names:
            section.broken(
                f"GLOO_SOCKET_IFNAME names {name}, which this machine does not have",
                f"set it to the one that the machines share; here are {', '.join(names)}",
            )

"""How long a rank waits for others: ``VESCALE_FSDP_TIMEOUT_S``, in one place."""

from __future__ import annotations

import datetime
import functools
import math
import os

import torch.distributed as dist

from vescale_fsdp import devices
from vescale_fsdp.backends import backend_of, backends_of

VARIABLE, WATCHDOG = "VESCALE_FSDP_TIMEOUT_S", "VESCALE_FSDP_WATCHDOG_S"
_ON_CPU_S, _LONG_S, _WORK_S = 60.0, 600.0, 1800.0
_FOREVER_S = 1e8


def limit_s(group: dist.ProcessGroup | None = None, *, may_be_late: bool = False) -> float:
    """The seconds that a rank waits for others; ``inf`` for no limit.

    ``VESCALE_FSDP_TIMEOUT_S`` is the limit of every wait. Without it: 60 s, or 600 where ranks may
    be late, and for messages of an accelerator's ranks.

    Args:
        group: the group whose ranks exchange a message through the store; None for a collective
            on the CPU. The timeout of the group (``init_process_group``) holds if it is shorter.
        may_be_late: ranks may load data or weights of different sizes before they come. The timeout
            of the group is not for that.

    Raises:
        ValueError: the variable is not a number of seconds.
    """
    text = os.environ.get(VARIABLE)
    if text:
        limit = _parsed(text, VARIABLE)
    else:
        is_cpu = group is None or {*backends_of(group).values()} == {"gloo"} or _is_cpu_alone()
        limit = _ON_CPU_S if is_cpu and not may_be_late else _LONG_S
    return limit if may_be_late else shorter(limit, group)


def work_limit_s() -> float:
    """The seconds that a rank's work may take without a sign of life; ``inf`` for no limit.

    Without the variable half an hour, as torch's groups have: a call that writes a large file gives
    no sign before its end.
    """
    text = os.environ.get(VARIABLE)
    return _parsed(text, VARIABLE) if text else _WORK_S


def shorter(limit: float, group: dist.ProcessGroup | None) -> float:
    """A limit in seconds, or the timeout of a group if that is shorter."""
    timeout = timeout_of(group)
    return limit if timeout is None else min(limit, timeout.total_seconds())


def watchdog_s() -> float:
    """After how long a wait is logged; ``inf``: never.

    Raises:
        ValueError: ``VESCALE_FSDP_WATCHDOG_S`` is not a number of seconds.
    """
    text = os.environ.get(WATCHDOG)
    return _parsed(text, WATCHDOG) if text else math.inf


@functools.cache
def _parsed(text: str, variable: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if math.isnan(seconds) or seconds < 0:
        raise ValueError(f"{variable} must be a number of seconds, or 0 for no limit, got {text!r}")
    return seconds or math.inf


@functools.cache
def _is_cpu_alone() -> bool:
    return not devices.has_accelerator()


def timeout_of(group: dist.ProcessGroup | None) -> datetime.timedelta | None:
    """The timeout of a group, from ``init_process_group`` or ``new_group``; None if unknown."""
    for device in getattr(group, "_device_types", ()):
        options = getattr(backend_of(group, device), "options", None)  # type: ignore[arg-type]
        timeout: datetime.timedelta | None = getattr(options, "_timeout", None)
        if timeout is not None:
            return timeout
    return None


def delta(seconds: float) -> datetime.timedelta:
    """A time for torch: no less than a millisecond, in which gloo counts, and finite."""
    return datetime.timedelta(seconds=min(max(seconds, 0.001), _FOREVER_S))

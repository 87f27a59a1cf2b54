"""Streams: what a gather sends is prepared beside the compute. On a CPU all of this does nothing.

::

    compute stream   | unit i - 1 |           unit i            |         unit i + 1
    copy stream                   | cast of i + 1 |
    NCCL's streams                                | gather i + 1 |

The rule of memory on an accelerator: **the compute stream allocates and frees every buffer**, and
frees it after it has waited for those that use it. (It is the stream that is current when a unit
runs.) What it frees it may allocate again at once, however far the host is ahead, so that memory
does not depend on the host, nothing is fragmented, and no ``record_stream`` is needed. The price: a
gather starts when the compute that was queued before it has ended. That one has used the memory
that the gather writes to, so with two full buffers there is no time to win.

Two rules keep the copy stream within this:

* Each task on it begins after all that compute has queued so far: the memory that the task is
  given may have been in use until then. Memory that a task allocates for itself is safe for the
  same reason.
* Who asked for a task waits for what it returns before a buffer of it is freed.

Alternatives are in docs/design/cuda.md.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Protocol

import torch

__all__ = ["Waitable", "copy_async", "has_streams", "start_beside"]

_HIGH_PRIORITY = -1  # a few short kernels that a gather waits for: before the blocks of a long one


class Waitable(Protocol):
    """What is under way: a ``Work``, or what waits like one."""

    def wait(self) -> object:
        """Return when it has ended (on CUDA: let the current stream wait for it)."""


def has_streams(device: torch.device) -> bool:
    """Whether work on ``device`` is queued on streams."""
    return device.type not in ("cpu", "meta")


def start_beside(device: torch.device, start: Callable[[], Waitable | None]) -> Waitable | None:
    """Call ``start`` on the copy stream, after what the current stream has queued so far.

    Returns what lets the current stream wait for all that ``start`` has queued, and for what it
    has returned. Without streams: what ``start`` returns.

    Cost on the host: two events.
    """
    if not has_streams(device):
        return start()
    module = torch.get_device_module(device)
    stream = _copy_stream(device)
    stream.wait_stream(module.current_stream(device))
    with module.stream(stream):
        work = start()
        return _Beside(device, stream.record_event(), work)


def copy_async(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy, and cast, without keeping the host waiting if ``source`` is pinned.

    Torch casts before it moves, on the CPU and into memory that is not pinned; so what comes from
    another device moves first. Memory for that: of the size of ``source``.
    """
    if source.device != target.device and source.dtype != target.dtype:
        source = source.to(target.device, non_blocking=True)
    target.copy_(source, non_blocking=True)


class _Beside:
    """A task of the copy stream, and what it has started."""

    def __init__(self, device: torch.device, event: Any, work: Waitable | None) -> None:
        self._device, self._event, self._work = device, event, work

    def wait(self) -> None:
        """Let the current stream wait for both."""
        torch.get_device_module(self._device).current_stream(self._device).wait_event(self._event)
        if self._work is not None:
            self._work.wait()
            self._work = None


@functools.cache
def _copy_stream(device: torch.device) -> Any:
    """The copy stream of a device, made at first use and shared by all models."""
    return torch.get_device_module(device).Stream(device=device, priority=_HIGH_PRIORITY)

"""Waits for other ranks on the CPU, with a time limit and an error that says what happened.

A rank may have one batch more than the others, raise an exception, or be killed. The other ranks
then wait in a collective that it does not join. Every wait of this package goes through this file::

    rank 0   waits for the gather of 'b' --- limit ---> note, closes connections, asks, raises
    rank 1   waits for the reduction of 'a' ----------------> cut off: note, asks, raises
    rank 2   computes, sleeps or has died             (no note; its next wait raises at once)

``VESCALE_FSDP_TIMEOUT_S`` is the limit in seconds. The default on the CPU is 60. With 0 or ``inf``
only the timeout of ``init_process_group`` holds. That timeout also holds if it is shorter. On an
accelerator a collective does not block the host, and NCCL's watchdog ends it. Then the limit
(600 by default) is only for messages through the store.

A rank closes the connections of a gloo communicator by a receive that times out: gloo then closes
all of them, as it does when a process dies. So every operation under way on the communicator ends
with an error, on all of its ranks. Its buffers are not written any more, and none of its threads
can delay the end of the process. The communicator cannot be used again.

``VESCALE_FSDP_WATCHDOG_S`` is also in seconds. When a wait has taken so long, this rank logs what
it waits for and what the other ranks do. It goes on waiting.

A rank writes a note (`notes`) when a wait is long or has failed. Before it raises, it reads those
of the others.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import logging
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from vescale_fsdp import devices, interruptible, notes
from vescale_fsdp.backends import backend_name, backend_of, backends_of, is_fake
from vescale_fsdp.errors import RankMismatchError

VARIABLE, WATCHDOG = "VESCALE_FSDP_TIMEOUT_S", "VESCALE_FSDP_WATCHDOG_S"
_UNWATCHED = contextlib.nullcontext()
_log = logging.getLogger(__name__)
_ON_CPU_S, _ELSEWHERE_S = 60.0, 600.0
TOGETHER = (
    "If a rank evaluates, saves or loads alone: evaluate on all ranks, or inside of `unsharded`; "
    "call checkpoint.save and load on all ranks"
)
_LONG_S = 15.0  # after this, or a quarter of the limit, a waiting rank writes a note
_FOREVER_S = 1e8
_CLOSING_TAG = 1 << 30  # the tag of a message that no rank sends
# Gloo may still write to these tensors after the receive has timed out.
_KEPT: list[Any] = []


class Waitable(Protocol):
    """An operation under way: a ``Work``, or an object that waits like one."""

    def wait(self) -> Any:
        """Return when it has ended."""


class _Fault:
    """Why the connections of a default group are closed."""

    text = ""
    world: weakref.ref[dist.ProcessGroup] | None = None


_fault = _Fault()
# The communicators that this package made, each with the default group of that time.
_ours: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[dist.ProcessGroup]]
_ours = weakref.WeakKeyDictionary()
_closed: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()


# The limit


def limit_s(group: dist.ProcessGroup | None = None) -> float:
    """The seconds that a rank waits for others; ``inf`` for no limit.

    Args:
        group: the group whose ranks exchange a message through the store; None for a collective
            on the CPU.

    Raises:
        ValueError: ``VESCALE_FSDP_TIMEOUT_S`` is not a number of seconds.
    """
    text = os.environ.get(VARIABLE)
    if text:
        return _parsed(text, VARIABLE)
    is_cpu = group is None or {*backends_of(group).values()} == {"gloo"} or not _has_accelerator()
    return _ON_CPU_S if is_cpu else _ELSEWHERE_S


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
def _has_accelerator() -> bool:
    return devices.has_accelerator()


def timeout_of(group: dist.ProcessGroup | None) -> datetime.timedelta | None:
    """The timeout of a group, from ``init_process_group`` or ``new_group``; None if unknown."""
    for device in getattr(group, "_device_types", ()):
        options = getattr(backend_of(group, device), "options", None)  # type: ignore[arg-type]
        timeout: datetime.timedelta | None = getattr(options, "_timeout", None)
        if timeout is not None:
            return timeout
    return None


def _up_to(limit: float, group: dist.ProcessGroup | None) -> float:
    timeout = timeout_of(group)
    return limit if timeout is None else min(limit, timeout.total_seconds())


def _delta(seconds: float) -> datetime.timedelta:
    return datetime.timedelta(seconds=min(max(seconds, 0.001), _FOREVER_S))


# Waiting


def wait(work: Waitable, what: str) -> Any:
    """Wait for ``work`` and return the result of its ``wait``. Reports call it ``what``."""
    with notes.Named(what):
        return work.wait()


class Bounded:
    """A collective under way on the CPU. It waits like a ``Work``, up to the limit.

    Args:
        work: the collective. Its ``wait`` may be called again after it has timed out.
        group: its process group.
        what: its name in a report, unless the function `wait` sets another.
    """

    __slots__ = ("_group", "_what", "_work")

    def __init__(self, work: dist.Work, group: dist.ProcessGroup, what: str) -> None:
        self._work, self._group, self._what = work, group, what

    def is_completed(self) -> bool:
        """Whether it has ended."""
        return bool(self._work.is_completed())

    def wait(self) -> None:
        """Return when it has ended.

        Raises:
            RankMismatchError: a rank did not join in time, or is no longer connected.
        """
        started = time.monotonic()
        try:
            if self._work.is_completed():
                self._work.wait()
                notes.finish(self._what)
                return
            limit = limit_s()
            first = min(limit / 4, _LONG_S)
            with watched(self._what, self._group):
                try:
                    self._work.wait(_delta(first))
                except RuntimeError:
                    if self._work.is_completed():
                        self._work.wait()  # it may have ended well meanwhile
                    else:
                        self._wait_long(limit - first)
        except RuntimeError as error:
            raise failure(error, self._group, self._what, started) from error
        notes.finish(self._what)

    def _wait_long(self, seconds: float) -> None:
        ranks = dist.get_process_group_ranks(self._group)
        with notes.written(ranks, f"waits for {notes.doing(self._what)}"):
            if math.isinf(seconds):
                self._work.wait()
            else:
                self._work.wait(_delta(seconds))


class Ending:
    """A wrapper of ``work`` that can also tell whether it has ended.

    On the CPU a thread waits for ``work``: an object that receives messages itself notices its end
    only in its ``wait``.
    """

    def __init__(self, work: Waitable, *, has_streams: bool) -> None:
        self._work = work
        self._error: BaseException | None = None
        self._ended = threading.Event()
        self._is_ready: Callable[[], bool] | None = None
        if has_streams:
            # Those of torch's fake group never say that they have ended.
            ready = None if is_fake() else getattr(work, "is_completed", None)
            self._is_ready = ready or (lambda: True)
        else:
            threading.Thread(target=self._run, name="vescale-fsdp wait", daemon=True).start()

    def _run(self) -> None:
        try:
            self._work.wait()
        except Exception as error:  # noqa: BLE001  # for `wait` to raise
            self._error = error
        self._ended.set()

    def has_ended(self, seconds: float) -> bool:
        """Whether it has ended. Waits for at most ``seconds``."""
        if self._is_ready is None:
            return self._ended.wait(seconds)
        end = time.monotonic() + seconds
        while not self._is_ready():
            if time.monotonic() > end:
                return False
            time.sleep(0.0001)
        return True

    def wait(self) -> None:
        """Return when it has ended. Raises the error of ``work``."""
        if self._is_ready is not None:
            self._work.wait()
            return
        self._ended.wait()
        if self._error is not None:
            raise self._error


def bounded(
    work: Any, tensor: torch.Tensor, group: dist.ProcessGroup | None, what: str
) -> dist.Work:
    """Return ``work`` with a time limit if ``tensor`` is on the CPU; else ``work`` itself.

    On the CPU, a wait for a collective blocks this thread.
    """
    if tensor.device.type != "cpu" or not isinstance(work, dist.Work):
        return work  # type: ignore[no-any-return]
    group = group or dist.group.WORLD
    assert group is not None, "there is a collective"
    return Bounded(work, group, what)  # type: ignore[return-value]


def deadline_for(group: dist.ProcessGroup) -> float | None:
    """The latest end of a wait that begins now; None if the group's own timeout is enough.

    It is for gloo's sends and receives. They cannot be waited for again after a timeout, and their
    limit replaces the timeout of the group.
    """
    limit = limit_s()
    if math.isinf(limit):
        return None
    return time.monotonic() + _up_to(limit, group)


def wait_until(works: Iterable[dist.Work | None], deadline: float | None) -> None:
    """Wait for sends or receives. If one times out, gloo closes the connections."""
    for work in works:
        assert work is not None, "this rank is in the group"
        if deadline is None:
            work.wait()
        else:
            work.wait(_delta(deadline - time.monotonic()))


def store_wait(
    store: Any, keys: list[str], seconds: float, ranks: Sequence[int], what: str
) -> None:
    """Block until all of ``keys`` are set.

    Args:
        seconds: the limit.
        ranks: the global ranks that this rank waits for.
        what: the name of the wait in a report.

    Raises:
        dist.DistError: the keys were not set in time (``dist.DistStoreError``), or the store is
            gone.
    """
    first = min(seconds / 4, _LONG_S)

    def wait(seconds: float) -> None:
        # Where hosts may be lost, one that was is noticed before the limit.
        interruptible.carry_out(lambda: store.wait(keys, _delta(seconds)))

    with watched(what, ranks):
        try:
            wait(first)
        except dist.DistStoreError:
            with notes.written(ranks, f"waits for {notes.doing(what)}"):
                wait(seconds - first)
    notes.finish(what)


# While it waits


def watched(
    what: str, ranks: dist.ProcessGroup | Sequence[int]
) -> contextlib.AbstractContextManager[object]:
    """A context around a wait. It logs the wait if it takes longer than the watchdog's time.

    Args:
        what: the name of the wait in the log.
        ranks: the ranks that this rank waits for: a group, or global ranks.
    """
    text = os.environ.get(WATCHDOG)
    seconds = _parsed(text, WATCHDOG) if text else math.inf
    if math.isinf(seconds):
        return _UNWATCHED
    if isinstance(ranks, dist.ProcessGroup):
        ranks = dist.get_process_group_ranks(ranks)
    return _Watchdog(seconds, notes.doing(what), ranks)


class _Watchdog:
    """The timer of `watched`. Cost: one thread for each wait."""

    def __init__(self, seconds: float, doing: str, ranks: Sequence[int]) -> None:
        self._seconds, self._doing = seconds, doing
        self._rank, self._ranks = dist.get_rank(), ranks
        self._timer = threading.Timer(seconds, self._tell)
        self._timer.daemon = True
        self._lock = threading.Lock()  # the note must not be written after it was erased
        self._has_told = self._is_over = False

    def __enter__(self) -> None:
        self._timer.start()

    def __exit__(self, kind: object, *_: object) -> None:
        self._timer.cancel()
        with self._lock:
            self._is_over = True
        if self._has_told and kind is None:  # the note of a wait that has failed stays
            notes.write(self._ranks, "")

    def _tell(self) -> None:
        with self._lock:
            if self._is_over:
                return
            self._has_told = True
            notes.write(self._ranks, f"waits for {self._doing}")
        others = notes.of([rank for rank in self._ranks if rank != self._rank])
        if self._is_over:
            return
        _log.warning(
            "rank %d has waited %g s for %s. %s The others: %s. It goes on waiting",
            self._rank, self._seconds, self._doing, notes.last(), others,
        )  # fmt: skip


# When it has failed


def failure(
    error: RuntimeError, group: dist.ProcessGroup, what: str, started: float
) -> RankMismatchError:
    """The error to raise in place of ``error``, with which a wait since ``started`` has ended.

    Closes the connections of ``group`` and of all communicators that this package made.
    """
    if isinstance(error, RankMismatchError):
        return error
    if is_closed(group):
        return _no_longer_connected()
    ranks = dist.get_process_group_ranks(group)
    seconds, doing = time.monotonic() - started, notes.doing(what)
    timed_out = "timed out" in str(error).lower()
    if timed_out:
        found = f"has waited {seconds:.1f} s for {doing}"
        note = f"gave up after {seconds:.1f} s of waiting for {doing}"
    else:
        found = f"was cut off from another rank while it waited for {doing}"
        note = found
    what_others_do = report(ranks, note, [group])
    text = f"rank {dist.get_rank()} {found}. {what_others_do} {advice(timed_out=timed_out)}"
    _remember(text)
    if not timed_out:
        text = f"{text} (gloo says: {error})"
    return RankMismatchError(text)


def report(ranks: Sequence[int], note: str, groups: Iterable[dist.ProcessGroup] = ()) -> str:
    """Write a note, `close` the connections, and return a text for an error.

    The text says what this rank finished last, and what the others of ``ranks`` do.
    """
    last = notes.last()
    notes.write(ranks, note)
    # Logged before: where another rank waits in a collective of the user, closing ends its process,
    # and the launcher may end this one before it has raised.
    _log.error("rank %d %s. %s.", dist.get_rank(), note, TOGETHER)
    close(groups, "")
    others = [rank for rank in ranks if rank != dist.get_rank()]
    return f"{last} The others: {notes.of(others)}."


def close(groups: Iterable[dist.ProcessGroup], why: str) -> None:
    """Close the connections of ``groups`` and of all communicators that this package made.

    Operations under way on them end with an error, on this rank and on the others. The groups
    cannot be used again. Does nothing for backends other than gloo.
    """
    _remember(why)
    ours = [group for group, world in _ours.items() if world() is dist.group.WORLD]
    for group in {*groups, *ours}:
        if group in _closed or backend_name(group, "cpu") != "gloo" or group.size() < 2:
            continue
        _closed.add(group)
        tensor = torch.empty(1)
        _KEPT.append(tensor)
        with contextlib.suppress(RuntimeError):
            peer = (group.rank() + 1) % group.size()
            work = dist.irecv(tensor, group=group, group_src=peer, tag=_CLOSING_TAG)
            assert work is not None, "this rank is in the group"
            work.wait(datetime.timedelta(milliseconds=1))
    interruptible.end(_no_longer_connected())


def _remember(why: str) -> None:
    """Keep the first reason for which the connections of this default group are closed."""
    world = dist.group.WORLD
    if _fault.world is None or _fault.world() is not world:
        _fault.text, _fault.world = "", weakref.ref(world) if world is not None else None
    _fault.text = _fault.text or why


def _no_longer_connected() -> RankMismatchError:
    return RankMismatchError(f"the ranks are no longer connected: {_fault.text}")


def is_closed(group: dist.ProcessGroup) -> bool:
    """Whether the connections of ``group`` have been closed."""
    return group in _closed


def is_cut() -> bool:
    """Whether connections of the present default group have been closed, for any reason."""
    is_ours = _fault.world is not None and _fault.world() is dist.group.WORLD
    return is_ours and bool(_fault.text)


def check_connected(group: dist.ProcessGroup) -> None:
    """Raise RankMismatchError if the connections of ``group`` have been closed."""
    if is_closed(group):
        raise _no_longer_connected()


def register(group: dist.ProcessGroup) -> None:
    """Record that this package made ``group``. `close` closes its connections too."""
    world = dist.group.WORLD
    assert world is not None, "a group has been made"
    _ours[group] = weakref.ref(world)


def advice(*, timed_out: bool) -> str:
    """What to look for after a wait that has failed, and what to do."""
    text = (
        "Ranks must run the same number of forwards, backwards and steps: look for a rank with a "
        "batch more or less, another number of micro-batches, or an exception that it caught. "
        f"{TOGETHER}."
    )
    if not timed_out:
        return text
    return (
        f"{text} If a rank only needs longer (it saves, evaluates, loads data, or the network is "
        f"slow), set {VARIABLE} to more seconds (0: no limit)."
    )

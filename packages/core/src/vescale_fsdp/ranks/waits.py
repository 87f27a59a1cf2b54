"""Waits for other ranks on the CPU, with a time limit and an error that says what happened.

A rank may have one batch more than the others, raise an exception, or be killed. The other ranks
then wait in a collective that it does not join. Every wait of this package goes through this file::

    rank 0   waits for the gather of 'b' --- limit ---> note, closes connections, asks, raises
    rank 1   waits for the reduction of 'a' ----------------> cut off: note, asks, raises
    rank 2   computes, sleeps or has died             (no note; its next wait raises at once)

On an accelerator a collective does not block the host. Then the limit (`limits`) is only for
messages through the store. A rank that gives up in one tells the others by an `alarm`: all of them
abort the communicators of NCCL, and whatever is asked of this package next raises (`check`).

A rank closes the connections of a gloo communicator by a receive that times out: gloo then closes
all of them, as it does when a process dies. So every operation under way on the communicator ends
with an error, on all of its ranks. Its buffers are not written any more, and none of its threads
can delay the end of the process. The communicator cannot be used again.
"""

from __future__ import annotations

import contextlib
import datetime
import logging
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from vescale_fsdp import compat
from vescale_fsdp.backends import backend_name, backend_of, is_fake, nccl_devices
from vescale_fsdp.devices import Waitable
from vescale_fsdp.errors import RankMismatchError
from vescale_fsdp.ranks import alarm, notes, threads
from vescale_fsdp.ranks.limits import VARIABLE, delta, limit_s, shorter, watchdog_s

_log = logging.getLogger(__name__)
TOGETHER = (
    "If a rank evaluates, saves or loads alone: evaluate on all ranks, or inside of `unsharded`; "
    "call checkpoint.save and load on all ranks"
)
_LONG_S = 15.0  # after this, or a quarter of the limit, a waiting rank has a note
_LOOKS_S = 0.1  # how often the watcher looks
_POLL_S, _LONGEST_POLL_S = 0.001, 0.5  # between looks for keys: at first, and at last
_CLOSING_TAG = 1 << 30  # the tag of a message that no rank sends
# Gloo may still write to these tensors after the receive has timed out.
_KEPT: list[Any] = []


class _Fault:
    """Why the connections of a default group are closed."""

    text = ""
    world: weakref.ref[dist.ProcessGroup] | None = None
    has_aborted = False  # communicators of NCCL


_fault = _Fault()
# The communicators that this package made, each with the default group of that time.
_ours: weakref.WeakKeyDictionary[dist.ProcessGroup, weakref.ref[dist.ProcessGroup]]
_ours = weakref.WeakKeyDictionary()
_closed: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
_aborted: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
_aborting = threading.Lock()  # while `_aborted` is read and written


# Waiting


def wait(work: Waitable, what: str) -> Any:
    """Wait for ``work`` and return the result of its ``wait``. Reports call it ``what``."""
    with notes.Named(what), asking:
        return work.wait()


class _Asking:
    """A context for what needs the other ranks. Use `asking`.

    If communicators of NCCL were aborted, it raises what `check` raises, also in place of what
    torch says of them. Cost: a comparison.
    """

    __slots__ = ()

    def __enter__(self) -> None:
        check()

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        if isinstance(error, RuntimeError) and not isinstance(error, RankMismatchError):
            check(error)


asking = _Asking()


class Waiting:
    """A context in which this rank waits for others.

    If it takes long, a thread writes a note (`notes`), which stays if the wait fails. After the
    time of the watchdog (``VESCALE_FSDP_WATCHDOG_S``) it logs what this rank waits for, and what
    the others do. Where a collective times out or is cut off, it raises RankMismatchError.

    Args:
        what: the name of the wait in a report, unless the function `wait` sets another.
        ranks: those that this rank waits for: the group of a collective, or global ranks, whose
            errors are left as they are.
    """

    __slots__ = ("_doing", "_is_noted", "_is_told", "_since", "_what", "group")

    def __init__(self, what: str, group: dist.ProcessGroup | Sequence[int]) -> None:
        self._what, self.group = what, group
        self._is_noted = self._is_told = False

    def __enter__(self) -> None:
        if _watcher is None:
            _start_watcher()
        self._since, self._doing = time.monotonic(), (notes.here.subject or self._what)
        _waits[threading.get_ident()] = self
        if not _begun.is_set():  # after it is in `_waits`: see `_watch`
            _begun.set()

    def __exit__(self, kind: object, error: BaseException | None, *_: object) -> None:
        del _waits[threading.get_ident()]
        if error is None:
            notes.here.last = (self._doing, notes.here.step, time.monotonic())
            if self._is_noted:
                with _writing:
                    notes.write(self._ranks(), "")
        elif isinstance(error, RuntimeError) and isinstance(self.group, dist.ProcessGroup):
            raise failure(error, self.group, self._what, self._since) from error

    def _ranks(self) -> Sequence[int]:
        if isinstance(self.group, dist.ProcessGroup):
            return dist.get_process_group_ranks(self.group)
        return self.group

    def look(self, long_s: float, watchdog: float) -> None:
        """Write a note and log, if it is time. The watcher calls this."""
        seconds, doing = time.monotonic() - self._since, f"{self._doing}, {notes.where()}"
        if seconds > long_s and not self._is_noted:
            with _writing:  # a note must not be written after it was erased
                self._is_noted = True  # before it looks: a wait that ends now erases it, or is seen
                if self in _waits.values():
                    notes.write(self._ranks(), f"waits for {doing}")
        if seconds > watchdog and not self._is_told:
            self._is_told, me = True, dist.get_rank()
            others = notes.of([rank for rank in self._ranks() if rank != me])
            if self in _waits.values():
                _log.warning(
                    "rank %d has waited %g s for %s. %s The others: %s. It goes on waiting",
                    me, watchdog, doing, notes.last(), others,
                )  # fmt: skip


_waits: dict[int, Waiting] = {}  # by thread
_writing = threading.Lock()
_watcher: threading.Thread | None = None
_begun = threading.Event()  # the watcher has waits to look at


def _start_watcher() -> None:
    global _watcher
    watchdog_s()  # raises here, not in the thread
    _watcher = threading.Thread(target=_watch, name="vescale-fsdp watcher", daemon=True)
    _watcher.start()


def _watch() -> None:
    while True:
        _begun.wait()  # a process that waits for nobody is not woken
        time.sleep(_LOOKS_S)
        # Cleared before it looks: a wait that begins meanwhile is seen now, or sets it again.
        _begun.clear()
        if _waits:
            _begun.set()
        with contextlib.suppress(Exception):  # the process group is destroyed at this moment
            _look()  # a function: a wait in a variable of this thread would keep its process group


def _look() -> None:
    for waiting in [*_waits.values()]:
        watchdog = watchdog_s()
        waiting.look(min(limit_s() / 4, _LONG_S, watchdog), watchdog)


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
        with contextlib.suppress(RuntimeError):  # raised again below
            if self._work.is_completed():
                self._work.wait()
                notes.finish(self._what)
                return
        with Waiting(self._what, self._group):
            try:
                self._work.wait(delta(limit_s()))
            except RuntimeError:
                if not self._work.is_completed():
                    raise
                self._work.wait()  # it may have ended well meanwhile


class Ending:
    """A wrapper of ``work`` that can also tell whether it has ended.

    On the CPU a thread waits for ``work``: an object that receives messages itself notices its end
    only in its ``wait``.
    """

    def __init__(self, work: Waitable, *, has_streams: bool) -> None:
        self._work = work
        self._call = None if has_streams else threads.Call(work.wait).start()
        # The work of torch's fake group never says that it has ended.
        ready = None if is_fake() else getattr(work, "is_completed", None)
        self._is_ready: Callable[[], bool] = ready or (lambda: True)

    def has_ended(self, seconds: float) -> bool:
        """Whether it has ended. Waits for at most ``seconds``."""
        if self._call is not None:
            return self._call.ended.wait(seconds)
        end = time.monotonic() + seconds
        while not self._is_ready():
            if time.monotonic() > end:
                return False
            time.sleep(0.0001)
        return True

    def wait(self) -> None:
        """Return when it has ended. Raises the error of ``work``."""
        if self._call is None:
            self._work.wait()
        else:
            self._call.ended.wait()
            self._call.result()


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


def wait_for_messages(
    works: Iterable[dist.Work | None], group: dist.ProcessGroup, what: str
) -> None:
    """Wait for sends and receives, which cannot be waited for again after a timeout.

    If one times out, gloo closes the connections. `threads.end` ends the wait.

    Raises:
        RankMismatchError: a rank did not take part in time, or is no longer connected.
    """
    if is_closed(group):  # gloo may have forgotten the messages
        raise _no_longer_connected()
    deadline = time.monotonic() + shorter(limit_s(), group)

    def wait() -> None:
        for work in works:
            assert work is not None, "this rank is in the group"
            work.wait(delta(deadline - time.monotonic()))

    with Waiting(what, group):
        threads.carry_out(wait)


def wait_for_keys(
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
        RankMismatchError: there was an alarm.
    """
    with Waiting(what, ranks):
        threads.carry_out(lambda: until_set(store, keys, seconds))


def until_set(store: Any, keys: list[str], seconds: float) -> None:
    """`wait_for_keys` without a report.

    Where NCCL is used it asks again and again, so that an alarm ends it: the store has no wait that
    another thread can end. It lasts at most twice as long, and half a second longer.
    """
    if alarm.present() is None:
        store.wait(keys, delta(seconds))
        return
    deadline, pause_s = time.monotonic() + seconds, _POLL_S
    while not store.check(keys):
        check()
        if time.monotonic() > deadline:
            raise dist.DistStoreError(f"{keys} were not set in {seconds:.0f} s")
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_POLL_S)


# When it has failed


def failure(
    error: RuntimeError, group: dist.ProcessGroup, what: str, since: float
) -> RankMismatchError:
    """The error to raise in place of ``error``, with which a wait for a group has ended.

    Closes the connections of ``group`` and of all communicators that this package made.

    Args:
        since: when the wait began.
    """
    if isinstance(error, RankMismatchError):
        return error
    if is_closed(group):
        return _no_longer_connected()
    seconds, doing = time.monotonic() - since, notes.doing(what)
    timed_out = "timed out" in str(error).lower()
    if timed_out:
        found = f"has waited {seconds:.1f} s for {doing}"
        note = f"gave up after {seconds:.1f} s of waiting for {doing}"
    else:
        note = found = f"was cut off from another rank while it waited for {doing}"
    others = report(dist.get_process_group_ranks(group), note, [group])
    text = f"rank {dist.get_rank()} {found}. {others} {advice(timed_out=timed_out)}"
    _remember(text)
    return RankMismatchError(text if timed_out else f"{text} (gloo says: {error})")


def report(
    ranks: Sequence[int], note: str, groups: Iterable[dist.ProcessGroup] = (), why: str = ""
) -> str:
    """Write a note, `abort`, and return a text for an error.

    The text says what this rank finished last, and what the others of ``ranks`` do.

    Args:
        why: for waits that begin later. Empty: the caller remembers it.
    """
    last, me = notes.last(), dist.get_rank()
    notes.write(ranks, note)
    # Logged before: where another rank waits in a collective of the user, closing ends its process,
    # and the launcher may end this one before it has raised.
    _log.error("rank %d %s. %s.", me, note, TOGETHER)
    _tell(why or f"rank {me} {note}")
    abort(why, groups)
    return f"{last} The others: {notes.of([rank for rank in ranks if rank != me])}."


def abort(why: str, groups: Iterable[dist.ProcessGroup] = ()) -> None:
    """Close the connections of ``groups`` and of all communicators that this package made.

    Operations under way on them end with an error, on this rank and on the others; so do waits of
    this process in other threads. The groups cannot be used again.

    If this package made a communicator of NCCL, all of NCCL's in this default group are aborted, on
    this rank, and within `alarm.LOOK_S` on the others: also the user's. One that waits keeps the
    device, and so the host of this rank, and what the abort of another one frees.
    """
    _remember(why)
    ours = [group for group, world in _ours.items() if world() is dist.group.WORLD]
    for group in {*groups, *ours}:
        if group not in _closed and backend_name(group, "cpu") == "gloo" and group.size() > 1:
            _closed.add(group)
            hang_up(group, (group.rank() + 1) % group.size())
    _tell(_fault.text)
    if alarm.present() is not None:
        _fault.has_aborted = True
        _abort_nccl({*groups, *ours, *compat.process_groups()})
    threads.end(_no_longer_connected())


def _hear(why: str) -> None:
    if not has_aborted():
        # The host may wait for something that does not end.
        _log.error("rank %d ends its waits for other ranks: %s", dist.get_rank(), why)
        abort(why)


def _tell(why: str) -> None:
    present = alarm.present()
    if present is not None:
        present.tell(why)


def _abort_nccl(groups: Iterable[dist.ProcessGroup]) -> None:
    """Abort the communicators that NCCL has for ``groups``, each once, all at the same time.

    An abort frees memory, for which CUDA may wait until no kernel runs, also none of a communicator
    whose turn has not come.
    """
    with _aborting:
        new = [
            (group, device) for group in groups if group not in _aborted
            for device in nccl_devices(group)
        ]  # fmt: skip
        _aborted.update(group for group, _ in new)
    calls = [threads.Call(backend_of(group, device).abort).start() for group, device in new]
    deadline = time.monotonic() + alarm.ABORT_S
    for call in calls:
        if not call.ended.wait(max(deadline - time.monotonic(), 0)):
            _log.error("a communicator of NCCL could not be aborted in %.0f s", alarm.ABORT_S)


def hang_up(group: Any, peer: int) -> None:
    """Close all connections of a gloo communicator. Its ``abort`` does not end what is under way.

    Args:
        peer: another rank of it, by its number there.
    """
    tensor = torch.empty(1)
    _KEPT.append(tensor)
    with contextlib.suppress(RuntimeError):
        work = group.recv([tensor], peer, _CLOSING_TAG)
        work.wait(datetime.timedelta(milliseconds=1))


def _remember(why: str) -> None:
    """Keep the first reason for which the connections of this default group are closed."""
    world = dist.group.WORLD
    if _fault.world is None or _fault.world() is not world:
        _fault.text, _fault.world = "", weakref.ref(world) if world is not None else None
        _fault.has_aborted = False
    _fault.text = _fault.text or why


def _no_longer_connected() -> RankMismatchError:
    return RankMismatchError(f"the ranks are no longer connected: {_fault.text}")


def check(error: Exception | None = None) -> None:
    """Raise if communicators of NCCL in this default group were aborted. Cost: a comparison.

    Args:
        error: what torch has said of it.

    Raises:
        RankMismatchError: with the reason.
    """
    if has_aborted():
        raise _no_longer_connected() from error


def has_aborted() -> bool:
    """Whether communicators of NCCL in this default group were aborted."""
    return _fault.has_aborted and is_cut()


def is_closed(group: dist.ProcessGroup) -> bool:
    """Whether the connections of ``group`` have been closed."""
    return group in _closed or group in _aborted


def is_cut() -> bool:
    """Whether connections of the present default group have been closed, for any reason."""
    is_ours = _fault.world is not None and _fault.world() is dist.group.WORLD
    return is_ours and bool(_fault.text)


def register(group: dist.ProcessGroup) -> None:
    """Record that this package made ``group``. `abort` closes its connections too."""
    world = dist.group.WORLD
    assert world is not None, "a group has been made"
    _ours[group] = weakref.ref(world)
    if nccl_devices(group):
        alarm.install(_hear)


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

"""StopOnSignal: after a signal to any rank, all ranks stop after the same step.

When one rank gets the signal, another may already have begun the next step. If the first stopped at
once, the second would wait for it in a collective. So the ranks agree through the store. Each rank
reports how often it has gone on after a step, and then waits at the end of its current step until
all ranks have reported. Each rank goes on as often as the highest number says, and stops at the end
of the next step::

              end of step 1        end of step 2        end of step 3
    rank 0    ---- goes on --- reports 1, waits, goes on --- stops       <- got the signal
    rank 1    ---- goes on ------- goes on -- reports 2 ---- stops

No rank goes on more often than that, because a rank that has reported does not start another step
before it knows the highest number. A thread on each rank reports, so that a report does not wait
for the end of a step. Without a signal this thread waits in the store, and `requested` costs a lock
and an addition.
"""

from __future__ import annotations

import atexit
import datetime
import os
import signal
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch.distributed as dist

from vescale_fsdp.backends import is_fake
from vescale_fsdp.errors import RankMismatchError
from vescale_fsdp.ranks import everyone, limit_s, waits
from vescale_fsdp.ranks.threads import Call

_CLOSED = "closed"
_DAY_S = 86_400.0
_CLOSE_S = 2.0  # for the store to answer when this rank leaves
_POLL_S = 0.1


class Tally:
    """Counts how often this rank has gone on after a step, and knows when all ranks stop.

    It uses no threads and sends nothing.
    """

    def __init__(self) -> None:
        self.num_passed = 0
        self.has_told = False
        self.last: int | None = None  # how often all ranks go on; after the next step they stop

    def arrive(self) -> bool | None:
        """Call at the end of a step. True: stop. False: go on. None: wait, then call again."""
        if self.last is None and self.has_told:
            return None
        if self.last is not None and self.num_passed >= self.last:
            return True
        self.num_passed += 1
        return False

    def tell(self) -> int:
        """Return the number to report. It does not change until `learn`."""
        self.has_told = True
        return self.num_passed

    def learn(self, told: list[int]) -> None:
        """Take the numbers that all ranks reported."""
        self.last = max(told)


class StopOnSignal:
    """Tells all ranks after the same step to save and exit, when one has got a signal.

    ::

        with checkpoint.StopOnSignal() as stop:
            for step in range(first, last):
                ...
                if stop.requested():
                    checkpoint.save(...)
                    sys.exit(stop.exit_code)

    Collective: make it on every rank, after ``init_process_group``, in the main thread. It replaces
    the handlers of its signals until it is closed: at the end of the ``with`` block,
    by ``close()`` or when the process exits. A signal may reach any ranks, any number of times.

    Args:
        signals: SIGTERM by default.
        timeout_s: limit for the answers of the other ranks after a signal.

    Cost: nothing is sent until there is a signal; then a few small messages per rank, through the
    store, and up to one step more than a single process would make.
    """

    def __init__(self, *signals: signal.Signals, timeout_s: float = 20.0) -> None:
        self._tally = Tally()
        self._received: int | None = None  # by this process
        self._reason: int | None = None  # what the ranks stop for; 0: without a signal
        self._is_asked = False
        self._peers: _Peers | None = None
        num_processes = int(os.environ.get("WORLD_SIZE", "1"))
        if dist.is_initialized():
            if dist.get_world_size() > 1 and not is_fake():
                self._peers = _Peers(self._tally, timeout_s)
        elif num_processes > 1:
            raise RuntimeError(
                f"this is one of {num_processes} processes, and they are not connected yet: make "
                "StopOnSignal after torch.distributed.init_process_group"
            )
        self._replaced = {
            each: signal.signal(each, self._receive) for each in signals or (signal.SIGTERM,)
        }
        atexit.register(self.close)

    def __enter__(self) -> StopOnSignal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _receive(self, number: int, _: FrameType | None) -> None:
        # Only this: the handler can interrupt the main thread anywhere.
        self._received = number

    def ask(self) -> None:
        """Let all ranks stop, as after a signal, but without one: `signal` is then None."""
        self._is_asked = True

    def requested(self) -> bool:
        """Whether to stop here. Call it on every rank at the end of every step.

        Raises:
            RankMismatchError: a signal has arrived, and a rank did not answer in time.
        """
        reason = 0 if self._is_asked and self._received is None else self._received
        if self._peers is None:
            self._reason = reason
            return reason is not None
        if reason is not None:
            self._peers.announce(reason)
        answer = self._peers.arrive()
        if answer:
            self._reason = self._peers.reason
        return answer

    @property
    def received(self) -> bool:
        """Whether this process itself has got a signal. Others may have got one instead."""
        return self._received is not None

    @property
    def signal(self) -> signal.Signals | None:
        """The signal, after `requested` has returned True; the same on all ranks. `ask`: None."""
        return signal.Signals(self._reason) if self._reason else None

    @property
    def exit_code(self) -> int:
        """128 + the signal's number, as for a process that it has ended; 0 without a signal.

        Launchers and schedulers count a job that exits with 0 as done.
        """
        return 128 + self._reason if self._reason else 0

    @property
    def own_exit_code(self) -> int:
        """128 + the number of the signal that this process itself has got; 0 if it has got none."""
        return 128 + self._received if self._received else 0

    def close(self) -> None:
        """Restore the signal handlers. Does not wait for other ranks."""
        atexit.unregister(self.close)
        for each, handler in self._replaced.items():
            if signal.getsignal(each) == self._receive:  # else other code has replaced ours
                # None: a handler that was not set from Python; it cannot be restored.
                signal.signal(each, signal.SIG_DFL if handler is None else handler)
        self._replaced = {}
        if self._peers is not None:
            self._peers.close()


class _Peers:
    """Talks to the other ranks through the store. Each instance has its own prefix for its keys::

    wanted    the number of ranks that have announced a signal; the first of them wakes all
    wake/3    what wakes the thread of rank 3: the number of a signal, or "closed"
    told/3    how often rank 3 has gone on after a step
    num_told  the number of ranks that have reported; the last one to report sets `last`
    last      how often all ranks go on, before they stop after the next step
    """

    def __init__(self, tally: Tally, timeout_s: float) -> None:
        self.reason: int | None = None
        self._tally, self._timeout_s = tally, timeout_s
        self._rank, self._size = dist.get_rank(), dist.get_world_size()
        # Clones have connections of their own. A wait blocks all other calls on its connection.
        default = everyone().store(limit_s(may_be_late=True))
        self._store, ears = default.clone(), default.clone()
        turn = self._store.add(f"stop/turn/{self._rank}", 1)
        self._place = f"stop/{turn}"
        self._announced = self._closed = False
        self._error: Exception | None = None
        self._changed = threading.Condition()
        # A daemon: it may still wait if the process ends without `close`.
        self._thread = threading.Thread(
            target=self._listen, args=(ears,), name="vescale-fsdp stop", daemon=True
        )
        self._thread.start()

    def _key(self, name: str, rank: int | None = None) -> str:
        return f"{self._place}/{name}" if rank is None else f"{self._place}/{name}/{rank}"

    def announce(self, reason: int) -> None:
        """Ask all ranks to report. Only the first call does something.

        The first rank to announce wakes all others.
        """
        if self._announced:
            return
        self._announced = True

        def tell() -> None:
            if self._store.add(self._key("wanted"), 1) == 1:
                for rank in range(self._size):
                    self._store.set(self._key("wake", rank), str(reason))
            # Else this rank could start another step before its thread has reported.
            self._tell(self._store)

        self._in_time(tell, self._timeout_s)

    def _in_time(self, ask: Callable[[], None], timeout_s: float) -> bool:
        """Call ``ask``, which uses the store. Returns whether it has ended in time.

        The store does not answer if its host is gone; then the call would never return.
        """
        call = Call(ask)
        try:
            call.start()
        except RuntimeError:  # from Python 3.12 on, if the interpreter ends
            call.run()
        end = time.monotonic() + timeout_s
        while not call.ended.wait(_POLL_S) and time.monotonic() < end and not _is_cut_off():
            pass
        if not call.ended.is_set():
            return False
        call.result()
        return True

    def arrive(self) -> bool:
        """Call at the end of a step. Returns whether to stop.

        Waits for the other ranks only after a signal.
        """
        with self._changed:
            answer, end = self._tally.arrive(), time.monotonic() + self._timeout_s
            while answer is None:
                self._changed.wait(_POLL_S)
                if self._error is not None or _is_cut_off() or time.monotonic() > end:
                    raise RankMismatchError(
                        f"a signal to stop has arrived, but {self._silent()} did not report its "
                        f"step within {self._timeout_s:.0f} s: it has died, hangs or does "
                        "not use StopOnSignal; its log says which"
                    ) from self._error
                answer = self._tally.arrive()
        return answer

    def _listen(self, store: Any) -> None:
        try:
            reason = self._read(store, self._key("wake", self._rank), _DAY_S)
            if reason == _CLOSED:
                return
            self.reason = int(reason)
            self._tell(store)
            last = int(self._read(store, self._key("last"), self._timeout_s))
            with self._changed:
                self._tally.learn([last])
                self._changed.notify_all()
        except Exception as error:  # noqa: BLE001  the store has closed, or a rank has died
            with self._changed:
                self._error = error
                self._changed.notify_all()

    def _tell(self, store: Any) -> None:
        with self._changed:
            if self._tally.has_told:
                return
            number = self._tally.tell()
        store.set(self._key("told", self._rank), str(number))
        if store.add(self._key("num_told"), 1) == self._size:
            keys = [self._key("told", rank) for rank in range(self._size)]
            store.set(self._key("last"), str(max(int(store.get(key)) for key in keys)))

    def _read(self, store: Any, key: str, timeout_s: float) -> str:
        while True:
            try:
                store.wait([key], datetime.timedelta(seconds=timeout_s))
            except dist.DistStoreError:
                if timeout_s < _DAY_S:
                    raise
            else:
                return str(store.get(key).decode())

    def _silent(self) -> str:
        try:
            ranks = [r for r in range(self._size) if not self._store.check([self._key("told", r)])]
        except RuntimeError:
            return "another rank (the store is gone, too)"
        return "rank " + ", ".join(map(str, ranks[:8])) if ranks else "a rank"

    def close(self) -> None:
        """Report, because other ranks may wait for it, and end the thread."""
        if self._closed:
            return
        self._closed = True

        def tell() -> None:
            self._tell(self._store)
            self._store.set(self._key("wake", self._rank), _CLOSED)

        try:
            is_told = self._in_time(tell, _CLOSE_S)
        except RuntimeError:
            return  # the store has closed, so the thread's wait has ended too
        if is_told and not _is_cut_off():  # else it may wait for a rank that has died
            self._thread.join(timeout=5.0)


def _is_cut_off() -> bool:
    """Whether this rank's connections to the others have been closed, because one is lost."""
    world = dist.group.WORLD if dist.is_initialized() else None
    return world is not None and waits.is_closed(world)

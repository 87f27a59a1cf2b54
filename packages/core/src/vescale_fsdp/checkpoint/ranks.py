"""Messages between the ranks that save or load together: all succeed, or all raise.

All of them use `Ranks.exchange`: each rank does its work, rank 0 combines the results, and each
rank gets an answer. If a rank fails, every rank raises an error that names the first rank that
failed. Ranks talk to rank 0 only. So rank 0 notices if a rank dies, and tells the others; in a
collective they would wait for it::

    rank 1  work --- value ----> |         | --- answer or fault --->
    rank 0  work                 | combine |
    rank 2  work --- fault ----> |         | --- fault ------------->

Messages are JSON: nothing is unpickled.

No rank waits for its send. In torch 2.13, gloo drops a queued send if the receiver dies
(`Pair::signalException` skips the unbound buffers in its queue), and a wait for that send ends only
with the timeout. A wait for a receive ends at once. So a sender waits for an answer: rank 0 for a
receipt, the others for their reply.
"""

from __future__ import annotations

import contextlib
import datetime
import math
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from vescale_fsdp import compat, errors, notes, waiting
from vescale_fsdp.backends import is_fake
from vescale_fsdp.checkpoint.files import bytes_of
from vescale_fsdp.checkpoint.manifest import from_json, to_json
from vescale_fsdp.engine import come_together

_TAG, _RECEIPT = 7_651, 7_652  # not the tags of the user's sends and receives
_KNOWN: dict[str, type[Exception]] = {
    each.__name__: each
    for each in (
        *(getattr(errors, name) for name in errors.__all__),
        *(FileNotFoundError, KeyError, NotImplementedError, OSError, RuntimeError),
        *(TypeError, ValueError),
    )
}
_GROUPS: weakref.WeakKeyDictionary[dist.ProcessGroup, dist.ProcessGroup] = (
    weakref.WeakKeyDictionary()
)
_LATE: list[torch.Tensor] = []  # what receives write to that have not ended in time
_RECEIPTS: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # the last one sent


class Ranks:
    """The ranks of a process group, or this process alone. Only one thread may use it at a time.

    Args:
        within_s: a rank that has not answered after so many seconds is an error.
    """

    def __init__(self, group: dist.ProcessGroup | None, within_s: float = math.inf) -> None:
        self._group, self._within_s = group, within_s
        self._deadline = time.monotonic() + within_s
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    @property
    def is_first(self) -> bool:
        return self.rank == 0

    def exchange(
        self,
        what: str,
        work: Callable[[], Any],
        combine: Callable[[list[Any]], Sequence[Any]],
        give_up: Callable[[], None] = lambda: None,
    ) -> Any:
        """Call ``work`` on every rank and ``combine`` on rank 0. Collective.

        Args:
            what: names the work in messages.
            work: returns JSON.
            combine: gets the results of all ranks, in order; returns an answer for each, as JSON.
                Called on rank 0 only.
            give_up: called on rank 0 if a rank has failed, before any rank raises.

        Returns:
            This rank's answer.
        """
        value, own = _attempt(work)
        fault = None if own is None else [self.rank, type(own).__name__, str(own)]
        if self.is_first:
            replies, error = self._combined(what, value, fault, combine)
            reply, own = replies[0], own or error
            if reply[1] is not None:
                give_up()
            self._answer(replies)
        else:
            try:
                sent = self._post([value, fault], 0)
                reply = self._receive(0)
            except RuntimeError as error:
                raise own or self._gone(0, what) from error
            del sent  # the reply shows that it has arrived
            with contextlib.suppress(RuntimeError):
                _RECEIPTS[self._group] = self._isend(torch.zeros(1), 0, _RECEIPT)
        answer, fault = reply
        if fault is not None:
            raise own or _error_of(fault)
        return answer

    def agree(self, what: str, work: Callable[[], Any]) -> None:
        """Call ``work`` on every rank. If it raises on one rank, all ranks raise. Collective."""
        self.exchange(what, work, lambda values: [None] * len(values))

    def _combined(
        self, what: str, value: Any, fault: Any, combine: Callable[[list[Any]], Sequence[Any]]
    ) -> tuple[list[Any], Exception | None]:
        """Return the reply for each rank, ``[answer, fault]``, and the error of ``combine``."""
        values, faults = [value], [fault]
        for rank in range(1, self.size):
            try:
                value, fault = self._receive(rank)
            except RuntimeError:
                gone = self._gone(rank, what)
                value, fault = None, [None, type(gone).__name__, str(gone)]
            values.append(value)
            faults.append(fault)
        fault = next((each for each in faults if each is not None), None)
        error = None
        if fault is None:
            answers, error = _attempt(lambda: list(combine(values)))
            if error is None:
                return [[answer, None] for answer in answers], None
            fault = [0, type(error).__name__, str(error)]
        return [[None, fault]] * self.size, error

    def _answer(self, replies: list[Any]) -> None:
        """Send the replies to the other ranks. Errors are ignored: a rank may have died."""
        waits: list[tuple[Any, ...]] = []
        for rank in range(1, self.size):
            with contextlib.suppress(RuntimeError):
                receipt = torch.zeros(1)
                wait = dist.irecv(receipt, group=self._group, tag=_RECEIPT, group_src=rank)
                waits.append((wait, receipt, self._post(replies[rank], rank)))
        for wait, receipt, _ in waits:
            with contextlib.suppress(RuntimeError):
                self._end(wait, receipt)

    def _post(self, message: Any, rank: int) -> list[Any]:
        """Begin to send. The caller holds the result until the other rank has answered."""
        data = torch.frombuffer(bytearray(to_json(message).encode()), dtype=torch.uint8)
        return [self._isend(each, rank, _TAG) for each in (torch.tensor([data.numel()]), data)]

    def _isend(self, data: torch.Tensor, rank: int, tag: int) -> Any:
        return dist.isend(data, group=self._group, tag=tag, group_dst=rank), data

    def _receive(self, rank: int) -> Any:
        length = torch.zeros(1, dtype=torch.int64)
        self._wait_for(length, rank)
        data = torch.empty(int(length), dtype=torch.uint8)
        self._wait_for(data, rank)
        return from_json(bytes(bytes_of(data)))

    def _wait_for(self, data: torch.Tensor, rank: int) -> None:
        work = dist.irecv(data, group=self._group, tag=_TAG, group_src=rank)
        self._end(work, data)

    def _end(self, work: Any, data: torch.Tensor) -> None:
        """Wait for a receive into ``data``, until the deadline."""
        if math.isinf(self._within_s):
            work.wait()
            return
        _LATE.append(data)  # gloo may still write to it after the time is over
        left = max(self._deadline - time.monotonic(), 0.0)
        # Gloo counts in milliseconds: one more, so that a wait without an answer ends late.
        work.wait(datetime.timedelta(seconds=left + 0.001))
        _LATE.pop()

    @property
    def _is_late(self) -> bool:
        return time.monotonic() >= self._deadline

    def _gone(self, rank: int, what: str) -> Exception:
        if not self._is_late:
            return errors.CheckpointIncompleteError(
                f"rank {rank} did not answer during {what}: it has died or hangs; its log says "
                "which. Start all ranks again"
            )
        who = f"rank {rank} did not come to {what} within {self._within_s:.0f} s"
        assert self._group is not None, "there are other ranks"
        ranks = dist.get_process_group_ranks(self._group)
        what_others_do = waiting.report(ranks, f"gave up {notes.where()}: {who}", [self._group])
        return errors.RankMismatchError(
            f"{who}. Rank {self.rank} is in {what}. {what_others_do} "
            f"{waiting.advice(timed_out=True)}"
        )


def meet(step: str, work: Callable[[], None], timeout_s: float | None) -> None:
    """Return when all ranks have come to ``step``, and have done ``work``. Collective.

    Messages after it have no limit of their own: a rank may write for long.

    Args:
        work: if it raises on one rank, all ranks raise.
        timeout_s: for the other ranks, as in `come_together`.

    Raises:
        RankMismatchError: a rank did not come in time, or it has come to something else.
        CheckpointIncompleteError: a rank has died.
    """
    world = _world()
    group = None if world is None else _GROUPS.get(world)
    if group is None and world is not None:
        come_together(step, timeout_s=timeout_s)  # the ranks are not connected yet
    within_s = waiting.limit_s(group) if timeout_s is None else timeout_s
    with notes.entered(f"in {step}"):
        Ranks(group, within_s).agree(step, work)


def all_ranks() -> Ranks:
    """Return all ranks of the default group, or this process alone. Collective at the first call.

    They use a separate gloo group. So a background thread can use it while the main thread trains,
    and a rank that dies is noticed at once even if the default group uses NCCL.
    """
    world = _world()
    if world is None:
        return Ranks(None)
    if world not in _GROUPS:
        _GROUPS[world] = compat.new_gloo_group() or world
    return Ranks(_GROUPS[world])


def _world() -> dist.ProcessGroup | None:
    """The default group; None if this process is alone in it."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return None if world is None or dist.get_world_size() == 1 or is_fake() else world


def disconnect(why: str) -> None:
    """Close the connections that `all_ranks` uses: whoever waits for a rank gets an error."""
    world = dist.group.WORLD if dist.is_initialized() else None
    group = None if world is None else _GROUPS.get(world)
    if group is not None and group is not world:
        waiting.close([group], why)


def _attempt(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001  every rank must learn of it
        return None, error


def _error_of(fault: list[Any]) -> Exception:
    rank, name, message = fault
    known = _KNOWN.get(name)
    place = "" if rank is None else f"on rank {rank}: "
    if known is None:
        return errors.VeScaleError(f"{place}{name}: {message}")
    return known(f"{place}{message}")

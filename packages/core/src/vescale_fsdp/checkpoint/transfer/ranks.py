"""Ranks that save or load together: all get an answer, or all raise.

Everything goes through one primitive, `Ranks.exchange`: each rank works, the first one combines
what they bring, and each gets its answer. If any rank fails, every rank raises, and says where the
first failure was. Ranks talk to the first one only, so that it notices one that has died, and tells
the others, which would wait for it in a collective::

    rank 1  work --- value ----> |         | --- answer or fault --->
    rank 0  work                 | combine |
    rank 2  work --- fault ----> |         | --- fault ------------->

Messages are JSON: nothing is unpickled.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from vescale_fsdp import compat, errors
from vescale_fsdp.backends import is_fake
from vescale_fsdp.checkpoint.disk import jsons
from vescale_fsdp.checkpoint.disk.files import bytes_of

_TAG = 7_651  # apart from the user's sends and receives
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


class Ranks:
    """The ranks of a group, by their numbers in it. One of several threads may use it at a time."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
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
        """Work on every rank, combine on the first, and give each rank its answer. Collective.

        Args:
            what: words for the work, for messages.
            work: returns JSON.
            combine: gets what all returned, by rank; returns JSON for each. First rank only.
            give_up: is called when somebody has failed, before any rank raises. First rank only.

        Raises:
            Exception: what ``work`` or ``combine`` raised. On other ranks an error of that type
                that names the rank.
            CheckpointIncompleteError: a rank has died or does not answer.
        """
        value, own = _attempt(work)
        fault = None if own is None else [self.rank, type(own).__name__, str(own)]
        if self.is_first:
            replies = self._combined(what, value, fault, combine)
            reply, own = replies[0], own or replies.error
            if reply[1] is not None:
                give_up()
            for rank in range(1, self.size):
                self._send(replies[rank], rank)
        else:
            try:
                self._send([value, fault], 0, must_arrive=True)
                reply = self._receive(0)
            except RuntimeError as error:
                raise own or _gone(0, what) from error
        answer, fault = reply
        if fault is not None:
            raise own or _error_of(fault)
        return answer

    def agree(self, what: str, work: Callable[[], Any]) -> None:
        """Work on every rank; raise on all if one raises. Collective."""
        self.exchange(what, work, lambda values: [None] * len(values))

    def _combined(
        self, what: str, value: Any, fault: Any, combine: Callable[[list[Any]], Sequence[Any]]
    ) -> _Replies:
        values, faults = [value], [fault]
        for rank in range(1, self.size):
            try:
                value, fault = self._receive(rank)
            except RuntimeError:
                gone = _gone(rank, what)
                value, fault = None, [None, type(gone).__name__, str(gone)]
            values.append(value)
            faults.append(fault)
        fault = next((each for each in faults if each is not None), None)
        error = None
        if fault is None:
            answers, error = _attempt(lambda: list(combine(values)))
            if error is None:
                return _Replies([[answer, None] for answer in answers], None)
            fault = [0, type(error).__name__, str(error)]
        return _Replies([[None, fault]] * self.size, error)

    def _send(self, message: Any, rank: int, *, must_arrive: bool = False) -> None:
        data = torch.frombuffer(bytearray(jsons.dump(message).encode()), dtype=torch.uint8)
        try:
            dist.send(torch.tensor([data.numel()]), group=self._group, tag=_TAG, group_dst=rank)
            dist.send(data, group=self._group, tag=_TAG, group_dst=rank)
        except RuntimeError:  # it has died; who waits for it finds out
            if must_arrive:
                raise

    def _receive(self, rank: int) -> Any:
        length = torch.zeros(1, dtype=torch.int64)
        dist.recv(length, group=self._group, tag=_TAG, group_src=rank)
        data = torch.empty(int(length), dtype=torch.uint8)
        dist.recv(data, group=self._group, tag=_TAG, group_src=rank)
        return jsons.load(bytes(bytes_of(data)))


class _Replies(list[Any]):
    """What each rank gets, and the error of the first one's own ``combine``."""

    def __init__(self, replies: list[Any], error: Exception | None) -> None:
        super().__init__(replies)
        self.error = error


def all_ranks() -> Ranks:
    """All ranks of the default group, or this process alone. Collective at the first call.

    They talk over gloo, in a group of their own: a background thread may, while the main one
    trains, and a rank that dies is noticed at once, also where the default group is NCCL's.
    """
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is None or dist.get_world_size() == 1 or is_fake():
        return Ranks(None)
    if world not in _GROUPS:
        _GROUPS[world] = compat.new_gloo_group() or world
    return Ranks(_GROUPS[world])


def _attempt(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001  every rank must learn of it
        return None, error


def _gone(rank: int, what: str) -> Exception:
    return errors.CheckpointIncompleteError(
        f"rank {rank} did not answer during {what}: it has died or hangs; its log says which. "
        "Start all ranks again"
    )


def _error_of(fault: list[Any]) -> Exception:
    rank, name, message = fault
    known = _KNOWN.get(name)
    place = "" if rank is None else f"on rank {rank}: "
    if known is None:
        return errors.VeScaleError(f"{place}{name}: {message}")
    return known(f"{place}{message}")

"""`Ranks`: some ranks that compare, exchange and do things together, or all raise.

Two ways for messages, both JSON: nothing is unpickled.

**The store** (the key-value server of ``init_process_group``) needs no communicator, and thousands
of ranks can use it. In a round (`Ranks.exchange`), each rank gives a value, and all get the merged
result. Ranks form a tree, so that each handles at most as many keys as the fan-in. Round 3 of a
topic, where 2 and 3 are the children of rank 1::

    rank 2   its value -------------------------> | topic/3/2
    rank 3   its value -------------------------> | topic/3/3
    rank 1   that it has arrived ---------------> | topic/3/1/here
             waits for 2 and 3, reads, merges --> | topic/3/1
    rank 0   ... its children, merges ----------> | topic/3/result      read by all

The store does not notice that a rank has died: the others notice when the limit is over.

**Sends and receives of gloo** (`Ranks.together`) notice a death at once, and have no limit of
length. Each rank does its work, rank 0 combines the results, and each rank gets an answer. Ranks
talk to rank 0 only. So rank 0 notices if a rank dies, and tells the others; in a collective they
would wait for it::

    rank 1  work --- value ----> |         | --- answer or fault --->
    rank 0  work                 | combine |
    rank 2  work --- fault ----> |         | --- fault ------------->

No rank waits for its send. In torch 2.13, gloo drops a queued send if the receiver dies
(`Pair::signalException` skips the unbound buffers in its queue), and a wait for that send ends only
with the timeout. A wait for a receive ends at once. So a sender waits for an answer: rank 0 for a
receipt, the others for their reply.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import itertools
import json
import math
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]

from vescale_fsdp import compat, errors
from vescale_fsdp.backends import is_fake
from vescale_fsdp.errors import RankMismatchError
from vescale_fsdp.ranks import notes, threads, waits
from vescale_fsdp.ranks.attempt import PLACE, AbsentError, agree_on_name
from vescale_fsdp.ranks.collectives import new_gloo_group
from vescale_fsdp.ranks.limits import delta, limit_s, work_limit_s

FAN_IN = 16
MAX_NAMED = 16  # of ranks that are absent: to look for each costs the store a few messages
_STEP = "next step"
_TAG = 7_651  # of messages; of receipts 1 more: not the tags of the user's sends and receives
_STILL = -1  # in place of a message's length: the sender still works
_GRACE_S = 1.0  # rank 0 knows better than the others who is late, so that it speaks first
_ERRORS: dict[str, type[Exception]] = {
    each.__name__: each
    for each in (
        *(getattr(errors, name) for name in errors.__all__),
        *(FileNotFoundError, KeyError, NotImplementedError, OSError, RuntimeError),
        *(TypeError, ValueError),
    )
}
_LATE: list[Any] = []  # of sends and receives that have not ended in time: gloo may still use it
_WAITING: list[tuple[Any, threads.Call]] = []  # for late messages, each with its link
_KNOWN: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[tuple[int, ...], Ranks]]
_KNOWN = weakref.WeakKeyDictionary()

Merge: TypeAlias = Callable[[list[Any]], Any]
_Pair = TypeVar("_Pair", bound=Sequence[Any])
_Item = TypeVar("_Item")


class MergeTree:
    """The tree of ranks: each waits for its children.

    It is as shallow as the fan-in allows. All subtrees but the last are full.
    """

    def __init__(self, size: int, fan_in: int = FAN_IN) -> None:
        self._size, self._fan_in = size, fan_in
        self._width = 1  # of the subtrees of the root's children
        while 1 + fan_in * self._width < size:
            self._width = 1 + fan_in * self._width

    def children(self, number: int) -> range:
        """At most ``fan_in`` of them, ascending. O(depth)."""
        start, stop, width = 0, self._size, self._width
        while start != number:
            start += 1 + (number - start - 1) // width * width
            stop = min(start + width, stop)
            width = (width - 1) // self._fan_in
        return range(start + 1, stop, max(width, 1))


def over(ranks: dist.ProcessGroup | Sequence[int]) -> Ranks:
    """The `Ranks` of a group, or of global ranks for which there may be no group yet.

    The same object for the same ranks in the same order, as long as the default group lives. With
    torch's backend "fake" it is this rank alone.
    """
    group = ranks if isinstance(ranks, dist.ProcessGroup) else None
    numbers = tuple(
        dist.get_process_group_ranks(ranks) if isinstance(ranks, dist.ProcessGroup) else ranks
    )
    world = dist.group.WORLD
    assert world is not None, "there are other ranks"
    notes.begin()
    known = _KNOWN.setdefault(world, {})
    if numbers not in known:
        known[numbers] = Ranks(numbers if not is_fake() else (), dist.get_rank())
    if group is not None and known[numbers].group is not group:  # several may have these ranks
        known[numbers].use(group)
    return known[numbers]


def everyone() -> Ranks:
    """All ranks of the default group; this process alone if there is none."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    return Ranks((), 0) if world is None else over(world)


class Ranks:
    """A set of ranks in one attempt (`attempt`), or this process alone.

    Each method is collective, except `tell`, `heard` and `still`. All ranks call the same ones in
    the same order, from one thread at a time.

    Args:
        ranks: global ones, in an order that all of them give. The first one is the root. With one
            or none this process is alone.
        me: this rank.
        store: new in this attempt. None: made at the first call that needs it.
        link: a gloo group of these ranks for `together`. None: made at the first call.
        fan_in: of the tree.

    Attributes:
        rank: this rank's number among ``size``.
    """

    def __init__(
        self,
        ranks: Sequence[int],
        me: int,
        store: compat.Store | None = None,
        link: dist.ProcessGroup | None = None,
        fan_in: int = FAN_IN,
    ) -> None:
        self._ranks, self._me = list(ranks), me
        self.size = max(len(ranks), 1)
        self.rank = self._ranks.index(me) if self.size > 1 else 0
        self._own_store, self._link = store, link
        self._group: weakref.ref[dist.ProcessGroup] | None = None
        self._fan_in = fan_in
        self._within_s: float | None = None  # the limit of `together`, if it has one of its own
        self._turns: Counter[str] = Counter()
        self._told, self._limit_s = time.monotonic(), math.inf  # of `still`
        self._sent: list[Any] = []  # messages under way
        self._tag, self._num_threads = _TAG, 0
        self._is_apart = False  # other threads use the link, which has to stay open

    @classmethod
    def linked(cls, link: dist.ProcessGroup | None) -> Ranks:
        """The ranks of a gloo group, or None for this process alone, without a limit in `together`.

        For groups that something else watches over, which closes their connections.
        """
        if link is None:
            return cls((), 0)
        made = cls(dist.get_process_group_ranks(link), dist.get_rank(), link=link)
        made._within_s = math.inf
        return made

    @property
    def is_first(self) -> bool:
        """Whether this rank is the root."""
        return self.rank == 0

    @property
    def group(self) -> dist.ProcessGroup | None:
        """In whose collectives ranks wait for one that does not come to a round."""
        return None if self._group is None else self._group()

    def use(self, group: dist.ProcessGroup) -> None:
        """Set `group`. It must not be kept alive: it may be the default group."""
        self._group = weakref.ref(group)

    # Through the store

    def store(self, timeout_s: float) -> Any:
        """The default group's store, under a name of these ranks in this attempt.

        The first call is collective.

        Raises:
            AbsentError: one of them did not take part in time.
        """
        if self._own_store is None:
            key = hashlib.sha256(json.dumps(self._ranks).encode()).hexdigest()[:16]
            whole, place = compat.default_store(), f"{PLACE}/of/{key}"
            try:
                name = agree_on_name(whole, place, self.rank, self.size, timeout_s)
            except AbsentError as error:
                # Others may have come, and read in the note of this rank who has not.
                notes.share(self._ranks, PrefixStore(f"{place}/{error.name}", whole))
                raise
            self._own_store = PrefixStore(f"{place}/{name}", whole)
            notes.share(self._ranks, self._own_store)
        return self._own_store

    def exchange(
        self,
        topic: str,
        value: Any,
        merge: Merge,
        finish: Callable[[Any], Any] | None = None,
        *,
        timeout_s: float | None = None,
    ) -> Any:
        """Merge the values of all ranks, and return the result on every rank. Blocking.

        Cost: three operations of the store; six for a rank with children, four for the root. Each
        is on at most as many keys as the fan-in.

        Args:
            value: JSON; so is what is returned.
            merge: merges values in the order of ranks. Each is a rank's value or the result of a
                merge for consecutive ranks. Must be associative.
            finish: converts the last value to the result, on the first rank.
            timeout_s: for the other ranks. None: they are in the same step, and have the limit of
                a collective (`limits`); after it no rank can continue.

        Raises:
            RankMismatchError: a rank did not take part in time.
        """
        if self.size == 1:
            merged = merge([value])
            return merged if finish is None else finish(merged)
        waits.check()
        within_s = limit_s(self.group) if timeout_s is None else timeout_s
        deadline = time.monotonic() + within_s
        try:
            store = self.store(within_s)
            return self._round(store, topic, value, merge, finish, deadline, within_s)
        except AbsentError as error:
            what, where = f"compare the {topic}", notes.where()
            raise self._absent(error.numbers, what, within_s, where, self.group) from error

    def _round(
        self, store: Any, topic: str, value: Any, merge: Merge,
        finish: Callable[[Any], Any] | None, deadline: float, within_s: float,
    ) -> Any:  # fmt: skip
        self._turns[topic] += 1
        place, tree = f"{topic}/{self._turns[topic]}", MergeTree(self.size, self._fan_in)
        result, children = f"{place}/result", tree.children(self.rank)

        def read(keys: list[str]) -> list[Any]:
            left, what = deadline - time.monotonic(), f"the comparison of the {topic}"
            waits.wait_for_keys(store, keys, left, self._ranks, what)
            return [json.loads(each) for each in store.multi_get(keys)]

        try:
            if topic == _STEP:
                self.tell(f"{_STEP}/{self._turns[_STEP] - 1}", value["step"])
            if children:
                store.set(f"{place}/{self.rank}/here", "")
                theirs = read([f"{place}/{child}" for child in children])
                value = merge([value, *theirs])
            if self.rank == 0:
                answer = value if finish is None else finish(value)
                store.set(result, json.dumps(answer))
                return answer
            store.set(f"{place}/{self.rank}", json.dumps(value))
            return read([result])[0]
        except dist.DistError as error:
            missing = itertools.islice(self._missing(store, tree, place, 0), MAX_NAMED + 1)
            raise AbsentError([*missing] or [0], within_s) from error

    def _missing(self, store: Any, tree: MergeTree, place: str, number: int) -> Iterator[int]:
        """Find the absent ranks in the subtree of ``number``, its root first.

        Cost: a few operations of the store for each absent rank, and for each on the path to it.
        """

        def is_there(key: str) -> bool:
            try:
                return bool(store.check([f"{place}/{key}"]))
            except dist.DistError:
                return True  # nobody knows

        if is_there(str(number) if number else "result"):
            return
        children = tree.children(number)
        below = itertools.chain.from_iterable(
            self._missing(store, tree, place, child) for child in children
        )
        if children and is_there(f"{number}/here"):
            first = next(below, number)  # itself, if it has all that it waits for
            yield first
        else:
            yield number
        yield from below

    def _absent(
        self,
        numbers: Sequence[int],
        what: str,
        within_s: float,
        where: str,
        group: dist.ProcessGroup | None,
    ) -> RankMismatchError:
        """The error for ranks that have not come in time. Others may wait in ``group``."""
        absent = [str(self._ranks[number]) for number in numbers[:MAX_NAMED]]
        more = " and others" if len(numbers) > MAX_NAMED else ""
        text = (
            f"rank{'s' if len(absent) > 1 else ''} {', '.join(absent)}{more} did not come to "
            f"{what} within {within_s:.0f} s: it has died, hangs, or runs other code than this "
            "rank. Its log says which"
        )
        if self._is_apart:
            return RankMismatchError(f"{text}. The ranks stay connected")
        note, groups = f"gave up {where}: {text}", [] if group is None else [group]
        others = waits.report(self._ranks, note, groups, f"rank {self._me} {note}")
        advice = waits.advice(timed_out=True)
        return RankMismatchError(f"{text}. Rank {self._me} is {where}. {others} {advice}")

    def agree(
        self, topic: str, entries: list[str], hint: str, *, timeout_s: float | None = None
    ) -> None:
        """Raise on every rank unless all ranks have the same entries, in order.

        Digests are compared first. Entries are sent only to name the first difference. The error
        says what differs, and ends with ``hint``.

        Raises:
            RankMismatchError: with the first entry that differs, and what two ranks have there.
        """
        digest = hashlib.sha256(json.dumps(entries).encode()).hexdigest()
        said = self.exchange(topic, [[digest, self._me]], merge_pairs, timeout_s=timeout_s)
        if len(said) == 1:
            return
        speakers = [rank for _, rank in said]
        mine = [[self._me, entries]] if self._me in speakers else []
        difference = self.exchange(
            f"{topic} difference", mine, merge_pairs, _first_difference, timeout_s=timeout_s
        )
        raise RankMismatchError(f"ranks disagree about the {topic}: {difference}. {hint}")

    def barrier(self, step: str, *, timeout_s: float | None = None) -> None:
        """Return when all ranks have come to ``step``: words that are the same on all.

        Raises:
            RankMismatchError: a rank did not come in time, or it has come to something else.
        """
        with notes.entered(f"in {step}"):
            self.step({"step": step, "rank": self._me}, _same_step, timeout_s=timeout_s)

    def step(self, value: dict[str, Any], merge: Merge, *, timeout_s: float | None = None) -> Any:
        """`exchange` at the begin or the end of a step. Ranks in other steps are told so.

        Cost: one more operation of the store, for `is_elsewhere`.

        Args:
            value: has "step" (words that are the same on all ranks) and "rank"; in what is merged,
                "wrong" says what is wrong, if anything.

        Raises:
            RankMismatchError: a rank did not come in time, or something is wrong.
        """
        said = self.exchange(_STEP, value, merge, timeout_s=timeout_s)
        if said.get("wrong"):
            raise RankMismatchError(
                f"ranks disagree about the next step: {said['wrong']}. Run the same passes with "
                "the same order of units on every rank; a rank may leave units out. "
                f"{waits.TOGETHER}"
            )
        return said

    def is_elsewhere(self, step: str) -> bool:
        """Whether another rank waits in the next `step`, and it is another one than ``step``.

        Then it waits for this rank, which waits for it in another place.
        """
        return self.heard(f"{_STEP}/{self._turns[_STEP]}") not in (None, step)

    def tell(self, key: str, text: str = "") -> None:
        """Write something that any of the ranks may hear. One operation of the store."""
        if self.size > 1:
            self.store(limit_s()).set(f"said/{key}", text)

    def heard(self, key: str) -> str | None:
        """What a rank has told last; None: nothing. At most two operations of the store."""
        if self.size == 1:
            return None
        store, key = self.store(limit_s()), f"said/{key}"
        return store.get(key).decode() if store.check([key]) else None

    # By sends and receives

    def together(
        self,
        what: str,
        work: Callable[[], Any],
        combine: Callable[[list[Any]], Sequence[Any]] | None = None,
        *,
        timeout_s: float | None = None,
        give_up: Callable[[], None] = lambda: None,
    ) -> Any:
        """Call ``work`` on every rank. If it raises on one rank, all ranks raise.

        The error names the first rank that has failed.

        Args:
            what: names the work in messages.
            work: returns JSON. Work that takes long calls `still`.
            combine: gets the results of all ranks, in order; returns an answer for each, as JSON.
                Called on rank 0 only. None: there is no answer.
            timeout_s: a rank that has not come, nor called `still`, for so long is an error. None:
                `work_limit_s`.
            give_up: called on rank 0 if a rank has failed, before any rank raises.

        Returns:
            This rank's answer.

        Raises:
            RankMismatchError: a rank has died, or did not come in time.
        """
        waits.check()
        timeout_s = self._within_s if timeout_s is None else timeout_s
        self._limit_s = work_limit_s() if timeout_s is None else timeout_s
        self._connect(what, self._limit_s)
        self._told = time.monotonic()

        def done() -> Any:
            value = work()
            if combine is None or self.is_first:
                return value if combine else None
            return _json([value, None])  # here, so that what is no JSON is a fault of this rank

        value, own = _attempt(done)
        fault = None if own is None else [self.rank, type(own).__name__, str(own)]
        if self.is_first:
            reply, others, error = self._combined(what, value, fault, combine)
            own = own or error
            if reply[1] is not None:
                give_up()
            # A rank that is late reads its reply when it wakes up, or never.
            is_one_late = self._is_apart and reply[1] is not None and reply[1][0] is None
            self._answer(others, _GRACE_S if is_one_late else self._limit_s)
        else:
            try:
                self._post(value or _json([None, fault]), 0)
                reply = self._receive(0, _GRACE_S)
            except RuntimeError as error:
                raise own or self._gone(0, what, error) from error
            # The reply shows that all has arrived that was sent before.
            with contextlib.suppress(RuntimeError):  # the first rank has died since
                self._sent = [self._isend(torch.zeros(1), 0, self._tag + 1)]
        answer, fault = reply
        if fault is not None:
            if own is not None and fault[0] is not None:
                raise own
            # If others gave up this rank, it may have failed because of that: its folder is gone.
            raise _error_of(fault) from own
        return answer

    def meet(self, step: str, work: Callable[[], Any], *, timeout_s: float | None = None) -> None:
        """Return when all ranks have come to ``step``, and have done ``work``. `together`.

        Args:
            timeout_s: for the other ranks. None: they are in the same step.
        """
        with notes.entered(f"in {step}"):
            self._connect(step, timeout_s)
            within_s = limit_s() if timeout_s is None else timeout_s
            self.together(step, work, timeout_s=within_s)

    def _connect(self, what: str, timeout_s: float | None) -> None:
        """Make the gloo group. It is made by all ranks, so they meet through the store before."""
        if self.size > 1 and self._link is None:
            self.barrier(what, timeout_s=timeout_s)
            self._link = new_gloo_group() or dist.group.WORLD

    def thread(self) -> Ranks:
        """The same ranks for another thread: its messages in `together` are apart.

        If a rank does not come in time, `together` raises as ever, but closes no connections, so
        that the other threads go on. All ranks call it in the same order, after a first `meet`.
        """
        self._num_threads += 1
        other = Ranks(self._ranks, self._me, self._own_store, self._link, self._fan_in)
        other._tag, other._is_apart = self._tag + 2 * self._num_threads, True
        return other

    def from_first(self, what: str, work: Callable[[], Any]) -> Any:
        """Call ``work`` on the first rank, and return its result, JSON, on all. `together`."""
        return self.together(
            what,
            lambda: work() if self.is_first else None,
            lambda values: [values[0]] * len(values),
        )

    def still(self) -> None:
        """Say that this rank still does its work in `together`. Costs nothing most of the time."""
        if self.size > 1 and time.monotonic() - self._told > self._limit_s / 16:
            self._tell_still()

    def going_on(self, items: Iterable[_Item]) -> Iterator[_Item]:
        """These items. Calls `still` before each."""
        for each in items:
            self.still()
            yield each

    def _tell_still(self) -> None:
        self._told = time.monotonic()
        for rank in range(1, self.size) if self.is_first else (0,):
            with contextlib.suppress(RuntimeError):  # the rank has died
                self._sent.append(self._isend(torch.tensor([_STILL]), rank, self._tag))

    def _combined(
        self,
        what: str,
        value: Any,
        fault: Any,
        combine: Callable[[list[Any]], Sequence[Any]] | None,
    ) -> tuple[list[Any], list[bytes], Exception | None]:
        """Return the reply for rank 0, ``[answer, fault]``, those for the others, encoded, and
        the error of ``combine``.
        """
        values, faults = [value], [fault]
        if self.size > 1:
            self._tell_still()  # the others may have waited for long, and `combine` may take long
        for rank in range(1, self.size):
            self.still()
            try:
                value, fault = self._receive(rank)
            except RuntimeError as lost:
                gone = self._gone(rank, what, lost)
                value, fault = None, [None, type(gone).__name__, str(gone)]
            values.append(value)
            faults.append(fault)
        fault, error = next((each for each in faults if each is not None), None), None
        if fault is None:

            def replies() -> tuple[list[Any], list[bytes]]:
                own, *others = combine(values) if combine else [None] * self.size
                return [own, None], [_json([each, None]) for each in others]

            found, error = _attempt(replies)
            if error is None:
                return *found, None
            fault = [0, type(error).__name__, str(error)]
        return [None, fault], [_json([None, fault])] * (self.size - 1), error

    def _answer(self, replies: list[bytes], seconds: float) -> None:
        """Send the replies to the other ranks. Errors are ignored: a rank may have died."""
        receipts = []
        for rank, reply in enumerate(replies, 1):
            with contextlib.suppress(RuntimeError):
                receipt = torch.zeros(1)
                work = dist.irecv(receipt, group=self._link, tag=self._tag + 1, group_src=rank)
                receipts.append((work, receipt))
                self._post(reply, rank)
        end, sent, self._sent = time.monotonic() + seconds, self._sent, []
        for work, receipt in receipts:
            try:
                self._end(work, receipt, end - time.monotonic())
            except RuntimeError:
                if self._is_apart:  # the rank may still receive it
                    _LATE.append(sent)

    def _post(self, message: bytes, rank: int) -> None:
        """Begin to send. What is sent is held until the other rank has answered."""
        data = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        for each in (torch.tensor([data.numel()]), data):
            self._sent.append(self._isend(each, rank, self._tag))

    def _isend(self, data: torch.Tensor, rank: int, tag: int) -> Any:
        return dist.isend(data, group=self._link, tag=tag, group_dst=rank), data

    def _receive(self, rank: int, more_s: float = 0.0) -> Any:
        length = torch.tensor([_STILL])
        while int(length) == _STILL:
            self._wait_for(length, rank, more_s)
            if self.is_first:
                self.still()  # the others wait for rank 0, which waits for this one
        data = torch.empty(int(length), dtype=torch.uint8)
        self._wait_for(data, rank, more_s)
        return json.loads(bytes(data.numpy()))

    def _wait_for(self, data: torch.Tensor, rank: int, more_s: float) -> None:
        work = dist.irecv(data, group=self._link, tag=self._tag, group_src=rank)
        # Counted from when the others were told last, so that rank 0 gives up first.
        end = self._told if self.is_first else time.monotonic()
        self._end(work, data, end + self._limit_s + more_s - time.monotonic())

    def _end(self, work: Any, data: torch.Tensor, seconds: float) -> None:
        """Wait for a receive into ``data``. Gloo closes all connections when its wait times out."""
        try:
            if self._is_apart:
                call = threads.Call(lambda: work.wait(delta(math.inf))).start()
                if not call.ended.wait(delta(seconds).total_seconds()):
                    _WAITING.append((self._link, call))
                    raise RuntimeError("timed out")
                call.result()
            elif math.isinf(seconds):
                work.wait()  # the timeout of the group
            else:
                work.wait(delta(seconds))
        except RuntimeError:
            _LATE.append(data)
            raise

    def _gone(self, rank: int, what: str, error: RuntimeError) -> RankMismatchError:
        if "timed out" in str(error).lower():
            return self._absent([rank], what, self._limit_s, f"in {what}", self._link)
        # Rank 0 says to the others which rank it has lost, or has written it into its note.
        others = "" if self.is_first else f" The others: {notes.of([self._ranks[0]])}."
        return RankMismatchError(
            f"rank {self._ranks[rank]} did not answer during {what}: it has died or hangs; its log "
            f"says which. Start all ranks again.{others}"
        )

    def disconnect(self, why: str) -> None:
        """Close the connections of `together`: whoever waits for a rank gets an error."""
        if self._link is not None and self._link is not dist.group.WORLD:
            waits.abort(why, [self._link])


@atexit.register
def _end_waiting() -> None:
    """Close what threads wait for: such a wait aborts a process that has taken down Python."""
    for link, call in _WAITING:
        if not call.ended.is_set():
            waits.hang_up(link, (link.rank() + 1) % link.size())
            call.ended.wait(_GRACE_S)


def _attempt(work: Callable[[], Any]) -> tuple[Any, Exception | None]:
    try:
        return work(), None
    except Exception as error:  # noqa: BLE001  every rank must learn of it
        return None, error


def _json(message: list[Any]) -> bytes:
    return json.dumps(message, allow_nan=False, separators=(",", ":")).encode()


def _error_of(fault: list[Any]) -> Exception:
    rank, name, message = fault
    place = "" if rank is None else f"on rank {rank}: "
    known = _ERRORS.get(name)
    if known is None:
        return errors.VeScaleError(f"{place}{name}: {message}")
    return known(f"{place}{message}")


def merge_pairs(values: list[list[_Pair]]) -> list[_Pair]:
    """Return the first pair, and the first pair with another left side, if any.

    It merges for `Ranks.exchange`: it is associative.
    """
    pairs = [*itertools.chain(*values)]
    return pairs[:1] + [pair for pair in pairs if pair[0] != pairs[0][0]][:1]


def _first_difference(said: list[Any]) -> str:
    (rank_a, a), (rank_b, b) = said
    for i in range(max(len(a), len(b))):
        left = a[i] if i < len(a) else "nothing more"
        right = b[i] if i < len(b) else "nothing more"
        if left != right:
            where = f"at entry {i}, " if max(len(a), len(b)) > 1 else ""
            return f"{where}rank {rank_a} has {left} and rank {rank_b} has {right}"
    return "no entry differs"


def _same_step(said: list[dict[str, Any]]) -> dict[str, Any]:
    first = said[0]
    wrong = next((each["wrong"] for each in said if each.get("wrong")), "")
    other = next((each for each in said if each["step"] != first["step"]), None)
    if other is not None and not wrong:
        wrong = (
            f"rank {first['rank']} is in {first['step']}, rank {other['rank']} in {other['step']}"
        )
    return {"step": first["step"], "rank": first["rank"], "wrong": wrong}

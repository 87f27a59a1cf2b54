"""What each rank waits for, in words that the other ranks can read.

A note says what a rank waits for. It is a key in the store, one for each rank. A thread writes it
when a wait is long, so that other waits cost nothing; a wait that has failed leaves it. A rank
whose wait has failed reads the notes of the others, for its error (`waits`)::

    rank 0   waits for the gather of 'b' ------------------------- limit ---> reads, raises
      its thread             ^ long: "waits for the gather of 'b', in forward of ..."
    rank 1   computes, sleeps or has died             (no note)
"""

from __future__ import annotations

import contextlib
import functools
import json
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

from vescale_fsdp.ranks.threads import Call

_GRACE_S = 1.0  # time for ranks that have just been cut off to write their notes
_STORE_S = 2.0  # time for the store to answer
_BEFORE = "before the first pass"


class _Here:
    """What this rank does now and did last."""

    subject: str | None = None  # what it waits for; None: only the kind of collective
    step = _BEFORE
    last: tuple[str, str, float] | None = None  # the last wait: for what, in which step, its end
    world: weakref.ref[dist.ProcessGroup] | None = None  # the default group of `_stores`


here = _Here()
_stores: dict[tuple[int, ...], Callable[[], Any]] = {}  # of the ranks that share each


# What this rank does


def enter(step: str) -> None:
    """Set the step that this rank is in: "in forward of ..."."""
    here.step = step


def where() -> str:
    """The step that this rank is in, from the last call of `enter`."""
    return here.step


@contextlib.contextmanager
def entered(step: str) -> Iterator[None]:
    """A context in which this rank is in ``step``, and then again where it was before."""
    before = where()
    enter(step)
    try:
        yield
    finally:
        enter(before)


class Named:
    """A context in which a collective is called ``what``.

    A collective is also started in it, because the start fails if connections are closed.
    """

    __slots__ = ("_what",)

    def __init__(self, what: str) -> None:
        self._what = what

    def __enter__(self) -> None:
        here.subject = self._what

    def __exit__(self, *exc_info: object) -> None:
        here.subject = None


def finish(what: str) -> None:
    """Record that this rank has finished ``what``, or what `Named` was told."""
    here.last = (here.subject or what, here.step, time.monotonic())


def doing(what: str) -> str:
    """What this rank waits for, and in which step. ``what`` is used outside of `Named`."""
    return f"{here.subject or what}, {here.step}"


def last() -> str:
    """A sentence: what this rank finished last."""
    if here.last is None:
        return "It has not waited before."
    what, step, at = here.last
    return f"The last that it finished was {what}, {step}, {time.monotonic() - at:.1f} s ago."


# In the store


def share(ranks: Sequence[int], store: Any) -> None:
    """Let ``ranks`` have their notes in a store. All of them use it, and no earlier job has."""
    world = dist.group.WORLD
    assert world is not None, "there is a store"
    if here.world is None or here.world() is not world:
        _stores.clear()
        here.world, here.last, here.step = weakref.ref(world), None, _BEFORE
    # A connection for notes alone, when there are some: a wait blocks all calls on its connection.
    _stores[tuple(ranks)] = functools.cache(store.clone)


def write(ranks: Sequence[int], note: str) -> None:
    """Write this rank's note for ``ranks``, unless the store does not answer."""
    key = f"waits/{dist.get_rank()}"
    _ask(ranks, lambda store: store.set(key, json.dumps(note)))


def of(ranks: Sequence[int]) -> str:
    """A text that says what each of ``ranks`` does, according to its note.

    Waits up to `_GRACE_S` for missing notes, because ranks that were just cut off are writing them.
    """
    found: dict[int, str] = {}

    def read(store: Any) -> None:
        deadline = time.monotonic() + _GRACE_S
        while len(found) < len(ranks):
            for rank in ranks:
                key = f"waits/{rank}"
                if (
                    rank not in found
                    and store.check([key])
                    and (note := json.loads(store.get(key)))
                ):
                    found[rank] = note
            if time.monotonic() > deadline:
                return
            time.sleep(0.02)

    missing = "cannot be asked: the process that holds the store has ended or hangs"
    if _ask(ranks, read):
        missing = "waits for no collective: it computes, sleeps, does something else, or has died"
    return "; ".join(
        f"rank {rank} {found.get(rank, f'{missing} (its log says which)')}" for rank in ranks
    )


def _ask(ranks: Sequence[int], ask: Callable[[Any], None]) -> bool:
    """Call ``ask`` with the store of ``ranks``. Returns whether it has answered in time."""
    world = dist.group.WORLD
    if here.world is None or here.world() is not world:
        return True  # they have none
    store = next((store for each, store in _stores.items() if set(ranks) <= set(each)), None)
    if store is None:
        return True
    call = Call(lambda: ask(store())).start()
    return call.ended.wait(_STORE_S) and call.error is None

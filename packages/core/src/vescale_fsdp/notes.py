"""What each rank waits for, in words that the other ranks can read.

A note says what a rank waits for. It is a key in the store, one for each rank. A rank writes it
only when a wait is long or has failed, so that other waits cost nothing. A rank whose wait has
failed reads the notes of the others, for its error (`waiting`).
"""

from __future__ import annotations

import contextlib
import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

_GRACE_S = 1.0  # time for ranks that have just been cut off to write their notes
_STORE_S = 2.0  # time for the store to answer


class _Here:
    """What this rank does now and did last."""

    subject: str | None = None  # what it waits for; None: only the kind of collective
    step = "before the first pass"
    last: tuple[str, str, float] | None = None  # the last wait: for what, in which step, its end
    world: weakref.ref[dist.ProcessGroup] | None = None  # the default group of `_stores`


_here = _Here()
_stores: list[tuple[Any, tuple[int, ...]]] = []  # and the ranks that share each


# What this rank does


def enter(step: str) -> None:
    """Set the step that this rank is in: "in forward of ..."."""
    _here.step = step


def where() -> str:
    """The step that this rank is in, from the last call of `enter`."""
    return _here.step


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
        _here.subject = self._what

    def __exit__(self, *exc_info: object) -> None:
        _here.subject = None


def finish(what: str) -> None:
    """Record that this rank has finished ``what``, or what `Named` was told."""
    _here.last = (_here.subject or what, _here.step, time.monotonic())


def doing(what: str) -> str:
    """What this rank waits for, and in which step. ``what`` is used outside of `Named`."""
    return f"{_here.subject or what}, {_here.step}"


def last() -> str:
    """A sentence: what this rank finished last."""
    if _here.last is None:
        return "It has not waited before."
    what, step, at = _here.last
    return f"The last that it finished was {what}, {step}, {time.monotonic() - at:.1f} s ago."


# In the store


def watch(store: Any, ranks: Sequence[int]) -> None:
    """Use ``store`` for the notes of ``ranks``.

    All of ``ranks`` use this store, and no earlier job has used it.
    """
    world = dist.group.WORLD
    assert world is not None, "there is a store"
    if _here.world is None or _here.world() is not world:
        _stores.clear()
        _here.world, _here.last, _here.step = weakref.ref(world), None, _Here.step
    if not any(each == tuple(ranks) for _, each in _stores):
        _stores.append((store, tuple(ranks)))


def write(ranks: Sequence[int], note: str) -> None:
    """Write this rank's note for ``ranks``, unless the store does not answer."""
    if (store := _store_of(ranks)) is not None:
        key = f"waits/{dist.get_rank()}"
        _in_time(lambda: store.set(key, json.dumps(note)))


@contextlib.contextmanager
def written(ranks: Sequence[int], note: str) -> Iterator[None]:
    """A context in which this rank has a note. It stays if the context ends with an error."""
    write(ranks, note)
    yield
    write(ranks, "")


def of(ranks: Sequence[int]) -> str:
    """A text that says what each of ``ranks`` does, according to its note.

    Waits up to `_GRACE_S` for missing notes, because ranks that were just cut off are writing them.
    """
    found: dict[int, str] = {}
    missing = "waits for no collective: it computes, sleeps, does something else, or has died"
    if (store := _store_of(ranks)) is not None:
        has_answered = _in_time(lambda: _read(store, ranks, found))
        if not has_answered:
            missing = "cannot be asked: the process that holds the store has ended or hangs"
    return "; ".join(
        f"rank {rank} {found.get(rank, f'{missing} (its log says which)')}" for rank in ranks
    )


def _store_of(ranks: Sequence[int]) -> Any:
    """The store with the notes of ``ranks``; None if there is none."""
    world = dist.group.WORLD
    if _here.world is None or _here.world() is not world:
        return None
    return next((store for store, each in _stores if set(ranks) <= set(each)), None)


def _read(store: Any, ranks: Sequence[int], found: dict[int, str]) -> None:
    deadline = time.monotonic() + _GRACE_S
    while len(found) < len(ranks):
        for rank in ranks:
            key = f"waits/{rank}"
            if rank not in found and store.check([key]) and (text := json.loads(store.get(key))):
                found[rank] = text
        if time.monotonic() > deadline:
            return
        time.sleep(0.02)


def _in_time(ask: Callable[[], None]) -> bool:
    """Call ``ask``, which uses the store. Returns whether the store has answered in time."""
    is_done = threading.Event()

    def run() -> None:
        with contextlib.suppress(Exception):
            ask()
            is_done.set()

    thread = threading.Thread(target=run, name="vescale-fsdp note", daemon=True)
    thread.start()
    thread.join(_STORE_S)
    return is_done.is_set()

"""Leases: the reasons why a unit is unsharded. It is freed when it has none.

::

    lease      taken                                     dropped
    FORWARD    its forward begins                        and ends
    BACKWARD   a gradient reaches its outputs            its inputs have theirs, or all ends
    USER       ``unshard()``                             its next forward, or ``reshard()``
    PINNED     ``with unsharded(...)`` begins            and ends
    AHEAD      unsharded by prefetch                     when it runs, or at the end of the pass
    KEPT       its forward ends, for the backward        by the backward, or the next forward
    RESTING    a backward ends that is not the last      the last one of a step
    HELD       joined for others in a backward, before   its own backward
               its own part in that

`TRANSITIONS` has the states of the parameters. A part is what forward keeps if
``reshard_after_forward`` is a number.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import Enum, auto
from typing import Any


class State(Enum):
    """The state of a unit's parameters."""

    SHARDED = auto()  # only the shard has memory
    UNSHARDING = auto()  # an all-gather writes them, or has; modules see the shards
    UNSHARDED = auto()  # modules see them
    PART = auto()  # a larger part than the shard is kept for the backward


TRANSITIONS = {
    State.SHARDED: {State.UNSHARDING},
    State.UNSHARDING: {State.UNSHARDED, State.SHARDED, State.PART},
    State.UNSHARDED: {State.SHARDED, State.PART, State.UNSHARDING},
    State.PART: {State.UNSHARDING, State.SHARDED},
}


class Lease(Enum):
    """A reason for a unit to be unsharded; see the module's docstring."""

    __hash__ = object.__hash__  # members are single; that of Enum is slow

    FORWARD = auto()
    BACKWARD = auto()
    USER = auto()
    PINNED = auto()
    AHEAD = auto()
    KEPT = auto()
    RESTING = auto()
    HELD = auto()


# Those of a forward or backward that runs, and of the user's context, are dropped by name only.
_STRONG = {Lease.FORWARD, Lease.BACKWARD, Lease.PINNED}


class Residency(ABC):
    """The leases and state of a unit's parameters. Subclasses unshard with torch, or count bytes.

    Attributes:
        index: of the unit in its model.
        leases: why it is unsharded.
        reshard_after_forward: None means True, except for the root of a model in training.
        num_parts: if more than 1, forward keeps one part of so many on each rank.
        unshard_in_backward, reshard_after_backward, requires_gradient_sync: as FSDP2's setters say.
        max_reductions: the user's limit for those under way at a time, if there is one.
        sizes: elements of its parameters; empty without parameters (it has no place in a program).
    """

    index = -1
    is_root = False
    reshard_after_forward: bool | None = None
    num_parts = 1
    reshard_after_backward = True
    unshard_in_backward = True
    requires_gradient_sync = True
    max_reductions: int | None = None
    sizes: Sequence[int] = ()

    def __init__(self) -> None:
        self.leases: set[Lease] = set()
        self.num_pins = 0
        self.open_calls: weakref.WeakSet[Any] = weakref.WeakSet()  # forwards that a backward awaits
        self.done_calls: weakref.WeakSet[Any] = weakref.WeakSet()  # those may come again
        self.lasts = False  # the backward that runs makes a graph, which reads it too
        self.is_over = False  # at the end of a backward: nothing of it is left to run in it

    # What carries it out

    @property
    @abstractmethod
    def is_sharded(self) -> bool:
        """Whether it is neither unsharded nor being unsharded."""

    @property
    @abstractmethod
    def is_stale(self) -> bool:
        """Whether the shards have changed since it was unsharded, and it is not pinned."""

    @property
    @abstractmethod
    def has_streams(self) -> bool:
        """Whether its work is queued on streams, so that the host does not wait."""

    @property
    @abstractmethod
    def trainable(self) -> bool:
        """Whether any parameter of it wants a gradient now."""

    @property
    @abstractmethod
    def all_trainable(self) -> bool:
        """Whether each of its groups has a parameter that wants a gradient."""

    @property
    @abstractmethod
    def version(self) -> Any:
        """The version of its shards; it changes with each write."""

    @abstractmethod
    def start_unshard(self, *, in_backward: bool = False) -> None:
        """Start the all-gather, if it is needed."""

    def has_arrived(self) -> bool:
        """Whether the all-gather has ended; waits a while for it, where the host waits at all."""
        return True

    @abstractmethod
    def wait_for_unshard(self) -> None:
        """Wait for the all-gather."""

    @abstractmethod
    def join_unshard(self) -> None:
        """Take part in an all-gather for other ranks; it is unsharded here already."""

    @abstractmethod
    def park(self) -> None:
        """Keep the unsharded memory, but hide the unsharded parameters."""

    @abstractmethod
    def free(self) -> None:
        """Free the unsharded parameters."""

    @abstractmethod
    def free_but_part(self) -> None:
        """Free the unsharded parameters, except this rank's part of ``num_parts``."""

    def prefetch_list(self, *, in_backward: bool) -> Sequence[int] | None:
        """The units to unshard beside its forward or backward, where a user has said so."""
        return None

    def end_modules(self) -> bool:
        """The outermost forward has ended; returns whether a list unit has modules left."""
        return False

    def keeps_no_message(self) -> None:
        """Drop the encoded message: no backward will send it again."""
        return

    # Leases

    def has(self, lease: Lease) -> bool:
        """Whether it is unsharded for that reason."""
        return lease in self.leases

    def pin(self) -> None:
        """Add a context that keeps it unsharded."""
        self.num_pins += 1
        self.leases.add(Lease.PINNED)

    def unpin(self) -> None:
        """Remove such a context. The caller releases."""
        self.num_pins -= 1
        if not self.num_pins:
            self.leases.discard(Lease.PINNED)

    def release(self, *dropped: Lease, to_part: bool = False) -> None:
        """Drop these leases and all weak ones; free it, unless a context pins it."""
        if Lease.PINNED in self.leases:
            self.leases.difference_update(dropped)
            return
        self.leases = (self.leases & _STRONG).difference(dropped)
        assert not self.leases, f"unit {self.index} is freed under {self.leases}"
        if to_part and self.num_parts > 1:
            self.free_but_part()
        else:
            self.free()

    def refresh(self) -> None:
        """Free the outdated parameters; the caller unshards them again."""
        if Lease.PINNED not in self.leases:
            self.leases -= {Lease.USER, Lease.RESTING}
            self.free()

    @property
    def is_busy(self) -> bool:
        """Whether a forward or a backward of it runs on this rank."""
        return Lease.FORWARD in self.leases or Lease.BACKWARD in self.leases

    @property
    def awaits_backward(self) -> bool:
        """Whether a gradient may still come back through one of its forwards."""
        return bool(self.open_calls) or Lease.BACKWARD in self.leases

    @property
    def stays_on_all_ranks(self) -> bool:
        """Whether it is unsharded for a reason that holds on every rank."""
        return not self.leases.isdisjoint((Lease.PINNED, Lease.USER, Lease.RESTING))

    def keeps_after_forward(self, wants_gradients: bool) -> bool:
        """Whether it is told to stay unsharded between forward and backward."""
        if self.reshard_after_forward is None:
            return self.is_root and wants_gradients
        return not self.reshard_after_forward

    # Forward

    def begin_pass(self) -> None:
        """The outermost forward begins: free what one without a backward, or an error, has left."""
        # Decided by what is the same on every rank; who still holds a graph is not.
        if self.is_sharded or Lease.PINNED in self.leases:
            self.leases.discard(Lease.AHEAD)
            return
        keeps = self.reshard_after_forward is False or self.stays_on_all_ranks
        if keeps and not self.is_stale:
            self.leases.discard(Lease.AHEAD)
        else:
            self.release(Lease.BACKWARD, Lease.FORWARD)

    def end_forward(self, keep: bool, comes_back: bool) -> None:
        """A forward has ended here, or another rank's was joined. ``keep``: for the backward."""
        self.leases.discard(Lease.FORWARD)
        if keep or not comes_back:
            self.keeps_no_message()
        if not keep:
            self.release(to_part=comes_back)
            return
        self.leases.add(Lease.KEPT)
        if Lease.AHEAD in self.leases:
            self.park()

    # Backward

    def enter_backward(self, call: Any) -> None:
        """A gradient has reached the outputs of a call."""
        if call not in self.open_calls:  # a retained graph: the other calls of its pass come again
            again = (each for each in self.done_calls if each.pass_number == call.pass_number)
            self.open_calls |= set(again)
        self.leases.add(Lease.BACKWARD)

    def leave_backward(self, call: Any) -> bool:
        """The gradients of a call's inputs are there; returns whether no other call is awaited."""
        self.open_calls.discard(call)
        self.done_calls.add(call)
        if self.open_calls:
            return False
        self.leases.discard(Lease.BACKWARD)
        self.leases.add(Lease.KEPT)  # until its schedule says otherwise
        return True

    @property
    def sets_gradients(self) -> bool:
        """Whether the backward sets ``.grad``, so that an optimizer step may come next."""
        return self.requires_gradient_sync

    @property
    def _rests_after_backward(self) -> bool:
        return (self.reshard_after_backward or self.sets_gradients) and not self.lasts

    def release_after_backward(self) -> None:
        """Free it, if no forward of it runs: nothing of it is left to run in a backward."""
        if Lease.FORWARD in self.leases:  # the backward runs inside of it
            self.leases &= {Lease.FORWARD, Lease.PINNED}
        else:
            self.release(Lease.BACKWARD)

    def release_open(self) -> None:
        """A backward has ended: reshard a unit that has run in it and was not completed by it.

        That is where its inputs want no gradient (tokens, say), or where another forward of it has
        got none.
        """
        if Lease.BACKWARD in self.leases and self._rests_after_backward:
            self.release_after_backward()
            self.is_over = True

    def end_backward(self) -> None:
        """The whole backward has ended."""
        self.is_over = False
        if self._rests_after_backward:
            self.release_after_backward()
        else:
            self.leases -= {Lease.BACKWARD, Lease.HELD}
            if not self.is_sharded:
                self.leases.add(Lease.RESTING)

    def forget(self) -> None:
        """A step was broken off: what it has unsharded is freed."""
        self.leases &= {Lease.PINNED}
        self.is_over = self.lasts = False
        self.open_calls.clear()
        self.done_calls.clear()

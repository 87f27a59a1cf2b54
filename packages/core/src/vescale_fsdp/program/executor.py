"""Executor: carries out a pass, with torch, or by counting bytes or seconds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from vescale_fsdp.program.order import Program
from vescale_fsdp.program.record import Record
from vescale_fsdp.program.reductions import Reduction
from vescale_fsdp.program.residency import Residency


class Executor(ABC):
    """What `passes.Passes` calls, beside units (`Residency`) and groups (`Reduction`).

    Attributes:
        sends_gathers: whether all-gathers send anything; not if each rank has all parameters.
    """

    sends_gathers = True

    # Agreement

    @abstractmethod
    def settle(self, mine: Record, timeout_s: float | None) -> Record:
        """Exchange and merge the records of all ranks (`record.merge`). Raises on a mismatch."""

    def is_elsewhere(self, step: str) -> bool:
        """Whether another rank waits in the next round in another pass than ``step``."""
        return False

    @abstractmethod
    def compare(self, entries: Sequence[str], unit: Residency | None) -> None:
        """Raise unless all ranks that share ``unit`` (None: any) have these entries. One round."""

    @abstractmethod
    def stall(self) -> None:
        """Tell the other ranks, without waiting, that this rank is late with its reductions."""

    # Events

    def begin_pass(self, first: Residency) -> None:
        """Called when the outermost forward begins."""
        return

    def begin_walk(self, program: Program, *, in_backward: bool) -> None:
        """Called when a forward or backward begins to follow ``program``."""
        return

    def end_walk(self) -> None:
        """Called at the end of that forward or backward."""
        return

    def end_pass(self) -> None:
        """Called at the end of a forward without gradients."""
        return

    def enter(self, where: str) -> None:
        """Set where this rank is, for errors."""
        return

    @abstractmethod
    def due(self) -> Sequence[Reduction]:
        """Return what the backward that begins reduces, the last defined first."""

    @abstractmethod
    def start_reductions(self, batch: Sequence[Reduction]) -> None:
        """Issue the reductions of these groups of one unit, together on streams."""

    def all_issued(self) -> None:
        """Called when all reductions of a backward have been issued."""
        return

    def end_backward(self) -> None:
        """Called when they and the backward have ended."""
        return

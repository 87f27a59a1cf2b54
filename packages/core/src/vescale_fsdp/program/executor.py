"""Executor: what carries out a pass: torch and processes, or an account of bytes or seconds."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from vescale_fsdp.program.order import Program
from vescale_fsdp.program.record import Record
from vescale_fsdp.program.reductions import Reduction
from vescale_fsdp.program.residency import Residency


class Executor(ABC):
    """What `passes.Passes` needs beside units (`Residency`) and groups (`Reduction`)."""

    # Agreement

    @abstractmethod
    def settle(self, mine: Record, timeout_s: float | None) -> Record:
        """What all ranks say together (`record.merge`). One round; raises if something is wrong."""

    def is_elsewhere(self, step: str) -> bool:
        """Whether another rank has come to the next round in another pass than ``step``."""
        return False

    @abstractmethod
    def compare(self, entries: Sequence[str], unit: Residency | None) -> None:
        """Raise unless all ranks that share ``unit`` (None: any) say the same. One round."""

    @abstractmethod
    def stall(self) -> None:
        """Tell the other ranks, without waiting, that reductions are behind on this one."""

    # Events

    def begin_pass(self, first: Residency) -> None:
        """The outermost forward begins."""
        return

    def begin_walk(self, program: Program, *, in_backward: bool) -> None:
        """A forward or backward follows ``program``."""
        return

    def end_walk(self) -> None:
        """It has come to its end."""
        return

    def gathered_for(self, unit: Residency) -> None:
        """The outermost forward has its parameters."""
        return

    def end_pass(self) -> None:
        """A forward has ended that no backward follows."""
        return

    def enter(self, where: str) -> None:
        """Where this rank is from now on, for errors."""
        return

    @abstractmethod
    def due(self) -> Sequence[Reduction]:
        """What the backward that begins reduces, those that are defined last first."""

    @abstractmethod
    def start_reductions(self, batch: Sequence[Reduction]) -> None:
        """Issue the reductions of these groups of one unit, together on streams."""

    def all_issued(self) -> None:
        """All reductions of a backward have been issued."""
        return

    def end_backward(self) -> None:
        """They have ended, and so has the backward."""
        return

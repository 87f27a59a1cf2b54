"""A thread that shows that this rank lives, and looks whether others want to join."""

from __future__ import annotations

import logging
import threading

from vescale_fsdp_elastic.hsdp.board import Board
from vescale_fsdp_elastic.hsdp.meeting import Life, wishes
from vescale_fsdp_elastic.hsdp.quorum import Member, Quorum

_log = logging.getLogger(__name__)


class Pulse:
    """The thread of one rank.

    Args:
        looks: whether this rank looks for others; one of a replica is enough.

    Attributes:
        quorum: in which this member is. None: not yet in one.
        is_replaced: a quorum without this member has been made, or the replica was started again.

    Cost: every ``beat_s`` seconds a file of a few bytes is written; the rank that looks reads the
    names in two folders.
    """

    def __init__(
        self, board: Board, life: Life, member: Member, rank: int, beat_s: float, *, looks: bool
    ) -> None:
        self._board, self._member, self._rank, self._looks = board, member, rank, looks
        self._life, self._beat_s = life, beat_s
        self._ends = threading.Event()
        self.quorum: Quorum | None = None
        self.is_replaced = False
        self._wished = 0  # the number of the quorum in which a replica wanted to join
        board.beat(member, rank, 0)
        self._thread = threading.Thread(target=self._run, name="vescale-fsdp pulse", daemon=True)
        self._thread.start()

    @property
    def is_wished(self) -> bool:
        """Whether a replica wants to join. The next quorum answers it."""
        return self.quorum is not None and self._wished == self.quorum.number

    def stop(self) -> None:
        """End the thread."""
        self._ends.set()
        self._thread.join()

    def _run(self) -> None:
        number = 0
        while not self._ends.wait(self._beat_s):
            number += 1
            try:
                try:
                    self._board.beat(self._member, self._rank, number)
                except FileNotFoundError:
                    if not self._board.is_replaced(self._member):
                        raise
                    self.is_replaced = True
                    return
                if self._looks and self.quorum is not None:
                    self._look(self.quorum)
            except OSError as error:
                _log.warning("the folder of the replicas cannot be used: %s", error)

    def _look(self, quorum: Quorum) -> None:
        if wishes(self._board, self._life.is_alive, quorum):
            self._wished = quorum.number
        last = self._board.last()
        self.is_replaced = (
            last is not None and last.number > quorum.number and self._member not in last.members
        )

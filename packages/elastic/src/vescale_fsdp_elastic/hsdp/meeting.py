"""How members agree on the next quorum: report, wait for those that live, and decide once.

Any member may decide. The decision is a file that can be made only once, so that two members with
different views of who is alive cannot both have their way. A member that is not in the decision, or
finds a later one, ends: it is started again and joins. So a replica that was cut off never goes on
beside the others.
"""

from __future__ import annotations

import logging
import math
import signal
import sys
from collections.abc import Callable, Iterable
from typing import Protocol

from vescale_fsdp.errors import RankMismatchError
from vescale_fsdp_elastic.hsdp.quorum import Member, Quorum, Report, decide

_log = logging.getLogger(__name__)
_POLL_S = 0.05
_PATIENCE = 10  # times wait_s that one waits that is not of the last quorum
_LAST_WORDS_S = 2.0  # if the others come in this time, the step is made before the process ends


class Notices(Protocol):
    """What this file uses of a `board.Board`."""

    def is_replaced(self, member: Member) -> bool: ...
    def has_left(self, member: Member) -> bool: ...
    def beats(self, member: Member, rank: int | None = None) -> dict[str, str]: ...
    def report(self, number: int, report: Report) -> None: ...
    def reports(self, number: int) -> list[Report]: ...
    def failures(self, number: int) -> list[int]: ...
    def decide(self, quorum: Quorum) -> None: ...
    def decision(self, number: int) -> Quorum | None: ...
    def last(self) -> Quorum | None: ...
    @property
    def finished(self) -> int: ...


class Clock(Protocol):
    """The functions of `time` that are used."""

    def monotonic(self) -> float: ...
    def sleep(self, seconds: float, /) -> None: ...


class Life:
    """Whether members are alive, as one process sees it. It compares its own times only.

    Args:
        timeout_s: a member of which a rank has not changed its number for so long counts as lost.
        rank: look at this rank of each member only. None: at all of them. One process of a replica
            does that; the others look at those that they exchange messages with.

    Cost: one small file for each rank that is looked at, at most 20 times in ``timeout_s``.
    """

    def __init__(
        self, board: Notices, clock: Clock, timeout_s: float, rank: int | None = None
    ) -> None:
        self._board, self._clock, self.timeout_s, self._rank = board, clock, timeout_s, rank
        self._seen: dict[Member, dict[str, tuple[str, float]]] = {}
        self._read: dict[Member, float] = {}

    def has_ended(self, member: Member) -> bool:
        """Whether it is certain that it will do nothing more, or must not."""
        return self._board.has_left(member) or self._board.is_replaced(member)

    def is_alive(self, member: Member, patience: float = 1.0) -> bool:
        """Whether it has not ended, and all of its ranks show that they live.

        Args:
            patience: a factor of the timeout.
        """
        if self.has_ended(member):
            return False
        now, seen = self._clock.monotonic(), self._seen.setdefault(member, {})
        seen.setdefault("", ("", now))  # the first look: beats may not be there yet
        if now - self._read.get(member, -math.inf) > self.timeout_s / 20:
            self._read[member] = now
            for rank, number in self._board.beats(member, self._rank).items():
                if rank not in seen or seen[rank][0] != number:
                    seen[rank] = (number, now)
        times = [time for rank, (_, time) in seen.items() if rank] or [seen[""][1]]
        return now - min(times) < self.timeout_s * patience


class Meeting:
    """The meetings of one member, on one of its processes.

    Args:
        stall_s: a member that is alive but has not come after so long counts as lost.
        num_replicas, wait_s: the first quorum waits so long until so many are there.
        is_stopped: whether this process was told to end. It does if it has to wait for others.
        takeover: those that join wait so many times the timeout before they believe that all
            members are lost, if these have not said so.

    Attributes:
        not_before: a member that is not expected does not report before this time.
    """

    def __init__(
        self,
        board: Notices,
        clock: Clock,
        life: Life,
        *,
        stall_s: float,
        num_replicas: int,
        wait_s: float,
        is_stopped: Callable[[], bool] = lambda: False,
        takeover: float = 6.0,
    ) -> None:
        self._board, self._clock, self._life = board, clock, life
        self._stall_s, self._num_replicas, self._wait_s = stall_s, num_replicas, wait_s
        self._takeover, self._is_stopped = takeover, is_stopped
        self.not_before = -math.inf

    def meet(self, report: Report, previous: Quorum | None, since: float | None = None) -> Quorum:
        """Return the next quorum, of which this member is one.

        Args:
            previous: this member's quorum; None if it is new.
            since: when this member began to wait for the others, if that was before now.

        Raises:
            RankMismatchError: the others have gone on without this member, or its replica was
                started again elsewhere.
        """
        began, number = self._clock.monotonic(), -1
        while True:
            if self._board.is_replaced(report.member):
                raise RankMismatchError(_replaced(report.member))
            last = self._board.last()
            if previous is not None and last is not None and last.number > previous.number:
                if report.member in last.members and last.number == previous.number + 1:
                    return last
                if report.place != "joining":
                    raise RankMismatchError(_left_behind(report.member, last))
            if last is not None and last.number == number and report.member in last.members:
                return last
            wanted = 1 if last is None else last.number + 1
            is_expected = last is not None and report.member in last.members
            may_report = is_expected or self._clock.monotonic() >= self.not_before
            if number != wanted and may_report:
                number = wanted
                self._board.report(number, report)
            waited_s = self._clock.monotonic() - began
            if waited_s > _LAST_WORDS_S and self._is_stopped():
                # A rank of this replica has died, and torchrun waits for this one. Or the job ends.
                sys.exit(128 + signal.SIGTERM)
            if number != wanted:
                self._clock.sleep(_POLL_S)
                continue
            stalled_s = waited_s if since is None else self._clock.monotonic() - since
            is_late = (
                report.place != "joining"
                and stalled_s > self._stall_s
                # Others that have waited as long as this one need a moment to report.
                and waited_s > min(self._life.timeout_s, self._stall_s)
            )
            reports = self._board.reports(number)
            told = {each.member for each in reports}
            patience = self._takeover if report.place == "joining" else 1.0

            def is_alive(
                member: Member,
                told: Iterable[Member] = told,
                patience: float = patience,
                is_late: bool = is_late,
            ) -> bool:
                if member in told:
                    return self._life.is_alive(member)
                return not is_late and self._life.is_alive(member, patience)

            quorum = decide(last, reports, is_alive)
            if quorum is not None and self._may_begin(last, quorum, report, began):
                if report.place == "joining" and last is not None and not self._has_ended(last):
                    _warn_of_loss(last, quorum)
                self._board.decide(quorum)
                continue
            self._clock.sleep(_POLL_S)

    def _may_begin(self, last: Quorum | None, quorum: Quorum, report: Report, began: float) -> bool:
        """Whether all replicas are there, or it is a quorum that has members with a state.

        If no replica of the last quorum is there, its steps would be lost: wait longer.
        """
        if report.place != "joining":
            return report.member in quorum.members
        if quorum.donor not in quorum.members or len(quorum.joining) + 1 < len(quorum.members):
            return False  # members with a state decide
        is_first = len(quorum.members) < self._num_replicas
        is_new = last is None or _is_known(last, quorum) or self._has_ended(last)
        wait_s = self._wait_s * (1 if is_new else _PATIENCE)
        return not (is_first and self._clock.monotonic() - began < wait_s)

    def _has_ended(self, last: Quorum) -> bool:
        """Whether the training was over with the last quorum."""
        finished = self._board.finished
        return finished > 0 and finished >= last.step


def _is_known(last: Quorum, quorum: Quorum) -> bool:
    """Whether a replica of the last quorum is in this one."""
    return not {each.replica for each in last.members}.isdisjoint(
        each.replica for each in quorum.members
    )


def _warn_of_loss(last: Quorum, quorum: Quorum) -> None:
    """Warn if the training begins with a state that is older than the last quorum."""
    if quorum.step >= last.step and _is_known(last, quorum):
        return
    missing = ", ".join(str(each.replica) for each in last.members)
    _log.warning(
        "the training goes on from step %d, the newest state that was found. The last quorum "
        "(number %d, replicas %s) began with step %d: its later steps are lost, unless you stop "
        "now and start these replicas first",
        quorum.step, last.number, missing, last.step,
    )  # fmt: skip


def _replaced(member: Member) -> str:
    return (
        f"replica {member.replica} was started again elsewhere, and this start (number "
        f"{member.start}) ends. Each replica must have a number of its own: look whether two jobs "
        f"were started with replica={member.replica}"
    )


def _left_behind(member: Member, last: Quorum) -> str:
    replicas = ", ".join(str(each.replica) for each in last.members)
    return (
        f"the others have gone on without replica {member.replica} (start {member.start}): quorum "
        f"{last.number} has the replicas {replicas}. It was cut off or too slow. Under torchrun "
        "with --max-restarts it is started again and joins them"
    )


def others_wait(
    board: Notices, is_alive: Callable[[Member], bool], quorum: Quorum, own: Report
) -> bool:
    """Whether it is of no use to wait longer for the other members in the step of ``own``.

    That is so if one of them is lost, or has given up this step or an earlier one, or another rank
    of this member has.
    """
    if any(step <= own.age.step for step in board.failures(quorum.number + 1)):
        return True
    others = [each for each in quorum.members if each != own.member]
    for report in board.reports(quorum.number + 1):
        if report.member in others and (
            report.place == "joining" or report.age.step <= own.age.step
        ):
            return True
    return not all(is_alive(each) for each in others)


def wishes(board: Notices, is_alive: Callable[[Member], bool], quorum: Quorum) -> bool:
    """Whether a replica wants to join."""
    return any(
        report.place == "joining" and report.member not in quorum.members
        and is_alive(report.member)
        for report in board.reports(quorum.number + 1)
    )  # fmt: skip

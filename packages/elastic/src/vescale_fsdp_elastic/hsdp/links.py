"""What the exchange does with real processes: lanes to the other replicas, agreements inside.

Each rank of a replica sends and receives on a lane of its own. What has happened on the lanes can
differ: the death of rank 1 of another replica breaks lane 1 only. So after each use the ranks of
this replica agree: it has worked if it has worked on all lanes.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from vescale_fsdp.errors import RankMismatchError
from vescale_fsdp_elastic.hsdp import catching_up
from vescale_fsdp_elastic.hsdp.board import Board
from vescale_fsdp_elastic.hsdp.facts import Facts, counted_in
from vescale_fsdp_elastic.hsdp.gradients import NUM_STEP, Gradients, numbers_of
from vescale_fsdp_elastic.hsdp.inside import Inside
from vescale_fsdp_elastic.hsdp.lanes import Lane, LaneError
from vescale_fsdp_elastic.hsdp.meeting import Life, Meeting, others_wait
from vescale_fsdp_elastic.hsdp.pulse import Pulse
from vescale_fsdp_elastic.hsdp.quorum import Member, Quorum, Report

_log = logging.getLogger(__name__)
_POLL_S = 0.1
_MOST_FAILURES = 5  # connections that fail one after the other, without a step
_LONGEST_PAUSE_S = 60.0


class Links:
    """The `exchange.Link` of one rank.

    Args:
        life, pulse: of this rank.
        meeting: used on the first rank of the replica.
        gradients, state: of this rank.
        extra: returns the values to send with a state.
        take: is given those that have arrived.
        num_replicas: of a quorum from which nobody is missing.

    Attributes:
        samples, loss: of this rank in the current step: how many, and the sum of weighted losses.
        nominal: the samples of a step in which all replicas take part.
        mean_loss: of the last step, over all samples of all that took part.
        is_wished: whether a replica wanted to join in the last step.
    """

    def __init__(
        self,
        board: Board,
        member: Member,
        inside: Inside,
        life: Life,
        meeting: Meeting,
        pulse: Pulse,
        gradients: Gradients,
        state: catching_up.State,
        extra: Callable[[], Mapping[str, Any]],
        take: Callable[[dict[str, Any]], None],
        *,
        num_replicas: int,
        timeout_s: float,
        stall_s: float,
    ) -> None:
        self._board, self._member, self._inside = board, member, inside
        self._meeting, self._pulse = meeting, pulse
        self._gradients, self._state, self._extra, self._take = gradients, state, extra, take
        self._num_replicas, self._timeout_s, self._stall_s = num_replicas, timeout_s, stall_s
        self._life = life
        self._lane: Lane | None = None
        self.samples = self.loss = self.nominal = self.mean_loss = 0.0
        self.is_wished = False
        self._since: float | None = None  # when the wait for the sum of this step began
        self._num_unconnected = self._num_not_joined = 0  # in a row
        self._counted: tuple[float, float] | None = None  # other facts than those of this one

    def meet(self, report: Report, previous: Quorum | None) -> Quorum:
        """Agree on the next quorum. The first rank does it for all."""
        value = self._inside.ranks.from_first(
            "the agreement on who takes part",
            lambda: self._meeting.meet(report, previous, self._since).to_json(),
        )
        self._since = None
        quorum = Quorum.from_json(value)
        self._pulse.quorum = quorum
        return quorum

    def connect(self, quorum: Quorum) -> bool:
        """Connect to the other members. Returns whether it was possible on all lanes.

        Raises:
            ConnectionError: it was not, several times in a row.
        """
        self.close()
        why = "another rank of this replica could not connect"
        if self._member in quorum.joining:
            self._check_same(quorum.donor)
        if len(quorum.members) > 1:
            try:
                self._lane = self._new_lane(quorum, "lane", quorum.members)
            except LaneError as error:
                why = str(error)
        if self._inside.all(self._lane is not None or len(quorum.members) == 1):
            return True
        self._count_unconnected(quorum, why)
        return False

    def _count_unconnected(self, quorum: Quorum, why: str) -> None:
        self._num_unconnected += 1
        if self._member in quorum.joining:
            self._put_off()
        text = (
            f"replica {self._member.replica} and the replicas {self._others(quorum)} could not all "
            f"connect within {self._timeout_s:g} s, for the {self._num_unconnected}. time in a row "
            f"({why.splitlines()[0]}). They see the same folder, and need TCP connections to each "
            f"other, too: GLOO_SOCKET_IFNAME is {os.environ.get('GLOO_SOCKET_IFNAME')!r}, set it "
            "to the network interface by which the machines reach each other"
        )
        if self._num_unconnected >= _MOST_FAILURES:
            raise ConnectionError(text)
        if self._inside.ranks.is_first:
            _log.warning("%s", text)

    def _put_off(self) -> None:
        """Wait for a while before this member tries again to join. The others make steps."""
        pause_s = min(2.0**self._num_not_joined, _LONGEST_PAUSE_S)
        self._num_not_joined += 1
        self._meeting.not_before = time.monotonic() + pause_s

    def _others(self, quorum: Quorum) -> str:
        return ", ".join(str(m.replica) for m in quorum.members if m != self._member)

    def sum(self, quorum: Quorum, report: Report) -> bool:
        """Sum this step's gradients over the members."""
        step = report.age.step
        self._counted, facts = None, self._gradients.facts(self.nominal)
        numbers = [self.samples, self.loss, float(self._pulse.is_wished)]
        numbers += facts.numbers(is_reference=self._member == _reference(quorum))
        self._gradients.pack(step, numbers)
        is_whole = not self._pulse.is_replaced and self._sum(quorum, report, facts)
        return self._complete(step, is_whole)

    def _sum(self, quorum: Quorum, report: Report, facts: Facts) -> bool:
        if len(quorum.members) == 1:
            return True
        assert self._lane is not None, "it is connected"
        slot, gives_up = self._gradients.slot(report.age.step), self._waiting(quorum, report)
        self._since = time.monotonic()
        try:
            self._lane.sum(slot.numbers, gives_up)
            numbers = slot.numbers[NUM_STEP:].tolist()
            if not facts.is_same(numbers):  # the gradients may have other sizes
                if not facts.is_reference(numbers):
                    self._counted = counted_in(numbers)
                return False
            self._lane.sum(slot.data, gives_up)
        except LaneError:
            self._board.give_up(quorum.number + 1, report.age.step)
            return False
        return True

    def _complete(self, step: int, is_whole: bool) -> bool:
        """Agree inside whether a sum has arrived on all lanes. If so, use it."""
        slot = self._gradients.slot(step)
        values = [float(is_whole), float(self._counted is not None), *(self._counted or (0.0, 0.0))]
        values += [*numbers_of(slot), float(slot.counts.sum())] if is_whole else [0.0] * 4
        whole, others, *counted, samples, loss, wishes, used = self._inside.sums(values)
        if others:
            raise RankMismatchError(self._other_facts([each / others for each in counted]))
        if whole < self._inside.size:
            return False
        if not used:
            raise RuntimeError(
                f"step {step}: no parameter has a gradient on any replica when they are averaged. "
                "Call step.backward(loss) inside of the loop over the micro-batches (`for batch "
                "in step`, not after list(step)); with run.steps, call run.reduce_gradients() "
                "after the last backward"
            )
        factor = self.nominal / (self._num_replicas * samples)
        self.mean_loss = loss * factor / self._inside.size
        self.is_wished = wishes > 0
        self._since, self._num_unconnected = None, 0
        self._gradients.unpack(step, factor)
        return True

    def _other_facts(self, counted: list[float]) -> str:
        own, (nominal, num_trainable) = self._gradients.facts(self.nominal), counted
        return (
            f"replica {self._member.replica} has steps of {own.nominal:g} samples and "
            f"{own.num_trainable} trainable parameters; the other replicas have steps of "
            f"{nominal:g} samples and {num_trainable:g} trainable parameters (if these are equal, "
            "other ones): start all replicas with the same global_batch, and freeze and unfreeze "
            "the same parameters at the same steps"
        )

    def hand_over(self, quorum: Quorum, report: Report) -> bool:
        """Send the kept sum of the last step to those that are behind, or receive it."""
        assert quorum.source is not None, "some are behind"
        parties = (quorum.source, *quorum.behind)
        if self._member not in parties:
            return True
        step, is_behind = quorum.step - 1, self._member in quorum.behind
        slot, gives_up = self._gradients.slot(step), self._waiting(quorum, report)
        is_whole = True
        try:
            with self._lane_of(quorum, "sum", parties) as lane:
                lane.broadcast(slot.data, 0, gives_up)
                lane.broadcast(slot.numbers, 0, gives_up)
                lane.sum(slot.numbers.new_zeros(1), gives_up)  # all of them have it
        except LaneError:
            is_whole = False
        if is_behind:
            return self._complete(step, is_whole)
        return self._inside.all(is_whole)

    def give(self, quorum: Quorum, report: Report) -> bool:
        """Send this member's state to those that join. Returns whether it has arrived."""
        rank, why = self._inside.rank, ""
        parties, gives_up = (self._member, *quorum.joining), self._waiting(quorum, report)
        try:
            text = self._state.write(self._inside, self._extra())
            self._board.tell_state(quorum.number, rank)
            with self._lane_of(quorum, "state", parties) as lane:
                catching_up.send(lane, text, self._state.file(self._inside), gives_up)
        except OSError as error:  # the memory or a disk is full
            why = f"{type(error).__name__}: {error}"
            self._board.tell_state(quorum.number, rank, why)
        except LaneError as error:
            why = str(error)
        finally:
            self._state.clear(self._inside)
        if self._inside.all(not why):
            return True
        if self._inside.ranks.is_first:
            _log.warning(
                "replica %d could not give its state to those that join (replicas %s): %s. It goes "
                "on without them, and they try again later", self._member.replica,
                ", ".join(str(each.replica) for each in quorum.joining),
                why or "another rank of this replica could not",
            )  # fmt: skip
        return False

    def receive(self, quorum: Quorum, report: Report) -> bool:
        """Get and load the donor's state."""
        assert quorum.donor is not None, "a member that joins has a donor"
        parties, gives_up = (quorum.donor, *quorum.joining), self._waiting(quorum, report)

        def arrive(folder: Path, name: str) -> bytes | None:
            try:
                self._wait_for_state(quorum, gives_up)
                with self._lane_of(quorum, "state", parties) as lane:
                    return catching_up.receive(lane, folder, name, gives_up)
            except LaneError as error:
                _log.warning(
                    "replica %d, rank %d: no state from replica %d, to join the others: %s. It "
                    "tries again later", self._member.replica, self._inside.rank,
                    parties[0].replica, error,
                )  # fmt: skip
                return None

        extra = self._state.load(self._inside, quorum.step, arrive)
        if extra is None:
            self._put_off()
            return False
        self._num_not_joined = 0
        self._take(extra)
        return True

    def _wait_for_state(self, quorum: Quorum, gives_up: Callable[[], bool]) -> None:
        """Wait until the donor has written its part, however long that takes while it lives."""
        while (told := self._board.told_of_state(quorum.number, self._inside.rank)) is None:
            if gives_up():
                raise LaneError("it is lost, or has given up")
            time.sleep(_POLL_S)
        if told:
            raise LaneError(told)

    def close(self) -> None:
        """Close the connections to the other members."""
        if self._lane is not None:
            self._lane.close()
            self._lane = None

    @contextlib.contextmanager
    def _lane_of(self, quorum: Quorum, name: str, parties: tuple[Member, ...]) -> Iterator[Lane]:
        """A lane for one purpose. The first of the parties has the index 0."""
        lane = self._new_lane(quorum, name, parties)
        try:
            yield lane
        finally:
            lane.close()

    def _new_lane(self, quorum: Quorum, name: str, parties: tuple[Member, ...]) -> Lane:
        folder = self._board.quorum_folder(quorum.number)
        file = folder / f"{name}-{self._inside.rank:05d}"
        return Lane(file, parties.index(self._member), len(parties), self._timeout_s)

    def _waiting(self, quorum: Quorum, report: Report) -> Callable[[], bool]:
        """A function that says whether it is of no use to wait longer."""
        began = time.monotonic()

        def gives_up() -> bool:
            is_stalled = time.monotonic() - began > self._stall_s
            return is_stalled or others_wait(self._board, self._life.is_alive, quorum, report)

        return gives_up

    def _check_same(self, donor: Member | None) -> None:
        assert donor is not None, "a member that joins has a donor"
        own, other = self._board.about(self._member), self._board.about(donor)
        if own != other:
            number, others = own["num_replicas"], other.get("num_replicas")
            if number != others:
                raise RankMismatchError(
                    f"replica {self._member.replica} was started with num_replicas={number}, and "
                    f"replica {donor.replica} with num_replicas={others}: it must be the same"
                )
            raise RankMismatchError(
                f"replica {self._member.replica} has {own['ranks']} ranks and other shards than "
                f"replica {donor.replica} with {other.get('ranks')} ranks: all replicas must have "
                "the same model, with the same dtypes and trainable parameters, sharded in the "
                "same way over the same number of ranks"
            )


def _reference(quorum: Quorum) -> Member:
    """The member whose facts count: one that has a state."""
    return quorum.donor or quorum.members[0]

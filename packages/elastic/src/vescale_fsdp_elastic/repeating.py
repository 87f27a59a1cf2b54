"""Goes on in the same process when others drive the loop: the whole training is called again.

`Run.batches` begins its own loop again in the next world. A trainer has another loop, and finds its
place in it when it restores a state. So the call of the trainer is repeated::

    repeat(fit)
      fit         makes or keeps the model, enters `training`, and trains
                  a rank is lost, or a host comes: `training` is left with an error
      end         what the call had begun, and not ended
      regroup     the ranks that are there meet, and shard the model in place
      take_world  what depends on the ranks
      fit         enters `training` again, which restores the newest state

A host that comes makes the model in the same way, in a world of its own. `training` leaves that
world with an error too, so that all ranks make the same calls from there.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import TypeVar

from vescale_fsdp_elastic import liveness, regroup, worlds
from vescale_fsdp_elastic.beginning import Options, begin, connect
from vescale_fsdp_elastic.losses import RanksHaveChanged, is_loss
from vescale_fsdp_elastic.meeting import MEETING
from vescale_fsdp_elastic.run import Run

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class Repetition:
    """The calls of one training, of which `training` knows.

    Attributes:
        number: of calls that have ended with a loss, or to join others.
    """

    def __init__(self) -> None:
        self._options: Options | None = None  # of the last call that has made its model
        self._run: Run | None = None
        self.number = 0
        self._last_try: tuple[object, ...] = ()
        self._ring: liveness.Ring | None = None  # between the meeting and the next attempt

    def run(self, options: Options, *, joins: bool) -> Run:
        """Begin an attempt of the call under way.

        Args:
            joins: others are in this training, and this host is in a world of its own.

        Raises:
            RanksHaveChanged: it can join them now.
            RuntimeError: there is no saved state, and that of the processes is gone.
        """
        self._options = options
        self.close()
        if joins:
            raise RanksHaveChanged("the model is made, and others are under way")
        attempt = begin(options, goes_on=self.number > 0)
        if self.number:
            regroup.check_found(attempt)
        try:
            self._run = Run(options, attempt, before=self._run, is_repeated=True)
        except BaseException:
            attempt.give_up()
            raise
        return self._run

    def finish(self) -> None:
        """The training is done, and its state on disk: a loss after that ends the process."""
        self._options = None

    def goes_on(self, error: Exception) -> bool:
        """Whether the call can be repeated after an error: not if nobody was lost by it."""
        meeting = worlds.current()
        if self._options is None or meeting is None or not is_loss(error):
            return False
        if not isinstance(error, RanksHaveChanged):
            this_try = (None if self._run is None else self._run.step, meeting.names)
            if this_try == self._last_try:  # the same step has failed again
                return False
            self._last_try = this_try
        return True

    def regroup(self, why: str) -> None:
        """Leave this world, and move the model to the next one."""
        assert self._options is not None, "a call has made its model"
        self.close()
        _, self._ring = regroup.meet(self._options, why, connect)
        self.number += 1

    def close(self) -> None:
        """Leave the ring that watches until an attempt has its own."""
        ring, self._ring = self._ring, None
        if ring is not None:
            ring.close()


_current: Repetition | None = None


def current() -> Repetition | None:
    """The training that is repeated; None if this one is not."""
    return _current


def repeat(
    train: Callable[[], _T], end: Callable[[Exception], None], take_world: Callable[[], None]
) -> _T:
    """Call ``train``, and call it again when ranks have been lost or hosts have come.

    Without ``VESCALE_FSDP_MEETING`` it is called once.

    Args:
        train: enters one `training` after its collectives on the model. Called again, it must keep
            the model, and find its place in the state that `training` has restored.
        end: ends what a call had begun that ended with the error. Must not wait for other ranks.
        take_world: called in the next world, before the next call.

    Raises:
        Exception: what ``train`` has raised, if no rank was lost.
    """
    global _current
    if _current is not None or not os.environ.get(MEETING):
        return train()
    _current = repetition = Repetition()
    try:
        while True:
            try:
                return train()
            except Exception as error:
                if not repetition.goes_on(error):
                    raise
                end(error)
                why = str(error)
                _log.info("the training is called again: %s", why)
            # Here the error is gone, and with it what the call has held: batches and activations.
            repetition.regroup(why)
            take_world()
    except BaseException:
        worlds.end()  # it does not come back: others must not wait
        raise
    finally:
        repetition.close()
        _current = None

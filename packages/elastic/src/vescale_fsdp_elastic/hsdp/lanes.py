"""A lane: the ranks with one number of several replicas, and the tensors that they send each other.

A lane is a gloo communicator outside of the default group, because the ranks of another replica are
in no group of this one. Its addresses are in a file of the shared folder. A wait looks regularly
whether it is still of use, and closes the connections if not.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vescale_fsdp import spi

_POLL_S = 0.2
_LONG = datetime.timedelta(days=7)  # the waits decide themselves when to end


class LaneError(RuntimeError):
    """The lane is broken: another rank in it has died or has closed it."""


class Lane:
    """A communicator. Collective: all of its ranks make it at about the same time.

    Args:
        file: a new one, on a file system that all ranks of the lane share.
        index, size: of this rank in the lane.
        timeout_s: the others must connect within this time.

    Raises:
        LaneError: they have not.
    """

    def __init__(self, file: Path, index: int, size: int, timeout_s: float) -> None:
        timeout = datetime.timedelta(seconds=timeout_s)
        self._peer = (index + 1) % size
        self._is_closed = False
        try:
            store = spi.FileStore(str(file))
            store.set_timeout(timeout)
            self._group: Any = dist.ProcessGroupGloo(store, index, size, timeout)
        except RuntimeError as error:
            raise LaneError(str(error)) from error

    def sum(self, tensor: torch.Tensor, gives_up: Callable[[], bool]) -> None:
        """Sum a tensor over the lane, in place. The result has the same bits on all ranks.

        Args:
            gives_up: called regularly: whether it is of no use to wait longer.

        Raises:
            LaneError: the sum is not complete on this rank. The tensor has any values.
        """
        options = dist.AllreduceOptions()
        options.timeout = _LONG
        self._run(lambda: self._group.allreduce([tensor], options), gives_up)

    def broadcast(self, tensor: torch.Tensor, source: int, gives_up: Callable[[], bool]) -> None:
        """Send a tensor of the rank with index ``source`` to the others. As `sum` otherwise."""
        options = dist.BroadcastOptions()
        options.rootRank, options.timeout = source, _LONG
        self._run(lambda: self._group.broadcast([tensor], options), gives_up)

    def _run(self, start: Callable[[], Any], gives_up: Callable[[], bool]) -> None:
        if self._is_closed:
            raise LaneError("it has been closed")
        try:
            work = start()
        except RuntimeError as error:
            self.close()
            raise LaneError(str(error)) from error
        while True:
            try:
                work.wait(datetime.timedelta(seconds=_POLL_S))
                return
            except RuntimeError:
                if work.is_completed():  # it may have ended just after this wait
                    self._result_of(work)
                    return
                if gives_up():
                    self.close()  # the operation then ends with an error

    def _result_of(self, work: Any) -> None:
        """Return if the work, which has ended, has done its task."""
        try:
            work.wait(datetime.timedelta(seconds=_POLL_S))
        except RuntimeError as error:
            self.close()
            raise LaneError(str(error)) from error

    def close(self) -> None:
        """Close the connections. Operations under way end with an error, also on other ranks."""
        if not self._is_closed:
            self._is_closed = True
            spi.waits.hang_up(self._group, self._peer)

"""Which errors say that other ranks are gone, so that the ranks that are left can go on."""

from __future__ import annotations

import torch.distributed as dist

from vescale_fsdp.errors import CheckpointIncompleteError, RankMismatchError
from vescale_fsdp.spi import AbsentError, waits
from vescale_fsdp_elastic.meeting import TooFewHostsError

_GLOO = ("gloo", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


class RanksHaveChanged(Exception):
    """Hosts wait to join, or ranks leave. The state has been saved."""


def is_loss(error: BaseException | None) -> bool:
    """Whether an error says that other ranks are gone, or one that it comes from does.

    When this package has closed the connections, collectives of others fail with texts of their
    backend. So any RuntimeError counts then. If it was another one, the step that is repeated
    raises it again.
    """
    kinds = (
        *(RanksHaveChanged, RankMismatchError, CheckpointIncompleteError),
        *(AbsentError, dist.DistError),
    )
    while error is not None:
        if isinstance(error, TooFewHostsError):
            return False
        if isinstance(error, kinds):
            return True
        if isinstance(error, RuntimeError) and (
            waits.is_cut() or any(word in str(error) for word in _GLOO)
        ):
            return True
        error = error.__cause__
    return False

"""`repeat` without a meeting, and errors that mean a loss. The adapters test it with one."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from vescale_fsdp.ranks import waits
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_elastic import repeating
from vescale_fsdp_elastic.losses import is_loss
from vescale_fsdp_elastic.regroup import RankMismatchError


def test_without_a_meeting_it_is_called_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VESCALE_FSDP_MEETING", raising=False)
    assert repeating.repeat(lambda: repeating.current() is None, _never, _never)

    def fail() -> None:
        raise RankMismatchError("a rank was lost")

    with pytest.raises(RankMismatchError):
        repeating.repeat(fail, _never, _never)


def _never(*_: object) -> None:
    raise AssertionError("it is not repeated")


def closed() -> tuple[bool, bool, str]:
    """A collective of a user's, while this package closes the connections."""
    group = dist.group.WORLD
    assert group is not None
    error, told = RuntimeError("another text"), ""
    before = is_loss(error)
    dist.barrier()
    if dist.get_rank() == 0:
        waits.abort("rank 1 has died", [group])
    try:
        dist.all_reduce(torch.ones(1))
    except RuntimeError as caught:
        told = str(caught)
        if dist.get_rank():  # its own thread tells it in a training
            waits.abort("rank 0 has closed them", [group])
    return before, is_loss(error), told


def test_an_error_after_connections_were_closed_is_a_loss() -> None:
    for before, after, told in run_ranks(closed, 2):
        assert (before, after) == (False, True)
        assert told, "the collective has failed"

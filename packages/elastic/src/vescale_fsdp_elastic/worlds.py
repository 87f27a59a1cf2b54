"""The process group of an elastic job: made at the start, and again when ranks have come or gone.

With ``VESCALE_FSDP_MEETING`` ranks meet in a folder (`meeting`), and a process can leave one world
and join the next. Without it, torchrun decides who is there, and starts the processes again.
"""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist

from vescale_fsdp import checkpoint, spi
from vescale_fsdp.spi import backends_of, waits
from vescale_fsdp_elastic import meeting
from vescale_fsdp_elastic.connecting import limited, watch_agents
from vescale_fsdp_elastic.meeting import Meeting, World

# torch's is half an hour. A rank that dies while others connect to it keeps them for so long.
_TIMEOUT = datetime.timedelta(minutes=2)


@dataclass
class _Joined:
    """How this process has joined."""

    meeting: Meeting | None = None
    backend: str | None = None
    connect_timeout_s: float = 120.0
    options: dict[str, Any] = field(default_factory=dict)
    is_apart: bool = False  # in a world of its own host, until it joins the others
    trainings: dict[str, int] = field(default_factory=dict)  # how many have begun, by directory


_joined = _Joined()


def init_process_group(
    backend: str | None = None, *, connect_timeout_s: float = 120.0, **options: Any
) -> None:
    """Call it in place of ``torch.distributed.init_process_group`` in an elastic job.

    If ``VESCALE_FSDP_MEETING`` names a folder, ranks meet there; ``RANK`` and ``WORLD_SIZE`` of the
    environment are changed. If a training is under way there, the ranks of this host have a world
    of their own first, in which they make the model; `training` joins the others.

    Else each attempt under ``torchrun --max-restarts`` gets a fresh store; everywhere else, and
    where ``options`` say how processes find each other, it is torch's.

    Under torchrun a process that is not connected to all others in time logs that and ends, with
    exit code 1. torchrun then starts the ranks that are there. So does one of a host that sees that
    torchrun has lost another host, until the training begins (docs/elastic.md).

    Args:
        backend: as in torch.
        connect_timeout_s: for all ranks to be connected. It must be longer than the time between
            the first and the last rank that comes to this line; with a meeting, than the time that
            the connections take.
        options: torch's other arguments.

    Raises:
        RankMismatchError: too few hosts have come within 10 minutes.
        ValueError: ``options`` say how processes find each other, and the environment does too; or
            the environment names a meeting, and the backend is not gloo.
    """
    found = meeting.from_environment()
    if found is None:
        watch_agents()
        with limited(connect_timeout_s):
            checkpoint.init_process_group(backend, **options)
        return
    told = {"store", "init_method", "rank", "world_size"} & options.keys()
    if told:
        raise ValueError(
            f"init_process_group was given {', '.join(sorted(told))}, but {meeting.MEETING} is "
            "set: ranks find each other in that folder. Leave out one of the two"
        )
    _joined.meeting, _joined.backend, _joined.connect_timeout_s = found, backend, connect_timeout_s
    _joined.options = {"timeout": _TIMEOUT, **options}
    _joined.is_apart = found.is_under_way()
    if not _joined.is_apart:
        _init(found.join())
    else:
        with limited(connect_timeout_s):
            checkpoint.init_process_group(backend, **options)
    if current() is None:
        names = ", ".join(sorted({*backends_of().values()}))
        raise ValueError(
            f"{meeting.MEETING} is set, and the backend is {names}. Ranks can go on in their "
            "processes with gloo only: a communicator of NCCL cannot be aborted safely "
            "while its kernels run. Leave the variable out, and start with torchrun's rendezvous"
        )


def is_apart() -> bool:
    """Whether this host has a world of its own, because it has come to a training under way."""
    return _joined.is_apart


def check_joined() -> None:
    """Raise if the environment names a meeting, and the process group was made without it.

    Raises:
        RuntimeError: each host would train by itself.
    """
    if os.environ.get(meeting.MEETING) and _joined.meeting is None:
        raise RuntimeError(
            f"{meeting.MEETING} is set, but the process group was not made by "
            "elastic.init_process_group: call that, or leave the variable out"
        )


def begin(directory: Path, *, is_again: bool) -> bool:
    """A training begins. Returns whether this process joins others that are in it.

    It does not join one that they have ended: a script may have several, one after the other, and
    a process that was restarted comes through all of them. The state of that one is on disk.

    Args:
        directory: of the run.
        is_again: the same training goes on in this process.

    Raises:
        RuntimeError: the others have ended it, and are in another one of the same directory.
    """
    meeting, name = _joined.meeting, str(directory.absolute())
    if meeting is None:
        return False
    meeting.attend()
    number = _joined.trainings[name] = _joined.trainings.get(name, 0) + (not is_again)
    if not _joined.is_apart:
        if not is_again and dist.get_rank() == 0:
            meeting.note(name, number, number - 1)
        return False
    begun, ended = meeting.noted(name)
    if number > ended:
        return True
    if begun > ended:
        raise RuntimeError(
            f"this host has come to training {number} in {directory}, and the others are in "
            f"training {begun} there. Ranks cannot join the second training of a directory: give "
            "each one in a script a directory of its own"
        )
    return False


def end(directory: Path | None = None) -> None:
    """Others do not wait for this process any more.

    Args:
        directory: of the run, if its training is done.
    """
    meeting = _joined.meeting
    if meeting is None:
        return
    if directory is not None and not _joined.is_apart and dist.get_rank() == 0:
        name = str(directory.absolute())
        number = _joined.trainings.get(name, 0)
        meeting.note(name, number, number)
    meeting.leave()


def current() -> Meeting | None:
    """The meeting by which the default group was made, if this process can join another one.

    None with NCCL: a communicator of it cannot be aborted safely while its kernels run, and an
    abort leaves the CUDA stream in error. Then the process must be started again.
    """
    world = dist.group.WORLD if dist.is_initialized() else None
    if _joined.meeting is None or world is None:
        return None
    return _joined.meeting if {*backends_of(world).values()} <= {"gloo"} else None


def leave(why: str) -> None:
    """Close all connections, and destroy the process groups. Does not wait for other ranks."""
    waits.abort(why)
    dist.destroy_process_group()


def rejoin() -> World:
    """Join the next round, after `leave`, and make the default group.

    Raises:
        RankMismatchError: too few hosts have come within 10 minutes.
        RuntimeError: a rank has died meanwhile.
    """
    assert _joined.meeting is not None, "the caller has asked `current`"
    world = _joined.meeting.join()
    _joined.is_apart = False
    _init(world)
    return world


def _init(world: World) -> None:
    size = len(world.names)
    os.environ["RANK"], os.environ["WORLD_SIZE"] = str(world.rank), str(size)
    os.environ["MASTER_ADDR"] = world.address
    spi.count_groups_from_zero()
    with limited(_joined.connect_timeout_s):
        dist.init_process_group(
            _joined.backend, store=world.store, rank=world.rank, world_size=size, **_joined.options
        )

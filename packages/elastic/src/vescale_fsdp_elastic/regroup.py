"""Goes on in the same process when other ranks have been lost, or have come.

::

    a rank is killed:    the others' waits fail -> leave the world -> meet -> shard the model over
    a host comes:        the step ends, save    -> the ranks that are there -> load from memory

The process keeps its model, its compiled code and its data. What was not saved in memory is
repeated, as after a restart of the process.
"""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable
from typing import TypeVar

import torch
import torch.distributed as dist

from vescale_fsdp import spi
from vescale_fsdp.errors import RankMismatchError
from vescale_fsdp.spi import named
from vescale_fsdp_elastic import worlds
from vescale_fsdp_elastic.beginning import Attempt, Options, begin
from vescale_fsdp_elastic.losses import is_loss

_T = TypeVar("_T")
_log = logging.getLogger(__name__)
_MOST = 10  # attempts of which none has begun: then the process ends


def regroup(options: Options, why: str) -> Attempt:
    """Leave this world, join the next one, move the model there, and restore the newest state.

    Raises:
        NotImplementedError: the model cannot move.
        RankMismatchError: too few hosts have come, or no attempt has begun after several losses.
        RuntimeError: there is no saved state, and that of the processes is gone.
    """

    def restore() -> Attempt:
        attempt = begin(options, goes_on=True)
        check_found(attempt)
        return attempt

    return meet(options, why, restore)


def meet(options: Options, why: str, then: Callable[[], _T]) -> _T:
    """Leave this world, join the next one, and move the model there, uninitialized.

    Args:
        then: called in the next world. If a rank is lost meanwhile, the others meet again.

    Raises:
        NotImplementedError: the model cannot move.
        RankMismatchError: too few hosts have come, or ranks were lost again and again.
    """
    began = time.monotonic()
    for module in options.modules:
        spi.check_remesh(module)
    for _ in range(_MOST):
        try:
            if dist.is_initialized():
                worlds.leave(why)
            # Process groups are in cycles of references. They keep threads and connections.
            gc.collect()
            world = worlds.rejoin()
            for module in options.modules:
                spi.remesh(module)
            _clear(options)
            found = then()
            if world.rank == 0:
                seconds, size = time.monotonic() - began, len(world.names)
                _log.info("%d ranks go on after %.1f s, without a restart", size, seconds)
            return found
        except Exception as error:
            if not is_loss(error):
                raise
            why = str(error)
            _log.warning("another rank was lost while ranks met: %s", why)
    raise RankMismatchError(f"ranks were lost {_MOST} times while they met; the last time: {why}")


def check_found(attempt: Attempt) -> None:
    """Give an attempt up that has found no state: the processes have none any more.

    Raises:
        RuntimeError: it has found none.
    """
    if attempt.restored.source == "start":
        attempt.give_up()
        raise RuntimeError(
            "ranks were lost before the first checkpoint, and there is no state to go on from; "
            "the processes must start again"
        )


def _clear(options: Options) -> None:
    """Drop what a step has left: states with the sizes of former shards, gradients, and stages."""
    params = [*options.model.parameters()]
    for optimizer in named(options.optimizer).values():
        optimizer.state.clear()
        params += [param for group in optimizer.param_groups for param in group["params"]]
    for param in params:
        param.grad = None
    for each in options.stateful.values():
        if isinstance(each, torch.amp.GradScaler):
            spi.forget_stages(each)

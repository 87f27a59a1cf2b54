"""The beginning of an attempt: ranks get to know each other, and restore the newest state."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch.distributed as dist
from torch import nn

from vescale_fsdp import spi
from vescale_fsdp.spi import Optimizers, Ranks, Stateful, everyone, is_fake, waits
from vescale_fsdp_elastic import connecting, leaving, liveness, memory
from vescale_fsdp_elastic.keeping import Keeper
from vescale_fsdp_elastic.leaving import Left
from vescale_fsdp_elastic.restoring import Restored, Restoring, meet

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Options:
    """What `training` was given."""

    directory: Path
    model: nn.Module
    optimizer: Optimizers
    stateful: Mapping[str, Stateful]
    every: int
    replicas: int
    every_on_disk: int | None
    keep_last: int
    signals: tuple[signal.Signals, ...]
    root: Path  # of the memory
    after_regroup: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        for name, least in (("every", 1), ("replicas", 0), ("every_on_disk", 1), ("keep_last", 2)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} is {value}, expected at least {least}")

    @property
    def modules(self) -> list[nn.Module]:
        """Those that may be sharded: the model, and such as a moving average of it."""
        others = [each for each in self.stateful.values() if isinstance(each, nn.Module)]
        return [self.model, *others]


@dataclass(frozen=True)
class Attempt:
    """What belongs to one attempt, in one world.

    Attributes:
        restored: the state that it begins with.
        leads: whether this is the first rank of its host.
        left: where a loop was left before this restart.
    """

    restored: Restored
    keeper: Keeper
    place: memory.Memory
    ring: liveness.Ring
    leads: bool
    left: Left | None

    def give_up(self, *, is_lost: bool = True) -> None:
        """After an error. ``is_lost``: other ranks are gone."""
        self.keeper.give_up(is_lost=is_lost or bool(self.ring.reason))
        self.ring.close()


def begin(options: Options, *, goes_on: bool = False) -> Attempt:
    """Restore the newest state. Collective.

    Args:
        goes_on: the training is under way in this process, or in one that it joins.
    """
    connecting.watch_agents()  # if others have made the process group
    # Saves on disk use these ranks. To make their group in the first save would wait for a rank
    # that has died, and torch's own wait for that ends only with its timeout.
    everyone()
    ranks, ring = connect()
    if ranks.is_first and _cannot_grow():
        _log.warning(
            "torchrun shares one store for all attempts: a node that joins later would wait for an "
            "address until both agents end. Set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun"
        )
    connecting.rely_on_ring()
    try:
        return _found(options, ranks, ring, goes_on)
    except BaseException:
        ring.close()
        raise


def connect() -> tuple[Ranks, liveness.Ring]:
    """Return all ranks with a communicator of their own, in a ring. Collective."""
    ranks, group = _own_ranks()
    return ranks, liveness.watch(ranks, group)


def _found(options: Options, ranks: Ranks, ring: liveness.Ring, goes_on: bool) -> Attempt:
    hosts, place = meet(ranks, options.directory, options.root)
    restoring = Restoring(ranks, hosts, place, options.directory, options.replicas)
    restored = restoring.carry_out(options.model, options.optimizer, options.stateful)
    if ranks.is_first and options.replicas > len(hosts) - 1:
        _log.warning(
            "replicas=%d, but there %s: memory checkpoints have %d copies on other hosts",
            options.replicas,
            "is 1 host" if len(hosts) == 1 else f"are {len(hosts)} hosts",
            len(hosts) - 1,
        )
    attempt, newest = restored.attempt, restored.age
    keeper = Keeper(options.directory, place, hosts, ranks, options.replicas, attempt, newest)
    step = int(restored.extra.get("step", 0))
    left = leaving.find(ranks, options.directory, step, attempt, goes_on=goes_on)
    return Attempt(restored, keeper, place, ring, hosts.is_leader(ranks.rank), left)


def _cannot_grow() -> bool:
    """Whether torchrun's agents would hang if a node joined (torch 2.13 and 2.14)."""
    several = int(os.environ.get("GROUP_WORLD_SIZE", "1")) > 1
    return several and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _own_ranks() -> tuple[Ranks, dist.ProcessGroup | None]:
    """Return all ranks, with a communicator that only `elastic` uses. Collective."""
    world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
    if world is None or dist.get_world_size() == 1 or is_fake():
        return Ranks.linked(None), None
    group = spi.new_gloo_group()
    if group is None:
        raise RuntimeError(
            "ranks of an elastic training send messages by gloo, and this torch was built "
            "without it: install one with gloo"
        )
    # When another wait fails, these connections are closed too, so that no thread waits for long.
    waits.register(group)
    return Ranks.linked(group), group

"""All of a load, or nothing of it.

A load prepares: it finds what is to be filled, and reads it into memory of its own. When all ranks
say that theirs is sound, each exchanges what it has read with what is in the tensors, so that the
old elements are kept. When one fails, all put them back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch

from vescale_fsdp.checkpoint.state.targets import ModelTarget, OptimizerTarget, Target
from vescale_fsdp.checkpoint.transfer.ranks import Ranks
from vescale_fsdp.checkpoint.transfer.reading import Arrival
from vescale_fsdp.engine import mark_blank
from vescale_fsdp.errors import RankMismatchError

_log = logging.getLogger(__name__)


class Change:
    """One load, on one rank.

    Args:
        title: words for it, for messages.

    Attributes:
        targets: what is loaded; for ``prepare`` to fill.
        arrived: what has been read for them, by `take`.
    """

    def __init__(self, ranks: Ranks, title: str) -> None:
        self.ranks, self._title = ranks, title
        self.targets: list[Target] = []
        self.arrived: list[Arrival] = []
        self._num_applied = 0

    @property
    def wanted(self) -> dict[str, torch.Tensor]:
        """The tensors that are to be filled, by name."""
        return {n: t for each in self.targets for n, t in {**each.live, **each.fresh}.items()}

    def take(self, arrivals: Iterable[Arrival]) -> None:
        """Hold on to what is read; what goes to tensors without values is put there at once.

        Those have nothing to keep, so that a model of meta needs no memory beside its shards but
        for one tensor.
        """
        blank = self._blank()
        for arrival in arrivals:
            if arrival.name in blank:
                arrival.put(keep=False)
            else:
                self.arrived.append(arrival)

    def _blank(self) -> dict[str, torch.Tensor]:
        targets = (each for each in self.targets if isinstance(each, ModelTarget))
        return {name: tensor for each in targets for name, tensor in each.blank.items()}

    def carry_out(self, prepare: Callable[[], Any]) -> None:
        """Prepare on every rank, then change what is to be changed. Collective.

        Args:
            prepare: returns JSON that tells what is read; must be the same on every rank.

        Raises:
            RankMismatchError: it is not.
            Exception: what ``prepare`` raised, here or on another rank. Nothing has changed then.
        """
        try:
            self.ranks.exchange(self._title, prepare, self._same)
            self.ranks.agree(self._title, self._apply)
        except BaseException:
            self._undo()
            raise

    def _same(self, identities: list[Any]) -> list[Any]:
        for rank, identity in enumerate(identities):
            if identity != identities[0]:
                raise RankMismatchError(
                    f"rank {rank} reads another checkpoint than rank 0 in {self._title}: the path "
                    "must be on a file system that all ranks share, and the same on every rank"
                )
        return [None] * len(identities)

    def _apply(self) -> None:
        """Write to the places, then give each object its values."""
        live = {name for each in self.targets for name in each.live}
        for arrival in self.arrived:
            arrival.put(keep=arrival.name in live)
        for target in self.targets:
            self._num_applied += 1
            target.apply()

    def _undo(self) -> None:
        """Put back what was there, as far as it was changed."""
        mark_blank(self._blank().values())
        for arrival in reversed(self.arrived):
            arrival.put_back()
        applied = self.targets[: self._num_applied]
        made = [each for each in self.targets if isinstance(each, OptimizerTarget)]
        for target in reversed([*(each for each in made if each not in applied), *applied]):
            try:
                target.undo()
            except Exception:  # noqa: BLE001  the first error is the one to raise
                _log.exception("%s failed, and could not be undone", self._title)

"""Settling: ranks put together what they say of a pass (`program.record`), through the store.

And without waiting: a rank that is behind with its reductions says so in the store. Ranks that have
waited long for one look there, in the first backward of a kind only.
"""

from __future__ import annotations

import weakref
from collections import Counter

import torch.distributed as dist

from vescale_fsdp import compat
from vescale_fsdp.backends import is_fake
from vescale_fsdp.engine.agreement import exchange
from vescale_fsdp.engine.attempts import store_for
from vescale_fsdp.engine.axes import Axes
from vescale_fsdp.errors import RankMismatchError
from vescale_fsdp.program.record import Record, merge

_STORE_S = 60.0  # for the store's name, which the ranks have agreed on before
_ROUNDS: weakref.WeakKeyDictionary[dist.ProcessGroup, Counter[tuple[int, ...]]] = (
    weakref.WeakKeyDictionary()
)


def settle(mine: Record, axes: Axes, timeout_s: float | None) -> Record:
    """What all ranks say together. Collective over the ranks of ``axes``: one round.

    Raises:
        RankMismatchError: on every rank, if passes differ or something is wrong on one.
    """

    def together(payloads: list[str]) -> str:
        return merge([Record.from_json(payload) for payload in payloads]).to_json()

    answer = mine.to_json()
    if _is_shared(axes):
        _store(axes).set(f"settling/{_num_rounds()[tuple(axes.ranks)]}", mine.step)
    # Ranks of one axis have a group, whose own limit holds.
    ranks = axes.groups[0] if len(axes.groups) == 1 else axes.ranks
    answer = exchange("next step", answer, ranks, together, timeout_s=timeout_s)
    if _is_shared(axes):
        _num_rounds()[tuple(axes.ranks)] += 1
    said = Record.from_json(answer)
    if said.wrong:
        raise RankMismatchError(
            f"ranks disagree about the next step: {said.wrong}. Run the same passes with the same "
            "order of units on every rank; a rank may leave units out"
        )
    return said


def stall(axes: Axes, backward: str) -> None:
    """Say that this rank is behind in a backward. One store operation."""
    if _is_shared(axes):
        _store(axes).set(f"stalled/{backward}", "")


def is_stalled(axes: Axes, backward: str) -> bool:
    """Whether a rank has said so. One store operation."""
    return _is_shared(axes) and bool(_store(axes).check([f"stalled/{backward}"]))


def is_elsewhere(axes: Axes, step: str) -> bool:
    """Whether another rank has come to the next round, in another pass than ``step``.

    It waits there for this one, which waits for it somewhere else. Two store operations at most.
    """
    if not _is_shared(axes):
        return False
    store, key = _store(axes), f"settling/{_num_rounds()[tuple(axes.ranks)]}"
    return bool(store.check([key])) and store.get(key).decode() != step


def _is_shared(axes: Axes) -> bool:
    return len(axes.ranks) > 1 and not is_fake()


def _store(axes: Axes) -> compat.Store:
    return store_for(axes.ranks, _STORE_S)


def _num_rounds() -> Counter[tuple[int, ...]]:
    """How many rounds each set of ranks has made in this world."""
    world = dist.group.WORLD
    assert world is not None, "a model runs in it"
    return _ROUNDS.setdefault(world, Counter())

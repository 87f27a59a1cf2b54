"""Exports: all ranks write into one stage, and the first one publishes it.

What `save` does, for other formats: who writes what is divided as there, and the target appears
when all of it is on the disk, or never.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from vescale_fsdp.checkpoint.disk import seal
from vescale_fsdp.checkpoint.sealed.save import finish_saves
from vescale_fsdp.checkpoint.state.contents import Contents
from vescale_fsdp.checkpoint.transfer.planning import LocalPlan, Task, divide
from vescale_fsdp.checkpoint.transfer.ranks import all_ranks
from vescale_fsdp.errors import CheckpointWriteError, RankMismatchError


def export(
    target: Path,
    collect: Callable[[], Contents],
    begin: Callable[[Path, list[Any]], list[Any]],
    write: Callable[[Path, LocalPlan, Task], Any],
    finish: Callable[[Path, list[Any]], Sequence[str]],
    *,
    options: Any = None,
    into: bool = False,
) -> None:
    """Write a directory by all ranks together. Collective.

    Args:
        collect: this rank's items.
        begin: gets the stage and what each rank offers to write (see `planning`); returns what
            each rank is told, as JSON. First rank only.
        write: gets the stage, this rank's plan, and its task, where ``task["told"]`` is from
            ``begin``; writes and flushes, and returns JSON.
        finish: gets the stage and what ``write`` returned on each rank; returns the names of all
            files, the one that makes them valid last. First rank only.
        options: JSON that must be the same on every rank.
        into: the target may be a folder that exists.

    Raises:
        CheckpointExistsError, CheckpointWriteError: as `seal.Stage` does.
        CheckpointMismatchError: ranks hold different models.
        RankMismatchError: ranks have other options, or another target.

    After an error nothing is left behind.
    """
    check_last = finish_saves()  # it talks over the same group
    ranks, title = all_ranks(), f"the export to {target}"
    stages: list[seal.Stage] = []
    plans: list[LocalPlan] = []
    identity = [str(target.absolute()), options]

    def offer() -> Any:
        check_last()
        plans.append(LocalPlan(collect(), ranks.is_first))
        return {**plans[0].offer(), "identity": identity}

    def combine(offers: list[Any]) -> list[Any]:
        for rank, each in enumerate(offers):
            if each["identity"] != offers[0]["identity"]:
                raise RankMismatchError(
                    f"rank {rank} exports with {each['identity']}, rank 0 with "
                    f"{offers[0]['identity']}; path and options must be the same on every rank"
                )
        tasks = divide(offers)
        seal.clean(target.parent)
        stages.append(seal.Stage(target, into=into))
        told = begin(stages[0].path, offers)
        return [
            {**task, "stage": stages[0].path.name, "told": each}
            for task, each in zip(tasks, told, strict=True)
        ]

    def publish(written: list[Any]) -> list[Any]:
        _publish(stages[0], finish(stages[0].path, written))
        return [None] * len(written)

    def abandon() -> None:
        for stage in stages:
            stage.abandon()

    try:
        task = ranks.exchange(title, offer, combine, abandon)
        stage = target.with_name(task["stage"])
        ranks.exchange(title, lambda: write(stage, plans[0], task), publish, abandon)
    except BaseException:  # an interrupt, too
        abandon()
        raise


def _publish(stage: seal.Stage, names: Sequence[str]) -> None:
    missing = [name for name in names if not (stage.path / name).is_file()]
    if missing:
        raise CheckpointWriteError(
            f"{stage.path / missing[0]} is not there for rank 0, but a rank has written it: the "
            "path must be on a file system that all ranks share"
        )
    if stage.target.is_dir():
        stage.merge(names)
    else:
        stage.publish(None)

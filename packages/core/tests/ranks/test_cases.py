"""A rank that dies, hangs or differs is named by the others within `VESCALE_FSDP_TIMEOUT_S`.

A table of cases: what rank 1 of three does while the others save, train or exchange something, and
what their errors say. The three ranks of a case make a checkpoint together before, unless it is the
first thing that they do.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale_fsdp import RankMismatchError, checkpoint, fully_shard
from vescale_fsdp.checkpoint import parts
from vescale_fsdp.ranks import everyone, over
from vescale_fsdp.testing import RankError, pool, run_ranks

LIMIT_S = 2.0
SLACK_S = 13.0  # of a busy machine


class Lit:
    """The model of a case, and where it saves."""

    def __init__(self, folder: Path, width: int = 4) -> None:
        self.folder, self.rank = folder, dist.get_rank()
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(width, width), nn.Linear(width, 4))
        fully_shard(self.model[0])
        fully_shard(self.model)
        self.width = width

    def step(self) -> None:
        self.model(torch.ones(2, self.width)).sum().backward()

    def evaluate(self) -> None:
        with torch.no_grad():
            self.model(torch.ones(2, self.width))

    def save(self, name: str = "second") -> None:
        checkpoint.save(self.folder / name, self.model)


class Stateful:
    """What a checkpoint also saves; ``act`` is called on rank 1 then."""

    def __init__(self, act: Callable[[], object]) -> None:
        self.act = act

    def state_dict(self) -> dict[str, Any]:
        if dist.get_rank() == 1:
            self.act()
        return {}

    def load_state_dict(self, _: dict[str, Any]) -> None:
        raise AssertionError("nothing is loaded")


def die() -> None:
    os._exit(3)


def hang() -> None:
    """Until the others have found out, so that the test ends then."""
    while not all(each.exists() for each in results(Path(os.environ["CASE"]))):
        time.sleep(0.05)
    os._exit(0)


def stop() -> None:
    (Path(os.environ["CASE"]) / "stopped").write_text(str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)


def results(folder: Path) -> list[Path]:
    return [folder / f"rank-{rank}" for rank in (0, 2)]


def only(rank: int, act: Callable[[], object], otherwise: Callable[[], object]) -> None:
    (act if dist.get_rank() == rank else otherwise)()


def rank_0_evaluates(lit: Lit) -> None:
    only(0, lit.evaluate, lit.step)


def rank_0_evaluates_after_others(lit: Lit) -> None:
    lit.step()
    lit.evaluate()
    only(0, lit.evaluate, lit.step)
    lit.step()


def rank_0_saves(lit: Lit) -> None:
    lit.step()
    only(0, lit.save, lit.step)


def rank_0_saves_after_others(lit: Lit) -> None:
    lit.step()
    lit.save("first")
    only(0, lit.save, lit.step)


def does_in_a_save(lit: Lit, act: Callable[[], object]) -> None:
    lit.save("first")
    checkpoint.save(lit.folder / "second", lit.model, stateful={"other": Stateful(act)})


def dies_in_a_save(lit: Lit) -> None:
    does_in_a_save(lit, die)


def hangs_in_a_save(lit: Lit) -> None:
    does_in_a_save(lit, hang)


def is_stopped_in_a_save(lit: Lit) -> None:
    does_in_a_save(lit, stop)


def dies_while_it_writes(lit: Lit) -> None:
    lit.save("first")
    with pytest.MonkeyPatch.context() as patch:
        if lit.rank == 1:
            patch.setattr(parts, "write_items", lambda *_: die())
        lit.save()


def hangs_while_it_writes(lit: Lit) -> None:
    with pytest.MonkeyPatch.context() as patch:
        if lit.rank == 1:
            patch.setattr(parts, "write_items", lambda *_: hang())
        lit.save()


def does_not_come_to_its_first_step(lit: Lit) -> None:
    only(1, hang, lit.step)


def hangs_in_its_first_step(lit: Lit) -> None:
    lit.model[1].register_forward_pre_hook(lambda *_: hang() if lit.rank == 1 else None)
    lit.step()


def dies_in_its_first_step(lit: Lit) -> None:
    lit.model[1].register_forward_pre_hook(lambda *_: die() if lit.rank == 1 else None)
    lit.step()


def dies_before_its_first_step(lit: Lit) -> None:
    only(1, die, lit.step)


def dies_in_a_step(lit: Lit) -> None:
    lit.step()
    lit.step()
    only(1, die, lit.step)


def does_in_an_exchange(act: Callable[[], object]) -> None:
    """As adapters do: the first rank does something, or each does."""
    assert everyone().from_first("the first exchange", lambda: 7) == 7
    everyone().together("the second exchange", lambda: only(1, act, lambda: None))


def dies_in_an_exchange(_: Lit) -> None:
    does_in_an_exchange(die)


def hangs_in_an_exchange(_: Lit) -> None:
    does_in_an_exchange(hang)


def does_not_come_to_the_first_exchange(_: Lit) -> None:
    only(1, hang, lambda: everyone().from_first("the first exchange", lambda: 7))


def does_something_else_than_the_first_exchange(lit: Lit) -> None:
    only(1, lit.evaluate, lambda: everyone().from_first("the first exchange", lambda: 7))


def has_another_model(lit: Lit) -> None:
    Lit(lit.folder, 4 + dist.get_rank() % 2).step()


def has_another_plan(lit: Lit) -> None:
    del lit
    over(range(dist.get_world_size())).agree("plan", [f"{dist.get_rank() == 1}"], "Make it equal.")


def raises_in_an_exchange(_: Lit) -> None:
    def act() -> None:
        raise FileNotFoundError("no such file: x")

    does_in_an_exchange(act)


SAVE = "the save of a checkpoint"
CASES: dict[Callable[[Lit], None], str] = {
    rank_0_evaluates: r"ranks disagree about the next step.*rank 0 is in .*rank 1 in forward",
    rank_0_saves: rf"[Rr]ank 0 .*in {SAVE}",
    rank_0_saves_after_others: rf"[Rr]ank 0 .*in {SAVE}",
    dies_in_a_save: r"rank 1 did not answer during the save of .*it has died or hangs",
    hangs_in_a_save: r"rank 1 did not come to the save of .*second within 2 s",
    hangs_in_its_first_step: r"rank 1 (did not come|waits for no collective)",
    has_another_model: r"ranks disagree about the model.*rank 0 has .*rank 1 has",
    # The others
    rank_0_evaluates_after_others: r"[Rr]ank \d .*in (forward|backward)",
    is_stopped_in_a_save: r"rank 1 did not come to the save of .*second within 2 s",
    dies_while_it_writes: r"rank 1 did not answer during the save of .*it has died or hangs",
    hangs_while_it_writes: r"rank 1 did not come to the save of .*second within 2 s",
    does_not_come_to_its_first_step: r"rank 1 did not come to compare the model within 2 s",
    dies_before_its_first_step: r"rank 1 did not come to compare the model within 2 s",
    dies_in_its_first_step: r"rank 1 (did not come|waits for no collective).*died",
    dies_in_a_step: r"rank 1 waits for no collective.*died",
    dies_in_an_exchange: r"rank 1 did not answer during the second exchange",
    hangs_in_an_exchange: r"rank 1 did not come to the second exchange within 2 s",
    does_not_come_to_the_first_exchange: r"rank 1 did not come to compare the next step within 2 s",
    does_something_else_than_the_first_exchange: r"ranks disagree|rank 1 did not come",
    has_another_plan: r"ranks disagree about the plan: rank 0 has False and rank 1 has True. Make",
    raises_in_an_exchange: r"on rank 1: no such file: x",
}


def outcome(case: Callable[[Lit], None], folder: Path) -> None:
    """Run a case, and write what this rank has raised, and after how many seconds."""
    os.environ |= {"VESCALE_FSDP_TIMEOUT_S": str(LIMIT_S), "CASE": str(folder)}
    lit = Lit(folder)
    dist.barrier()
    begun = time.monotonic()
    text = "nothing was raised"
    try:
        case(lit)
    except (RankMismatchError, FileNotFoundError) as error:
        text = str(error)
    (folder / f"rank-{dist.get_rank()}.new").write_text(f"{time.monotonic() - begun} {text}")
    (folder / f"rank-{dist.get_rank()}.new").rename(folder / f"rank-{dist.get_rank()}")
    if (folder / "stopped").exists() and all(each.exists() for each in results(folder)):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int((folder / "stopped").read_text()), signal.SIGKILL)
    os._exit(0)  # as an exception ends a script


def check(case: Callable[[Lit], None], folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "GRACE_S", 2 * (LIMIT_S + SLACK_S))  # for the others, if a rank dies
        with pytest.raises(RankError):
            run_ranks(outcome, 3, case, folder, timeout_s=60)
    for path in results(folder):
        seconds, _, text = path.read_text().partition(" ")
        assert float(seconds) < LIMIT_S + SLACK_S
        assert re.search(CASES[case], text), text


FIRST = list(CASES)[:7]


@pytest.mark.parametrize("case", FIRST, ids=lambda case: case.__name__)
def test_who_evaluates_saves_dies_or_hangs_alone_is_named(
    case: Callable[[Lit], None], tmp_path: Path
) -> None:
    check(case, tmp_path)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("case", list(CASES)[len(FIRST) :], ids=lambda case: case.__name__)
def test_so_is_who_dies_hangs_or_differs_anywhere_else(
    case: Callable[[Lit], None], tmp_path: Path
) -> None:
    check(case, tmp_path)

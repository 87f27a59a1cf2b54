"""Runs a list of faults, in as many trainings as they need, and collects what came of them."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .faults import Fault, happen
from .hosts import RANKS, RESTARTED, TORCHFT, new_hosts
from .trial import (
    EVERY,
    EVERY_ON_DISK,
    FOLDER,
    STEP_S,
    TOLERANCE,
    Hang,
    Outcome,
    Trial,
    farthest_weight,
    losses_of,
    reference,
)

TIMEOUT_S = 10.0  # of a wait for another rank; docs/elastic.md says how to choose it
CONNECT_S = 60.0  # for the ranks of an attempt
ROOM_STEPS = 120  # a fault is only begun if so many steps are left
END_S = 400.0


@dataclass
class Report:
    """What came of some trainings.

    Attributes:
        outcomes: of the faults, in order.
        wrong: what was not right at the end of a training, or in its steps.
        farthest: the largest difference of a weight at the end of a training.
        num_steps: reports of steps that were compared, one for each rank.
    """

    outcomes: list[Outcome] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    farthest: float = 0.0
    farthest_loss: float = 0.0
    num_steps: int = 0
    num_trainings: int = 0
    seconds: float = 0.0

    @classmethod
    def of(cls, parts: Iterable[Report]) -> Report:
        """What came of all of them."""
        made = cls()
        for each in parts:
            made.add(each)
        return made

    def add(self, other: Report) -> None:
        """Add what came of others."""
        self.outcomes += other.outcomes
        self.wrong += other.wrong
        self.farthest = max(self.farthest, other.farthest)
        self.farthest_loss = max(self.farthest_loss, other.farthest_loss)
        self.num_steps += other.num_steps
        self.num_trainings += other.num_trainings
        self.seconds += other.seconds


def reference_script(how: str, script: str) -> str:
    """The script that can train in one process without faults."""
    return "stock.py" if how == TORCHFT else script


def run_all(
    faults: Sequence[Fault],
    until: int,
    folder: Path,
    seed: int,
    *,
    with_network: bool,
    until_s: float = float("inf"),
    how: str = RESTARTED,
    script: str = "train.py",
    after: Callable[[Report], None] = lambda _: None,
) -> Report:
    """Let all faults happen, one after the other; a training of ``until`` steps has several.

    Args:
        folder: of the trainings. That of one that was wrong is kept.
        seed: of the times and the victims.
        with_network: whether hosts are namespaces.
        until_s: no training is begun after this time.
        how: ranks find out who is there.
        script: ``train.py``, ``stock.py`` or ``peers.py``.
        after: called after each training, with the report so far.
    """
    report, left, start = Report(), list(faults), time.monotonic()
    while left and time.monotonic() - start < until_s:
        seed += 1
        part = run_training(
            left, until, folder, seed, with_network=with_network, how=how, script=script
        )
        left = left[max(1, len(part.outcomes)) :]
        report.add(part)
        after(report)
    return report


def run_training(
    faults: Sequence[Fault],
    until: int,
    folder: Path,
    seed: int,
    *,
    with_network: bool,
    how: str = RESTARTED,
    script: str = "train.py",
) -> Report:
    """One training with the first of these faults: as many as there is room for."""
    quiet = reference(folder, until, reference_script(how, script))
    root = folder / f"training-{seed}"
    shutil.rmtree(root, ignore_errors=True)
    (root / "events").mkdir(parents=True)
    arguments = [str(FOLDER / script), str(root), str(until), str(STEP_S)]
    report, start = Report(num_trainings=1), time.monotonic()
    own = {"EVERY": str(EVERY), "EVERY_ON_DISK": str(EVERY_ON_DISK)}
    own |= {"VESCALE_FSDP_TIMEOUT_S": str(TIMEOUT_S), "CONNECT_S": str(CONNECT_S)}

    def tell(text: str) -> None:
        print(f"{time.monotonic() - start:6.1f} s  {text}", flush=True)

    tell(f"training {seed} begins")
    with new_hosts(root, how, arguments, with_network=with_network, **own) as hosts:
        trial = Trial(root, hosts, seed, tell=tell)
        for _ in range(2):
            hosts.add()
        try:
            trial.wait_for_ranks(2 * RANKS, 180, EVERY_ON_DISK + EVERY)
            _let_happen(trial, faults, until, report)
            if not any(each.is_hang for each in report.outcomes):
                tell(f"{trial.watch.reached()} of {until} steps are made; the rest without faults")
                trial.wait_for_end(END_S)
                _compare_end(trial, root, quiet, until, report)
        except Hang as hang:
            report.wrong.append(f"training {seed}: hang: {hang}")
        trial.watch.read()
    losses = losses_of(quiet)
    report.num_steps = len(trial.watch.made)
    report.farthest_loss = trial.watch.farthest(losses)
    if report.farthest_loss > TOLERANCE:
        report.wrong.append(f"training {seed}: a loss differs by {report.farthest_loss:.1e}")
    report.seconds = time.monotonic() - start
    for text in report.wrong:
        tell(f"WRONG: {text}")
    if report.wrong or any(each.fault for each in report.outcomes):
        tell(f"kept in {root}")
    else:
        shutil.rmtree(root, ignore_errors=True)
    return report


def _let_happen(trial: Trial, faults: Sequence[Fault], until: int, report: Report) -> None:
    for fault in faults:
        if trial.watch.reached() > until - ROOM_STEPS and report.outcomes:
            return
        trial.sleep(trial.chance.uniform(0, 2 * EVERY * STEP_S))
        outcome = happen(trial, fault)
        report.outcomes.append(outcome)
        trial.tell(f"  {outcome.text()}")
        if outcome.is_hang:
            return


def _compare_end(trial: Trial, root: Path, quiet: Path, until: int, report: Report) -> None:
    missing = set(range(until)) - {made.step for made in trial.watch.made}
    if missing:
        report.wrong.append(f"{root.name}: {len(missing)} steps are missing")
    report.farthest = farthest_weight(root, quiet)
    trial.tell(f"weights differ from those of the undisturbed run by {report.farthest:.1e}")
    if not report.farthest <= TOLERANCE:
        report.wrong.append(f"{root.name}: a weight differs by {report.farthest:.1e}")

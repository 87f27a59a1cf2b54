"""Alternates between the engines in one cell."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field

from benchmarks.compare.grid import Cell
from benchmarks.engines import missing
from benchmarks.slow_network import Network, counted_network, why_not
from benchmarks.team import Team

__all__ = ["LEAST_ROUNDS", "Result", "Settings", "measure"]

LEAST_ROUNDS = 3


@dataclass(frozen=True)
class Settings:
    """How much to measure.

    Attributes:
        rounds: of each start, at most. At least 3, also after ``seconds``.
        steps: of each engine in each round, after one that is not timed.
        seconds: for the rounds of a start.
        starts: how often the engines are started. On busy cores one start may differ from the next
            by 5%, which the spread of its rounds does not show.
    """

    rounds: int
    steps: int
    seconds: float
    starts: int = 1


@dataclass
class Result:
    """The results of one engine in one cell. Lists have one entry per round.

    Attributes:
        step_s: median of the round's steps, mean of the ranks.
        cpu_s: CPU time of a process per step, mean of the ranks.
        sent_bytes: per step and rank, through the network's interface; None: not counted.
        expected_bytes: the same by the calls of ``torch.distributed``, without headers.
        resident_bytes: peak, minus the size before the model was made; the largest of the ranks.
        tensor_bytes: peak of tensors (`benchmarks.inspection`); None: not counted.
        copied_bytes: written by copies in one step, also the model's; mean of the ranks.
        losses: of all steps, the same for every engine, mean of the ranks.
        left_out: why it was not measured.
    """

    step_s: list[float] = field(default_factory=list)
    cpu_s: list[float] = field(default_factory=list)
    sent_bytes: float | None = None
    expected_bytes: float = 0.0
    resident_bytes: int = 0
    tensor_bytes: int | None = None
    copied_bytes: float | None = None
    losses: list[float] = field(default_factory=list)
    left_out: str | None = None


def measure(
    cell: Cell, engines: list[str], settings: Settings, say: Callable[[str], object]
) -> tuple[dict[str, Result], list[float]]:
    """The results by engine, and what each rank can receive on a limited network, in bit/s.

    Memory and copies do not depend on the network, and are counted over loopback only.

    Raises:
        RuntimeError: an engine failed in a step, or the limit of the network does not hold. (One
            that cannot be made is left out.)
    """
    if why_not() is not None:
        assert cell.rate is None, "no networks of a given speed can be made here"
        return _measure(cell, None, engines, settings, say), []
    with counted_network(cell.ranks, cell.rate) as network:
        speeds = network.check() if cell.rate is not None else []
        return _measure(cell, network, engines, settings, say), speeds


def _measure(
    cell: Cell,
    network: Network | None,
    engines: list[str],
    settings: Settings,
    say: Callable[[str], object],
) -> dict[str, Result]:
    results = {name: Result(left_out=missing(name)) for name in engines}
    sent = dict.fromkeys(engines, 0)
    for start in range(settings.starts):
        with ExitStack() as stack:
            teams = {
                name: stack.enter_context(_team(name, cell, network))
                for name, result in results.items()
                if result.left_out is None
            }
            for name in list(teams):
                say(f"{name} starts")
                try:
                    results[name].expected_bytes = teams[name].start()
                except RuntimeError as error:
                    results[name] = Result(left_out=str(error))
                    teams.pop(name).close()
            _take_turns(teams, results, sent, network, settings, say)
            if cell.rate is None and start == settings.starts - 1:
                _inspect(teams, results, cell, say)
    for name, result in results.items():
        if network and result.step_s:
            num_steps = len(result.step_s) * (settings.steps + 1)
            result.sent_bytes = sent[name] / num_steps / cell.ranks
    return results


def _team(engine: str, cell: Cell, network: Network | None) -> Team:
    places = network.places if network else None
    return Team(engine, cell.model, cell.precision, cell.ranks, places)


def _take_turns(
    teams: dict[str, Team],
    results: dict[str, Result],
    sent: dict[str, int],
    network: Network | None,
    settings: Settings,
    say: Callable[[str], object],
) -> None:
    started = time.monotonic()
    for index in range(settings.rounds):
        if index >= LEAST_ROUNDS and time.monotonic() - started > settings.seconds:
            break
        for name, team in teams.items():
            say(f"round {index + 1}, {name}")
            before = sum(network.sent_bytes()) if network else 0
            turn = team.run(settings.steps)
            sent[name] += (sum(network.sent_bytes()) if network else 0) - before
            result = results[name]
            result.step_s.append(turn.step_s)
            result.cpu_s.append(turn.cpu_s)
            result.losses += turn.losses
            result.resident_bytes = max(result.resident_bytes, turn.peak_bytes)


def _inspect(
    teams: dict[str, Team], results: dict[str, Result], cell: Cell, say: Callable[[str], object]
) -> None:
    for name, team in teams.items():
        say(f"{name}: memory and copies")
        found = team.inspect()
        results[name].tensor_bytes = max(each.peak_bytes for each in found)
        copied = sum(each.copied_bytes for each in found)
        results[name].copied_bytes = copied / cell.ranks

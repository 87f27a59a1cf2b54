"""One cell: what each budget chooses, and the real step and peak of all candidates."""

from __future__ import annotations

import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.models import PRESETS
from benchmarks.optimizers.results import read
from benchmarks.slow_network import Network, counted_network, run_in
from benchmarks.team import Team
from benchmarks.tune.candidates import grid, text_of

__all__ = ["measure"]

LEAST_ROUNDS = 3
MODULE = "benchmarks.tune.trained"


def measure(
    model: str,
    ranks: int,
    rate: str | None,
    rounds: int,
    seconds: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Return the choices by budget, and step times and peaks by candidate.

    Args:
        rate: of the network; None: loopback.
        rounds: turns of each candidate, at least 3; no more than fit in ``seconds``.

    Raises:
        RuntimeError: a rank failed, or the limit of the network does not hold.
    """
    with counted_network(ranks, rate) as network:
        if rate is not None:
            network.check()
        say("choosing")
        asked = _asked(model, network)
        blocks: Any = PRESETS[model].make().blocks
        texts = [text_of(each) for each in grid(len(blocks))]
        texts += [each["chosen"]["candidate"] for each in asked["choices"].values()]
        tried = _tried(list(dict.fromkeys(texts)), model, network, rounds, seconds, say)
    return asked | {"candidates": tried}


def _asked(model: str, network: Network) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "choices.json"
        command = [sys.executable, "-m", "benchmarks.tune.choose", model, str(path)]
        if code := run_in(network, command):
            raise RuntimeError(f"choosing ended with {code}")
        return read(path)


def _tried(
    texts: list[str],
    model: str,
    network: Network,
    rounds: int,
    seconds: float,
    say: Callable[[str], None],
) -> dict[str, Any]:
    ranks = len(network.places)
    with ExitStack() as stack:
        teams: dict[str, Team] = {}
        for number, text in enumerate(texts, start=1):
            say(f"candidate {number} of {len(texts)} starts")
            team = Team(text, model, "fp32", ranks, network.places, MODULE)
            teams[text] = stack.enter_context(team)
            team.start()  # one after the other: many ranks at once make each other wait
        for team in teams.values():  # the first turn of each has cold caches
            team.run(1)
        found: dict[str, Any] = {text: {"step_s": []} for text in texts}
        started = time.monotonic()
        for index in range(rounds):
            if index >= LEAST_ROUNDS and time.monotonic() - started > seconds:
                break
            say(f"round {index + 1}")
            for text, team in teams.items():
                found[text]["step_s"].append(team.run(1).step_s)
        say("memory")
        for text, team in teams.items():
            found[text]["peak_bytes"] = max(each.peak_bytes for each in team.inspect())
            team.close()  # the profiler keeps up to 1 GB in each process
    return found

"""The demo: a small GPT trains on 4 ranks of two hosts, while hosts die and come back."""

from __future__ import annotations

import statistics
import time
from itertools import pairwise
from pathlib import Path

from .faults import BACK_S, WHOLE_S
from .hosts import RANKS, new_hosts
from .plot import Panel, draw
from .runner import CONNECT_S, TIMEOUT_S
from .trial import (
    EVERY,
    EVERY_ON_DISK,
    FOLDER,
    SETTLED_STEPS,
    TOLERANCE,
    Hang,
    Trial,
    losses_of,
    reference,
)

STEPS, STEP_S, SAID_EVERY = 200, 0.25, 20
ROOT = FOLDER.parents[1]


class Demo:
    """Says on the terminal what happens to a training.

    Args:
        trial: the training.
    """

    def __init__(self, trial: Trial, start: float) -> None:
        self.trial, self.start = trial, start
        self.faults: list[tuple[float, str]] = []
        self.alive: list[tuple[float, float]] = []
        self._said = self._attempt = 0
        self._lost_at: float | None = None
        trial.after_poll = self._look

    def say(self, text: str) -> None:
        """Print a line with the time."""
        print(f"{time.time() - self.start:6.1f} s  {text}", flush=True)

    def fault(self, text: str) -> None:
        """Say that a fault happens now."""
        self._lost_at = time.time()
        self.trial.now()
        self.faults.append((self._lost_at - self.start, text))
        self.say(f"*** {text}")

    def _look(self) -> None:
        alive = sum(len(host.ranks()) for host in self.trial.hosts.here)
        if not self.alive or alive != self.alive[-1][1]:
            self.alive.append((time.time() - self.start, alive))
        watch = self.trial.watch
        newest = watch.newest()
        if newest is not None and newest.number > self._attempt and newest.first is not None:
            self._attempt = newest.number
            self._tell_attempt()
        if watch.reached() >= self._said + SAID_EVERY and watch.made:
            last = max(watch.made, key=lambda made: (made.step, made.at))
            self._said = watch.reached() - watch.reached() % SAID_EVERY
            self.say(f"step {last.step + 1}, loss {last.loss:.3f}, {last.size} ranks")

    def _tell_attempt(self) -> None:
        newest = self.trial.watch.newest()
        assert newest is not None
        assert newest.first is not None, "it has made a step"
        if self._lost_at is None:
            self.say(f"{newest.size} ranks train, from {newest.source}")
            return
        text = f"{newest.size} ranks train on, with step {newest.from_step + 1} from "
        text += f"{newest.source}: {newest.repeated} steps are repeated"
        if newest.first.at > self._lost_at:
            seconds = newest.first.at - self._lost_at
            text += f", the first step {seconds:.1f} s after the fault"
            if (parts := newest.parts(self._lost_at)) is not None:
                text += (
                    f" (ranks and agents meet {parts.meeting:.1f}, processes start "
                    f"{parts.starting:.1f}, state {parts.restoring:.1f}, "
                    f"step {parts.stepping:.1f})"
                )
        self.say(text)

    def play(self, *, with_network: bool) -> None:
        """The faults, one after the other."""
        trial, hosts = self.trial, self.trial.hosts
        first, second = hosts.add(), hosts.add()
        self.say(f"{first.name} and {second.name} start, each with {RANKS} ranks")
        trial.wait_for_ranks(2 * RANKS, 180, SETTLED_STEPS)
        self.fault(f"kill -9 of a rank of {second.name}")
        second.kill_rank(1)
        trial.wait_for_ranks(2 * RANKS, WHOLE_S, SETTLED_STEPS)
        self.fault(f"{first.name} dies, with its memory")
        hosts.remove(first)
        trial.wait_for_ranks(RANKS, BACK_S, SETTLED_STEPS)
        third = hosts.add()
        self.fault(f"a new host, {third.name}, joins")
        trial.wait_for_ranks(2 * RANKS, WHOLE_S, SETTLED_STEPS)
        if with_network:
            second.cut()
            self.fault(f"the network of {second.name} is cut for 5 s")
            trial.sleep(5)
            second.mend()
            self.say(f"the network of {second.name} is back")
            trial.wait_for_ranks(2 * RANKS, WHOLE_S, SETTLED_STEPS, is_new=False, since=time.time())
        else:
            self.say("(no network is cut: that needs root and `ip`)")
        self.say("no more faults")
        trial.wait_for_end(300)


def progress(trial: Trial) -> list[tuple[float, int, float]]:
    """When each step was finished for the first time, and its loss."""
    found: dict[int, tuple[float, float]] = {}
    for made in trial.watch.made:
        if made.step not in found or made.at < found[made.step][0]:
            found[made.step] = (made.at, made.loss)
    return [(at, step, loss) for step, (at, loss) in sorted(found.items())]


def lost(times: list[float]) -> list[tuple[float, float]]:
    """The time lost so far: by how much new steps came later than usual."""
    gaps = [b - a for a, b in pairwise(times)]
    usual, total, made = statistics.median(gaps), 0.0, [(times[0], 0.0)]
    for at, gap in zip(times[1:], gaps, strict=True):
        if gap > 3 * usual:
            made.append((at - gap + usual, total))
            total += gap - usual
        made.append((at, total))
    return made


def run(folder: Path, picture: Path, *, how: str, with_network: bool) -> int:
    """Play the demo, draw the picture, compare. Returns the exit code."""
    root = folder / "demo"
    (root / "events").mkdir(parents=True)
    if with_network:
        print(
            "Two hosts: each is a network namespace with an agent of torchrun, 2 ranks and memory"
        )
    else:
        print("Two hosts: each is an agent of torchrun with 2 ranks and a memory folder")
    arguments = [str(FOLDER / "train.py"), str(root), str(STEPS), str(STEP_S)]
    own = {"EVERY": str(EVERY), "EVERY_ON_DISK": str(EVERY_ON_DISK)}
    own |= {"VESCALE_FSDP_TIMEOUT_S": str(TIMEOUT_S), "CONNECT_S": str(CONNECT_S)}
    with new_hosts(root, how, arguments, with_network=with_network, **own) as hosts:
        demo = Demo(Trial(root, hosts, 0), time.time())
        try:
            demo.play(with_network=with_network)
        except Hang as hang:
            demo.say(f"stopped: {hang}; the logs are in {root}")
            return 1
    made = progress(demo.trial)
    times = [at - demo.start for at, _, _ in made]
    losses = [(at - demo.start, loss) for at, _, loss in made]
    time_lost = lost(times)
    panels = [
        Panel("loss, nats per byte", losses, "#2c7fb8", is_stepped=False, from_zero=False),
        Panel("ranks alive", demo.alive, "#238b45", is_stepped=True, from_zero=True),
        Panel("time lost, s", time_lost, "#d95f0e", is_stepped=False, from_zero=True),
    ]
    draw(picture, f"{STEPS} steps of a small GPT, while hosts die", panels, demo.faults, times[-1])
    print("The same training in one process, without faults, for comparison ...", flush=True)
    quiet = losses_of(reference(folder, STEPS))
    apart = max(abs(loss - quiet[step]) for _, step, loss in made)
    print(
        f"{STEPS} steps in {times[-1]:.0f} s, of which {time_lost[-1][1]:.0f} s were lost to "
        f"{len(demo.faults)} faults.\nLosses differ from those of the undisturbed training by "
        f"{apart:.1e} at most.\nThe picture: {picture}"
    )
    return 0 if apart <= TOLERANCE and len(made) == STEPS else 1

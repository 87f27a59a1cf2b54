"""One training with faults: start two hosts, let faults happen, and compare with no faults."""

from __future__ import annotations

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from .hosts import Host, Hosts
from .watch import Parts, Watch

FOLDER = Path(__file__).resolve().parent
TOLERANCE = 1e-6  # of a loss and of a weight
EVERY, EVERY_ON_DISK = 5, 25
STEP_S = 0.25
SETTLED_STEPS = 2 * EVERY + 2  # after these, a memory checkpoint of this attempt is confirmed


class Hang(Exception):
    """Something did not happen before its deadline."""


@dataclass
class Outcome:
    """What a fault has caused.

    Attributes:
        attempts: those that began after it: (ranks, where the state was from, steps repeated).
        seconds: from the fault to the next finished step.
        parts: of that time, if processes were started.
        fault: what is not as expected; empty if all is.
    """

    name: str
    attempts: list[tuple[int, str, int]] = field(default_factory=list)
    seconds: float = 0.0
    parts: Parts | None = None
    repeated: int = 0
    revived: int = 0
    notes: list[str] = field(default_factory=list)
    fault: str = ""

    @property
    def is_hang(self) -> bool:
        """Whether something was not in time."""
        return self.fault.startswith("hang")

    def text(self) -> str:
        """It on one line."""
        told = [f"{size} ranks from {source}, {n} steps again" for size, source, n in self.attempts]
        text = f"next step after {self.seconds:.1f} s; {'; then '.join(told) or 'no restart'}"
        if self.parts is not None:
            each = self.parts
            text += f"; meeting {each.meeting:.1f}, processes {each.starting:.1f}, "
            text += f"state {each.restoring:.1f}, first step {each.stepping:.1f} s"
        return f"{text}; NOT AS EXPECTED: {self.fault}" if self.fault else text


class Trial:
    """A training under way on hosts, for the faults.

    Args:
        root: an empty folder.
        seed: of the times and victims of the faults.
        tell: prints what happens.
    """

    def __init__(
        self, root: Path, hosts: Hosts, seed: int, *, tell: Callable[[str], None] = lambda _: None
    ) -> None:
        self.root, self.hosts, self.watch = root, hosts, Watch(root / "events")
        self.chance, self.tell = random.Random(seed), tell
        self.at, self.attempt = 0.0, 0  # when the last fault has happened, and in which attempt
        self.num_revived = 0
        self.notes: list[str] = []
        self.after_poll: Callable[[], None] = lambda: None

    def any_host(self) -> Host:
        """A random one."""
        return self.chance.choice(self.hosts.here)

    def now(self) -> None:
        """The fault has happened."""
        self.at = time.time()
        newest = self.watch.newest()
        self.attempt = 0 if newest is None else newest.number

    def poll(self) -> None:
        """Read the events. Start agents again that have ended, as a cluster's manager does."""
        self.watch.read()
        for host in self.hosts.here:
            code = host.agent.poll() if host.agent is not None else None
            if code is not None and code != 0:
                self.num_revived += 1
                self.notes.append(f"the agent of {host.name} ended with exit code {code}")
                self.tell(f"the agent of {host.name} has ended; it is started again")
                host.kill()
                self.hosts.start(host)
        self.after_poll()

    def wait(self, what: str, is_so: Callable[[], bool], seconds: float) -> None:
        """Wait until something is so.

        Raises:
            Hang: it was not in time.
        """
        end = time.monotonic() + seconds
        while True:
            self.poll()
            if is_so():
                return
            if time.monotonic() > end:
                self.show_stacks()
                raise Hang(f"{what}: not within {seconds:g} s")
            time.sleep(0.05)

    def show_stacks(self) -> None:
        """Let each rank write to its log what its threads do."""
        for host in self.hosts.here:
            for rank in host.ranks():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(rank, signal.SIGUSR1)
        time.sleep(1)

    def sleep(self, seconds: float) -> None:
        """Let so much time pass."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            self.poll()
            time.sleep(0.05)

    def wait_for_ranks(
        self,
        size: int,
        seconds: float,
        steps: int = 1,
        *,
        is_new: bool = True,
        since: float | None = None,
    ) -> None:
        """Wait until the newest attempt has so many ranks, and has made so many steps.

        On a busy machine, the others may have made all steps before a lost host has come back.

        Args:
            is_new: it must have begun after the fault.
            since: steps count from this time on. None: from that of the fault on.
        """
        start = self.at if since is None else since

        def is_so() -> bool:
            newest = self.watch.newest()
            if self.watch.num_done:
                return True
            if newest is None or newest.size != size:
                return False
            if is_new and newest.number <= self.attempt:
                return False
            return self.watch.steps_of(newest.number, start) >= steps

        self.wait(f"{steps} steps on {size} ranks", is_so, seconds)

    def wait_for_end(self, seconds: float) -> None:
        """Let the steps take no more time than they need, until all are made."""
        (self.root / "hurry").touch()
        self.wait("the end of the training", lambda: self.watch.num_done > 0, seconds)
        end = time.monotonic() + 60
        for host in self.hosts.here:
            while host.agent is not None and host.agent.poll() is None:
                if time.monotonic() > end:
                    raise Hang(f"the agent of {host.name} has not ended")
                time.sleep(0.05)


def reference(folder: Path, until: int, script: str = "train.py") -> Path:
    """The training without faults, in one process. Returns its folder. It is made once."""
    root = folder / f"reference-{Path(script).stem}-{until}"
    if (root / "weights.pt").exists():
        return root
    (root / "events").mkdir(parents=True)
    (root / "hurry").touch()
    environ = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1"}
    environ |= {"MASTER_PORT": str(free_port()), "VESCALE_FSDP_MEMORY_DIR": str(root / "memory")}
    environ |= {"EVERY": "1000000", "EVERY_ON_DISK": "1000000", "OMP_NUM_THREADS": "1"}
    environ |= {"VESCALE_FSDP_TIMEOUT_S": "60", "CONNECT_S": "60"}
    command = [sys.executable, str(FOLDER / script), str(root), str(until), "0"]
    subprocess.run(command, env={**os.environ, **environ}, check=True, timeout=1200)
    return root


def losses_of(root: Path) -> dict[int, float]:
    """The losses of an undisturbed run, by step."""
    watch = Watch(root / "events")
    watch.read()
    return {made.step: made.loss for made in watch.made}


def free_port() -> int:
    import socket

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def farthest_weight(one: Path, other: Path) -> float:
    """The largest difference of a weight between two trainings."""
    a, b = (torch.load(each / "weights.pt") for each in (one, other))
    return max(float((a[name] - b[name]).detach().abs().max()) for name in a)


def log_of(root: Path, pattern: str) -> list[str]:
    """The lines of the hosts' logs that match."""
    found = []
    for path in sorted(root.glob("log-*")):
        found += [
            line
            for line in path.read_text(errors="replace").splitlines()
            if re.search(pattern, line)
        ]
    return found

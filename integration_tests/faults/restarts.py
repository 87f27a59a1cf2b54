"""``examples/train_gpt.py`` under torchrun, signalled and killed, ends as if nothing had been."""

from __future__ import annotations

import contextlib
import functools
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .harness import Scenario, Trial

SAME, OTHER, NO_END = "the digest of an undisturbed run", "another digest", "no end"
SCRIPT = Path(__file__).resolve().parents[1] / "train_with_faults.py"
LAUNCHER = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts", "3"]
OPTIONS = ["--layers", "2", "--width", "24", "--max-steps", "12", "--save-every", "3"]
MOST_LAUNCHES = 3  # a signal to torchrun ends it, and somebody starts it again
LIMIT_S = 200


@dataclass
class Launch:
    """One run of torchrun."""

    code: int
    output: str

    @property
    def digest(self) -> str:
        found = re.search(r"\ndigest: ([0-9a-f]{16})\n", self.output)
        return found[1] if found else ""


def launch(out: Path, fault: str = "", kill_after_s: float = 0.0) -> Launch:
    """Run the script until torchrun ends; perhaps kill one of its processes meanwhile."""
    process = subprocess.Popen(
        [*LAUNCHER, "--nproc-per-node=2", str(SCRIPT), *OPTIONS, "--out", str(out)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "FAULTS": fault},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    said: list[str] = []
    killer = threading.Thread(target=kill_a_rank, args=(process, out, kill_after_s, said))
    if kill_after_s:
        killer.start()
    try:
        output, _ = process.communicate(timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        output = "(it was killed)"
    finally:
        end(process)
    if kill_after_s:
        killer.join()
    return Launch(process.returncode, "".join(said) + output)


def end(process: subprocess.Popen[str]) -> None:
    """End torchrun and its processes, which are in sessions of their own, if they have not."""
    if process.poll() is None:
        children = children_of(process.pid)
        process.kill()
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        process.wait()


def kill_a_rank(process: subprocess.Popen[str], out: Path, after_s: float, said: list[str]) -> None:
    """Kill a process of torchrun's, some time after the first checkpoint has appeared."""
    while not any(out.glob("step-*")):
        if process.poll() is not None:
            return
        time.sleep(0.01)
    time.sleep(after_s)
    ranks = children_of(process.pid)
    if process.poll() is None and ranks:
        os.kill(random.Random(after_s).choice(ranks), signal.SIGKILL)
        said.append(f"killed one of {len(ranks)} processes after {after_s:.2f} s\n")


def children_of(parent: int) -> list[int]:
    """The processes that it has started, by Linux' list of them."""
    text = Path(f"/proc/{parent}/task/{parent}/children")
    return [int(pid) for pid in text.read_text().split()] if text.exists() else []


def until_the_end(out: Path, fault: str = "", kill_after_s: float = 0.0) -> list[Launch]:
    """Launch again while it ends without a digest, as a scheduler does."""
    launches = [launch(out, fault, kill_after_s)]
    while not launches[-1].digest and len(launches) < MOST_LAUNCHES:
        launches.append(launch(out))
    return launches


FAULTS = {  # attempt, step, rank, what it does in that step
    "SIGTERM to one rank": "0 5 0 SIGTERM",
    "SIGTERM to all ranks": "0 7 all SIGTERM",
    "SIGTERM to torchrun": "0 8 1 SIGTERM-to-torchrun",
    "kill -9 of one rank": "0 5 1 SIGKILL",
}


def judged(name: str, launches: list[Launch], quiet: Launch, evidence: str) -> Trial:
    last = launches[-1]
    outcome = SAME if last.digest == quiet.digest else OTHER if last.digest else NO_END
    codes = ", ".join(str(each.code) for each in launches)
    detail = f"{name}: torchrun ended with {codes}"
    if outcome != SAME:
        detail += f": {last.output[-500:]}"
    return Trial(outcome, evidence, detail=detail)


@functools.cache
def undisturbed() -> Launch:
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        found = launch(Path(folder))
    assert found.digest, found.output
    return found


def signalled(engine: str, num_trials: int, folder: Path) -> Iterator[Trial]:
    for number, (name, fault) in enumerate(FAULTS.items()):
        launches = until_the_end(folder / f"{number}", fault)
        found = re.findall(r"rank \d in step \d+: SIG\S+", launches[0].output)
        yield judged(name, launches, undisturbed(), "; ".join(found))


def killed(engine: str, num_trials: int, folder: Path) -> Iterator[Trial]:
    chance = random.Random(3)
    for number in range(num_trials):
        after_s = chance.uniform(0.001, 0.4)
        launches = until_the_end(folder / f"{number}", kill_after_s=after_s)
        found = re.search(r"killed one of \d processes after .* s\n", launches[0].output)
        evidence = found[0].strip() if found and "exitcode: -9" in launches[0].output else ""
        yield judged("kill -9", launches, undisturbed(), evidence)


GROUP = "restarts, with torchrun --standalone --max-restarts 3"
SCENARIOS = [
    Scenario(
        GROUP,
        "SIGTERM to one rank, to all, to torchrun; kill -9 of a rank",
        signalled,
        frozenset({SAME}),
        short=None,  # test_restarts.py runs with every change
        full=0,
        engines=("ours",),
    ),
    Scenario(
        GROUP,
        "kill -9 of a random rank, at a random time",
        killed,
        frozenset({SAME}),
        short=None,  # test_restarts.py runs with every change
        full=5,
        engines=("ours",),
    ),
]

"""Ranks go on in their processes when a rank or a host is lost, and when a host comes.

Each host has a torchrun of its own, with two ranks and a memory folder.
"""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from integration_tests.torchrun import Torchrun, run_torchrun

SCRIPT = Path(__file__).resolve().parent / "regroup_run.py"
STEPS, PAUSE_S = 60, 0.5
PRELOAD = {
    "": ["vescale_fsdp_elastic"],
    "lightning": ["lightning.pytorch", "vescale_fsdp_lightning"],
    "transformers": ["transformers", "accelerate"],
}


class Host:
    """A torchrun with its ranks and its memory."""

    def __init__(
        self,
        root: Path,
        name: str,
        ranks: int = 2,
        hosts: str = "1:2",
        steps: int = STEPS,
        with_: Sequence[str] = (),
    ) -> None:
        self.memory, self.log = root / f"memory-{name}", root / f"log-{name}"
        own = {"VESCALE_FSDP_MEMORY_DIR": str(self.memory), "VESCALE_FSDP_HOSTS": hosts}
        own |= {"VESCALE_FSDP_MEETING": str(root / "meeting")}
        self.process = Torchrun(
            *("--standalone", "--nproc-per-node", ranks, "--max-restarts", "99"),
            *(SCRIPT, root / "run", steps, PAUSE_S, *with_),
            log=self.log,
            environ=own,
            preload=[name for each in ("", *with_) for name in PRELOAD.get(each, ())],
        )


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    started: list[Host] = []
    yield started
    for host in started:
        host.process.kill()


def lines(root: Path, run: str = "run") -> list[dict[str, Any]]:
    found = []
    for file in (root / run).glob("losses-*.jsonl"):
        process = int(file.stem.partition("-")[2])
        found += [{**json.loads(t), "process": process} for t in file.read_text().splitlines()]
    return sorted(found, key=lambda line: line["time"])


def check(root: Path, steps: int) -> None:
    """Each step was made, with the numbers of one process without faults."""
    code = run_torchrun(
        *("--standalone", SCRIPT, root / "quiet", steps, "0"),
        log=root / "log-quiet",
        timeout_s=120,
        environ={"VESCALE_FSDP_MEMORY_DIR": str(root / "memory-quiet")},
        preload=PRELOAD[""],
    )
    assert code == 0, (root / "log-quiet").read_text()
    expected, found = {line["step"]: line for line in lines(root, "quiet")}, lines(root)
    assert {line["step"] for line in found} == set(range(steps))
    for line in found:
        for value in {"loss", "average"} & line.keys():
            assert line[value] == pytest.approx(expected[line["step"]][value], abs=1e-6), line
        assert line["num_main"] == 1, line


def wait_for(what: Callable[[], bool], hosts: list[Host], timeout_s: float = 120) -> None:
    end = time.monotonic() + timeout_s
    while not what():
        if time.monotonic() > end:
            logs = "\n".join(f"--- {each.log}\n{each.log.read_text()}" for each in hosts)
            pytest.fail(f"it has not come to that in {timeout_s} s:\n{logs}")
        time.sleep(0.05)


def has_reached(root: Path, step: int, ranks: int, *, after: int = 0) -> Callable[[], bool]:
    """Tells whether this step was made on so many ranks, in an attempt after one."""
    return lambda: any(
        line["step"] >= step and line["ranks"] == ranks and line["attempt"] > after
        for line in lines(root)
    )


@pytest.mark.timeout(500)
def test_survivors_keep_their_processes(tmp_path: Path, hosts: list[Host]) -> None:
    """Longer than 10 s: ranks wait for a lost one for 2.5 s, twice, and for the lost host."""
    hosts += [Host(tmp_path, "a"), Host(tmp_path, "b")]

    reached = partial(has_reached, tmp_path)
    wait_for(reached(4, 4), hosts)
    survivors = hosts[1].process.ranks()
    assert len(survivors) == 2
    os.kill(
        hosts[0].process.ranks()[1], signal.SIGKILL
    )  # its torchrun ends the other, and starts two
    wait_for(reached(0, 2, after=1), hosts)
    alone = lines(tmp_path)[-1]["attempt"]
    wait_for(reached(0, 4, after=alone), hosts)
    together = lines(tmp_path)[-1]["attempt"]
    hosts[0].process.kill()
    wait_for(reached(0, 2, after=together), hosts)
    (tmp_path / "run" / "hurry").touch()
    wait_for(lambda: hosts[1].process.poll() is not None, hosts)
    assert hosts[1].process.poll() == 0, hosts[1].log.read_text()

    check(tmp_path, STEPS)
    found = lines(tmp_path)
    for line in found:
        assert line["source"] == ("start" if line["attempt"] == 1 else "memory"), line
    own = {line["process"] for line in found if line["process"] in survivors}
    assert own == set(survivors)
    last = {line["process"] for line in found if line["step"] == STEPS - 1}
    assert last == set(survivors), "they have made the first step and the last one"


@pytest.mark.nightly  # 75 s
@pytest.mark.timeout(400)
def test_with_accelerate(tmp_path: Path, hosts: list[Host]) -> None:
    """A host is lost, the one with the main process, and later another comes."""
    hosts += [Host(tmp_path, name, with_=["accelerate"]) for name in "ab"]
    wait_for(lambda: any(x["ranks"] == 4 and x["step"] > 4 for x in lines(tmp_path)), hosts)
    main = next(host for host in hosts if "begins on 4 ranks" in host.log.read_text())
    survivor = next(host for host in hosts if host is not main)
    together = lines(tmp_path)[-1]["attempt"]
    main.process.kill()
    wait_for(lambda: any(line["attempt"] > together for line in lines(tmp_path)), hosts)
    lost = lines(tmp_path)[-1]["attempt"]
    hosts.append(Host(tmp_path, "c", with_=["accelerate"]))
    wait_for(lambda: any(line["attempt"] > lost for line in lines(tmp_path)), hosts)
    (tmp_path / "run" / "hurry").touch()
    wait_for(lambda: survivor.process.poll() is not None, hosts)
    assert survivor.process.poll() == 0, survivor.log.read_text()
    assert hosts[2].process.wait(60) == 0, hosts[2].log.read_text()
    check(tmp_path, STEPS)
    found = lines(tmp_path)
    assert {line["ranks"] for line in found} == {2, 4}
    last = [line for line in found if line["step"] == STEPS - 1]
    assert sorted(line["met"][-2:] for line in last) == [[2, 4]] * 2 + [[4]] * 2, last


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "trainer", ["lightning", pytest.param("transformers", marks=pytest.mark.nightly)]
)
def test_a_trainer_keeps_its_process(tmp_path: Path, hosts: list[Host], trainer: str) -> None:
    """A rank is killed, and its host comes back.

    Longer than 10 s: ranks wait for the lost one for 2.5 s, and two agents load Lightning.
    """
    hosts += [Host(tmp_path, name, with_=[trainer]) for name in "ab"]

    reached = partial(has_reached, tmp_path)
    wait_for(reached(4, 4), hosts)
    survivors = hosts[1].process.ranks()
    os.kill(hosts[0].process.ranks()[1], signal.SIGKILL)
    wait_for(reached(0, 2, after=1), hosts)
    wait_for(reached(0, 4, after=lines(tmp_path)[-1]["attempt"]), hosts)
    (tmp_path / "run" / "hurry").touch()
    for host in hosts:
        wait_for(lambda: host.process.poll() is not None, hosts)  # noqa: B023
        assert host.process.poll() == 0, host.log.read_text()
    check(tmp_path, STEPS)
    found = lines(tmp_path)
    for line in found:
        assert line["source"] == ("start" if line["attempt"] == 1 else "memory"), line
    last = {line["process"] for line in found if line["step"] == STEPS - 1}
    assert {*survivors} < last, "they have made the first step and the last one"


@pytest.mark.nightly
@pytest.mark.timeout(300)
def test_all_hosts_are_needed_in_the_second_training(tmp_path: Path, hosts: list[Host]) -> None:
    """The others wait for the host that was lost, which comes through the first training again."""
    hosts += [
        Host(tmp_path, name, ranks=1, hosts="2:2", steps=40, with_=["twice"]) for name in "ab"
    ]
    wait_for(lambda: any(line["step"] == 5 for line in lines(tmp_path)), hosts)
    (survivor,) = hosts[1].process.ranks()
    os.kill(hosts[0].process.ranks()[0], signal.SIGKILL)
    wait_for(lambda: any(line["attempt"] == 2 for line in lines(tmp_path)), hosts)
    (tmp_path / "run" / "hurry").touch()
    for host in hosts:
        wait_for(lambda: host.process.poll() is not None, hosts)  # noqa: B023
        assert host.process.poll() == 0, host.log.read_text()
    check(tmp_path, 40)
    found = lines(tmp_path)
    assert {line["ranks"] for line in found} == {2}
    assert {line["process"] for line in found if line["step"] == 39} >= {survivor}


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("with_", [(), ("lightning",), ("transformers",)])
def test_random_ranks_are_killed_at_random_times(
    tmp_path: Path, hosts: list[Host], with_: Sequence[str]
) -> None:
    """Three hosts with a rank each. Ranks are killed while they train, meet, and load the state."""
    chance, steps = random.Random(0), 400
    for name in "abc":
        hosts.append(Host(tmp_path, name, ranks=1, hosts="1:3", steps=steps, with_=with_))
    wait_for(lambda: len(lines(tmp_path)) > 0, hosts)
    kills = 0
    while kills < 12 and all(host.process.poll() is None for host in hosts):
        time.sleep(chance.choice([0.3, 2.0, 4.0, 8.0]))
        for rank in chance.choice(hosts).process.ranks():
            os.kill(rank, signal.SIGKILL)
            kills += 1
    for host in hosts:
        wait_for(lambda: host.process.poll() is not None, hosts, 400)  # noqa: B023
        assert host.process.poll() == 0, host.log.read_text()
    assert kills >= 8
    check(tmp_path, steps)

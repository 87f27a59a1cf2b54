"""`vescale_fsdp_elastic` under torchrun: two agents, each with its own memory folder, as two hosts.

A rank is killed, then a whole host with its memory, and a new host comes: from 4 to 4 to 2 to 4
ranks. Every loss is that of a run in one process that nobody disturbs.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from integration_tests.torchrun import Torchrun, run_torchrun

SCRIPT = Path(__file__).resolve().parent / "elastic_run.py"
STEPS, PAUSE_S, EVERY = 80, 0.3, 2
# How long torchrun waits for further nodes, and for a node that sends no heartbeat.
# The store is a file, so that no host is special.
RENDEZVOUS = "store_type=file,last_call_timeout=3,keep_alive_interval=1,keep_alive_max_attempt=5"


class Host:
    """An agent of torchrun with two ranks, and its memory."""

    def __init__(self, root: Path, name: str, **environ: str) -> None:
        self.memory, self.log = root / f"memory-{name}", root / f"log-{name}"
        own = {"VESCALE_FSDP_MEMORY_DIR": str(self.memory), **environ}
        # Else a node that joins later waits for an address that torch 2.13 does not publish again.
        own["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        own["PET_RDZV_ENDPOINT"] = str(root / "meeting")
        self.process = Torchrun(
            *("--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "9"),
            *("--rdzv-backend", "c10d", "--rdzv-id", "elastic", "--rdzv-conf", RENDEZVOUS),
            *(SCRIPT, root / "run", STEPS, PAUSE_S),
            log=self.log,
            environ=own,
            preload=["vescale_fsdp_elastic"],
        )

    def die(self) -> None:
        """Kill the agent and its ranks, and delete the memory, as when a machine goes down."""
        self.process.kill()
        shutil.rmtree(self.memory)


def lines(run: Path, attempt: int | None = None) -> list[dict[str, Any]]:
    found = []
    for file in sorted(run.glob(f"losses-{attempt or '*'}.jsonl")):
        number = int(file.stem.partition("-")[2])
        texts = file.read_text().splitlines()
        found += [{**json.loads(text), "attempt": number} for text in texts]
    return found


def wait_for(what: Callable[[], bool], hosts: list[Host], timeout_s: float = 120) -> None:
    end = time.monotonic() + timeout_s
    while not what():
        if time.monotonic() > end:
            logs = "\n".join(f"--- {each.log}\n{each.log.read_text()}" for each in hosts)
            pytest.fail(f"it has not come to that in {timeout_s} s:\n{logs}")
        time.sleep(0.1)


@pytest.fixture
def hosts() -> Iterator[list[Host]]:
    started: list[Host] = []
    yield started
    for host in started:
        host.process.kill()


def undisturbed(tmp_path: Path, steps: int = STEPS) -> dict[int, float]:
    code = run_torchrun(
        *("--standalone", SCRIPT, tmp_path / "quiet", steps, "0"),
        log=tmp_path / "log-quiet",
        timeout_s=120,
        environ={"VESCALE_FSDP_MEMORY_DIR": str(tmp_path / "m"), "EVERY": "100000"},
        preload=["vescale_fsdp_elastic"],
    )
    assert code == 0, (tmp_path / "log-quiet").read_text()
    return {line["step"]: line["loss"] for line in lines(tmp_path / "quiet")}


@pytest.mark.timeout(500)
def test_a_rank_and_a_host_are_killed_and_a_host_joins(tmp_path: Path, hosts: list[Host]) -> None:
    """Longer than 10 s: torchrun takes 5 s to miss a host, and waits 3 s for another one."""
    run = tmp_path / "run"
    hosts.append(Host(tmp_path, "a", FAULTS="1 5 1 SIGKILL"))
    hosts.append(Host(tmp_path, "b", FAULTS="1 5 1 SIGKILL"))

    def reached(step: int, ranks: int, *, after: int) -> Callable[[], bool]:
        return lambda: any(
            line["step"] >= step and line["ranks"] == ranks and line["attempt"] > after
            for line in lines(run)
        )

    wait_for(reached(7, 4, after=1), hosts)
    hosts[0].die()
    wait_for(reached(10, 2, after=2), hosts)
    alone = lines(run)[-1]["attempt"]
    hosts.append(Host(tmp_path, "c"))
    wait_for(reached(0, 4, after=alone), hosts)
    (run / "hurry").touch()
    for host in hosts[1:]:
        wait_for(lambda: host.process.poll() is not None, hosts)  # noqa: B023
        assert host.process.poll() == 0, host.log.read_text()

    expected, found = undisturbed(tmp_path), lines(run)
    assert {line["step"] for line in found} == set(range(STEPS))
    for line in found:
        assert line["loss"] == pytest.approx(expected[line["step"]], abs=1e-6), line
    firsts = {line["attempt"]: line for line in reversed(found)}
    for attempt, first in firsts.items():
        if attempt > 1:
            last = max(line["step"] for line in found if line["attempt"] < attempt)
            assert first["source"] == "memory", first
            assert last - first["step"] < 2 * EVERY, (last, first)
    assert not list((tmp_path / "memory-b").glob("run-*")), "it is deleted at the end"


@pytest.mark.nightly
@pytest.mark.timeout(500)
def test_random_ranks_are_killed_at_random_times(tmp_path: Path) -> None:
    """With a memory checkpoint after every step, so that most kills are in the middle of one."""
    run, kills, steps = tmp_path / "run", 3, 250
    environ = {"KILLS": str(kills), "EVERY": "1", "RANKS_PER_HOST": "2"}
    environ["VESCALE_FSDP_MEMORY_DIR"] = str(tmp_path / "memory")
    code = run_torchrun(
        *("--standalone", "--max-restarts", kills, "--nproc-per-node", "4"),
        *(SCRIPT, run, steps, "0"),
        log=tmp_path / "log",
        timeout_s=400,
        environ=environ,
        preload=["vescale_fsdp_elastic"],
    )
    assert code == 0, (tmp_path / "log").read_text()
    expected, found = undisturbed(tmp_path, steps), lines(run)
    assert {line["step"] for line in found} == set(range(steps))
    reached = 0
    for line in found:
        assert line["loss"] == pytest.approx(expected[line["step"]], abs=1e-6), line
        assert line["step"] >= reached - 2, "at most two steps are repeated"
        assert line["source"] == ("memory" if reached and line["attempt"] > 1 else "start"), line
        reached = max(reached, line["step"] + 1)

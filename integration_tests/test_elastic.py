"""`vescale_fsdp.elastic` under torchrun: two agents, each with its own memory folder, as two hosts.

A rank is killed, then a whole host with its memory, and a new host comes: from 4 to 4 to 2 to 4
ranks. Every loss is that of a run in one process that nobody disturbs.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from vescale_fsdp.testing import free_port

ROOT = Path(__file__).resolve().parents[1]
SCRIPT = Path(__file__).resolve().parent / "elastic_run.py"
STEPS, PAUSE_S, EVERY = 60, 0.3, 2
# How long torchrun waits for further nodes, and for a node that sends no heartbeat.
RENDEZVOUS = "last_call_timeout=4,keep_alive_interval=2,keep_alive_max_attempt=4"


class Host:
    """An agent of torchrun with two ranks, and its memory."""

    def __init__(self, root: Path, name: str, port: int, **environ: str) -> None:
        self.memory, self.log = root / f"memory-{name}", root / f"log-{name}"
        self._stream = open(self.log, "a")  # noqa: SIM115
        own = {"VESCALE_FSDP_MEMORY_DIR": str(self.memory), "OMP_NUM_THREADS": "1", **environ}
        # Else a node that joins later waits for an address that torch 2.13 does not publish again.
        own["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"
        self.process = subprocess.Popen(
            [
                *(sys.executable, "-m", "torch.distributed.run"),
                *("--nnodes", "1:2", "--nproc-per-node", "2", "--max-restarts", "9"),
                *("--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}"),
                *("--rdzv-id", "elastic", "--rdzv-conf", RENDEZVOUS),
                *(str(SCRIPT), str(root / "run"), str(STEPS), str(PAUSE_S)),
            ],
            env={**os.environ, **own},
            stdin=subprocess.DEVNULL,
            stdout=self._stream,
            stderr=subprocess.STDOUT,
        )

    def die(self) -> None:
        """Kill the agent and its ranks, and delete the memory, as when a machine goes down."""
        for process in (self.process.pid, *children(self.process.pid)):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.wait()
        shutil.rmtree(self.memory)

    def close(self) -> None:
        for process in (*children(self.process.pid), self.process.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        self.process.wait()
        self._stream.close()


def children(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in map(int, task.read_text().split()):
            found += [child, *children(child)]
    return found


def listens(port: int) -> bool:
    with socket.socket() as made:
        return made.connect_ex(("localhost", port)) == 0


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
        host.close()


def undisturbed(tmp_path: Path) -> dict[int, float]:
    environ = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost"}
    environ |= {"MASTER_PORT": str(free_port()), "VESCALE_FSDP_MEMORY_DIR": str(tmp_path / "m")}
    command = [sys.executable, str(SCRIPT), str(tmp_path / "quiet"), str(STEPS), "0"]
    subprocess.run(command, env={**os.environ, **environ}, check=True, timeout=120)
    return {line["step"]: line["loss"] for line in lines(tmp_path / "quiet")}


@pytest.mark.timeout(500)
def test_a_rank_and_a_host_are_killed_and_a_host_joins(tmp_path: Path, hosts: list[Host]) -> None:
    run, port = tmp_path / "run", free_port()
    hosts.append(Host(tmp_path, "a", port, FAULTS="1 7 1 SIGKILL"))
    wait_for(lambda: listens(port), hosts)  # the store of the rendezvous is on this host
    hosts.append(Host(tmp_path, "b", port))

    def reached(step: int, ranks: int, *, after: int) -> Callable[[], bool]:
        return lambda: any(
            line["step"] >= step and line["ranks"] == ranks and line["attempt"] > after
            for line in lines(run)
        )

    wait_for(reached(12, 4, after=1), hosts)
    hosts[1].die()
    wait_for(reached(16, 2, after=2), hosts)
    alone = lines(run)[-1]["attempt"]
    hosts.append(Host(tmp_path, "c", port))
    wait_for(reached(0, 4, after=alone), hosts)
    wait_for(lambda: hosts[0].process.poll() is not None, hosts)
    wait_for(lambda: hosts[2].process.poll() is not None, hosts)
    assert hosts[0].process.returncode == 0, hosts[0].log.read_text()

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
    assert not list((tmp_path / "memory-a").glob("run-*")), "it is deleted at the end"

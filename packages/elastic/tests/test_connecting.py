"""A rank that cannot be connected to the others ends in time."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed.elastic.rendezvous import RendezvousParameters
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import create_backend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import create_handler

import vescale_fsdp_elastic as elastic
from vescale_fsdp.testing import free_port
from vescale_fsdp_elastic import connecting

SCRIPT = """
import vescale_fsdp_elastic as elastic
elastic.init_process_group("gloo", connect_timeout_s={timeout_s})
"""
LOST = "torchrun counts 1 of the 2 hosts on which it has started ranks"


def error_of_rank_1(timeout_s: float, **environ: str) -> str:
    """What it writes when rank 0 never comes. It ends with code 1."""
    environ |= {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "0"}
    environ |= {"MASTER_PORT": str(free_port()), "TORCHELASTIC_RUN_ID": "job"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(timeout_s=timeout_s)],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 1
    return done.stderr


def meeting_of(num_hosts: int, file: Path) -> str:
    """The file of a rendezvous of torchrun in which so many agents have met."""
    params = RendezvousParameters("c10d", str(file), "job", num_hosts, num_hosts, store_type="file")

    def meet() -> None:
        backend, store = create_backend(params)
        agent = create_handler(store, backend, params)
        agent.next_rendezvous()
        agent._stop_heartbeats()

    agents = [threading.Thread(target=meet) for _ in range(num_hosts)]
    for each in agents:
        each.start()
    for each in agents:
        each.join()
    return str(file)


class Ends:
    """Why the process would have ended."""

    def __init__(self) -> None:
        self.why, self.has_come = "", threading.Event()

    def __call__(self, why: str) -> None:
        self.why = why
        connecting.rely_on_ring()
        self.has_come.set()


@pytest.fixture
def ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Ends]:
    """On the first rank of two hosts, of which torchrun counts one."""
    for name, value in [
        ("TORCHELASTIC_RUN_ID", "job"), ("GROUP_WORLD_SIZE", "2"), ("LOCAL_RANK", "0"),
        ("PET_RDZV_ENDPOINT", meeting_of(1, tmp_path / "one")),
    ]:  # fmt: skip
        monkeypatch.setenv(name, value)
    found = Ends()
    monkeypatch.setattr(connecting, "_end", found)
    monkeypatch.setattr(connecting, "_LOOK_S", 0.01)
    yield found
    connecting.rely_on_ring()
    for thread in watching():
        thread.join()


def watching() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == connecting._THREAD]


@pytest.mark.timeout(100)
def test_a_rank_ends_if_the_host_of_rank_0_is_gone() -> None:
    assert "rank 1: not connected to all of 2 ranks within 0.5 s" in error_of_rank_1(0.5)


@pytest.mark.timeout(100)
def test_a_rank_that_connects_ends_if_torchrun_has_taken_out_a_host(tmp_path: Path) -> None:
    file = meeting_of(1, tmp_path / "one")
    error = error_of_rank_1(80, GROUP_WORLD_SIZE="2", PET_RDZV_ENDPOINT=file)
    assert f"rank 1: {LOST}" in error


def test_so_does_one_that_makes_its_model(ends: Ends) -> None:
    connecting.watch_agents()
    assert ends.has_come.wait(20)
    assert ends.why.startswith(LOST)


def test_it_does_not_if_torchrun_counts_all_hosts(
    ends: Ends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PET_RDZV_ENDPOINT", meeting_of(2, tmp_path / "two"))
    connecting.watch_agents()
    assert not ends.has_come.wait(0.5)
    assert watching()


def test_it_does_not_look_while_it_trains(
    ends: Ends, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connecting, "_LOOK_S", 1000.0)
    connecting.watch_agents()
    (thread,) = watching()
    model = torch.nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters())
    with elastic.training(tmp_path / "run", model, optimizer, memory_directory=tmp_path / "memory"):
        thread.join(20)
        assert not thread.is_alive()
    assert not ends.why


@pytest.mark.parametrize("name", ["PET_RDZV_ENDPOINT", "TORCHELASTIC_RUN_ID", "GROUP_WORLD_SIZE"])
def test_only_several_hosts_that_meet_in_a_file_are_watched(
    name: str, ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(name)
    connecting.watch_agents()
    assert not watching()


def test_the_first_rank_of_a_host_looks(ends: Ends, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    connecting.watch_agents()
    assert not watching()

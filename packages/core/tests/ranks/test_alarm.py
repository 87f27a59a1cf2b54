"""The alarm: where NCCL keeps devices, a rank that gives up ends the others, too.

There is no NCCL here: groups say that they are its own.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale_fsdp import RankMismatchError, compat, fully_shard
from vescale_fsdp.ranks import Ranks, alarm, collectives, everyone, waits
from vescale_fsdp.testing import run_ranks


class Fake:
    """A group that says that it is NCCL's."""

    _device_types = (torch.device("lazy"),)

    def __init__(self, hangs: bool = False) -> None:
        self.num_aborts = 0
        self._goes_on = threading.Event()
        if not hangs:
            self._goes_on.set()

    def _get_backend(self, device: torch.device) -> Any:
        if device.type != "lazy":
            raise RuntimeError("No backend type associated with device type")
        return SimpleNamespace(name=lambda: "nccl", abort=self._abort)

    def _abort(self) -> None:
        self.num_aborts += 1
        self._goes_on.wait()


def make(hangs: bool = False) -> Any:
    alarm.LOOK_S = 0.05
    group: Any = Fake(hangs)
    waits.register(group)
    return group


def listeners() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "vescale-fsdp alarm"]


def hear() -> None:
    end = time.monotonic() + 20
    while not waits.has_aborted():
        assert time.monotonic() < end, "nothing is heard"
        time.sleep(0.01)


def reason() -> str:
    with pytest.raises(RankMismatchError) as caught:
        waits.check()
    return str(caught.value)


class OfPython(dist.Store):
    """A store that can do nothing."""


def with_another_store() -> bool:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "default_store", OfPython)
        group = make()
    waits.abort("a test")
    return alarm.present() is None and not group.num_aborts


def test_without_a_store_that_can_be_asked_there_is_no_alarm() -> None:
    assert run_ranks(with_another_store, 1) == [True]


def first_counts() -> tuple[str, list[int]]:
    groups = [make(), make()]
    everyone().barrier("the beginning")
    if dist.get_rank() == 0:
        waits.abort("the first")
    hear()
    waits.abort("the second")
    dist.barrier()
    if dist.get_rank() == 2:
        alarm.present().tell("the third")  # type: ignore[union-attr]
    alarm.present()._thread.join()  # type: ignore[union-attr]
    return reason(), [group.num_aborts for group in groups]


def test_all_ranks_hear_the_first_reason_and_abort_each_communicator_once() -> None:
    for text, num_aborts in run_ranks(first_counts, 3):
        assert text == "the ranks are no longer connected: the first"
        assert num_aborts == [1, 1]


WAITS_FOR_0 = {
    "a round": lambda: everyone().barrier("a step"),
    "a name, asked for": lambda: Ranks([0, 1], 1).barrier("a step"),
    "a name, given": lambda: Ranks([1, 0], 1).barrier("a step"),
}


def waits_in_the_store(name: str) -> str:
    make()
    everyone().barrier("the beginning")
    if dist.get_rank() == 0:
        waits.abort("rank 0 gave up")
        return ""
    with pytest.raises(RankMismatchError) as caught:
        WAITS_FOR_0[name]()
    return str(caught.value)


@pytest.mark.parametrize("name", WAITS_FOR_0)
def test_a_wait_in_the_store_ends(name: str) -> None:
    _, text = run_ranks(waits_in_the_store, 2, name)
    assert text == "the ranks are no longer connected: rank 0 gave up"


def asks_again() -> list[str]:
    group = make()
    everyone().barrier("the beginning")
    if dist.get_rank() == 0:
        waits.abort("rank 0 gave up")
    hear()
    said = []
    for ask in (
        lambda: everyone().barrier("a step"),
        lambda: everyone().together("a test", lambda: 1, list),
        lambda: collectives.all_reduce(torch.zeros(1), dist.group.WORLD),
        lambda: collectives.all_gather_uneven([torch.zeros(1)] * 2, torch.zeros(1), group),
        lambda: collectives.all_gather_many([torch.zeros(2)], [torch.zeros(1)], group),
        lambda: waits.wait(SimpleNamespace(wait=lambda: 1), "a test"),
    ):
        with pytest.raises(RankMismatchError) as caught:
            ask()
        said.append(str(caught.value))
    assert waits.is_closed(group)
    dist.barrier()  # a group of the user that is not NCCL's
    return said


def test_whatever_is_asked_next_raises() -> None:
    for said in run_ranks(asks_again, 2):
        assert said == ["the ranks are no longer connected: rank 0 gave up"] * 6


def ask(error: Exception, *, aborts: bool = False) -> None:
    with waits.asking:
        if aborts:
            waits.abort("a test")
        raise error


def says_it_otherwise() -> None:
    make()
    error = dist.DistBackendError("NCCL communicator was aborted on rank 0")
    with pytest.raises(dist.DistBackendError):
        ask(error)
    with pytest.raises(ZeroDivisionError):
        ask(ZeroDivisionError())
    with pytest.raises(RankMismatchError, match="no longer connected: a test") as caught:
        ask(error, aborts=True)
    assert caught.value.__cause__ is error


def test_what_torch_says_of_an_aborted_communicator_gets_the_reason() -> None:
    run_ranks(says_it_otherwise, 1)


def one_hangs() -> tuple[int, int]:
    hanging, other = make(hangs=True), make()
    alarm.ABORT_S = 0.1
    waits.abort("a test")
    found = hanging.num_aborts, other.num_aborts
    hanging._goes_on.set()
    return found


def test_an_abort_that_hangs_keeps_no_other() -> None:
    assert run_ranks(one_hangs, 1) == [(1, 1)]


def train_on_cpu() -> tuple[bool, bool]:
    before = listeners()  # of the tests before
    model = fully_shard(nn.Linear(3, 3))
    for _ in range(2):
        model(torch.ones(2, 3)).sum().backward()
    return {*listeners()} <= {*before}, alarm.present() is None


def test_where_nccl_is_not_used_nobody_looks() -> None:
    assert run_ranks(train_on_cpu, 2) == [(True, True)] * 2


class Counted:
    """A store that notes in which default group it was asked."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.worlds: list[int] = []

    def clone(self) -> Counted:
        return self

    def __getattr__(self, name: str) -> Any:
        self.worlds.append(id(dist.group.WORLD))
        return getattr(self._store, name)


def in_the_next_default_group() -> None:
    store = compat.default_store()
    counted = Counted(store)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "default_store", lambda: counted)
        group = make()
        thread = alarm.present()._thread  # type: ignore[union-attr]
    world = dist.group.WORLD
    end = time.monotonic() + 20
    while len(counted.worlds) < 5:
        assert time.monotonic() < end, "it does not look"
        time.sleep(0.01)
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=dist.PrefixStore("again", store), rank=0, world_size=1)
    thread.join(20)
    assert not thread.is_alive()
    assert {*counted.worlds} == {id(world)}
    assert alarm.present() is None
    waits.abort("a test")
    assert group.num_aborts == 0
    waits.check()


def test_nothing_of_a_former_default_group_is_looked_at() -> None:
    run_ranks(in_the_next_default_group, 1)


def with_an_old_reason() -> int:
    store = compat.default_store()
    store.set(alarm._KEY, "of another attempt")
    group = make()
    present = alarm.present()
    assert present is not None
    present.join()
    assert not present._is_rung
    waits.check()
    present.tell("a new one")
    assert store.get(alarm._KEY) == b"a new one"
    return int(group.num_aborts)


def test_the_reason_of_an_attempt_before_is_no_alarm() -> None:
    assert run_ranks(with_an_old_reason, 1) == [0]


SCRIPT = f"""
import sys, torch.distributed as dist
sys.path[:0] = {sys.path!r}
from {__name__} import *
rank, port = int(sys.argv[1]), int(sys.argv[2])
store = dist.TCPStore("127.0.0.1", port, 2, rank == 0) if port else dist.HashStore()
dist.init_process_group("gloo", store=store, rank=rank, world_size=2 if port else 1)
alarm.LOOK_S = 0.5 if port else 1000.0
waits.register(group := Fake())
assert alarm.present() is not None
if port:
    everyone().barrier("the beginning")
    if rank == 0:
        waits.abort("rank 0 gave up")
        sys.exit(7)  # with the store
    hear()
    waits.check()
"""


def start(rank: int, port: int) -> Any:
    command = [sys.executable, "-c", SCRIPT, str(rank), str(port)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_process_ends_at_once_and_says_nothing() -> None:
    with start(0, 0) as alone:
        assert alone.communicate(timeout=60) == ("", "")
    assert alone.returncode == 0


def test_the_process_of_the_store_ends_when_all_have_heard() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    with start(0, port) as first, start(1, port) as second:
        said = second.communicate(timeout=60)[1]
        first.communicate(timeout=60)
    assert "RankMismatchError: the ranks are no longer connected: rank 0 gave up" in said
    assert (first.returncode, second.returncode) == (7, 1)

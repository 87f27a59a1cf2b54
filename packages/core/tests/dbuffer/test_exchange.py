"""Sends and receives in place of gloo's collectives: the same numbers, receives first."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from vescale_fsdp import RankMismatchError, fully_shard
from vescale_fsdp.dbuffer import SlabPool, transport
from vescale_fsdp.dbuffer.collectives import Comm
from vescale_fsdp.ranks import threads, waits
from vescale_fsdp.testing import RankError, run_ranks

from .helpers import CPU, random
from .test_collectives import make_buffer, make_comm

PART = 40  # elements


class Recorder(TorchDispatchMode):
    """What goes to the network, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, name = func._schema.name.split("::")
        if namespace == "c10d":
            self.names.append(name)
        return func(*args, **(kwargs or {}))


@contextmanager
def shortest(num_bytes: int) -> Iterator[None]:
    """Exchange parts from this size on. The process serves other tests after this one."""
    before, transport.SHORTEST_BYTES = transport.SHORTEST_BYTES, num_bytes
    try:
        yield
    finally:
        transport.SHORTEST_BYTES = before


def both_ways(run: Any) -> tuple[Any, Any]:
    """What ``run()`` gives by collectives, and by exchanges."""
    with shortest(1 << 60):
        plain = run()
    with shortest(0):
        return plain, run()


def gather(comm: Comm, dtype: torch.dtype, in_place: bool) -> Tensor:
    full = torch.full((comm.size * PART,), -1.0, dtype=dtype)
    own = random(PART, comm.rank, dtype)
    if in_place:
        full.view(comm.size, -1)[comm.rank] = own
        own = full.view(comm.size, -1)[comm.rank]
    comm.all_gather(full, own).wait()
    return full


def reduce(comm: Comm, dtype: torch.dtype, reduce_dtype: torch.dtype) -> Tensor:
    full = random(comm.size * PART, comm.rank, dtype)
    return comm.start_reduce(full, reduce_dtype, SlabPool(CPU)).finish()


def check_numbers() -> None:
    comm = make_comm()
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for in_place in (False, True):
            plain, exchanged = both_ways(lambda: gather(comm, dtype, in_place))  # noqa: B023
            expected = torch.cat([random(PART, rank, dtype) for rank in range(comm.size)])
            assert torch.equal(plain, expected)
            assert torch.equal(exchanged, expected)
        for reduce_dtype in (torch.float32, dtype):
            plain, exchanged = both_ways(lambda: reduce(comm, dtype, reduce_dtype))  # noqa: B023
            assert torch.equal(plain, exchanged)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_numbers_are_those_of_the_collectives(world_size: int) -> None:
    run_ranks(check_numbers, world_size)


def check_order() -> None:
    comm = make_comm()
    with shortest(0), Recorder() as recorder:
        comm.all_gather(torch.zeros(3 * PART), torch.ones(PART)).wait()
    assert recorder.names == ["recv_", "recv_", "send", "send"]


def test_all_receives_are_posted_before_the_first_send() -> None:
    run_ranks(check_order, 3)


def check_scratch() -> None:
    """The own part is summed where it is."""
    comm, pool = make_comm(), SlabPool(CPU)
    with shortest(0):
        pending = comm.start_reduce(torch.ones(3 * PART), torch.float32, pool)
    assert [region.storage.nbytes() for region in pool._lent.values()] == [2 * PART * 4]
    assert pending.finish().tolist() == [1.0] * PART
    assert not pool._lent


def test_a_reduction_borrows_memory_for_what_others_send_only() -> None:
    run_ranks(check_scratch, 3)


def check_choice() -> None:
    for reduction, size, names in (
        ("all_to_all", PART, ["recv_", "send"] * 2),
        ("all_to_all", PART - 1, ["_allgather_base_", "alltoall_base_"]),
        ("native", PART, ["_allgather_base_", "_reduce_scatter_base_"]),
    ):
        comm = make_comm(reduction)  # type: ignore[arg-type]
        with shortest(4 * PART), Recorder() as recorder:
            comm.all_gather(torch.zeros(2 * size), torch.ones(size)).wait()
            comm.start_reduce(torch.ones(2 * size), torch.float32, SlabPool(CPU)).finish()
        assert recorder.names == names


def test_short_parts_and_native_reductions_stay_collectives() -> None:
    run_ranks(check_choice, 2)


def check_flight() -> None:
    comm, buffer, pool = make_comm(), make_buffer(torch.float32), SlabPool(CPU)
    with shortest(0):
        reductions = [
            comm.start_reduce(torch.full((6,), float(k)), torch.float32, pool) for k in range(4)
        ]
        gathers = [comm.start_gather(buffer), comm.start_gather(make_buffer(torch.float32))]
    for work in gathers[::-1]:  # in any order
        assert work is not None
        work.wait()
    for k, pending in enumerate(reductions):
        assert pending.finish().tolist() == [float(k)] * 3


def test_several_exchanges_may_be_in_flight() -> None:
    run_ranks(check_flight, 2)


def check_lost_rank() -> None:
    comm = make_comm()
    with shortest(0):
        comm.all_gather(torch.zeros(2 * PART), torch.ones(PART)).wait()
        if comm.rank == 1:
            os._exit(3)
        comm.all_gather(torch.zeros(2 * PART), torch.ones(PART)).wait()


def test_a_rank_that_dies_is_not_waited_for() -> None:
    with pytest.raises(RankError) as caught:
        run_ranks(check_lost_rank, 2)
    types = {failure.rank: failure.type_name for failure in caught.value.failures}
    assert types == {0: "RankMismatchError", 1: "RankDied"}


def train() -> list[Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 8), nn.Linear(8, 4))
    for layer in (model[0], model[2]):
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        model(random(4 * 8, 10 * step + dist.get_rank()).view(4, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [param.full_tensor().detach() for param in model.parameters()]


def check_training() -> None:
    plain, exchanged = both_ways(train)
    for a, b in zip(plain, exchanged, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("world_size", [2, 4])
def test_training_gives_the_same_bits(world_size: int) -> None:
    run_ranks(check_training, world_size)


def exchanges_with_a_rank_that_stands_still() -> str:
    """Rank 1 is stopped when it has received a part of a message.

    gloo's waits for such a message end only with their timeout, also if its connection is closed.
    """
    group = dist.group.WORLD
    assert group is not None
    processes: list[int] = [0, 0]
    dist.all_gather_object(processes, os.getpid())
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    large, small = torch.zeros(16 << 20), torch.zeros(1 << 12)
    sent, received = [small, small], [small.clone(), small.clone()]
    (sent if rank == 0 else received)[other] = large
    threads.enable()
    threading.Timer(1.0, lambda: waits.abort("a host is gone", [group])).start()
    exchange = transport.Exchange(sent, received, rank, group)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    with pytest.raises(RankMismatchError) as caught:
        exchange.wait()
    if rank == 0:
        os.kill(processes[1], signal.SIGCONT)
    threads.disable(RuntimeError("the test is over"))
    return str(caught.value)


def waits_after_the_end(is_enabled: bool, folder: Path) -> str:
    """The wait for a message that was being received when the connection was closed."""
    group = dist.group.WORLD
    assert group is not None
    rank, empty, large = dist.get_rank(), torch.empty(0), torch.zeros(16 << 20)
    sent, received = [empty, large], [empty, empty]
    if is_enabled:
        threads.enable()
    if rank == 1:
        sent, received = [empty, empty], [large, empty]
    exchange = transport.Exchange(sent, received, rank, group)
    (folder / str(rank)).touch()
    while not (folder / str(1 - rank)).exists():
        time.sleep(0.001)
    waits.abort("a host is gone", [group])
    with pytest.raises(RankMismatchError) as caught:
        exchange.wait()
    threads.disable(RuntimeError("the test is over"))
    return str(caught.value)


@pytest.mark.parametrize("is_enabled", [False, True])
def test_a_wait_that_begins_when_connections_are_closed_raises(
    is_enabled: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VESCALE_FSDP_TIMEOUT_S", "1000")
    texts = run_ranks(waits_after_the_end, 2, is_enabled, tmp_path)
    assert texts == ["the ranks are no longer connected: a host is gone"] * 2


def test_a_wait_ends_when_connections_are_closed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VESCALE_FSDP_TIMEOUT_S", "1000")  # longer than the timeout of a test
    texts = run_ranks(exchanges_with_a_rank_that_stands_still, 2)
    assert texts == ["the ranks are no longer connected: a host is gone"] * 2

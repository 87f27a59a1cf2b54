"""What would run on which stream of an accelerator, found out on the CPU by a model of streams."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from vescale_fsdp import fully_shard
from vescale_fsdp.dbuffer import Comm, SlabPool, streams
from vescale_fsdp.engine.schedule import Schedule
from vescale_fsdp.testing import run_ranks

from .helpers import shard_units
from .models import MLP, inputs_of, make
from .stream_model import Streams, modelled_streams

WORLD_SIZE = 2
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def train(policy: MixedPrecisionPolicy, num_steps: int = 3, **options: Any) -> list[float]:
    model = make(MLP)
    shard_units(model, model.layers, mp_policy=policy, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    losses = []
    for step in range(num_steps):
        loss = model(inputs_of(step, dist.get_rank())).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def check_races() -> None:
    with mock.patch.dict(os.environ, {"VESCALE_FSDP_REDUCE": "native"}):
        expected = train(BF16)
        with modelled_streams() as model:
            found = train(BF16)
    assert found == expected
    assert not model.races, "\n".join(model.races[:10])
    # 3 layers, 3 steps: each gathered in forward and backward, its own part cast beside.
    assert len(model.made) == 1
    assert model.num_ops["side 0"] >= 18
    assert model.num_ops["all_gather_single"] == 2 * 18
    assert model.num_ops["reduce_scatter_single"] == 2 * 9


def test_nothing_is_used_or_freed_while_another_stream_uses_it() -> None:
    run_ranks(check_races, WORLD_SIZE)


def check_races_with_replicas() -> None:
    """2 replicas of 2 shards; in the second model what rests is cut over both axes."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    for options in ({}, {"sharding": "hsdp_zero1"}, {"reshard_after_forward": 2, "mesh": None}):
        with mock.patch.dict(os.environ, {"VESCALE_FSDP_REDUCE": "native"}):
            expected = train(BF16, **{"mesh": mesh, **options})
            with modelled_streams() as model:
                found = train(BF16, **{"mesh": mesh, **options})
        assert found == expected, options
        assert not model.races, (options, model.races[:10])


def test_nor_with_replicas_nor_with_parts_that_are_kept() -> None:
    run_ranks(check_races_with_replicas, 4)


def check_races_are_found() -> list[str]:
    def start_at_once(device: torch.device, start: Any) -> Any:
        model = torch.get_device_module(device)
        with model.stream(streams._copy_stream(device)):  # without waiting for the compute
            return start()

    with (
        mock.patch.dict(os.environ, {"VESCALE_FSDP_REDUCE": "native"}),
        mock.patch("vescale_fsdp.dbuffer.collectives.start_beside", start_at_once),
        modelled_streams() as model,
    ):
        train(BF16)
    return model.races


def test_the_model_of_streams_finds_a_copy_that_does_not_wait() -> None:
    races, _ = run_ranks(check_races_are_found, WORLD_SIZE)
    assert any("side 0 after" in race and "compute" in race for race in races)


class Recorded:
    """A task, and a work that is waited for."""

    def __init__(self, model: Streams) -> None:
        self.model, self.waited_on = model, ""

    def wait(self) -> None:
        self.waited_on = self.model.current.name


@pytest.fixture
def tensor() -> Tensor:
    return torch.zeros(4)


def test_a_task_runs_beside_and_is_waited_for(tensor: Tensor) -> None:
    with modelled_streams() as model:
        tensor.add_(1)
        work = Recorded(model)

        def start() -> Recorded:
            tensor.mul_(2)
            return work

        pending = streams.start_beside(tensor.device, start)
        assert model.num_ops == {"compute": model.num_ops["compute"], "side 0": 2}
        assert pending is not None
        pending.wait()
        tensor.add_(1)
    assert not model.races
    assert work.waited_on == "compute"


def test_without_waiting_for_a_task_there_is_a_race(tensor: Tensor) -> None:
    with modelled_streams() as model:

        def start() -> None:
            tensor.mul_(2)

        streams.start_beside(tensor.device, start)
        tensor.add_(1)
    assert model.races


def test_on_a_cpu_a_task_runs_at_once_and_its_work_comes_back(tensor: Tensor) -> None:
    work = object()
    assert streams.start_beside(tensor.device, lambda: work) is work  # type: ignore[arg-type, return-value]


def test_what_comes_from_another_device_is_cast_after_it_has_moved() -> None:
    moves: list[torch.dtype] = []

    class Far(Tensor):
        """A tensor that says it is elsewhere, and notes in which dtype it moves."""

        device = torch.device("meta")  # type: ignore[assignment]

        def to(self, device: Any, **options: Any) -> Tensor:  # type: ignore[override]
            moves.append(self.dtype)
            assert options == {"non_blocking": True}
            return torch.ones(3)

    target = torch.zeros(3, dtype=torch.bfloat16)
    streams.copy_async(target, Far(torch.ones(3)))
    assert moves == [torch.float32]
    assert target.tolist() == [1, 1, 1]


def check_buffers_of_a_reduction() -> list[torch.dtype]:
    """In the last of three steps, of a model that is one unit."""
    taken: list[torch.dtype] = []
    take = SlabPool.take

    def noting(pool: SlabPool, num_elements: int, dtype: torch.dtype) -> Tensor:
        taken.append(dtype)
        return take(pool, num_elements, dtype)

    with (
        mock.patch.dict(os.environ, {"VESCALE_FSDP_REDUCE": "native"}),
        mock.patch.object(SlabPool, "take", noting),
    ):
        model = fully_shard(make(MLP), mp_policy=BF16)
        for step in range(3):
            taken.clear()
            model(inputs_of(step, dist.get_rank())).float().sum().backward()
    return taken


def test_a_reduce_scatter_needs_one_buffer_in_the_dtype_of_the_sum() -> None:
    # The copy of each gradient casts: there is no second buffer to cast from.
    found = run_ranks(check_buffers_of_a_reduction, WORLD_SIZE)
    assert found == [[torch.float32]] * WORLD_SIZE


@pytest.mark.parametrize(("in_flight", "expected"), [(1, 0), (2, 1), (3, 1)])
def test_the_gradients_of_the_unit_that_runs_count_as_a_reduction_under_way(
    in_flight: int, expected: int
) -> None:
    schedule = SimpleNamespace(units=list, in_flight=in_flight)
    assert Schedule.max_reductions.fget(schedule) == expected  # type: ignore[attr-defined]


@pytest.mark.parametrize("has_streams", [False, True])
def test_one_rank_keeps_its_gradients_where_they_are_if_nobody_else_will_use_the_memory(
    has_streams: bool,
) -> None:
    group: Any = None  # nothing is sent
    comm = Comm(group, group, rank=0, size=1, reduction="native")
    gradients, cpu = torch.ones(4), torch.device("cpu")
    with mock.patch("vescale_fsdp.dbuffer.collectives.has_streams", return_value=has_streams):
        reduced = comm.start_reduce(gradients, torch.float32, SlabPool(cpu)).finish()
    assert reduced.tolist() == [1, 1, 1, 1]
    assert (reduced.data_ptr() == gradients.data_ptr()) == has_streams

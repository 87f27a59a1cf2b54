"""What only a GPU can show. On one device: world size 1 over NCCL, larger worlds by the fake group.

`test_streams` checks the order of streams on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.profiler import ProfilerActivity, profile

from vescale_fsdp import clip_grad_norm_
from vescale_fsdp.engine.axes import comm_for
from vescale_fsdp.engine.group import Group
from vescale_fsdp.engine.unit import units_in

from .helpers import shard_units
from .models import TinyGPT, gpt_loss, make, tokens_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DEVICE = torch.device("cuda", 0)
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
FAKE_WORLD_SIZE = 8
WORLDS = pytest.mark.parametrize("world_size", [1, FAKE_WORLD_SIZE])
World = Callable[[int], AbstractContextManager[None]]


@contextmanager
def _world(size: int) -> Iterator[None]:
    backend, store = "nccl", dist.HashStore()
    if size > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        backend, store = "fake", FakeStore()
    torch.cuda.set_device(DEVICE)
    dist.init_process_group(backend, store=store, rank=0, world_size=size)
    try:
        yield
    finally:
        torch.cuda.synchronize()
        dist.destroy_process_group()


@pytest.fixture
def world() -> World:
    """Enter it for a default group of so many ranks, of which this process is the first."""
    return _world


def sharded(**options: Any) -> nn.Module:
    model = make(TinyGPT).to(DEVICE)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    return shard_units(model, model.blocks, mesh=mesh, **options)


def groups_of(model: nn.Module) -> list[Group]:
    return [group for unit in units_in(model).values() for group in unit.groups]


class Training:
    """A model, its optimizer, and batches that are on the device before a step begins."""

    def __init__(self, model: nn.Module, num_steps: int = 8) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        self._batches = [tokens_of(step, 0).to(DEVICE) for step in range(num_steps)]
        self._num_steps = 0

    def step(self, clips: bool = False) -> Tensor:
        loss = gpt_loss(self.model, self._batches[self._num_steps])
        self._num_steps += 1
        loss.backward()
        if clips:
            clip_grad_norm_(self.model, 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


def test_one_rank_over_nccl_trains_like_the_plain_model(world: World) -> None:
    plain = Training(make(TinyGPT).to(DEVICE))
    expected = torch.stack([plain.step() for _ in range(5)])
    with world(1):
        ours = Training(sharded())
        found = torch.stack([ours.step() for _ in range(5)])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_offloaded_parameters_train_like_those_on_the_device(world: World) -> None:
    with world(1):
        here, there = Training(sharded()), Training(sharded(offload_policy=CPUOffloadPolicy()))
        for _ in range(4):
            torch.testing.assert_close(there.step(), here.step(), rtol=1e-5, atol=1e-6)
        assert all(group.buffer.shard.is_pinned() for group in groups_of(there.model))


@WORLDS
def test_a_step_never_makes_the_host_wait(world: World, world_size: int) -> None:
    with world(world_size):
        training = Training(sharded(mp_policy=BF16))
        for _ in range(3):  # orders are recorded, unused parameters found out
            training.step(clips=True)
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("error")
        try:
            for _ in range(2):
                training.step(clips=True)
        finally:
            torch.cuda.set_sync_debug_mode(before)


@WORLDS
def test_record_stream_is_never_called(world: World, world_size: int) -> None:
    with (
        world(world_size),
        mock.patch.object(Tensor, "record_stream", side_effect=AssertionError("record_stream")),
    ):
        training = Training(sharded(mp_policy=BF16))
        for _ in range(3):
            training.step()


@WORLDS
def test_between_steps_there_are_the_shards_and_the_states(world: World, world_size: int) -> None:
    with world(world_size):
        training = Training(sharded(mp_policy=BF16))
        rests = []
        for _ in range(4):
            training.step()
            torch.cuda.synchronize()
            rests.append(torch.cuda.memory_allocated())
        assert len(set(rests[1:])) == 1
        assert all(group.is_sharded for group in groups_of(training.model))
        assert not any(group.buffer.full.is_materialized for group in groups_of(training.model))


def test_reserved_memory_does_not_grow_when_the_host_runs_ahead(world: World) -> None:
    with world(FAKE_WORLD_SIZE):
        training = Training(sharded(mp_policy=BF16), num_steps=30)
        for _ in range(4):
            training.step()
        torch.cuda.synchronize()
        reserved = torch.cuda.memory_reserved()
        torch.cuda._sleep(1_000_000_000)  # cycles: the host gets all steps queued behind it
        for _ in range(20):
            training.step()
        torch.cuda.synchronize()
        assert torch.cuda.memory_reserved() == reserved


@WORLDS
def test_every_gathered_view_begins_at_a_multiple_of_16_bytes(
    world: World, world_size: int
) -> None:
    with world(world_size):
        model = sharded(mp_policy=BF16)
        for unit in units_in(model).values():
            unit.unshard()
            for group in unit.groups:
                full = group.buffer.full
                views = [view for view in full.views if view.numel()]
                assert all(view.data_ptr() % 16 == 0 for view in [full.flat, *views])
                assert group.layout.shard_size * full.flat.element_size() % 16 == 0
            unit.reshard()


def kernels_of(training: Training) -> list[Any]:
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as recorded:
        training.step()
        torch.cuda.synchronize()
    on_gpu = torch.autograd.DeviceType.CUDA
    return [
        event
        for event in recorded.events()
        if event.device_type == on_gpu and not event.is_user_annotation
    ]


def test_own_parts_are_cast_on_another_stream_than_the_compute(world: World) -> None:
    with world(FAKE_WORLD_SIZE):
        training = Training(sharded(mp_policy=BF16))
        for _ in range(3):
            training.step()
        kernels = kernels_of(training)
        by_stream: dict[int, list[str]] = {}
        for kernel in kernels:
            by_stream.setdefault(kernel.device_resource_id, []).append(kernel.name)
        compute, *others = sorted(by_stream.values(), key=len, reverse=True)
        assert any("gemm" in name or "sgemm" in name or "cutlass" in name for name in compute)
        # The root (kept after forward), and two blocks in both directions.
        assert len(others) == 1
        casts = [name for name in others[0] if "Memcpy" not in name]  # that the fake group sends
        assert len(casts) == 5
        assert all("copy" in name for name in casts)


def test_nothing_is_copied_out_of_a_gather(world: World) -> None:
    with world(FAKE_WORLD_SIZE):
        training = Training(sharded(mp_policy=BF16))
        for _ in range(3):
            training.step()
        names = [kernel.name for kernel in kernels_of(training)]
        assert names
        assert not [name for name in names if "split_with_sizes" in name or "chunk_cat" in name]


def test_collectives_have_communicators_of_their_own_on_streams_of_high_priority(
    world: World,
) -> None:
    with world(1):
        (group, *_) = groups_of(sharded())
        comm = comm_for(group.axes)
        assert comm.gather_group is not comm.reduce_group
        for each in (comm.gather_group, comm.reduce_group):
            assert each is not dist.group.WORLD
            backend: Any = each._get_backend(DEVICE)
            assert backend.options.is_high_priority_stream
        assert comm.reduction == "native"

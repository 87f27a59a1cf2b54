"""Gathers that a user supplies: through memory of their own, and in place."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from vescale_fsdp.dbuffer import Comm, DBuffer
from vescale_fsdp.dbuffer.buffer import FlatBuffer
from vescale_fsdp.dbuffer.transport import memory_for
from vescale_fsdp.ranks import collectives
from vescale_fsdp.testing import run_ranks

from .helpers import CPU, SHAPES, make_layout, random

WORLD_SIZE = 2


class Gather:
    """FSDP2's interface. Notes where it was told to write to."""

    def __init__(self) -> None:
        self.outputs: list[int] = []
        self.num_allocated = 0

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        self.num_allocated += 1
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, async_op: bool
    ) -> None:
        assert not async_op
        self.outputs.append(output_tensor.data_ptr())
        collectives.all_gather_single(output_tensor, input_tensor, group).wait()


def check(in_place: bool) -> None:
    """The shard is fp32 and the full buffer bf16, so that the own part is cast."""
    contexts: list[bool] = []  # whether there was memory when one was entered

    @contextmanager
    def symmetric(device: torch.device) -> Iterator[None]:
        contexts.append(buffer.full.is_materialized)
        yield
        assert buffer.full.is_materialized

    rank, layout = dist.get_rank(), make_layout(WORLD_SIZE)
    buffer = DBuffer(
        layout, SHAPES, rank, shard_dtype=torch.float32, full_dtype=torch.bfloat16, device=CPU
    )
    buffer.shard.copy_(random(layout.shard_size, rank))
    groups = dist.new_group(), dist.new_group()
    comm, gather = Comm(*groups, rank, WORLD_SIZE, "native"), Gather()
    with (
        mock.patch.object(collectives, "uses_symmetric_memory", return_value=in_place),
        mock.patch.object(collectives, "symmetric_memory", symmetric),
    ):
        for _ in range(2):
            work = comm.start_gather(buffer, custom=gather)
            if work is not None:
                work.wait()
            expected = torch.cat([random(layout.shard_size, k) for k in range(WORLD_SIZE)])
            assert torch.equal(buffer.full.flat, expected.bfloat16())
            address = buffer.full.flat.data_ptr()
            assert (gather.outputs[-1] == address) == in_place
            buffer.full.release()
    assert contexts == ([False] * 2 if in_place else [])
    assert gather.num_allocated == (0 if in_place else 2)


@pytest.mark.parametrize("in_place", [False, True])
def test_a_gather_that_may_writes_the_parameters_in_place(in_place: bool) -> None:
    run_ranks(check, WORLD_SIZE, in_place)


def test_full_buffers_are_of_the_pool_that_all_else_is_of() -> None:
    """In one of their own, memory that is short is not looked for elsewhere, nor is it given back.

    Only a gather that asks for symmetric memory has another.
    """
    cuda, region = torch.device("cuda"), mock.Mock()
    buffer: Any = SimpleNamespace(
        is_materialized=False, flat=SimpleNamespace(device=cuda), region=region
    )
    with (
        mock.patch.object(torch.cuda, "MemPool"),
        mock.patch.object(torch.cuda, "use_mem_pool") as use_mem_pool,
    ):
        FlatBuffer.materialize(buffer)
        with memory_for(Gather(), cuda):
            pass
    region.materialize.assert_called_once()
    use_mem_pool.assert_not_called()

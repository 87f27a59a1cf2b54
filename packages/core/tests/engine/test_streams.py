"""What of the engine depends on whether a device has streams. `tests/simulator` runs them."""

from __future__ import annotations

import os
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from vescale_fsdp import fully_shard
from vescale_fsdp.dbuffer import Comm, SlabPool
from vescale_fsdp.program.window import policy_of
from vescale_fsdp.testing import run_ranks

from .models import MLP, inputs_of, make

WORLD_SIZE = 2
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


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
    assert policy_of(in_flight, [None, None], has_streams=False).reductions == expected


@pytest.mark.parametrize("has_streams", [False, True])
def test_one_rank_keeps_its_gradients_where_they_are_if_nobody_else_will_use_the_memory(
    has_streams: bool,
) -> None:
    group: Any = None  # nothing is sent
    comm = Comm(group, group, rank=0, size=1, reduction="native")
    gradients, cpu = torch.ones(4), torch.device("cpu")
    with mock.patch("vescale_fsdp.devices.has_streams", return_value=has_streams):
        reduced = comm.start_reduce(gradients, torch.float32, SlabPool(cpu)).finish()
    assert reduced.tolist() == [1, 1, 1, 1]
    assert (reduced.data_ptr() == gradients.data_ptr()) == has_streams

"""Communicators that torch would make in another way than we need."""

from __future__ import annotations

import datetime
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from vescale_fsdp import compat
from vescale_fsdp.testing import run_ranks


def check_group_of_one_rank() -> list[int]:
    """As of another pipeline stage: the other rank never calls."""
    world = dist.group.WORLD
    assert world is not None
    world.bound_device_id = torch.device("cuda", 0)  # as init_process_group(device_id=...) does
    try:
        splits = AssertionError("torch would split the default group")
        with mock.patch.object(dist.distributed_c10d, "_get_split_source", side_effect=splits):
            group = compat.new_group([0]) if dist.get_rank() == 0 else None
        assert world.bound_device_id == torch.device("cuda", 0)
    finally:
        world.bound_device_id = None
    return [] if group is None else dist.get_process_group_ranks(group)


def test_a_group_is_not_split_from_a_default_group_that_has_a_device() -> None:
    assert run_ranks(check_group_of_one_rank, 2) == [[0], []]


class _Options:
    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream = is_high_priority_stream
        self.config: Any = "default"
        self._timeout: Any = "default"


def test_nccl_gets_streams_of_high_priority_and_the_configuration_of_the_default_group() -> None:
    given = _Options()
    given.config = "by copy engines"
    world: Any = SimpleNamespace(_get_backend=lambda device: SimpleNamespace(options=given))
    fake = SimpleNamespace(ProcessGroupNCCL=SimpleNamespace(Options=_Options))
    with mock.patch.object(compat, "dist", fake):
        options = compat._nccl_options(datetime.timedelta(seconds=7), world, "cuda")
        as_it_was = compat._nccl_options(None, world, "cuda")
    assert options.is_high_priority_stream
    assert options.config == "by copy engines"
    assert options._timeout == datetime.timedelta(seconds=7)
    assert as_it_was._timeout == "default"

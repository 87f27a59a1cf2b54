"""The scenarios on the streams of a GPU. ``python3 dev.py gpu`` runs them with torch's sanitizer.

With one rank over NCCL each has to give the bits of a run in which the host waits for each copy.
With torch's fake group, which sends nothing, for a world of two it is only the sanitizer that says
something.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch.cuda._sanitizer import EventHandler

from .scenarios import ALL_ACTIVATIONS, ALL_STATES, ONE, TWO, Scenario, host_waits

if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

SCENARIOS = [each for each in (*ONE, *TWO) if each.name not in ("Muon", "SOAP")]
named = pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda each: each.name)


@pytest.fixture(autouse=True)
def a_view_is_no_write() -> Iterator[None]:
    """The sanitizer takes ``set_``, which makes a view of memory, for a write to it."""
    handler: Any = EventHandler
    launch = handler._handle_kernel_launch

    def without_views(
        self: Any, stream: Any, reads: Any, writes: Any, outputs: Any, *rest: Any
    ) -> Any:
        if rest[0].name == "aten::set_":
            writes, outputs = set(), set()
        return launch(self, stream, reads, writes, outputs, *rest)

    with mock.patch.object(handler, "_handle_kernel_launch", without_views):
        yield


@contextmanager
def world(size: int) -> Iterator[None]:
    backend, store = "nccl", dist.HashStore()
    if size > 1:
        from torch.testing._internal.distributed.fake_pg import FakeStore

        backend, store = "fake", FakeStore()
    torch.cuda.set_device(0)
    dist.init_process_group(backend, store=store, rank=0, world_size=size)
    try:
        yield
        torch.cuda.synchronize()
    finally:
        dist.destroy_process_group()


@named
def test_streams_give_the_bits_of_one_stream(scenario: Scenario) -> None:
    with world(1), ALL_ACTIVATIONS, ALL_STATES:
        with host_waits():
            expected = scenario.run(device="cuda")
        found = scenario.run(device="cuda")
        for value, right in zip(found, expected, strict=True):
            assert torch.equal(value, right)


@named
def test_no_kernel_meets_another(scenario: Scenario) -> None:
    with world(2), ALL_ACTIVATIONS, ALL_STATES:
        scenario.run(device="cuda")
        torch.cuda.synchronize()

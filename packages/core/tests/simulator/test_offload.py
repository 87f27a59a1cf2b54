"""``optim.offload_`` on a simulated device: what runs beside what, and what memory it takes."""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from torch import nn

from vescale_fsdp import devices, fully_shard, transfers
from vescale_fsdp.optim import offload, offload_
from vescale_fsdp.testing import run_ranks

from .simulator import Simulator, simulated

WIDTH, NUM_LAYERS = 64, 8
PART_BYTES = WIDTH * WIDTH * 4  # of parameters: two layers on each of two ranks


def train(simulator: Simulator, offloads: bool, num_steps: int = 3) -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    if offloads:
        offload_(optimizer, part_bytes=PART_BYTES)
    with simulator:
        for _ in range(num_steps):
            model(torch.randn(4, WIDTH)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        simulator.states = optimizer.state  # type: ignore[attr-defined]  # they live on
        simulator.device.synchronize()


def check_order() -> list[tuple[str, int]]:
    """What the device has done of the last step, if it computes as late as it may."""
    log: list[tuple[str, int]] = []
    counts = dict.fromkeys(("step", "to the device", "to the host"), 0)
    copied, step = transfers._copied, offload._Streamed._step_on

    def note(what: str) -> None:
        number = counts[what]
        counts[what] += 1
        simulator.device.enqueue(lambda: log.append((what, number)))

    def noted_copy(targets: Any, sources: Any, device: Any, use: str) -> Any:
        event = copied(targets, sources, device, use)
        with devices.side_stream(device, use):
            note(use)
        return event

    def noted_step(self: Any, *args: Any) -> None:
        counts.update(dict.fromkeys(counts, 0))
        log.clear()
        real = self._step

        def one(optimizer: Any) -> None:
            real(optimizer)
            note("step")

        with mock.patch.object(self, "_step", one):
            step(self, *args)

    with (
        simulated("starve compute") as simulator,
        mock.patch.object(transfers, "_copied", noted_copy),
        mock.patch.object(offload._Streamed, "_step_on", noted_step),
    ):
        train(simulator, offloads=True)
    return log


def test_copies_run_beside_the_step_on_another_part() -> None:
    for log in run_ranks(check_order, 2):
        number = NUM_LAYERS // 2
        assert len(log) == 3 * number
        for part in range(number - 1):
            assert log.index(("to the device", part + 1)) < log.index(("step", part))
        for part in range(number - 2):  # two parts are on the device, and one leaves it
            assert log.index(("to the host", part)) < log.index(("step", part + 2))


def check_memory() -> list[tuple[int, int]]:
    found = []
    for offloads in (False, True):
        with simulated("first") as simulator:
            train(simulator, offloads)
        allocator = simulator.allocator
        found.append((allocator.allocated, allocator.peak_allocated))
    return found


def test_states_take_memory_of_the_device_only_in_parts() -> None:
    states = 2 * NUM_LAYERS * WIDTH * WIDTH * 4 // 2  # of two ranks
    part = 2 * PART_BYTES
    for (kept, kept_peak), (moved, moved_peak) in run_ranks(check_memory, 2):
        assert kept - moved == states
        # Temporary memory of a step on all parameters is less here too.
        assert kept_peak - moved_peak >= states - 3 * part

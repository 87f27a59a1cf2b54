"""The stream on which a model's engine allocates and frees: that of its forward, for each model."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_fsdp.testing import run_ranks

from .models import WIDTH
from .scenarios import NATIVE, NUM_STEPS, ORDERS, plain_step, sgd
from .simulator import Simulator, simulated
from .test_simulator import named


def counted(begins: str) -> list[dict[str, int]]:
    """Of each step, how many events each stream waits for, and how many kernels it gets.

    Args:
        begins: the stream of the first step. The others are on that for compute.
    """
    found: list[dict[str, int]] = []
    before: dict[str, int] = {}

    def step(model: nn.Module, optimizer: Any, simulator: Simulator | None) -> None:
        plain_step(model, optimizer, simulator)
        if simulator is not None:
            device = simulator.device
            now = {f"waits of {name}": n for name, n in device.num_waits.items()}
            now |= {f"kernels of {name}": n for name, n in device.num_kernels.items()}
            each = {key: now[key] - before.get(key, 0) for key in now}
            found.append({key: number for key, number in each.items() if number})
            before.update(now)

    scenario = replace(
        named("default")[0], step=step, on_user_stream=lambda step, _: begins == "user" and not step
    )
    with NATIVE:
        scenario.run()  # DTensor remembers how it shards operators
        with simulated() as simulator:
            scenario.run(simulator)
            simulator.device.synchronize()
    return found


def test_a_first_step_on_another_stream_leaves_nothing_there() -> None:
    plain, warmed = (run_ranks(counted, 2, begins) for begins in ("compute", "user"))
    for expected, found in zip(plain, warmed, strict=True):
        assert found[0]["kernels of user"] > 0
        # Once for the model's lane; the user's own wait is before the second step.
        assert found[1]["waits of compute"] == expected[1]["waits of compute"] + 2
        assert found[2] == expected[2]


def check_two_models() -> list[str]:
    """Two models train alternately, each on its own stream.

    Returns the streams that a step of each has given kernels to, but for those of sending.
    """
    scenario = named("default")[0]

    def train(simulator: Simulator | None) -> tuple[list[Tensor], list[str]]:
        models = [scenario.build(simulator, "cpu") for _ in range(2)]
        optimizers = [sgd(model) for model in models]
        losses, seen = [], []
        with simulator or nullcontext():
            streams = (
                [simulator.device.new_stream(f"model {n}") for n in range(2)] if simulator else []
            )
            for stream in streams:
                stream.wait_stream(simulator.device.compute)
            for step in range(NUM_STEPS):
                for number, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
                    with streams[number] if streams else nullcontext():
                        before = dict(simulator.device.num_waits) if simulator else {}
                        x = torch.full((4, WIDTH), 0.1 * (step + number + dist.get_rank()))
                        loss = model(x).float().square().mean()
                        loss.backward()
                        plain_step(model, optimizer, simulator)
                        losses.append(loss.detach())
                        after = simulator.device.num_waits if simulator else {}
                        seen += [f"{number}: {s}" for s, n in after.items() if n > before.get(s, 0)]
            if simulator:
                simulator.device.synchronize()
            return [simulator.value(x) if simulator else x for x in losses], seen

    with NATIVE:
        expected, _ = train(None)
    for policy, seed in ORDERS:
        with simulated(policy, seed) as simulator:
            found, seen = train(simulator)
            for value, right in zip(found, expected, strict=True):
                assert torch.equal(value, right), f"{policy}: {value}, expected {right}"
    return sorted(set(seen))


def test_two_models_on_two_streams_each_stay_on_theirs() -> None:
    for seen in run_ranks(check_two_models, 2):
        assert "0: model 0" in seen
        assert "1: model 1" in seen
        assert not {"0: model 1", "1: model 0", "0: compute", "1: compute"} & {*seen}

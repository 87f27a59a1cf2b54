"""Trainings that are run eagerly and in the simulator, and have to give the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from vescale_fsdp import fully_shard

from .simulator import Simulator, simulated
from .streams import SimulationError, Stream

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WIDTH = 16
NUM_STEPS = 3
ORDERS = [
    ("first", 0),
    ("latest", 0),
    ("random", 0),
    ("random", 1),
    ("starve compute", 0),
    ("starve side", 0),
    ("starve all_gather", 0),
    ("starve reduce", 0),
]


class Layers(nn.Module):
    """Linear layers with a tanh between; each is a unit."""

    def __init__(self, num_layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


@dataclass
class Scenario:
    """A training.

    Attributes:
        options: of ``fully_shard``; called, as a mesh can be made on a rank only.
        micro_batches: in a step; all but the last do not synchronize.
        num_ranks: that it needs.
        quiet_from: the step from which the host is never to wait for the device.
    """

    name: str
    options: Callable[[], dict[str, Any]] = dict
    model: Callable[[], nn.Module] = Layers
    units: Callable[[nn.Module], Iterator[nn.Module]] = field(
        default=lambda model: iter(model.layers)  # type: ignore[arg-type]
    )
    micro_batches: int = 1
    num_ranks: int = 2
    quiet_from: int | None = 2
    optimizer: Callable[[Any], Any] = lambda params: torch.optim.SGD(params, 0.1, momentum=0.9)
    after_step: Callable[[nn.Module, int], None] = lambda model, step: None

    def build(self) -> nn.Module:
        torch.manual_seed(0)
        model = self.model()
        options = {"mp_policy": BF16, **self.options()}
        for unit in self.units(model):
            fully_shard(unit, **options)
        return fully_shard(model, **options)

    def run(self, simulator: Simulator | None = None) -> list[Tensor]:
        """The losses, and then the shards of the parameters."""
        model = self.build()
        optimizer = self.optimizer(model.parameters())
        for module in model.modules():
            if isinstance(module, OnStream):
                module.simulator = simulator
        found = []
        with simulator or nullcontext():
            for step in range(NUM_STEPS):
                syncs = simulator.device.num_host_syncs if simulator else 0
                for part in range(self.micro_batches):
                    generator = torch.Generator().manual_seed(100 * step + 10 * part)
                    x = torch.randn(4, WIDTH, generator=generator)
                    model.set_requires_gradient_sync(part == self.micro_batches - 1)
                    loss = model(x + 0.01 * dist.get_rank()).float().square().mean()
                    loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                self.after_step(model, step)
                found.append(loss.detach())
                if simulator and self.quiet_from is not None and step >= self.quiet_from:
                    if simulator.device.num_host_syncs > syncs:
                        raise SimulationError(f"the host waits for the device in step {step}")
        found += [param.to_local().detach() for param in model.parameters()]  # type: ignore[attr-defined]
        return [simulator.value(x) if simulator else x.clone() for x in found]


def differences(scenario: Scenario, orders: list[tuple[str, int]] = ORDERS) -> list[str]:
    """What goes wrong in which order; empty if all give the bits of the eager run."""
    with simulated() as _:
        pass  # for its environment
    expected = eager(scenario)
    wrong = []
    for policy, seed in orders:
        with simulated(policy, seed) as simulator:
            try:
                found = scenario.run(simulator)
                simulator.device.synchronize()
            except SimulationError as error:
                return [*wrong, f"{policy} {seed}: {error}"]
        for number, (value, right) in enumerate(zip(found, expected, strict=True)):
            if not torch.equal(value, right):
                wrong.append(f"{policy} {seed}: value {number} is {value}, expected {right}")
                break
    return wrong


def eager(scenario: Scenario) -> list[Tensor]:
    import os
    from unittest import mock

    with mock.patch.dict(os.environ, {"VESCALE_FSDP_REDUCE": "native"}):
        return scenario.run()


class OnStream(nn.Module):
    """Runs a module on a stream of its own, in backward too, as torch does on an accelerator."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.simulator: Simulator | None = None
        self._stream: Stream | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.simulator is None:
            return self.module(x)
        if self._stream is None:
            self._stream = self.simulator.device.new_stream("user")
        x = _Switch.apply(x, self._stream, self.simulator.device.compute)
        return _Switch.apply(self.module(x), self.simulator.device.compute, self._stream)


class _Switch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, to: Stream, before: Stream) -> Tensor:
        ctx.to, ctx.before = to, before
        to.wait_stream(before)
        to.device.current = to
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        ctx.before.wait_stream(ctx.to)
        ctx.to.device.current = ctx.before
        return grad, None, None


class Branches(nn.Module):
    """A branch on a stream of its own, as shared experts run."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))
        self.beside = OnStream(self.layers[1])

    def forward(self, x: Tensor) -> Tensor:
        first, _, *others = self.layers
        x = torch.tanh(first(x))
        y = self.beside(x)
        for layer in others:
            x = torch.tanh(layer(x))
        return x + y


SCENARIOS = [
    Scenario("default"),
    Scenario("in_flight=1", lambda: {"in_flight": 1}),
    Scenario("in_flight=3", lambda: {"in_flight": 3}),
    Scenario("fp32", lambda: {"mp_policy": MixedPrecisionPolicy()}),
    Scenario("kept after forward", lambda: {"reshard_after_forward": False}),
    Scenario("accumulation", micro_batches=2),
    Scenario("branch on a stream", model=Branches),
]

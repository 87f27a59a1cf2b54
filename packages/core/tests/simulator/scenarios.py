"""Trainings that are run eagerly and in the simulator, and have to give the same bits."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.distributed.tensor import Shard

from vescale_fsdp import (
    QuantizedGather,
    QuantizedReduce,
    clip_grad_norm_,
    devices,
    fully_shard,
    transfers,
)
from vescale_fsdp.engine import activations
from vescale_fsdp.optim import SOAP, Muon, offload, offload_

from .models import (
    WIDTH,
    Apart,
    Blocks,
    Branches,
    Checkpointed,
    CheckpointedReentrant,
    Layers,
    LeftOut,
    OnStream,
    PartlyUsed,
    Senders,
    Shared,
)
from .simulator import Simulator, simulated
from .streams import SimulationError

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
NUM_STEPS = 3
Order = tuple[str, int]  # a policy of `Device`, and a seed
ORDERS: list[Order] = [
    ("latest", 0),
    ("random", 0),
    ("starve compute", 0),
    ("starve side", 0),
    ("starve reduce", 0),
]
MORE: list[Order] = [("first", 0), ("random", 1), ("starve all_gather", 0)]
USER: list[Order] = [("random", 1), ("starve user", 0)]  # where there are a user's streams
FEW = ORDERS[1:4]  # of what takes long
NATIVE = mock.patch.dict(os.environ, {"VESCALE_FSDP_REDUCE": "native"})
# These models have small tensors.
ALL_ACTIVATIONS = mock.patch.object(activations, "MIN_BYTES", 1)
ALL_STATES = mock.patch.object(offload, "MIN_BYTES", 64)


def each_layer(model: nn.Module) -> Sequence[nn.Module]:
    return list(model.layers)  # type: ignore[arg-type]


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)


def plain_step(model: nn.Module, optimizer: Any, simulator: Simulator | None) -> None:
    optimizer.step()
    optimizer.zero_grad()


@dataclass
class Scenario:
    """A training.

    Attributes:
        options: of ``fully_shard``; called on a rank, as a mesh can be made there only.
        units: the modules that are units, beside the root.
        micro_batches: in a step; all but the last do not synchronize.
        quiet_from: the step from which the host is never to wait for the device.
        kept: the places of units that stay gathered after forward.
        on_user_stream: whether a micro-batch runs on another stream, by step and place in it; or
            its "backward" alone, with the step of the optimizer.
        orders: in which kernels are carried out.
    """

    name: str
    options: Callable[[], dict[str, Any]] = dict
    model: Callable[[], nn.Module] = Layers
    units: Callable[[nn.Module], Sequence[nn.Module]] = each_layer
    num_ranks: int = 2
    micro_batches: int = 1
    quiet_from: int = 2
    optimizer: Callable[[nn.Module], Any] = sgd
    step: Callable[[nn.Module, Any, Simulator | None], list[Tensor] | None] = plain_step
    kept: Sequence[int] = ()
    on_user_stream: Callable[[int, int], bool | str] | None = None
    orders: Sequence[Order] = tuple(ORDERS)

    def build(self, simulator: Simulator | None, device: str) -> nn.Module:
        torch.manual_seed(0)
        model = self.model().to(device)
        for module in model.modules():
            if isinstance(module, OnStream):
                module.simulator = simulator
        mesh = init_device_mesh(device, (dist.get_world_size(),))
        options = {"mesh": mesh, "mp_policy": BF16, **self.options()}
        for place, unit in enumerate(self.units(model)):
            stays = {"reshard_after_forward": False} if place in self.kept else {}
            fully_shard(unit, **options, **stays)
        return fully_shard(model, **options)

    def run(self, simulator: Simulator | None = None, device: str = "cpu") -> list[Tensor]:
        """The losses, and then this rank's parts of the parameters."""
        model = self.build(simulator, device)
        optimizer = self.optimizer(model)
        user = new_stream(simulator, device) if self.on_user_stream else None
        if simulator is not None and user is not None:
            take_what_is_free(model, simulator, user)
        found = []
        with simulator or nullcontext():
            for step in range(NUM_STEPS):
                before = simulator.device.num_host_syncs if simulator else 0
                found += self._train(model, optimizer, simulator, step, device, user)
                after = simulator.device.num_host_syncs if simulator else 0
                if step >= self.quiet_from and after > before:
                    raise SimulationError(f"the host waits for the device in step {step}")
        if simulator is None and user is not None:
            user.synchronize()
        found += [local for param in model.parameters() for local in _locals(param)]
        return [simulator.value(x) if simulator else x.clone() for x in found]

    def _train(
        self,
        model: nn.Module,
        optimizer: Any,
        simulator: Simulator | None,
        step: int,
        device: str,
        user: Any,
    ) -> list[Tensor]:
        for part in range(self.micro_batches):
            is_last = part == self.micro_batches - 1
            where = self.on_user_stream(step, part) if self.on_user_stream else False
            with on_stream(user if where is True else None, simulator):
                generator = torch.Generator().manual_seed(100 * step + 10 * part)
                x = torch.randn(4, WIDTH, generator=generator).to(device)
                model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
                loss: Tensor = model(x + 0.01 * dist.get_rank()).float().square().mean()
                with on_stream(user if where == "backward" else None, simulator):
                    loss.backward()  # type: ignore[no-untyped-call]
                    others = self.step(model, optimizer, simulator) if is_last else None
        return [*getattr(loss, "held", [loss.detach()]), *(others or [])]


@contextmanager
def on_stream(user: Any, simulator: Simulator | None) -> Iterator[None]:
    """Run what is within on the user's stream, if there is one. It joins the other one."""
    if user is None:
        yield
        return
    compute = simulator.device.compute if simulator else current_stream()
    user.wait_stream(compute)
    with user:
        yield
    compute.wait_stream(user)


def current_stream() -> torch.Stream:
    return torch.accelerator.current_stream()


def new_stream(simulator: Simulator | None, device: str) -> Any:
    """A user's stream; None without an accelerator."""
    if simulator is not None:
        return simulator.device.new_stream("user")
    return torch.cuda.Stream() if device == "cuda" else None


def take_what_is_free(model: nn.Module, simulator: Simulator, stream: Any) -> None:
    """At each forward and backward of a layer, let a stream write to what it has free.

    As code does that works there on something else, and waits for nobody.
    """

    def take(*given: Any) -> None:
        simulator.take_free(stream)
        if len(given) > 1:  # the outputs of a forward
            given[-1].register_hook(take)

    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.register_forward_hook(take)


def _locals(param: Tensor) -> Sequence[Tensor]:
    local = param._local_tensor.detach()  # type: ignore[attr-defined]
    return getattr(local, "held", (local,))


def differences(scenario: Scenario, orders: Sequence[Order] | None = None) -> list[str]:
    """What goes wrong in which order; empty if all give the bits of the eager run.

    Args:
        orders: instead of those of the scenario.
    """
    with NATIVE:
        expected = scenario.run()
    wrong = []
    for policy, seed in orders or scenario.orders:
        with simulated(policy, seed) as simulator, ALL_ACTIVATIONS, ALL_STATES:
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


@contextmanager
def host_waits() -> Iterator[None]:
    """The host waits for the device after whatever the engine sends or starts beside."""

    def after(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            result = function(*args, **kwargs)
            torch.cuda.synchronize()
            return result

        return called

    names = ["all_gather_single", "reduce_scatter_single", "all_reduce", "all_to_all_single"]
    with (
        mock.patch.multiple(dist, **{name: after(getattr(dist, name)) for name in names}),
        mock.patch.object(devices, "start_beside", after(devices.start_beside)),
    ):
        yield


# Steps


def clipped(model: nn.Module, optimizer: Any, simulator: Simulator | None) -> None:
    clip_grad_norm_(model, 0.1)
    plain_step(model, optimizer, simulator)


def beside(model: nn.Module, optimizer: Any, simulator: Simulator | None) -> None:
    """On a stream of its own, for which the next forward waits."""
    params = list(model.parameters())
    stream = new_stream(simulator, params[0].device.type)
    if stream is None:
        plain_step(model, optimizer, simulator)
        return
    stream.wait_stream(simulator.device.current if simulator else current_stream())
    with stream:
        optimizer.step()
        event = stream.record_event()
    model.set_post_optim_event(event)  # type: ignore[operator]
    # Nobody but the user can know that the other stream still reads them.
    optimizer.kept = [param.grad for param in params]
    optimizer.zero_grad()


def saved(model: nn.Module, optimizer: Any, simulator: Simulator | None) -> list[Tensor]:
    """What an asynchronous save copies to the host before the weights change."""
    staging = transfers.Staging()
    copies = [staging.copy(x) for param in model.parameters() for x in _locals(param)]
    staging.wait()
    plain_step(model, optimizer, simulator)
    return copies


def finalized(model: Any, optimizer: Any, simulator: Simulator | None) -> None:
    """After two more micro-batches, whose gradients are reduced by hand."""
    model.set_manual_backward_finalization(True)
    model.set_requires_gradient_sync(False)
    device = next(model.parameters()).device
    for part in range(2):
        x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(part)).to(device)
        model(x + 0.01 * dist.get_rank()).float().square().mean().backward()
    model.set_requires_gradient_sync(True)
    handle = model.finalize_backward(async_op=True)
    handle.wait()
    plain_step(model, optimizer, simulator)


def keeps(model: Any) -> Any:
    """An optimizer of a model whose unsharded parameters keep their memory."""
    model.set_keep_unsharded_storage(True)
    return sgd(model)


def post_hook(model: nn.Module) -> Any:
    """An optimizer of a model whose reduced gradients are changed by a hook."""
    for module in model.modules():
        if hasattr(module, "set_all_reduce_hook"):
            module.set_all_reduce_hook(lambda gradient: gradient.mul_(0.5))
    return sgd(model)


# Options


def mesh_2d() -> Any:
    device = "cuda" if dist.get_backend() == "nccl" else "cpu"
    return init_device_mesh(device, (2, 2), mesh_dim_names=("replicate", "shard"))


def quantized() -> dict[str, Any]:
    return {
        "gather_codec": QuantizedGather(block=WIDTH, policy=lambda name, param: param.dim() == 2),
        "reduce_codec": QuantizedReduce(
            block=WIDTH, policy=lambda name, param: param.dim() == 2, error_feedback=True
        ),
    }


def offloaded() -> dict[str, Any]:
    return {"offload_policy": CPUOffloadPolicy(pin_memory=devices.has_accelerator())}


def shards_columns() -> dict[str, Any]:
    """Matrices are gathered one by one."""
    return {"shard_placement_fn": lambda param: Shard(1) if param.dim() == 2 else None}


def muon(model: nn.Module) -> Any:
    return Muon([p for p in model.parameters() if p.dim() == 2], lr=0.02)


def soap(model: nn.Module) -> Any:
    return SOAP([p for p in model.parameters() if p.dim() == 2], lr=0.02)


def streamed(model: nn.Module, **options: Any) -> Any:
    """AdamW, which steps on a few parameters at a time."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, foreach=True)
    return offload_(optimizer, part_bytes=WIDTH * WIDTH * 4, **options)


def streams_parameters(model: nn.Module) -> Any:
    return streamed(model, states=False)


TWO = [
    Scenario("default", orders=[*ORDERS, *MORE]),
    Scenario("in_flight=1", lambda: {"in_flight": 1}),
    Scenario("in_flight=3", lambda: {"in_flight": 3}),
    Scenario("fp32", lambda: {"mp_policy": MixedPrecisionPolicy()}),
    Scenario("kept after forward", lambda: {"reshard_after_forward": False}),
    Scenario("ddp", lambda: {"sharding": "ddp"}, quiet_from=9),
    Scenario("zero1", lambda: {"sharding": "zero1"}, micro_batches=2),
    Scenario("zero2", lambda: {"sharding": "zero2"}, micro_batches=2),
    Scenario("zero3", lambda: {"sharding": "zero3"}),
    Scenario("accumulation", micro_batches=2),
    Scenario("finalization", step=finalized),
    Scenario("kept memory", optimizer=keeps),
    Scenario("frozen and unused", model=PartlyUsed, quiet_from=9),
    Scenario(
        "a rank leaves out a unit",
        lambda: {"in_flight": 4},
        model=LeftOut,
        quiet_from=9,
        orders=FEW,
    ),
    Scenario("checkpointing", model=Checkpointed),
    Scenario("reentrant checkpointing", model=CheckpointedReentrant),
    Scenario("branch on a stream", model=Branches, orders=[*ORDERS, *USER]),
    Scenario("branch of the root", model=Branches, orders=[*ORDERS, *USER], units=lambda model: []),
    Scenario(
        "a unit on two streams",
        lambda: {"in_flight": 1},
        model=Shared,
        orders=[*ORDERS, *USER],
        kept=[1],
    ),
    Scenario("a unit on two streams, gathered twice", model=Shared, orders=[*ORDERS, *USER]),
    Scenario(
        "a unit of two branches",
        model=Apart,
        orders=[*ORDERS, *USER],
        units=lambda model: model.units(),
    ),
    Scenario(
        "accumulation with a branch",
        model=Branches,
        orders=[*ORDERS, *USER],
        units=lambda model: [],
        micro_batches=2,
    ),
    Scenario(
        "steps on another stream",
        on_user_stream=lambda step, part: step > 0,
        orders=[*ORDERS, *USER],
    ),
    Scenario(
        "backward on another stream",
        on_user_stream=lambda step, part: "backward",
        orders=[*ORDERS, *USER],
    ),
    Scenario(
        "first step on another stream",
        on_user_stream=lambda step, part: step == 0,
        orders=[*ORDERS, *USER],
    ),
    # What is in use while the lane moves: gradients that wait, and the unsharded parameters.
    *(
        Scenario(
            f"{sharding}, first micro-batch on another stream",
            partial(dict, sharding=sharding),
            micro_batches=2,
            on_user_stream=lambda step, part: part == 0,
            orders=[*ORDERS, *USER],
        )
        for sharding in ("zero3", "zero1")
    ),
    Scenario(
        "quantized, first micro-batch on another stream",
        quantized,
        micro_batches=2,
        on_user_stream=lambda step, part: part == 0,
        orders=[*FEW, *USER],
    ),
    Scenario("optimizer on a stream", step=beside, orders=[*ORDERS, *USER]),
    Scenario("clipping", step=clipped),
    Scenario("hook", optimizer=post_hook),
    Scenario("offload", offloaded, quiet_from=9),
    Scenario(
        "offload with accumulation",
        offloaded,
        micro_batches=2,
        quiet_from=9,
    ),
    Scenario("activations", lambda: {"activations": "offload"}, model=Blocks),
    Scenario(
        "activations with accumulation",
        lambda: {"activations": "offload"},
        model=Blocks,
        micro_batches=2,
    ),
    Scenario("inputs of recomputation", lambda: {"activations": "recompute+offload"}, model=Blocks),
    Scenario("states on the host", optimizer=streamed, quiet_from=9),
    Scenario("all on the host", offloaded, optimizer=streamed, quiet_from=9),
    Scenario("parameters on the host", offloaded, optimizer=streams_parameters, quiet_from=9),
    Scenario("quantized", quantized, orders=FEW),
    Scenario("quantized with accumulation", quantized, micro_batches=2, orders=FEW),
    Scenario("gathers itself", model=Senders),
    Scenario("gathers itself, in_flight=1", lambda: {"in_flight": 1}, model=Senders),
    Scenario("Shard(1)", shards_columns),
    Scenario("Shard(1) with accumulation", shards_columns, micro_batches=2),
    Scenario("Muon", optimizer=muon, quiet_from=9),
    Scenario("SOAP", optimizer=soap, quiet_from=9),
    Scenario("asynchronous save", step=saved, quiet_from=9),
]
FOUR = [
    Scenario("hsdp", lambda: {"mesh": mesh_2d(), "sharding": "hsdp"}),
    Scenario("hsdp with accumulation", lambda: {"mesh": mesh_2d()}, micro_batches=2),
    Scenario("hsdp, finalization", lambda: {"mesh": mesh_2d()}, step=finalized),
    Scenario("hsdp_zero1", lambda: {"mesh": mesh_2d(), "sharding": "hsdp_zero1"}),
    Scenario(
        "hsdp_zero1, quantized",
        lambda: {"mesh": mesh_2d(), "sharding": "hsdp_zero1", **quantized()},
    ),
    Scenario("parts of 2", lambda: {"reshard_after_forward": 2}),
    Scenario("Shard(1), parts of 2", lambda: {"reshard_after_forward": 2, **shards_columns()}),
    Scenario("Shard(1), hsdp", lambda: {"mesh": mesh_2d(), **shards_columns()}),
]
ONE = [
    Scenario("one rank"),
    Scenario("one rank, offload", offloaded, quiet_from=9),
]

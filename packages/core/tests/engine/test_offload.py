"""``optim.offload_``: optimizer states in host memory, and a step on the device in parts."""

from __future__ import annotations

import copy
import io
import warnings
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, SGD, Adagrad, AdamW, Optimizer

from vescale_fsdp.optim import AdamW8bit, Muon, flatten_, offload, offload_
from vescale_fsdp.testing import run_ranks

from .accelerator import DEVICE, nccl_like_world
from .helpers import full_parameters, shard_units
from .models import MLP, inputs_of, make
from .test_nccl_like import mesh_on

WIDTH, PART_BYTES = 12, 256
ALL_STATES = mock.patch.object(offload, "MIN_BYTES", 1)


def matrices(model: nn.Module) -> list[nn.Parameter]:
    return [param for param in model.parameters() if param.dim() == 2]


OPTIMIZERS: dict[str, Callable[[nn.Module], Any]] = {
    "foreach": lambda model: AdamW(model.parameters(), 0.01, foreach=True, amsgrad=True),
    "momentum": lambda model: SGD(model.parameters(), 0.1, momentum=0.9, foreach=False),
    "adagrad": lambda model: Adagrad(model.parameters(), 0.1),  # its states are there at once
    "8 bits": lambda model: AdamW8bit(model.parameters(), 0.01, min_8bit_size=16, block_size=16),
    "muon": lambda model: Muon(matrices(model), lr=0.01),
}
Trained = tuple[dict[str, Tensor], set[str], set[str]]


def devices_of(tensors: Any) -> set[str]:
    locals_ = (x._local_tensor if isinstance(x, DTensor) else x for x in tensors)
    return {local.device.type for local in locals_ if local.dim() and local.numel()}


def trained(name: str, on_host: bool, options: dict[str, Any] | None) -> Trained:
    """Parameters after some steps, with a load in between, and where states and parameters lie.

    Args:
        on_host: ``CPUOffloadPolicy``.
        options: of ``offload_``; None: it is not called.
    """
    model = make(MLP, 3, WIDTH)
    policy = {"offload_policy": CPUOffloadPolicy()} if on_host else {}
    shard_units(model, model.layers, mesh=mesh_on(DEVICE, (dist.get_world_size(),)), **policy)
    optimizer: Optimizer = OPTIMIZERS[name](model)
    if options is not None:
        assert offload_(optimizer, part_bytes=PART_BYTES, **options) is optimizer
    for step in range(4):
        batch = inputs_of(step, dist.get_rank(), WIDTH).to(DEVICE)
        model(batch).float().square().sum().backward()
        grads = [param.grad for param in model.parameters()]
        optimizer.step()
        assert all(a is p.grad for a, p in zip(grads, model.parameters(), strict=True))
        optimizer.zero_grad()
        if step == 1:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    states = [value for state in optimizer.state.values() for value in state.values()]
    found = {key: value.cpu() for key, value in full_parameters(model).items()}
    return found, devices_of(filter(torch.is_tensor, states)), devices_of(model.parameters())


def check_bits(name: str) -> None:
    with nccl_like_world("stand_in"), ALL_STATES:
        expected, states, params = trained(name, False, None)
        assert (states, params) == ({DEVICE.type}, {DEVICE.type})
        for on_host, options in ((False, {}), (True, {}), (True, {"states": False})):
            found, states, params = trained(name, on_host, options)
            assert states == {"cpu" if options.get("states", True) else DEVICE.type}
            assert params == {"cpu" if on_host else DEVICE.type}
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.sampled(1)
def test_a_step_in_parts_has_the_bits_of_one_on_all(name: str) -> None:
    run_ranks(check_bits, 2, name)


def check_hooks(device: str) -> None:
    model = make(MLP, 3, WIDTH)
    shard_units(model, model.layers, mesh=mesh_on(torch.device(device), (1,)))
    optimizer = AdamW(model.parameters())
    former = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    offload_(optimizer, part_bytes=PART_BYTES)
    calls: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
    optimizer.register_step_post_hook(lambda *_: calls.append("after"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

    def closure() -> Tensor:
        calls.append("closure")
        loss: Tensor = model(inputs_of(0, 0, WIDTH).to(device)).square().sum()
        loss.backward()
        return loss

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert optimizer.step(closure) > 0
        scheduler.step()
        former.step()
    assert calls == ["before", "closure", "after"]
    torch.save(optimizer.state_dict(), io.BytesIO())
    offload_(copy.deepcopy(optimizer)).step()


def check_hooks_in_a_world() -> None:
    check_hooks("cpu")
    with nccl_like_world("stand_in"), ALL_STATES:
        check_hooks(DEVICE.type)


def test_hooks_and_the_closure_run_once_a_step() -> None:
    run_ranks(check_hooks_in_a_world, 1)


class Counts(SGD):
    """Counts the steps of a group, and has a state with two names."""

    def step(self, closure: Any = None) -> Any:
        with torch.no_grad():
            for group in self.param_groups:
                group["k"] = group.get("k", 0) + 1
                for param in group["params"]:
                    if param.grad is None:
                        continue
                    state = self.state[param]
                    if not state:
                        state["a"] = state["b"] = torch.zeros_like(param)
                    state["a"].add_(param.grad)
                    state["b"].mul_(0.5)
                    param.sub_(state["a"], alpha=0.01 / group["k"])


def odd_steps(on_host: bool, offloads: bool) -> tuple[dict[str, Tensor], int]:
    """With a plain parameter on the CPU, and a penalty on sharded parameters."""
    model = make(MLP, 3, WIDTH)
    policy = {"offload_policy": CPUOffloadPolicy()} if on_host else {}
    shard_units(model, model.layers, mesh=mesh_on(DEVICE, (2,)), **policy)
    extra = nn.Parameter(torch.ones(3))
    seen = [weakref.ref(param) for param in model.parameters()]
    optimizer: Optimizer = Counts([extra, *model.parameters()], 0.1)
    if offloads:
        offload_(optimizer, part_bytes=PART_BYTES)
    for step in range(3):
        for param in model.parameters():
            (param * param).to_local().sum().backward()  # type: ignore[operator]
        model(inputs_of(step, dist.get_rank(), WIDTH).to(DEVICE)).square().sum().backward()
        extra.grad = torch.ones(3)
        optimizer.step()
        optimizer.zero_grad()
    assert all(ref() is not None for ref in seen)
    found = {key: value.cpu() for key, value in full_parameters(model).items()}
    return {**found, "extra": extra.detach()}, optimizer.param_groups[0]["k"]


def check_odd_steps() -> None:
    with nccl_like_world("stand_in"), ALL_STATES:
        expected, count = odd_steps(False, False)
        assert count == 3
        for on_host in (False, True):
            found, count = odd_steps(on_host, True)
            assert count == 3
            torch.testing.assert_close(found, expected, rtol=0, atol=0)


def test_counters_of_groups_shared_states_and_graphs_that_end_at_parameters() -> None:
    run_ranks(check_odd_steps, 2)


class Stops(AdamW):
    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        Stops.num_steps += 1
        if Stops.num_steps == 4:
            raise RuntimeError("the third part")
        return super().step(closure)


def check_exception() -> None:
    with nccl_like_world("stand_in"), ALL_STATES:
        model = make(MLP, 3, WIDTH)
        mesh = mesh_on(DEVICE, (2,))
        shard_units(model, model.layers, mesh=mesh, offload_policy=CPUOffloadPolicy())
        optimizer = offload_(Stops(model.parameters()), part_bytes=PART_BYTES)
        before = [param._local_tensor for param in model.parameters()]
        batch = inputs_of(0, 0, WIDTH).to(DEVICE)
        model(batch).square().sum().backward()
        with pytest.raises(RuntimeError, match="the third part"):
            optimizer.step()
        assert all(param.grad is not None for param in model.parameters())
        after = [param._local_tensor for param in model.parameters()]
        assert all(a is b for a, b in zip(before, after, strict=True))
        optimizer.step()
        model(batch)


def test_after_an_exception_all_is_where_it_was() -> None:
    run_ranks(check_exception, 2)


def test_what_cannot_be_stepped_on_in_parts_is_refused() -> None:
    params = [nn.Parameter(torch.ones(4))]
    with pytest.raises(TypeError, match="LBFGS computes with all parameters at once"):
        offload_(LBFGS(params))
    with pytest.raises(ValueError, match="part_bytes must be positive"):
        offload_(SGD(params), part_bytes=0)
    optimizer = offload_(SGD(params))
    with pytest.raises(ValueError, match="already called"):
        offload_(optimizer)


def check_flattened() -> None:
    model = make(MLP, 3, WIDTH)
    shard_units(model, model.layers)
    with pytest.raises(TypeError, match="flatten_ was called on this optimizer"):
        offload_(flatten_(AdamW(model.parameters())))


def test_a_flattened_optimizer_is_refused() -> None:
    run_ranks(check_flattened, 1)

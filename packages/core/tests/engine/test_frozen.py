"""What is frozen after ``fully_shard`` has no gradient memory and is not sent, from then on."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from vescale_fsdp import fully_shard
from vescale_fsdp.testing import run_ranks

from .helpers import assert_bit_equal, averaged_gradients, full_gradients
from .test_wire import Wire

WIDTH = 32


class MLP(nn.Module):
    """Of the sizes of FSDP2's own test."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.in_proj = nn.Linear(width, 4 * width)
        self.out_proj = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.out_proj(torch.relu(self.in_proj(x)))


def made(width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(42)
    return nn.Sequential(*(MLP(width) for _ in range(3)))


def sharded(model: nn.Sequential, shard: Any = fully_shard, **options: Any) -> nn.Sequential:
    for mlp in model:
        shard(mlp, **options)
    shard(model, **options)
    return model


def inputs(step: int, width: int = WIDTH) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(8, width, generator=generator)


def set_trainable(model: nn.Module, wanted: Callable[[str], bool]) -> None:
    for name, param in model.named_parameters():
        param.requires_grad_(wanted(name))


def is_bias(name: str) -> bool:
    return "bias" in name


def is_any(name: str) -> bool:
    return True


# Bytes


@contextlib.contextmanager
def watched_buffers() -> Iterator[list[int]]:
    """The elements of each gradient buffer of this rank, and of each reduced shard."""
    from vescale_fsdp.dbuffer.gradients import GradientBuffer

    sizes: list[int] = []
    seal = GradientBuffer.seal

    def watching(self: GradientBuffer) -> Tensor:
        sizes.append(seal(self).numel())
        return self.flat

    GradientBuffer.seal = watching  # type: ignore[method-assign]
    try:
        yield sizes
    finally:
        GradientBuffer.seal = seal  # type: ignore[method-assign]


def one_step(model: nn.Module, step: int) -> int:
    """Bytes that this rank sends in a backward whose parameters are there already."""
    model.zero_grad()
    loss = model(inputs(step)).sum()
    with Wire() as wire:
        loss.backward()
    return wire.num_bytes


def count_bytes() -> list[Any]:
    model = sharded(made(), reshard_after_forward=False)
    world, found = dist.get_world_size(), []
    plans: list[Callable[[str], bool]] = [is_any, is_bias, lambda n: n[0] != "1", is_any, is_bias]
    for step, plan in enumerate(plans):
        set_trainable(model, plan)
        with watched_buffers() as sizes:
            num_bytes = one_step(model, step)
            again = one_step(model, step)  # the flags stay, and all orders are known
        assert num_bytes == again
        assert len(sizes) == 2 * len({n[0] for n, _ in model.named_parameters() if plan(n)})
        # Everything that is sent is a gradient, or one byte a parameter of who has used it.
        assert abs(num_bytes - 4 * sum(sizes) / 2 * (world - 1) / world) < 200
        found.append(sizes[: len(sizes) // 2])
    return found


@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.usefixtures("each_alone")
def test_frozen_parameters_have_no_memory_and_are_not_sent(world_size: int) -> None:
    everything = 2 * 4 * WIDTH * WIDTH + 5 * WIDTH
    for full, biases, two, full_again, biases_again in run_ranks(
        count_bytes, world_size, timeout_s=120
    ):
        assert all(everything <= size < 1.01 * everything for size in full)
        # The largest part of the biases that a rank has, for each rank.
        assert all(5 * WIDTH <= size <= 5 * WIDTH * world_size for size in biases)
        assert (two, full_again, biases_again) == (full[:2], full, biases)


def numels_of_reductions(shard: Any) -> list[tuple[int, int]]:
    """Of each reduce-scatter: what it leaves on this rank, and what the rank has that trains."""
    found: list[int] = []
    model = sharded(made(), shard)
    set_trainable(model, is_bias)
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else ""
    name = name or "reduce_scatter_tensor"
    original = getattr(dist, name)

    def watching(output: Tensor, *args: Any, **kwargs: Any) -> Any:
        found.append(output.numel())
        return original(output, *args, **kwargs)

    setattr(dist, name, watching)
    try:
        model(inputs(0)).sum().backward()
    finally:
        setattr(dist, name, original)
    own = [
        sum(p._local_tensor.numel() for n, p in mlp.named_parameters() if is_bias(n))  # type: ignore[attr-defined]
        for mlp in model
    ]
    return list(zip(found, own, strict=True))


def reductions_of_both() -> list[Any]:
    return [numels_of_reductions(shard) for shard in (fully_shard, torch_fully_shard)]


def test_reductions_leave_as_much_as_with_fsdp2(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VESCALE_FSDP_REDUCE", "native")
    for ours, theirs in run_ranks(reductions_of_both, 2, timeout_s=60):
        assert ours == theirs == [(80, 80)] * 3


# Gradients


def check_steps(options: dict[str, Any], shape: tuple[int, ...] = ()) -> None:
    """Biases, then other parts, then all: gradients of each step are those of a plain model."""
    if shape:
        options = options | {"mesh": init_device_mesh("cpu", shape, mesh_dim_names=("a", "b"))}
    plain = made(5)
    model = sharded(copy.deepcopy(plain), **options)
    plans: list[Callable[[str], bool]] = [
        is_any,
        is_bias,
        is_bias,
        lambda n: "in_proj" in n and n[0] != "1",
        lambda n: n == "2.out_proj.weight",
        is_any,
    ]
    for step, plan in enumerate(plans):
        for each in (plain, model):
            set_trainable(each, plan)
            each.zero_grad()
            each(inputs(step, 5)).square().sum().backward()
        check_gradients(model, plain)


def check_gradients(model: nn.Module, plain: nn.Module, bits: bool = True) -> None:
    """With ``bits``, bit for bit where the order of a sum over ranks does not matter."""
    found, expected = full_gradients(model), averaged_gradients(plain)
    if bits and dist.get_world_size() <= 2:
        assert_bit_equal(found, expected)
        return
    for name, tensor in expected.items():
        other = found[name]
        if tensor is None or other is None:
            assert tensor is other, name
        else:
            torch.testing.assert_close(other, tensor, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_gradients_are_those_of_a_plain_model(world_size: int) -> None:
    run_ranks(check_steps, world_size, {}, timeout_s=120)


def check_variants() -> None:
    check_steps({"reshard_after_forward": False})
    for sharding in ("ddp", "zero1", "zero2"):
        check_steps({"sharding": sharding})
    check_steps({"in_flight": 4})
    check_zeros()


def check_zeros() -> None:
    """With zeros for what no rank has used: frozen parameters get nothing all the same."""
    model = sharded(made(5), unused="zeros")
    set_trainable(model, is_bias)
    model(inputs(0, 5)).sum().backward()
    assert {n for n, p in model.named_parameters() if p.grad is not None} == {
        n for n, _ in model.named_parameters() if is_bias(n)
    }


def test_with_other_rows_of_the_table() -> None:
    run_ranks(check_variants, 2, timeout_s=120)


@pytest.mark.parametrize("sharding", ["hsdp", "hsdp_zero1"])
def test_with_replicas(sharding: str) -> None:
    run_ranks(check_steps, 4, {"sharding": sharding}, (2, 2), timeout_s=120)

"""``activations="offload"``: what is moved to the host, and when, on a simulated device."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vescale_fsdp import fully_shard
from vescale_fsdp.engine import activations
from vescale_fsdp.testing import run_ranks

from .simulator import simulated

WIDTH, NUM_BLOCKS, NUM_ROWS = 32, 6, 64


def on_simulator(run: Callable[[], Any], policy: str = "first", **options: Any) -> Any:
    with simulated(policy, **options) as simulator:
        with simulator, mock.patch.object(activations, "MIN_BYTES", 1024):
            found = run()
        simulator.device.synchronize()
        return found, simulator


class Shared(nn.Module):
    """Saves one tensor three times, a view of it, a tensor of integers, and its weight."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.register_buffer("mask", torch.ones(NUM_ROWS, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x)
        q, k, v = self.q(y), self.k(y), self.v(y.view(2, -1, WIDTH)).view(-1, WIDTH)
        return (q @ k.t()).softmax(-1) @ v * self.mask  # type: ignore[no-any-return]


def check_what_is_moved() -> list[int]:
    sizes: list[int] = []
    real = activations.transfers.Copies.to_host

    def to_host(sources: Any) -> Any:
        sizes.extend(len(source) for source in sources)
        return real(sources)

    def run() -> None:
        model = nn.Sequential(Shared(), Shared())
        for block in model:
            fully_shard(block, activations="offload")
        fully_shard(model)
        with mock.patch.object(activations.transfers.Copies, "to_host", to_host):
            loss = model(torch.randn(NUM_ROWS, WIDTH)).square().sum()
        loss.backward(retain_graph=True)
        loss.backward()

    on_simulator(run)
    return sizes


def test_one_storage_is_moved_once_and_parameters_are_not() -> None:
    rows, scores = 4 * NUM_ROWS * WIDTH, 4 * NUM_ROWS * NUM_ROWS
    for sizes in run_ranks(check_what_is_moved, 2):
        assert sorted(sizes[:5]) == [rows] * 4 + [scores]  # y, q, k, v; the softmax
        assert len(sizes) == 2 * 5


class Block(nn.Module):
    """Saves 6 times as much as its input has."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.down(torch.tanh(self.up(torch.tanh(x)))))


def check_peak() -> dict[Any, int]:
    peaks = {}
    for wanted in (None, "offload"):

        def run(wanted: Any = wanted) -> None:
            model = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
            for block in model:
                fully_shard(block, activations=wanted)
            fully_shard(model)
            for _ in range(2):
                model(torch.randn(64 * NUM_ROWS, WIDTH)).square().mean().backward()

        peaks[wanted] = on_simulator(run)[1].allocator.peak_allocated
    return peaks


def test_the_device_holds_the_activations_of_two_units() -> None:
    block = 64 * NUM_ROWS * WIDTH * 4 * (1 + 2 + 1)  # the results of tanh
    for peaks in run_ranks(check_peak, 2):
        saved = peaks[None] - peaks["offload"]
        assert saved > (NUM_BLOCKS - 3) * block, (peaks, block)


def check_what_lives_on() -> list[bool]:
    """Whether parts are there after two forwards, and after a backward or without one."""
    kept: list[weakref.ref[Any]] = []
    begin = activations.Offload.begin

    def noted(self: Any, *args: Any) -> Any:
        found = begin(self, *args)
        kept.append(weakref.ref(found))
        return found

    def has_parts() -> bool:
        return any(found._parts for ref in kept if (found := ref()) is not None)

    def run() -> list[bool]:
        model = nn.Sequential(*(Block() for _ in range(NUM_BLOCKS)))
        for block in model:
            fully_shard(block, activations="offload")
        fully_shard(model)
        seen = []
        for has_backward in (True, False):
            loss = model(torch.randn(NUM_ROWS, WIDTH)).square().mean()
            seen.append(has_parts())
            if has_backward:
                loss.backward()
            del loss
            seen.append(has_parts())
        return seen

    gc.disable()
    try:
        with mock.patch.object(activations.Offload, "begin", noted):
            found: list[bool] = on_simulator(run)[0]
    finally:
        gc.enable()
    return found


def test_all_is_freed_with_the_graph_and_not_by_the_collector_of_cycles() -> None:
    for found in run_ranks(check_what_lives_on, 2):
        assert found == [True, False, True, False]


class Changes(nn.Module):
    """Changes a tensor in place that autograd has saved: an input of an operator, or its output."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.linear, self.what = nn.Linear(WIDTH, WIDTH), what

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        y = torch.tanh(x) if self.what == "output" else x.sin()
        (y if self.what == "output" else x).add_(1)
        return y


def check_changes(what: str, where: str) -> None:
    def run() -> None:
        module = Changes(what if where == "inside" else "nothing")
        model = nn.Sequential(fully_shard(module, activations="offload"), nn.Linear(WIDTH, WIDTH))
        if where == "outside":
            module.forward = lambda x: torch.tanh(module.linear(x))  # type: ignore[method-assign]
            model[0].register_forward_hook(lambda *args: args[-1].add_(1))
        fully_shard(model)
        model(torch.randn(NUM_ROWS, WIDTH)).sum().backward()

    with pytest.raises(RuntimeError, match="changed by an in-place operation after autograd"):
        on_simulator(run)


@pytest.mark.parametrize(
    ("what", "where"), [("output", "inside"), ("input", "inside"), ("output", "outside")]
)
def test_a_tensor_that_is_changed_after_it_was_saved_raises(what: str, where: str) -> None:
    run_ranks(check_changes, 2, what, where)


class Twice(nn.Module):
    """A unit in a user's checkpoint, which is called again outside of it."""

    def __init__(self, wanted: Any) -> None:
        super().__init__()
        self.block = fully_shard(Block(), activations=wanted)

    def forward(self, x: Tensor) -> Tensor:
        def region(x: Tensor) -> Tensor:
            return torch.sin(self.block(torch.sin(self.block(x) * 2)) * 2)

        return checkpoint(region, x, use_reentrant=False) + self.block(x)  # type: ignore[no-any-return]


class Odd(nn.Module):
    """Saves conjugated, sparse, small, expanded and unused tensors."""

    def __init__(self, wanted: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        fully_shard(self, activations=wanted)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        z = torch.complex(x, x * 2)
        y = ((z * 1).conj() * z.exp()).imag + x.mean(0, keepdim=True).expand_as(x).sin() * x
        return y * x[:1, :1].sin()


def gradients_of(make: Callable[[Any], nn.Module], wanted: Any) -> list[Tensor]:
    """Those of a second step: of the input, and of the parameters."""

    def run() -> list[Tensor]:
        torch.manual_seed(0)
        model = fully_shard(make(wanted)) if make is Twice else make(wanted)
        for _ in range(2):
            x = torch.linspace(-1, 1, NUM_ROWS * WIDTH).view(NUM_ROWS, WIDTH).requires_grad_()
            model.zero_grad()
            model(x).square().mean().backward()
        assert x.grad is not None
        return [x.grad, *(param.grad._local_tensor for param in model.parameters())]

    found, simulator = on_simulator(run)
    return [simulator.value(each) for each in found]


def check_gradients(make: Callable[[Any], nn.Module]) -> None:
    expected = gradients_of(make, None)
    for wanted in ("offload", "recompute+offload"):
        found = gradients_of(make, wanted)
        for value, right in zip(found, expected, strict=True):
            torch.testing.assert_close(value, right, rtol=0, atol=0)


@pytest.mark.parametrize("make", [Twice, Odd])
def test_gradients_are_those_of_a_unit_that_keeps_all(make: Callable[[Any], nn.Module]) -> None:
    run_ranks(check_gradients, 1, make)


def kept_alone() -> activations.Kept:
    """As in a forward, of a unit on the CPU."""
    return activations.Kept(activations.Offload(), torch.device("cpu"), "unit", set(), checks=True)


def test_tensors_come_back_as_they_were() -> None:
    w = torch.randn(4, 4, dtype=torch.complex64)
    kept = kept_alone()
    for tensor in (w.conj(), w.conj().imag, w.t(), w[1:, ::2], w.real.expand(3, 4, 4), w[:0]):
        back = kept.pack(tensor).restore()
        assert torch.equal(back, tensor)
        assert (back.stride(), back.is_conj()) == (tensor.stride(), tensor.is_conj())
    sparse = torch.eye(3).to_sparse()
    assert kept.pack(sparse) is sparse
    kept.leave()
    assert kept.pack(w) is w


def test_a_small_tensor_that_is_changed_raises_too() -> None:
    x = torch.ones(4, requires_grad=True) * 1
    kept = kept_alone()
    y = x.sin()
    x.add_(1)
    kept.end()
    with pytest.raises(RuntimeError, match="changed by an in-place operation"):
        y.sum().backward()

"""Small units that share messages: the same numbers, fewer collectives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from vescale_fsdp import MixedPrecisionPolicy, fully_shard, unsharded
from vescale_fsdp.engine.unit import unit_of
from vescale_fsdp.testing import run_ranks

from .recorders import Recorder

WIDTH, NUM_LAYERS = 8, 6


class Stack(nn.Module):
    """Small layers, of which some may be left out."""

    def __init__(self, large: int = -1) -> None:
        super().__init__()
        torch.manual_seed(0)
        widths = [256 if index == large else WIDTH for index in range(NUM_LAYERS)]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, width), nn.Tanh(), nn.Linear(width, WIDTH))
            for width in widths
        )
        self.skips: set[int] = set()

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            if index not in self.skips:
                x = x + layer(x)
        return x


def sharded(model: Stack, **options: Any) -> Stack:
    for layer in model.layers:
        fully_shard(layer, **options)
    fully_shard(model, **options)
    return model


def batch(step: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(4, WIDTH, generator=generator)


def train_both(num_steps: int, make: Any = Stack, **options: Any) -> list[list[int]]:
    """Train beside a plain model; returns the counts of gathers and reductions of each step."""
    plain = make()
    model = sharded(copy.deepcopy(plain), **options)
    counts = []
    for step in range(num_steps):
        with Recorder() as recorder:
            model(batch(step)).square().mean().backward()
        counts.append([recorder.count("gathers"), recorder.count("reductions")])
        plain(batch(step)).square().mean().backward()
        with torch.no_grad():
            for own, theirs in zip(plain.parameters(), model.parameters(), strict=True):
                dist.all_reduce(own.grad, op=dist.ReduceOp.SUM)
                own.grad /= dist.get_world_size()
                assert theirs.grad is not None
                full = theirs.grad.full_tensor()
                torch.testing.assert_close(full, own.grad, rtol=1e-5, atol=1e-7)
                own -= 0.1 * own.grad
                theirs -= 0.1 * theirs.grad
        plain.zero_grad()
        model.zero_grad()
    return counts


@pytest.mark.parametrize("world_size", [2, 3])
def test_neighbours_are_one_collective_once_their_order_is_confirmed(world_size: int) -> None:
    counts = run_ranks(train_both, world_size, 3)[0]
    assert counts[0] == [2 * NUM_LAYERS, NUM_LAYERS]
    assert counts[1:] == [[2, 1], [2, 1]]


def with_a_large_one() -> Stack:
    return Stack(large=3)


def test_a_large_unit_travels_by_itself() -> None:
    counts = run_ranks(train_both, 2, 3, with_a_large_one)[0]
    # Three before it, and two after; what it sends by itself is not counted as a collective.
    assert counts[1:] == [[4, 2], [4, 2]]


def train_in_bf16() -> list[list[int]]:
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float64)
    return train_both(3, mp_policy=policy)


def test_in_another_reduce_dtype() -> None:
    assert run_ranks(train_in_bf16, 2)[0][2] == [2, 1]


def train_with_replicas() -> list[list[int]]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    return train_both(3, mesh=mesh)


def test_with_replicas() -> None:
    gathers, _ = run_ranks(train_with_replicas, 4)[0][2]
    assert gathers == 2


def train_with_kept_units() -> list[list[int]]:
    return train_both(3, reshard_after_forward=False)


def test_units_that_stay_are_gathered_together_too() -> None:
    assert run_ranks(train_with_kept_units, 2)[0][2] == [1, 1]


def train_while_ranks_leave_out_layers() -> None:
    plain, model = Stack(), sharded(Stack())
    for step in range(8):
        skips = {(step + index) % NUM_LAYERS for index in range(step % 3)}
        for each in (plain, model):
            each.skips = skips if dist.get_rank() == step % 2 else set()
        model(batch(step)).square().mean().backward()
        plain(batch(step)).square().mean().backward()
        for own, theirs in zip(plain.parameters(), model.parameters(), strict=True):
            grad = torch.zeros_like(own) if own.grad is None else own.grad
            dist.all_reduce(grad)
            assert theirs.grad is not None
            torch.testing.assert_close(theirs.grad.full_tensor(), grad / dist.get_world_size())
        plain.zero_grad()
        model.zero_grad()


@pytest.mark.parametrize("world_size", [2, 3])
def test_ranks_leave_out_layers(world_size: int) -> None:
    run_ranks(train_while_ranks_leave_out_layers, world_size)


class Teacher(nn.Module):
    """The last layers are written to before they run, on their shards, in some steps."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = Stack()
        self.writes = False

    def forward(self, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.stack.layers):
            if index == 2 and self.writes:
                with torch.no_grad():
                    for param in self.stack.layers[4].parameters():
                        param.mul_(2.0)
            x = x + layer(x)
        return x


def write_to_what_was_sent() -> None:
    plain, model = Teacher(), Teacher()
    for layer in model.stack.layers:
        fully_shard(layer)
    fully_shard(model)
    with torch.no_grad():
        for step in range(6):
            plain.writes = model.writes = step in (3, 5)
            torch.testing.assert_close(model(batch(step)), plain(batch(step)))


def test_what_was_written_to_since_the_message_is_gathered_again() -> None:
    run_ranks(write_to_what_was_sent, 2)


def unshard_by_hand_in_a_pass() -> None:
    plain, model = Teacher(), Teacher()
    for layer in model.stack.layers:
        fully_shard(layer)
    fully_shard(model)
    fifth = model.stack.layers[4]

    def look(*_: Any) -> None:
        with unsharded(fifth):
            for own, full in zip(
                plain.stack.layers[4].parameters(), fifth.parameters(), strict=True
            ):
                torch.testing.assert_close(full, own)

    for step in range(4):
        model(batch(step)).sum().backward()
        if step == 1:
            model.stack.layers[1].register_forward_pre_hook(look)
        plain(batch(step)).sum().backward()
        torch.testing.assert_close(model(batch(step)), plain(batch(step)))
        with unsharded(model):
            for own, full in zip(plain.parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(full, own)


def test_a_unit_of_a_message_may_be_unsharded_by_hand() -> None:
    run_ranks(unshard_by_hand_in_a_pass, 2)


def accumulate_and_fail() -> None:
    plain, model = Stack(), sharded(Stack())
    for step in range(6):
        for part in range(2):
            model.set_requires_gradient_sync(part == 1)  # type: ignore[operator]
            model(batch(2 * step + part)).square().mean().backward()
            plain(batch(2 * step + part)).square().mean().backward()
        for own, theirs in zip(plain.parameters(), model.parameters(), strict=True):
            assert own.grad is not None
            assert theirs.grad is not None
            dist.all_reduce(own.grad)
            full = theirs.grad.full_tensor()
            torch.testing.assert_close(full, own.grad / dist.get_world_size())
        plain.zero_grad()
        model.zero_grad()
        if step == 3:
            handle = model.layers[3].register_forward_pre_hook(_raise)
            with pytest.raises(ZeroDivisionError):
                model(batch(0))
            handle.remove()


def fail_in_evaluation_and_in_backward() -> None:
    plain, model = Stack(), sharded(Stack())
    engine: Any = None
    for step in range(8):
        with torch.no_grad():
            torch.testing.assert_close(model(batch(step)), plain(batch(step)))
        engine = engine or unit_of(model).engine  # type: ignore[union-attr]
        if step in (3, 4):
            handle = model.layers[3].register_forward_pre_hook(_raise)
            with torch.no_grad(), pytest.raises(ZeroDivisionError):
                model(batch(0))
            handle.remove()
            assert engine._small_gathers is None, "the pass is over"
        if step == 5:
            output = model.layers[3].register_forward_hook(_raise_in_backward)
            with pytest.raises(ZeroDivisionError):
                model(batch(0)).sum().backward()
            output.remove()
            model.reset_iter_state()  # type: ignore[operator]
            assert engine._small_gathers is None
        model(batch(step)).square().mean().backward()
        plain(batch(step)).square().mean().backward()
        for own, theirs in zip(plain.parameters(), model.parameters(), strict=True):
            assert own.grad is not None
            assert theirs.grad is not None
            dist.all_reduce(own.grad)
            full = theirs.grad.full_tensor()
            torch.testing.assert_close(full, own.grad / dist.get_world_size())
        plain.zero_grad()
        model.zero_grad()


def test_an_evaluation_and_a_backward_that_raise() -> None:
    run_ranks(fail_in_evaluation_and_in_backward, 2)


def _raise_in_backward(_: nn.Module, __: Any, output: Tensor) -> Tensor:
    output.register_hook(_raise)
    return output


def _raise(*_: Any) -> None:
    raise ZeroDivisionError


def test_micro_batches_and_a_forward_that_raises() -> None:
    run_ranks(accumulate_and_fail, 2)


def test_gradients_of_one_message_can_be_kept_and_changed() -> None:
    run_ranks(keep_gradients, 2)


def keep_gradients() -> None:
    model = sharded(Stack())
    kept = []
    for step in range(4):
        model(batch(0)).sum().backward()
        kept.append([param.grad.full_tensor() for param in model.parameters()])
        first = next(iter(model.parameters())).grad
        assert first is not None
        first.mul_(0.0)  # in place: of no other parameter
        for param, was in list(zip(model.parameters(), kept[-1], strict=True))[1:]:
            torch.testing.assert_close(param.grad.full_tensor(), was)
        model.zero_grad()
        if step:
            for now, before in zip(kept[-1], kept[0], strict=True):
                torch.testing.assert_close(now, before)

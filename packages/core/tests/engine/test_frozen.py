"""What is frozen after ``fully_shard`` has no gradient memory and is not sent, from then on.

Ranks that freeze other parameters are told. Gradients are asked about in questions.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard as torch_fully_shard

from vescale_fsdp import RankMismatchError, fully_shard
from vescale_fsdp.engine import reducing
from vescale_fsdp.testing import RankError, run_ranks

from .frozen_models import (
    WIDTH,
    backward,
    inputs,
    is_any,
    is_bias,
    made,
    not_first,
    set_trainable,
    sharded,
)
from .test_wire import Wire

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


# What is refused


def unfreeze_in_backward() -> None:
    model = sharded(made(5))
    backward(model, 0)
    late = model[0].in_proj.weight

    def unfreeze(_: Tensor) -> None:
        late.requires_grad_(True)

    model[1].register_forward_hook(lambda _, args, output: output.register_hook(unfreeze) and None)
    loss = model(inputs(0, 5)).sum()
    late.requires_grad_(False)
    with pytest.raises(RuntimeError, match=r"'0.in_proj.weight' was unfrozen while a backward ran"):
        loss.backward()


def test_unfreezing_in_a_backward_is_refused() -> None:
    run_ranks(unfreeze_in_backward, 2, timeout_s=60)


def freeze_another() -> None:
    model = sharded(made(5))
    backward(model, 0)
    other = f"0.{('in', 'out')[dist.get_rank()]}_proj.bias"
    set_trainable(model, lambda name: name != other)
    text = r"frozen parameters: rank 0 has .*'0.in_proj.bias'.* and rank 1 has .*'0.out_proj.bias'"
    with pytest.raises(RankMismatchError, match=text):
        backward(model, 1)


def test_ranks_that_freeze_different_parameters_are_told() -> None:
    run_ranks(freeze_another, 2, timeout_s=60)


def count_exchanges() -> list[int]:
    """How often ranks compare flags: after a change, and not while micro-batches wait."""
    calls: list[list[str]] = []
    original = reducing.agree_on_frozen

    def counting(changed: list[str], *args: Any) -> None:
        calls.append(changed)
        original(changed, *args)

    reducing.agree_on_frozen = counting
    try:
        model, found = sharded(made(5)), []
        for step, plan in enumerate((is_any, is_bias, is_bias, not_first, is_any, is_any)):
            set_trainable(model, plan)
            for is_last in (False, False, True):
                model.set_requires_gradient_sync(is_last)  # type: ignore[operator]
                backward(model, step)
            found.append(len(calls))
    finally:
        reducing.agree_on_frozen = original
    return found


def test_flags_are_compared_when_they_have_changed() -> None:
    assert run_ranks(count_exchanges, 2, timeout_s=60) == [[0, 1, 1, 2, 3, 3]] * 2


def freeze_on_one_rank() -> None:
    os.environ["VESCALE_FSDP_TIMEOUT_S"] = "2"
    model = sharded(made(5))
    backward(model, 0)
    if dist.get_rank() == 0:
        model[1].in_proj.bias.requires_grad_(False)
    backward(model, 1)


def test_a_rank_that_alone_freezes_something_is_told() -> None:
    text = r"rank 0: RankMismatchError(?s:.)*have changed on this rank.*'1.in_proj.bias'"
    with pytest.raises(RankError, match=text):
        run_ranks(freeze_on_one_rank, 2, timeout_s=60)

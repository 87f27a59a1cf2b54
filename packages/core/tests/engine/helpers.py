"""What the engine's tests do again and again, inside a rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_fsdp import fully_shard

Tensors = dict[str, Tensor | None]


def shard_units(model: nn.Module, units: Iterable[nn.Module], **options: Any) -> nn.Module:
    """``fully_shard`` each unit, then the root."""
    for unit in units:
        fully_shard(unit, **options)
    return fully_shard(model, **options)


def full(tensor: Tensor) -> Tensor:
    """The whole tensor of a sharded one, a copy of a plain one."""
    whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


def full_parameters(model: nn.Module) -> Tensors:
    return {name: full(parameter) for name, parameter in model.named_parameters()}


def full_gradients(model: nn.Module) -> Tensors:
    """The gradients by name; None where there is none."""
    return {
        name: None if parameter.grad is None else full(parameter.grad)
        for name, parameter in model.named_parameters()
    }


def averaged_gradients(model: nn.Module) -> Tensors:
    """The gradients of a plain model, averaged over the ranks as DDP does it.

    A gradient that is None on some ranks counts as zero there; None on all stays None.
    """
    averaged: Tensors = {}
    for name, parameter in model.named_parameters():
        used = torch.tensor(float(parameter.grad is not None))
        dist.all_reduce(used)
        if not used:
            averaged[name] = None
            continue
        grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.clone()
        grad = grad.detach().contiguous()
        dist.all_reduce(grad)
        averaged[name] = grad / dist.get_world_size()
    return averaged


def assert_bit_equal(found: Tensors, expected: Tensors) -> None:
    """Same names, None in the same places, and the same bits, dtypes and shapes elsewhere."""
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        other = found[name]
        if tensor is None or other is None:
            assert tensor is other, f"{name}: expected {tensor}, found {other}"
            continue
        torch.testing.assert_close(
            other, tensor, rtol=0, atol=0, msg=lambda text, name=name: f"{name}: {text}"
        )


def assert_gradients_like_plain(
    make_model: Callable[[], nn.Module],
    units_of: Callable[[nn.Module], Iterable[nn.Module]],
    run: Callable[[nn.Module], Tensor],
    **options: Any,
) -> None:
    """One forward and backward gives the plain model's loss and its averaged gradients.

    Bit for bit at 2 ranks, where the order of a sum does not matter. Twice, because the first
    iteration of the engine is unlike the later ones.
    """
    plain, sharded = make_model(), make_model()
    shard_units(sharded, units_of(sharded), **options)
    for _ in range(2):
        plain.zero_grad()
        sharded.zero_grad()
        plain_loss, sharded_loss = run(plain), run(sharded)
        assert torch.equal(sharded_loss, plain_loss), f"{sharded_loss} against {plain_loss}"
        plain_loss.backward()
        sharded_loss.backward()
        assert_bit_equal(full_gradients(sharded), averaged_gradients(plain))

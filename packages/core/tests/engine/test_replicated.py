"""With ``sharding="ddp"`` memory lasts from step to step, and is never taken from who holds it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from vescale_fsdp import fully_shard
from vescale_fsdp.testing import run_ranks

WIDTH = 16


def make(num_blocks: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(num_blocks)))


def sharded(sharding: str, **options: Any) -> nn.Sequential:
    model = make()
    for block in model:
        fully_shard(block, sharding=sharding, **options)
    fully_shard(model, sharding=sharding, **options)
    return model


def batch(seed: int) -> Tensor:
    rank = torch.distributed.get_rank()
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * seed + rank))


def local(tensor: Any) -> Tensor:
    result: Tensor = tensor.to_local()
    return result


def backward(model: nn.Module, seed: int) -> None:
    model(batch(seed)).square().mean().backward()


def check_one_copy() -> None:
    model = sharded("ddp")
    before = [local(p).data_ptr() for p in model.parameters()]
    seen: list[int] = []
    model[0].register_forward_hook(lambda m, *_: seen.extend(p.data_ptr() for p in m.parameters()))
    backward(model, 0)
    assert seen == before[:2]


def check_gradients_that_somebody_holds() -> None:
    model = sharded("ddp")
    backward(model, 0)
    params = list(model.parameters())
    held = [local(p.grad) for p in params]
    values, places = [g.clone() for g in held], [g.data_ptr() for g in held]
    model.zero_grad()
    backward(model, 1)
    assert all(torch.equal(g, v) for g, v in zip(held, values, strict=True))
    del held
    model.zero_grad()
    backward(model, 2)
    again = [local(p.grad).data_ptr() for p in params]
    model.zero_grad()
    backward(model, 3)
    assert [local(p.grad).data_ptr() for p in params] == again != places


def check_gradients_that_add_up() -> None:
    model = sharded("ddp")
    expected = []
    for seed in (0, 1):
        backward(model, seed)
        expected.append([local(p.grad).clone() for p in model.parameters()])
        model.zero_grad()
    backward(model, 0)
    backward(model, 1)  # without zero_grad: torch adds
    for param, *each in zip(model.parameters(), *expected, strict=True):
        assert torch.equal(local(param.grad), each[0] + each[1])


def check_against_ddp(sharding: str) -> None:
    ours, theirs = sharded(sharding), DistributedDataParallel(make())
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.01) for model in (ours, theirs)]
    for seed in range(4):
        for model, optimizer in zip((ours, theirs), optimizers, strict=True):
            backward(model, seed)
            optimizer.step()
            model.zero_grad()
    whole = [p.full_tensor() for p in ours.parameters()]  # type: ignore[attr-defined]
    for mine, other in zip(whole, theirs.parameters(), strict=True):
        torch.testing.assert_close(mine, other.data, rtol=1e-6, atol=1e-7)


def check_writes_by_hand() -> None:
    """They stay, as in DDP: there is one copy."""
    model: Any = sharded("ddp")
    before = [local(p).clone() for p in model.parameters()]
    for module in [model, *model]:
        module.unshard()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    for module in [model, *model]:
        module.reshard()
    for param, was in zip(model.parameters(), before, strict=True):
        assert torch.equal(local(param), was + 1)


def check_casts() -> None:
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = sharded("ddp", mp_policy=policy)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for seed in range(3):
        backward(model, seed)
        optimizer.step()
        model.zero_grad()
    for param in model.parameters():
        assert param.dtype == torch.float32
        others = [torch.empty_like(local(param)) for _ in range(torch.distributed.get_world_size())]
        torch.distributed.all_gather(others, local(param).detach())
        assert all(torch.equal(each, others[0]) for each in others)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_parameters_have_one_copy(num_ranks: int) -> None:
    run_ranks(check_one_copy, num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_memory_of_gradients_is_used_again_if_nobody_holds_them(num_ranks: int) -> None:
    run_ranks(check_gradients_that_somebody_holds, num_ranks)


@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_gradients_of_two_backwards_add_up(num_ranks: int) -> None:
    run_ranks(check_gradients_that_add_up, num_ranks)


@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero2"])
def test_training_is_that_of_ddp(sharding: str) -> None:
    run_ranks(check_against_ddp, 4, sharding)


def test_what_is_written_by_hand_stays() -> None:
    run_ranks(check_writes_by_hand, 2)


def test_a_compute_dtype_of_its_own() -> None:
    run_ranks(check_casts, 2)


def check_fused_optimizers() -> None:
    for make_optimizer in (torch.optim.AdamW, torch.optim.SGD):
        weights = []
        for sharding in ("ddp", "zero3"):
            model = sharded(sharding)
            optimizer = make_optimizer(model.parameters(), lr=0.1, fused=True)
            for seed in range(3):
                backward(model, seed)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
            weights.append([p.full_tensor() for p in model.parameters()])  # type: ignore[attr-defined]
        assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))


def test_fused_optimizers() -> None:
    run_ranks(check_fused_optimizers, 2)

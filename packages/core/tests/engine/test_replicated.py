"""With replicated parameters memory lasts from step to step, and is not taken from who holds it."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from vescale_fsdp import CPUOffloadPolicy, QuantizedReduce, fully_shard, unsharded
from vescale_fsdp.engine.unit import units_in
from vescale_fsdp.optim import flatten_
from vescale_fsdp.testing import run_ranks

WIDTH = 16
LONG = 128  # so that the memory of a block's shard lasts, on 4 ranks too


def make(width: int = WIDTH) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(4)))


def sharded(sharding: str, width: int = WIDTH, **options: Any) -> nn.Sequential:
    model = make(width)
    for block in model:
        fully_shard(block, sharding=sharding, **options)
    fully_shard(model, sharding=sharding, **options)
    return model


def batch(seed: int, width: int) -> Tensor:
    rank = torch.distributed.get_rank()
    return torch.randn(8, width, generator=torch.Generator().manual_seed(10 * seed + rank))


def local(tensor: Any) -> Tensor:
    result: Tensor = tensor.to_local()
    return result


def backward(model: nn.Module, seed: int) -> None:
    width = next(model.parameters()).shape[-1]
    model(batch(seed, width)).square().mean().backward()


def backward_and_wait(model: nn.Module, seed: int) -> None:
    """Until gloo's threads have let go of what they send: that is not used again before."""
    backward(model, seed)
    time.sleep(0.2)


def check_one_copy() -> None:
    model = sharded("ddp")
    before = [local(p).data_ptr() for p in model.parameters()]
    seen: list[int] = []
    model[0].register_forward_hook(
        lambda m, *_: seen.extend(p.data_ptr() for p in (m.weight, m.bias))
    )
    backward(model, 0)
    assert seen == before[:2]


def memory_of_grads(model: nn.Module) -> dict[int, int]:
    """The bytes of gradients, by address."""
    storages = [local(p.grad).untyped_storage() for p in model.parameters()]
    return {storage.data_ptr(): storage.nbytes() for storage in storages}


def lasting(model: nn.Module) -> dict[int, int]:
    """The bytes of the memory of gradients that lasts, by address."""
    groups = [group for unit in units_in(model).values() for group in unit.groups]
    flats = [group.gradients._memory._flat for group in groups]
    return {flat.data_ptr(): flat.nbytes for flat in flats if flat is not None}


def check_gradients_that_somebody_holds(sharding: str) -> None:
    model = sharded(sharding, LONG)
    backward_and_wait(model, 0)
    held = [local(p.grad) for p in model.parameters()]
    values, before = [g.clone() for g in held], memory_of_grads(model)
    model.zero_grad()
    for seed in (1, 2):
        backward_and_wait(model, seed)
        assert all(torch.equal(g, v) for g, v in zip(held, values, strict=True))
        assert not memory_of_grads(model).keys() & before
        model.zero_grad()
    del held
    for seed in (3, 4):
        backward_and_wait(model, seed)
        assert memory_of_grads(model) == lasting(model) == before
        model.zero_grad()


def check_ways_to_hold(sharding: str) -> None:
    """A view, the DTensor itself, an array, and what a hook has kept."""
    model = sharded(sharding, LONG)
    kept: list[Tensor] = []
    params = list(model.parameters())
    params[-2].register_post_accumulate_grad_hook(lambda p: kept.append(p.grad))
    backward_and_wait(model, 0)
    grads: list[Any] = [p.grad for p in params]
    seen = [g.clone() for g in map(local, grads)]
    view, whole, array = local(grads[0]).view(-1)[1:], grads[2], local(grads[4]).numpy()
    del grads
    model.zero_grad()
    backward_and_wait(model, 1)
    assert torch.equal(view, seen[0].view(-1)[1:])
    assert torch.equal(local(whole), seen[2])
    assert torch.equal(torch.from_numpy(array), seen[4])
    assert torch.equal(local(kept[0]), seen[-2])


def check_more_ways_to_hold(sharding: str) -> None:
    """A detached one, the local tensor itself, its data, and a graph."""
    model = sharded(sharding, LONG)
    params = list(model.parameters())
    backward_and_wait(model, 0)
    seen = [local(p.grad).clone() for p in params]
    detached: Any = params[0].grad
    detached = detached.detach()
    with torch.no_grad():
        part = local(params[2].grad)
    data = local(params[4].grad).data
    factor = torch.ones_like(params[6]).requires_grad_()
    product = params[6].grad * factor
    model.zero_grad()
    backward_and_wait(model, 1)
    again: Any = params[0].grad
    again.mine = True
    model.zero_grad()
    backward_and_wait(model, 2)
    assert not hasattr(params[0].grad, "mine"), "a gradient is a new tensor in each step"
    assert torch.equal(local(detached), seen[0])
    assert torch.equal(part, seen[2])
    assert torch.equal(data, seen[4])
    (of_product,) = torch.autograd.grad(product.sum(), factor)
    assert torch.equal(local(of_product), seen[6])


def check_shards_of_hooks(sharding: str) -> None:
    model = sharded(sharding, LONG)
    shards: list[Tensor] = []
    for block in model:
        block.set_all_reduce_hook(shards.append)  # type: ignore[operator]
    backward_and_wait(model, 0)
    before = [shard.clone() for shard in shards]
    assert before, "a hook is called for each block"
    model.zero_grad()
    backward_and_wait(model, 1)
    assert all(torch.equal(shard, was) for shard, was in zip(shards, before, strict=False))


def check_held_gradients(sharding: str) -> None:
    check_ways_to_hold(sharding)
    check_more_ways_to_hold(sharding)
    check_shards_of_hooks(sharding)


def check_gradients_that_add_up(sharding: str) -> None:
    model = sharded(sharding, LONG)
    expected = []
    for seed in (0, 1, 2):
        backward_and_wait(model, seed)
        expected.append([local(p.grad).clone() for p in model.parameters()])
        model.zero_grad()
    for seed in (0, 1, 2):  # without zero_grad: torch adds
        backward_and_wait(model, seed)
    for param, *each in zip(model.parameters(), *expected, strict=True):
        assert torch.equal(local(param.grad), each[0] + each[1] + each[2])
    if sharding != "zero2":  # whose sums do not last
        assert lasting(model) == memory_of_grads(model)  # there is no more than one


def check_micro_batches(sharding: str) -> None:
    model: Any = sharded(sharding, LONG)
    expected = []
    for seed in (0, 1):
        backward_and_wait(model, seed)
        expected.append([local(p.grad).clone() for p in model.parameters()])
        model.zero_grad()
    for _ in range(2):
        for seed in (0, 1):
            model.set_requires_gradient_sync(seed == 1)
            backward_and_wait(model, seed)
        for param, *each in zip(model.parameters(), *expected, strict=True):
            torch.testing.assert_close(local(param.grad), each[0] + each[1])
        model.zero_grad()


def check_what_lasts(sharding: str, options: dict[str, Any], is_kept: bool) -> None:
    """Whether it lasts or not, nobody loses what he holds."""
    model = sharded(sharding, LONG, **options)
    backward_and_wait(model, 0)
    held = [local(p.grad) for p in model.parameters()]
    values = [g.clone() for g in held]
    size = sum(memory_of_grads(model).values())
    model.zero_grad()
    backward_and_wait(model, 1)
    assert all(torch.equal(g, v) for g, v in zip(held, values, strict=True))
    assert sum(lasting(model).values()) == (size if is_kept else 0)


def check_flat_optimizer() -> None:
    model = sharded("zero1", LONG)
    optimizer = flatten_(torch.optim.AdamW(model.parameters(), lr=0.01))
    for seed in range(5):
        backward_and_wait(model, seed)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
        assert memory_of_grads(model) == lasting(model)
        model.zero_grad()


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


def check_that_nothing_changes(sharding: str) -> None:
    """With memory that lasts training has the same numbers as without, where all is held."""
    losses: list[Tensor] = []
    held = []
    for holds in (False, True):
        model = sharded(sharding, LONG)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        for seed in range(4):
            loss = model(batch(seed, LONG)).square().mean()
            loss.backward()
            losses.append(loss.detach())
            if holds:
                held.append([local(p.grad) for p in model.parameters()])
            optimizer.step()
            model.zero_grad()
    assert losses[:4] == losses[4:]


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


ROWS = ["ddp", "zero1", "zero2"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("sharding", ["ddp", "zero1"])
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_memory_of_gradients_is_used_again_if_nobody_holds_them(
    num_ranks: int, sharding: str
) -> None:
    run_ranks(check_gradients_that_somebody_holds, num_ranks, sharding)


@pytest.mark.parametrize("sharding", ROWS)
def test_gradients_stay_with_who_holds_them(sharding: str) -> None:
    run_ranks(check_held_gradients, 2, sharding)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("sharding", ROWS)
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_gradients_of_three_backwards_add_up(num_ranks: int, sharding: str) -> None:
    run_ranks(check_gradients_that_add_up, num_ranks, sharding)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("sharding", ROWS)
def test_gradients_of_micro_batches_add_up(sharding: str) -> None:
    run_ranks(check_micro_batches, 2, sharding)


CASTS = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
WIDE = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
LASTS: dict[str, tuple[str, dict[str, Any], bool]] = {
    "zero3": ("zero3", {}, False),
    "zero3, unsharded": ("zero3", {"reshard_after_forward": False}, False),
    "zero1, summed in bf16": ("zero1", {"mp_policy": CASTS}, False),
    "zero1, summed in fp32": ("zero1", {"mp_policy": WIDE}, True),
    "zero1, in 8 bits": ("zero1", {"reduce_codec": QuantizedReduce()}, False),
    "zero1, offloaded": ("zero1", {"offload_policy": CPUOffloadPolicy(pin_memory=False)}, True),
    "zero2": ("zero2", {}, False),
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", LASTS)
def test_sums_last_if_the_row_does_not_shard_them_and_nothing_is_cast(name: str) -> None:
    run_ranks(check_what_lasts, 2, *LASTS[name])


def test_an_optimizer_on_flat_shards_lets_go_of_gradients() -> None:
    run_ranks(check_flat_optimizer, 2)


@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero2"])
def test_training_is_that_of_ddp(sharding: str) -> None:
    run_ranks(check_against_ddp, 4, sharding)


@pytest.mark.parametrize("sharding", ["ddp", "zero1", "zero2"])
def test_training_is_the_same_if_memory_lasts(sharding: str) -> None:
    run_ranks(check_that_nothing_changes, 2, sharding)


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


def check_other_seeds(sharding: str, policy: MixedPrecisionPolicy, before: str) -> None:
    """A script without a seed: DistributedDataParallel sends the first rank's parameters."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    kinds = {"sharding": sharding} | ({} if sharding == "ddp" else {"mesh": mesh})
    torch.manual_seed(dist.get_rank())
    model: Any = nn.Sequential(nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3))
    model[1].requires_grad_(False)
    for layer in model:
        fully_shard(layer, mp_policy=policy, **kinds)
    fully_shard(model, mp_policy=policy, **kinds)
    if before == "unshard":
        model.unshard()
        model[0].unshard()
    if before:
        with unsharded(model, writeback=True) if before == "writeback" else nullcontext():
            outputs = model(torch.ones(2, 4)).detach().contiguous()
        everywhere = [torch.empty_like(outputs) for _ in range(4)]
        dist.all_gather(everywhere, outputs)
        assert all(torch.equal(each, everywhere[0]) for each in everywhere)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(4, 4)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        for param in model.parameters():
            everywhere = [torch.empty_like(param.full_tensor()) for _ in range(4)]
            dist.all_gather(everywhere, param.full_tensor().contiguous())
            assert all(torch.equal(each, everywhere[0]) for each in everywhere)
    if sharding == "ddp":
        torch.manual_seed(0)
        first = nn.Linear(4, 6)
        assert not torch.equal(first.weight, model[0].weight.full_tensor())  # it has trained
        assert (first.weight - model[0].weight.full_tensor()).abs().max() < 1


@pytest.mark.parametrize("policy", [MixedPrecisionPolicy(), CASTS], ids=["fp32", "bf16"])
@pytest.mark.parametrize("before", ["", "unshard", "writeback"])
@pytest.mark.parametrize("sharding", ["ddp", "hsdp", "hsdp_zero1"])
@pytest.mark.sampled(3)
def test_replicas_begin_with_the_parameters_of_the_first(
    sharding: str, policy: MixedPrecisionPolicy, before: str
) -> None:
    run_ranks(check_other_seeds, 4, sharding, policy, before)

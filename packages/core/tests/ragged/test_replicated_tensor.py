"""Optimizers do to ReplicatedTensors what they do to plain tensors; all else is as of DTensors."""

from __future__ import annotations

import copy
import io
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from vescale_fsdp.ragged import RaggedShard, RaggedTensor, ReplicatedTensor, wrap_replicated
from vescale_fsdp.ranks import collectives
from vescale_fsdp.testing import run_ranks

SHAPES = [(3, 4), (5,), (), (2, 1, 3), (0, 2), (1,)]


def make(mesh: DeviceMesh, shape: tuple[int, ...], seed: int, ours: bool) -> DTensor:
    whole = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    plain = DTensor.from_local(whole, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return wrap_replicated(plain.to_local(), plain._spec) if ours else plain


def whole_or_ours(mesh: DeviceMesh, number: int, seed: int, ours: bool) -> Tensor:
    replicated = make(mesh, SHAPES[number], seed, True)
    return replicated if ours else replicated.to_local()


OPTIMIZERS: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "fused": lambda p: torch.optim.AdamW(p, lr=0.1, fused=True),
    "foreach": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=True),
    "loop": lambda p: torch.optim.AdamW(p, lr=0.1, foreach=False),
    "amsgrad": lambda p: torch.optim.Adam(p, lr=0.1, amsgrad=True, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "sgd fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "lr tensor": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.1), fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.1, foreach=True),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.1, foreach=True),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=0.1, foreach=True),
}


def train(
    mesh: DeviceMesh, params: list[nn.Parameter], optimizer: torch.optim.Optimizer, ours: bool
) -> None:
    for step in range(3):
        for number, param in enumerate(params):
            param.grad = whole_or_ours(mesh, number, 100 * step + number, ours)
        nn.utils.clip_grad_norm_(params, 1.0, foreach=step == 1)
        optimizer.step()
        optimizer.zero_grad()


def check_optimizers() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for name, optimizer in OPTIMIZERS.items():
        results = []
        for ours in (True, False):
            values = [whole_or_ours(mesh, n, n, ours) for n in range(len(SHAPES))]
            params = [nn.Parameter(value) for value in values]
            made = optimizer(params)
            train(mesh, params, made, ours)
            states = [made.state[p] for p in params]
            tensors = [v for s in states for v in s.values() if isinstance(v, Tensor)]
            results.append([*params, *tensors])
        for a, b in zip(*results, strict=True):
            one, two = (t.to_local() if isinstance(t, DTensor) else t for t in (a, b))
            assert torch.equal(one, two), name


OPERATORS: list[Callable[[Any, Any, float, DeviceMesh], Any]] = [
    lambda a, b, x, mesh: a + b,
    lambda a, b, x, mesh: a.add_(b, alpha=x),
    lambda a, b, x, mesh: a.mul_(x),
    lambda a, b, x, mesh: a.copy_(b),
    lambda a, b, x, mesh: torch.zeros_like(a),
    lambda a, b, x, mesh: torch.full_like(a, x),
    lambda a, b, x, mesh: a.clone(),
    lambda a, b, x, mesh: a.detach(),
    lambda a, b, x, mesh: a.to(torch.float64).to(torch.float32),
    lambda a, b, x, mesh: torch.empty_like(a, dtype=torch.float64).zero_().float(),
    lambda a, b, x, mesh: a.view(4, 3).view(3, 4),
    lambda a, b, x, mesh: a.t().t(),
    lambda a, b, x, mesh: a.lerp_(b, x),
    lambda a, b, x, mesh: torch._foreach_add_([a], [b]),
    lambda a, b, x, mesh: torch._foreach_mul_([a, b], x),
    lambda a, b, x, mesh: torch._foreach_add([a, b], 1.0)[0],
    lambda a, b, x, mesh: torch._foreach_sqrt([a.abs()])[0],
    lambda a, b, x, mesh: a.sum(),
    lambda a, b, x, mesh: torch.linalg.vector_norm(a),
    lambda a, b, x, mesh: a.mm(b.t())[:3, :3].repeat(1, 2)[:, :4],
    lambda a, b, x, mesh: a + torch.ones(3, 4),  # an error: a plain tensor
    lambda a, b, x, mesh: torch._foreach_add_([a], [torch.ones(3, 4)]),  # also one
    lambda a, b, x, mesh: a.add_(distribute_tensor(torch.ones(3, 4), mesh, [Shard(0)])),  # too
]


def check_random_operators(seed: int) -> None:
    """The same random sequence of operators gives the same, of the same kind."""
    mesh = init_device_mesh("cpu", (2,))
    outcomes = []
    for ours in (True, False):
        draw = random.Random(seed)
        at_hand: list[Any] = [make(mesh, (3, 4), n, ours) for n in range(3)]
        log: list[Any] = []
        for _ in range(30):
            a, b = draw.choice(at_hand), draw.choice(at_hand)
            try:
                result = draw.choice(OPERATORS)(a, b, draw.random(), mesh)
            except (RuntimeError, ValueError, NotImplementedError) as error:
                log.append(type(error))
                continue
            if isinstance(result, DTensor):
                log.append((result.placements, result.dtype, result is a))
                if result.shape == (3, 4) and result.dtype == torch.float32:
                    at_hand[draw.randrange(3)] = result
            else:
                log.append(type(result))
        outcomes.append((log, [t.full_tensor() for t in at_hand]))
    (log, wholes), (other_log, other_wholes) = outcomes
    assert log == other_log
    assert all(torch.equal(a, b) for a, b in zip(wholes, other_wholes, strict=True))


def check_objects() -> None:
    mesh = init_device_mesh("cpu", (2,))
    param = nn.Parameter(make(mesh, (3, 4), 0, True))
    assert isinstance(param, nn.Parameter)
    assert type(param) is ReplicatedTensor
    param.grad = make(mesh, (3, 4), 1, True)
    twin = copy.deepcopy(param)
    assert type(twin) is ReplicatedTensor
    assert isinstance(twin, nn.Parameter)
    assert twin.grad is not None
    assert torch.equal(twin.grad.to_local(), param.grad.to_local())
    assert twin.to_local().data_ptr() != param.to_local().data_ptr()
    file = io.BytesIO()
    torch.save({"p": param, "t": param.detach()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    for each in loaded.values():
        assert type(each) is DTensor
        assert torch.equal(each.to_local(), param.to_local())
    assert isinstance(loaded["p"], nn.Parameter)
    assert loaded["p"].requires_grad
    # Two tensors on equal meshes that are not the same object.
    other = make(init_device_mesh("cpu", (2,)), (3, 4), 2, True)
    before = param.to_local().clone()
    torch._foreach_add_([param.detach()], [other])
    assert torch.equal(param.to_local(), before + other.to_local())
    version = param.to_local()._version
    with torch.no_grad():
        torch._foreach_add_([param], [other])
    assert param.to_local()._version > version  # the engine reads it
    loss = (param * param).sum()
    loss.backward()
    assert isinstance(param.grad, DTensor)


def check_beside_ragged_ones() -> None:
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(6.0)
    for ragged_first in (True, False):
        for fused in (True, False):
            ours = nn.Parameter(make(mesh, (2, 3), 0, True))
            ragged = nn.Parameter(
                RaggedTensor.distribute(whole.view(2, 3), mesh, [RaggedShard((0,), (1, 1))])
            )
            before = ours.to_local().clone()
            ours.grad = torch.ones_like(ours)
            ragged.grad = torch.ones_like(ragged)
            params = [ragged, ours] if ragged_first else [ours, ragged]
            optimizer = torch.optim.SGD(params, lr=1.0, fused=fused, foreach=not fused)
            optimizer.step()
            assert torch.equal(ours.to_local(), before - 1)
            assert torch.equal(ragged.full_tensor(), whole.view(2, 3) - 1)
    plain = torch.ones(2, 3)  # may read it, as a plain tensor may read a plain parameter
    torch._foreach_add_([plain], [make(mesh, (2, 3), 0, True)])
    assert torch.equal(plain, make(mesh, (2, 3), 0, True).to_local() + 1)


def check_beside_plain_ones() -> None:
    """As code for DDP does: averages that were copied before, factors of rows, transposed grads."""
    mesh = init_device_mesh("cpu", (2,))
    param, twin = (nn.Parameter(make(mesh, (3, 4), 0, is_ours)) for is_ours in (True, False))
    plain = twin.to_local().detach().clone().requires_grad_()
    param.grad = make(mesh, (3, 4), 1, True)
    plain.grad = param.grad.to_local().clone()
    results = []
    for x in (param, plain):
        assert x.grad is not None
        average, rows = torch.ones(3, 4), torch.zeros(3)
        with torch.no_grad():
            average.lerp_(x, 0.1)
            rows.add_(x.grad.square().mean(1))
            x.addcdiv_(x.grad, rows.sqrt()[:, None] + average, value=-0.1)
            torch._foreach_lerp_([average], [x], 0.5)
            found = [average, rows, average * x, torch.where(x > average, x, average)]
            turned = x.grad.clone().transpose_(0, 1)
            found.append(turned @ (torch.ones(3, 3) + x.grad @ turned))
        found.append(x.detach())
        results.append([t.to_local() if isinstance(t, DTensor) else t for t in found])
    assert all(map(torch.equal, *results))
    for attempt in (lambda: param + torch.ones(3, 4), lambda: torch.ones(2, 3) @ param):
        with pytest.raises(RuntimeError, match=r"mixed torch\.Tensor and DTensor"):
            attempt()  # with gradients: an activation


def test_plain_ones_count_as_whole_without_gradients() -> None:
    run_ranks(check_beside_plain_ones, 2)


def test_lists_beside_ragged_ones() -> None:
    run_ranks(check_beside_ragged_ones, 2)


def test_optimizers() -> None:
    run_ranks(check_optimizers, 2)


@pytest.mark.parametrize("first", [0, 20])
def test_random_operators(first: int) -> None:
    run_ranks(check_sequences, 2, first)


def check_sequences(first: int) -> None:
    for seed in range(first, first + 20):
        check_random_operators(seed)


def test_objects() -> None:
    run_ranks(check_objects, 2)


# --- collectives ----------------------------------------------------------------------------------

COLLECTIVES: dict[str, Callable[[Tensor, int], Any]] = {
    "all_reduce": lambda p, rank: dist.all_reduce(p),
    "all_reduce of the data": lambda p, rank: dist.all_reduce(p.data, dist.ReduceOp.MAX),
    "broadcast": lambda p, rank: dist.broadcast(p, 1),
    "reduce": lambda p, rank: dist.reduce(p, 0),
    "async": lambda p, rank: dist.all_reduce(p, async_op=True).wait(),
    "coalesced": lambda p, rank: coalesced(p),
    "all_gather": lambda p, rank: all_gathered(p),
    "all_gather_single": lambda p, rank: gathered_in_one(p),
    "reduce_scatter": lambda p, rank: dist.reduce_scatter(p[0], [p.clone()[0], p.clone()[1]]),
    "all_to_all": lambda p, rank: dist.all_to_all_single(p, p.clone()),
    "gather": lambda p, rank: dist.gather(
        p, [torch.empty_like(p) for _ in range(2)][: 2 - 2 * rank]
    ),
    "scatter": lambda p, rank: dist.scatter(p, [p + 1, p + 2][: 2 - 2 * rank]),
    "send and recv": lambda p, rank: dist.send(p, 1) if rank == 0 else dist.recv(p, 0),
    "flattened": lambda p, rank: flattened(p),
    "functional": lambda p, rank: funcol.all_reduce(p, "sum", dist.group.WORLD) * 1,
}


def coalesced(p: Tensor) -> None:
    with dist.distributed_c10d._coalescing_manager():
        dist.all_reduce(p)
        dist.all_reduce(p[1])


def all_gathered(p: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(p) for _ in range(2)]
    dist.all_gather(parts, p)
    return parts


def gathered_in_one(p: Tensor) -> Tensor:
    whole = p.new_empty(2 * len(p), *p.shape[1:])
    collectives.all_gather_single(whole, p, dist.group.WORLD).wait()
    return whole


def flattened(p: Tensor) -> None:
    flat = torch.cat([p.view(-1), p.view(-1) * 2])
    dist.all_reduce(flat)
    p.copy_(flat[: p.numel()].view_as(p))


def check_collectives() -> None:
    """Ranks have different values, and get those that plain tensors get."""
    mesh, rank = init_device_mesh("cpu", (2,)), dist.get_rank()
    for name, collective in COLLECTIVES.items():
        with torch.no_grad():
            ours = nn.Parameter(make(mesh, (2, 3), rank, True))
            plain = nn.Parameter(ours.to_local().clone())
            version = ours.to_local()._version
            results = [collective(each, rank) for each in (ours, plain)]
        values = [
            [each, *flat_tensors(found)] for each, found in zip((ours, plain), results, strict=True)
        ]
        for mine, theirs in zip(*values, strict=True):
            mine = mine.to_local() if isinstance(mine, DTensor) else mine
            torch.testing.assert_close(mine.detach(), theirs.detach(), msg=name)
        is_written = not torch.equal(plain, make(mesh, (2, 3), rank, True).to_local())
        assert (ours.to_local()._version > version) or not is_written, name  # the engine reads it
    grads = [nn.Parameter(make(mesh, (2, 3), rank, True)), torch.empty(2, 2, 3)]
    dist.all_gather(list(grads[1]), grads[0])  # with gradients
    assert torch.equal(grads[1][rank], grads[0].to_local())


def flat_tensors(found: Any) -> list[Tensor]:
    found = found if isinstance(found, list) else [found]
    return [each for each in found if isinstance(each, Tensor)]


def test_collectives_are_those_of_plain_tensors() -> None:
    run_ranks(check_collectives, 2)


def check_collectives_of_sharded_ones() -> None:
    mesh = init_device_mesh("cpu", (2,))
    for units in ((1, 1), (2, 0)):
        x = RaggedTensor.distribute(torch.ones(2, 3), mesh, [RaggedShard((0,), units)])
        for name, collective in COLLECTIVES.items():
            if name == "flattened":
                continue  # of the whole
            with pytest.raises(NotImplementedError, match=r"nothing was sent.*full_tensor\(\)"):
                collective(x, dist.get_rank())
        for of_x in (x.T, x.sum()):
            with pytest.raises(NotImplementedError, match="nothing was sent"):
                dist.all_reduce(of_x)


def test_collectives_of_sharded_tensors_are_refused() -> None:
    run_ranks(check_collectives_of_sharded_ones, 2)

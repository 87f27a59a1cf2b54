"""``parameters`` and ``zero_grad`` of a sharded module, of its parts, and of a module around it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from vescale_fsdp import fully_shard
from vescale_fsdp.engine.unit import unit_of, units_in
from vescale_fsdp.testing import run_ranks

WORLD_SIZE = 2


class Around(nn.Module):
    """As Fabric's wrapper, or that of ``torch.compile``."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, x: Tensor) -> Tensor:
        return self.module(x)


def made(sharding: str) -> tuple[Around, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4))
    fully_shard(model[0], sharding=sharding)
    fully_shard(model, sharding=sharding)  # type: ignore[call-overload]
    return Around(model), model


def norm_of(model: nn.Module) -> float:
    return float(nn.utils.get_total_norm([p.grad for p in model.parameters()]))  # type: ignore[misc]


def check_zero_grad(sharding: str) -> None:
    around, model = made(sharding)
    norms = []
    for _ in range(3):
        loss = around(torch.ones(2, 4)).sum()
        around.zero_grad()  # a GAN does this here
        loss.backward()
        norms.append(norm_of(model))
    assert norms[0] == norms[1] == norms[2] > 0


@pytest.mark.parametrize("sharding", ["zero3", "zero2", "zero1", "ddp"])
def test_zero_grad_between_forward_and_backward(sharding: str) -> None:
    run_ranks(check_zero_grad, WORLD_SIZE, sharding)


def check_accumulated() -> None:
    around, model = made("zero3")
    around(torch.ones(2, 4)).sum().backward()
    once = norm_of(model)
    for clears, expected in ((model, once), (around, 2 * once)):
        around.zero_grad()
        model.set_requires_gradient_sync(False)
        around(torch.ones(2, 4)).sum().backward()
        clears.zero_grad()  # what was accumulated is not in ``.grad`` yet
        model.set_requires_gradient_sync(True)
        around(torch.ones(2, 4)).sum().backward()
        assert norm_of(model) == expected


def test_zero_grad_of_the_sharded_module_drops_what_is_accumulated() -> None:
    # That of a module around it clears what is in ``.grad``, as with FSDP2.
    run_ranks(check_accumulated, WORLD_SIZE)


class Parallel(nn.Module):
    """The sum of layers, or of other such modules. Shards of these have gaps."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([layer(x) for layer in self.layers]).sum(0)


def layers(number: int) -> list[nn.Linear]:
    return [nn.Linear(5, 3, bias=False) for _ in range(number)]


def check_clears_a_part(set_last: str, options: dict[str, Any], replicas: int | None) -> None:
    mesh = None
    if replicas is not None:
        mesh = init_device_mesh("cpu", (replicas, 1), mesh_dim_names=("replicate", "shard"))
    model = Parallel(*layers(2), Parallel(*layers(3)))
    first, second, unit = model.layers
    a, b, c = unit.layers
    fully_shard([first, second], mesh=mesh, **options)  # type: ignore[call-overload]
    fully_shard(unit, mesh=mesh, **options)  # type: ignore[call-overload]
    fully_shard(model, mesh=mesh, **options)  # type: ignore[call-overload]
    for number in range(3):
        getattr(model, set_last)(False)
        model(torch.full((1, 5), 2.0)).sum().backward()
        first.zero_grad(set_to_none=number != 1)
        for part in (a, unit)[:number]:
            part.zero_grad()  # that of ``a``, which is no unit, clears ``.grad`` only
        torch.optim.SGD(second.parameters()).zero_grad()  # so does this
        getattr(model, set_last)(True)
        model(torch.ones(1, 5)).sum().backward()
        for layer in (first, second, a, b, c):
            is_cleared = layer is first or (number == 2 and layer in (a, b, c))
            wanted = torch.full((3, 5), 1.0 if is_cleared else 3.0)
            assert torch.equal(layer.weight.grad.full_tensor(), wanted), (number, layer)
        model.zero_grad()
    getattr(model, set_last)(False)
    model(torch.ones(1, 5)).sum().backward()
    groups = [group for each in units_in(model).values() for group in each.groups]
    assert any(group.gradients.awaits_more for group in groups)
    Around(model).zero_grad()
    assert any(group.gradients.awaits_more for group in groups)
    model.zero_grad()
    assert not any(group.gradients.awaits_more for group in groups)


@pytest.mark.parametrize(
    ("set_last", "options", "replicas"),
    [
        ("set_requires_gradient_sync", {}, None),
        ("set_requires_gradient_sync", {"sharding": "zero1"}, None),
        ("set_requires_all_reduce", {}, 2),
        ("set_requires_gradient_sync", {"accumulate": "sharded"}, 2),
        ("set_requires_all_reduce", {"sharding": "hsdp_zero1"}, 2),
    ],
)
def test_zero_grad_of_a_part_drops_what_is_accumulated_for_it_alone(
    set_last: str, options: dict[str, Any], replicas: int | None
) -> None:
    run_ranks(check_clears_a_part, WORLD_SIZE, set_last, options, replicas)


def check_parameters(sharding: str) -> None:
    around, model = made(sharding)
    before = list(around.named_parameters())
    seen: list[Any] = []

    def look(module: nn.Linear, *_: Any) -> None:
        seen.append([(name, id(p)) for name, p in module.named_parameters(prefix="module.2")])
        seen.append([isinstance(p, DTensor) for p in (module.weight, module.bias)])

    model[2].register_forward_hook(look)
    loss = around(torch.ones(2, 4)).sum()
    between = list(around.named_parameters())
    assert [(name, id(p)) for name, p in between] == [(name, id(p)) for name, p in before]
    assert list(around.parameters()) == [p for _, p in between]
    assert not any(unit.is_sharded for unit in [unit_of(model)])
    loss.backward()
    shards = [(name, id(p)) for name, p in before if name.startswith("module.2.")]
    assert seen == [shards, [False, False]]  # attributes are what forward computes with


@pytest.mark.parametrize("sharding", ["zero3", "zero1"])
def test_parameters_between_forward_and_backward(sharding: str) -> None:
    run_ranks(check_parameters, WORLD_SIZE, sharding)


def check_unsharded_by_hand() -> None:
    model = made("zero3")[1]
    shards = list(model.parameters())
    for _ in range(2):
        for unit in (model[0], model):
            unit.unshard()
        assert not any(isinstance(p, DTensor) for p in model.parameters())
        loss = model(torch.ones(2, 4)).sum()
        between = list(model.parameters())
        loss.backward()
        for seen in (between, list(model.parameters())):
            assert all(a is b for a, b in zip(seen, shards, strict=True))
        assert all(p.grad is not None for p in shards)
        model.zero_grad()


def test_a_forward_ends_what_was_unsharded_by_hand() -> None:
    # Pipelines of torch unshard a stage before its forward, and look for its parameters after it.
    run_ranks(check_unsharded_by_hand, WORLD_SIZE)


def test_other_modules_are_as_before() -> None:
    plain = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
    plain(torch.ones(2, 2)).sum().backward()
    names = [name for name, _ in plain.named_parameters(prefix="a", recurse=True)]
    assert names == ["a.0.weight", "a.0.bias", "a.1.weight", "a.1.bias"]
    plain.zero_grad(set_to_none=False)
    assert all(p.grad is not None and not p.grad.any() for p in plain.parameters())
    plain.zero_grad()
    assert all(p.grad is None for p in plain.parameters())


class Tied(nn.Module):
    """A tied and a frozen parameter, and a unit that a forward may skip."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(8, 4)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.head = nn.Linear(4, 8, bias=False)
        self.head.weight = self.words.weight
        self.second.bias.requires_grad_(False)

    def forward(self, words: Tensor, *, skips: bool = False) -> Tensor:
        x = self.first(self.words(words)).relu()
        return self.head(x if skips else self.second(x))


class AroundTied(Around):
    def forward(self, words: Tensor, *, skips: bool = False) -> Tensor:
        return self.module(words, skips=skips)


def trained_from_outside(sharding: str | None) -> list[float]:
    """Norms of gradients, and sums of weights, of a loop that knows the outer module only."""
    model = Tied()
    for unit in (model.first, model.second, model) if sharding else ():
        fully_shard(unit, sharding=sharding)  # type: ignore[call-overload]
    around = AroundTied(model)
    optimizer = torch.optim.SGD(around.parameters(), 0.05)
    found = []
    for step in range(4):
        for number in range(WORLD_SIZE) if sharding is None else [dist.get_rank()]:
            generator = torch.Generator().manual_seed(10 * step + number)
            words = torch.randint(8, (3,), generator=generator)
            loss = around(words).square().mean() + around(words, skips=True).square().mean()
            if number == 0 or sharding:
                around.zero_grad()
            (loss / (WORLD_SIZE if sharding is None else 1)).backward()
        if step == 1:
            around(words)  # an exception came before its backward
        trained = [param for param in around.parameters() if param.requires_grad]
        found.append(float(nn.utils.clip_grad_norm_(trained, 0.5)))
        optimizer.step()
        optimizer.zero_grad()
    for param in around.parameters():
        whole = param.full_tensor() if isinstance(param, DTensor) else param
        found.append(float(whole.detach().sum()))
    return found


@pytest.mark.parametrize("sharding", ["zero3", "zero2", "ddp"])
def test_a_loop_that_knows_the_outer_module_only(sharding: str) -> None:
    expected = run_ranks(trained_from_outside, WORLD_SIZE, None)[0]
    for found in run_ranks(trained_from_outside, WORLD_SIZE, sharding):
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6)


class ReadsDtype(nn.Module):
    """As models of transformers do: ``self.dtype`` is that of the first parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        dtype = next(self.parameters()).dtype
        return self.layer(x.to(dtype)).to(dtype)


def check_compiled() -> None:
    torch.manual_seed(0)
    plain = ReadsDtype()
    model = nn.Sequential(ReadsDtype(), ReadsDtype())
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    x = torch.ones(2, 4)
    expected = model(x)
    for layer in (*model, plain):
        layer.compile(backend="eager")
    assert torch.equal(model(x), expected)
    model(x).sum().backward()
    whole = torch.compile(plain, backend="eager", fullgraph=True)
    assert torch.equal(whole(x), plain(x))
    whole.zero_grad()


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo reads that of inputs
def test_compiled_models_may_read_their_parameters() -> None:
    run_ranks(check_compiled, 2)

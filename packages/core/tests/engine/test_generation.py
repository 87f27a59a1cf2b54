"""``generating``: loops of forwards of different lengths on each rank."""

from __future__ import annotations

import contextlib
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from vescale_fsdp import (
    RankMismatchError,
    fully_shard,
    generating,
    register_fsdp_forward_method,
    unsharded,
)
from vescale_fsdp.engine.hooks import unit_of
from vescale_fsdp.testing import run_ranks

WIDTH, VOCAB = 12, 17


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = x + torch.tanh(self.linear(self.norm(x)))
        return y


class Model(nn.Module):
    """Generates until a rank's own number of tokens; its encoder runs once, by itself."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.encoder = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits

    def score(self, tokens: Tensor) -> Tensor:
        """A second method."""
        return self.forward(tokens).logsumexp(-1)

    def generate(self, tokens: Tensor, length: int) -> Tensor:
        seen = self.encoder(self.embed(tokens)).sum()
        for _ in range(length):
            logits = self(tokens)[-1] + seen
            tokens = torch.cat([tokens, logits.argmax()[None]])
        return tokens


def sharded(model: Model, **options: Any) -> Model:
    for block in model.blocks:
        fully_shard(block, **options)
    return fully_shard(model, **options)


def lengths_of(step: int, world: int) -> list[int]:
    draw = random.Random(step)
    return [draw.choice([0, 1, 2, 5, 20]) for _ in range(world)]


def train(model: nn.Module, step: int) -> None:
    tokens = torch.arange(5) + step
    loss = model(tokens).square().mean()
    loss.backward()
    with torch.no_grad():
        for param in model.parameters():
            if param.grad is not None:
                param.add_(param.grad, alpha=-0.1)
                param.grad = None


def check(limit: int | None, options: dict[str, Any]) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    if "mesh" in options:
        names = ("outer", "inner")
        options["mesh"] = init_device_mesh("cpu", options["mesh"], mesh_dim_names=names)
    plain, model = Model(), sharded(Model(), **options)
    for step in range(6):
        length = lengths_of(step, world)[rank]
        start = torch.tensor([1 + rank, 3, step])
        with torch.no_grad():
            expected = plain.generate(start, length)
        with generating(model, max_unsharded_bytes=limit):
            assert not torch.is_grad_enabled()
            found = model.generate(start, length)
            assert torch.equal(found, expected)
            again = model.generate(start, length // 2)
            assert torch.equal(again, expected[: len(again)])
        assert torch.is_grad_enabled()
        if step % 2:
            train(plain, step)
            train(model, step)
    for unit in (unit_of(module) for module in model.modules()):
        if unit is not None:
            assert unit.before_pass is None
            assert unit.num_pins == 0


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("limit", [None, 0])
def test_ranks_may_stop_after_any_number_of_tokens(world: int, limit: int | None) -> None:
    run_ranks(check, world, limit, {})


@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": False},
        {"sharding": "ddp"},
        {"sharding": "zero2"},
        {"in_flight": 1},
        {"in_flight": 4},
    ],
)
@pytest.mark.sampled(3)
def test_so_they_may_with(options: dict[str, Any]) -> None:
    run_ranks(check, 2, 0, options)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{"mesh": (2, 2)}, {"mesh": (2, 2), "sharding": "hsdp_zero1"}])
def test_so_they_may_with_replicas(options: dict[str, Any]) -> None:
    run_ranks(check, 4, 0, options)


def check_collectives() -> list[int]:
    model = sharded(Model())
    unit = unit_of(model.blocks[0])
    assert unit is not None
    found = []
    for limit in (0, 1 << 20):
        with generating(model, max_unsharded_bytes=limit):
            for length in (3, 10 * dist.get_rank()):
                model.generate(torch.tensor([1]), length)
            found.append(int(unit.is_sharded))
        assert unit.is_sharded
    return found


def test_units_stay_unsharded_if_there_is_room() -> None:
    assert run_ranks(check_collectives, 2) == [[1, 0], [1, 0]]


def check_methods(name: str) -> None:
    model, plain = sharded(Model()), Model()
    register_fsdp_forward_method(model, name)
    rank = dist.get_rank()
    for lengths in ((3, 8), (8, 3), (0, 5)):
        with generating(model, max_unsharded_bytes=0):
            for repeat in range(1 + 2 * rank):
                tokens = torch.tensor([1 + rank, repeat])
                for each in (model, plain):
                    with torch.no_grad():
                        found = each.score(tokens), each.generate(tokens, lengths[rank])
                    if each is model:
                        expected = found
                assert all(map(torch.equal, found, expected))
        train(model, 0)
        train(plain, 0)


@pytest.mark.parametrize("name", ["score", "generate"])
def test_registered_methods_run_any_number_of_forwards(name: str) -> None:
    run_ranks(check_methods, 2, name)


class WithEncoder(Model):
    """Its encoder is called by itself, and has units of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(Block(), Block())


def check_encoder(limit: int | None, counts: list[int]) -> None:
    model, plain = WithEncoder(), WithEncoder()
    for block in model.encoder:
        fully_shard(block)
    sharded(model)
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(2):
        with generating(model, max_unsharded_bytes=limit):
            for call in range(counts[(rank + step) % world]):
                tokens, length = torch.tensor([1 + rank, call]), (3 * call + 2 * rank) % 5
                found = model.generate(tokens, length)
                assert torch.equal(found, plain_generate(plain, tokens, length))


@pytest.mark.parametrize("limit", [None, 0])
@pytest.mark.parametrize("counts", [[0, 2], [3, 1], [1, 4, 2]])
def test_ranks_may_generate_another_number_of_times(limit: int | None, counts: list[int]) -> None:
    run_ranks(check_encoder, len(counts), limit, counts)


def check_nested(limit: int | None) -> None:
    model, plain = sharded(Model()), Model()
    rank, tokens = dist.get_rank(), torch.tensor([1, 3])
    for outer in (generating(model, max_unsharded_bytes=limit), unsharded(model)):
        with outer:
            model.generate(tokens, 1)
            for inner in range(2 * rank):  # on one rank only
                with generating(model, max_unsharded_bytes=0):
                    found = model.generate(tokens, inner)
                assert torch.equal(found, plain_generate(plain, tokens, inner))
            length = 5 - 4 * rank
            with torch.no_grad():
                found = model.generate(tokens, length)
            assert torch.equal(found, plain_generate(plain, tokens, length))


@pytest.mark.parametrize("limit", [None, 0])
def test_inside_of_another_it_does_nothing_more(limit: int | None) -> None:
    run_ranks(check_nested, 2, limit)


def check_unit_of_two_modules(limit: int | None) -> None:
    model, plain = Model(), Model()
    fully_shard([model.embed, model.head])
    sharded(model)
    rank, tokens = dist.get_rank(), torch.tensor([1, 2])
    pair = nn.ModuleList([model.embed, model.head])
    for step in range(3):
        train(model, step)
        train(plain, step)
        with generating(model, max_unsharded_bytes=limit):
            if rank == 0:
                model.head(torch.ones(WIDTH))
            length = 2 + 3 * rank
            found = model.generate(tokens, length)
            assert torch.equal(found, plain_generate(plain, tokens, length))
        with generating(pair, max_unsharded_bytes=limit):
            for _ in range(rank):
                pair[1](pair[0](tokens))


@pytest.mark.parametrize("limit", [None, 0])
def test_of_a_unit_one_module_may_run(limit: int | None) -> None:
    run_ranks(check_unit_of_two_modules, 2, limit)


def check_gradients() -> None:
    model, plain = sharded(Model()), Model()
    tokens = torch.tensor([1, 2])

    def with_gradients(limit: int | None) -> None:
        with generating(model, max_unsharded_bytes=limit), torch.enable_grad():
            model(tokens).sum().backward()

    with pytest.raises(RuntimeError, match="a forward with gradients inside of generating"):
        with_gradients(0)
    with_gradients(None)
    plain(tokens).sum().backward()
    for one, two in zip(model.parameters(), plain.parameters(), strict=True):
        assert (one.grad is None) == (two.grad is None)
        assert two.grad is None or torch.allclose(one.grad.full_tensor(), two.grad)


def test_gradients_where_all_is_unsharded() -> None:
    run_ranks(check_gradients, 2)


def check_failure(inside: bool) -> str:
    model = sharded(Model())
    rank = dist.get_rank()

    def fail(*_: Any) -> None:
        raise KeyError("a token")

    try:
        with generating(model, max_unsharded_bytes=0):
            model.generate(torch.tensor([1]), 3)
            if rank == 0:
                if inside:
                    model.blocks[1].norm.register_forward_hook(fail)
                    model.generate(torch.tensor([1]), 3)
                fail()
            if rank == 1:
                model.generate(torch.tensor([1]), 30)
    except (KeyError, RankMismatchError) as error:
        if rank == 0 and inside:
            model.blocks[1].norm._forward_hooks.clear()
        plain = Model()
        tokens = torch.tensor([1])
        for limit in (0, None):
            with generating(model, max_unsharded_bytes=limit):
                assert torch.equal(model.generate(tokens, 4), plain_generate(plain, tokens, 4))
        return type(error).__name__
    return "nothing"


def check_going_on() -> None:
    model, tokens = sharded(Model()), torch.tensor([1])
    errors = contextlib.suppress(KeyError, RankMismatchError)
    with errors, generating(model, max_unsharded_bytes=0):
        if dist.get_rank() == 0:
            raise KeyError("a token")
        for _ in range(3):  # without a wait for the rank that has left
            with pytest.raises(RankMismatchError, match="by an exception"):
                model(tokens)
    train(model, 0)


def test_no_rank_goes_on_after_an_exception() -> None:
    run_ranks(check_going_on, 2)


def plain_generate(model: Model, tokens: Tensor, length: int) -> Tensor:
    with torch.no_grad():
        return model.generate(tokens, length)


@pytest.mark.parametrize("inside", [False, True])
def test_an_exception_on_one_rank_reaches_all(inside: bool) -> None:
    expected = ["KeyError", "RankMismatchError", "RankMismatchError"]
    assert run_ranks(check_failure, 3, inside) == expected


def check_any(seed: int) -> None:
    draw, rank, world = random.Random(seed), dist.get_rank(), dist.get_world_size()
    limit = draw.choice([None, 0, 0])
    model, plain = Model(), Model()
    if draw.random() < 0.5:
        fully_shard([model.embed, model.head])
    if draw.random() < 0.5:
        fully_shard(model.encoder)
    options: dict[str, Any] = draw.choice([{}, {"in_flight": 4}, {"reshard_after_forward": False}])
    sharded(model, **options)
    if draw.random() < 0.5:
        register_fsdp_forward_method(model, "generate")
    tokens, x = torch.tensor([1, rank]), torch.ones(WIDTH)
    calls = {
        "a loop": lambda each, length: each.generate(tokens, length),
        "a forward": lambda each, _: each(tokens),
        "the head": lambda each, _: each.head(x),
        "the encoder": lambda each, _: each.encoder(x),
        "a block": lambda each, _: each.blocks[rank % 3](x),
    }
    for step in range(4):
        if draw.random() < 0.6:
            train(model, step)
            train(plain, step)
        plans = [draw.choices([*calls], k=draw.randrange(4)) for _ in range(world)]
        lengths = [draw.randrange(6) for _ in range(world)]
        with generating(model, max_unsharded_bytes=limit):
            for name in plans[rank]:
                found, expected = (calls[name](each, lengths[rank]) for each in (model, plain))
                assert torch.allclose(found, expected, atol=1e-5)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.sampled(4)
def test_each_rank_may_run_what_it_likes(seed: int) -> None:
    run_ranks(check_any, 2 + seed % 2, seed)


def check_places() -> None:
    outer = nn.ModuleDict({"policy": sharded(Model()), "critic": sharded(Model())})
    plain = Model()
    rank, tokens = dist.get_rank(), torch.tensor([2, 1])
    with generating(outer, max_unsharded_bytes=0):
        for _ in range(2 + rank):  # two roots in turn, not in the same order
            for name in ("policy", "critic")[:: 1 - 2 * rank]:
                found = outer[name].generate(tokens, 3)
                assert torch.equal(found, plain_generate(plain, tokens, 3))
    model = sharded(Model())
    model(tokens).sum().backward()
    model.blocks[0].register_forward_pre_hook(lambda *_: generating(model).__enter__())
    with pytest.raises(RuntimeError, match="enter it between two steps"):
        model(tokens)
    with generating(nn.Linear(2, 2)):  # nothing is sharded
        pass


def test_several_roots_and_wrong_places() -> None:
    run_ranks(check_places, 2)

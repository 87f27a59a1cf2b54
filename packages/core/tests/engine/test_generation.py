"""``generating``: loops of forwards of different lengths on each rank."""

from __future__ import annotations

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
)
from vescale_fsdp.engine.hooks import unit_of
from vescale_fsdp.testing import RankError, run_ranks

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
def test_so_they_may_with(options: dict[str, Any]) -> None:
    run_ranks(check, 2, 0, options)


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
                before = unit.groups[0]._gathered_version
                model.generate(torch.tensor([1]), length)
                del before
            found.append(int(unit.is_sharded))
        assert unit.is_sharded
    return found


def test_units_stay_unsharded_if_there_is_room() -> None:
    assert run_ranks(check_collectives, 2) == [[1, 0], [1, 0]]


def check_methods(other: bool) -> None:
    model = sharded(Model())
    register_fsdp_forward_method(model, "score")
    plain = Model()
    tokens, rank = torch.tensor([1, 2]), dist.get_rank()
    with generating(model, max_unsharded_bytes=0):
        for _ in range(3 + 2 * rank):
            with torch.no_grad():
                assert torch.equal(model.score(tokens), plain.score(tokens))
        if other:
            (model if rank else model.score)(tokens)


def test_the_others_join_whatever_method_is_run() -> None:
    run_ranks(check_methods, 2, False)


def test_two_methods_at_a_time_are_an_error_on_all_ranks() -> None:
    with pytest.raises(RankError, match=r"one rank runs forward of the root and another one score"):
        run_ranks(check_two_methods, 2)


def check_two_methods() -> None:
    model = sharded(Model())
    register_fsdp_forward_method(model, "score")
    with generating(model, max_unsharded_bytes=0):
        (model.score if dist.get_rank() else model)(torch.tensor([1, 2]))


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


def plain_generate(model: Model, tokens: Tensor, length: int) -> Tensor:
    with torch.no_grad():
        return model.generate(tokens, length)


@pytest.mark.parametrize("inside", [False, True])
def test_an_exception_on_one_rank_reaches_all(inside: bool) -> None:
    expected = ["KeyError", "RankMismatchError", "RankMismatchError"]
    assert run_ranks(check_failure, 3, inside) == expected


def check_places() -> None:
    outer = nn.ModuleDict({"policy": sharded(Model()), "critic": sharded(Model())})
    plain = Model()
    rank, tokens = dist.get_rank(), torch.tensor([2, 1])
    with generating(outer, max_unsharded_bytes=0):
        for _ in range(2 + rank):  # two roots in turn
            for name in ("policy", "critic"):
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

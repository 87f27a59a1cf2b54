"""Parts of a trained model in a new one: transfer learning, teachers, linear probes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Shard

from vescale_fsdp import fully_shard, register_fsdp_forward_method, unsharded
from vescale_fsdp.testing import run_ranks

from .helpers import assert_bit_equal, full_parameters

WIDTH = 6


class Backbone(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(2)))
        self.again = nn.Linear(WIDTH, WIDTH)
        self.again.weight = self.stem.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.blocks(self.stem(x)).tanh())


class Model(nn.Module):
    def __init__(self, backbone: nn.Module, width: int) -> None:
        super().__init__()
        self.backbone, self.head = backbone, nn.Linear(WIDTH, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.backbone(x))


class Distilled(nn.Module):
    """A student with a frozen teacher."""

    def __init__(self, teacher: nn.Module, _: int) -> None:
        super().__init__()
        self.teacher, self.student = teacher.requires_grad_(False), nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            wanted = self.teacher(x)
        return self.student(x) - wanted


def train(model: nn.Module, seed: int, shards: bool) -> None:
    """Two steps, on this rank's half of a batch if the model is sharded."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for step in range(2):
        batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * seed + step))
        part = batch.chunk(dist.get_world_size())[dist.get_rank()] if shards else batch
        model(part).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def as_it_is(former: nn.Module, module: nn.Module) -> nn.Module:
    return module


def as_a_copy(former: nn.Module, module: nn.Module) -> nn.Module:
    return copy.deepcopy(module)


def by_state_dict(former: nn.Module, module: nn.Module) -> nn.Module:
    made = Backbone() if isinstance(module, Backbone) else Model(Backbone(), 3)
    made.load_state_dict(module.state_dict())
    return made


def by_assignment(former: nn.Module, module: nn.Module) -> nn.Module:
    made = Backbone() if isinstance(module, Backbone) else Model(Backbone(), 3)
    made.load_state_dict(module.state_dict(), assign=True)
    backbone: Any = made if isinstance(made, Backbone) else made.backbone
    backbone.again.weight = backbone.stem.weight  # an assignment has untied them
    return made


def as_a_plain_copy(former: nn.Module, module: nn.Module) -> nn.Module:
    if not isinstance(former.backbone.stem.weight, DTensor):
        return copy.deepcopy(module)
    with unsharded(former):
        made = copy.deepcopy(module)
    assert all(type(param) is nn.Parameter for param in made.parameters())
    return made


Take = Callable[[nn.Module, nn.Module], nn.Module]
WAYS: list[Take] = [as_it_is, as_a_copy, by_state_dict, by_assignment, as_a_plain_copy]


def shard(model: nn.Module, has_blocks: bool, **options: Any) -> nn.Module:
    for module in model.modules() if has_blocks else ():
        if isinstance(module, nn.Sequential) and not hasattr(module[0], "unshard"):
            for block in module:
                fully_shard(block, **options)
    return fully_shard(model, **options)


def transferred(take: Take, makes: str, *, shards: bool, **options: Any) -> nn.Module:
    torch.manual_seed(0)
    former: nn.Module = Model(Backbone(), 3)
    former = shard(former, **options) if shards else former
    train(former, 0, shards)
    torch.manual_seed(1)
    if makes == "distilled":
        made: nn.Module = Distilled(take(former, former), 2)
    else:
        made = Model(take(former, former.backbone), 2)
    made = shard(made, **options) if shards else made
    train(made, 1, shards)
    return made


def check_transferred(take: Take, makes: str, options: dict[str, Any]) -> None:
    expected = full_parameters(transferred(take, makes, shards=False))
    found = full_parameters(transferred(take, makes, shards=True, **options))
    assert list(found) == list(expected)
    for name, param in expected.items():
        torch.testing.assert_close(found[name], param, rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("makes", ["classifier", "distilled"])
@pytest.mark.parametrize("take", WAYS)
def test_a_trained_part_trains_in_a_new_model_as_in_one_process(take: Take, makes: str) -> None:
    for has_blocks in (False, True):
        run_ranks(check_transferred, 2, take, makes, {"has_blocks": has_blocks})


def cut_rows(_: nn.Parameter) -> Shard:
    return Shard(0)


@pytest.mark.parametrize(
    "options",
    [{"sharding": "ddp"}, {"sharding": "zero2"}, {"shard_placement_fn": cut_rows}],
    ids=["ddp", "zero2", "rows"],
)
def test_any_placement_can_be_taken_over(options: dict[str, Any]) -> None:
    # Entries of a state dict with Shard(0) are torch's DTensors, and cannot be told from others.
    for take in WAYS if "sharding" in options else (as_it_is, as_a_copy, as_a_plain_copy):
        run_ranks(check_transferred, 2, take, "classifier", {"has_blocks": True, **options})


def check_shared() -> None:
    """Two models with one backbone train it in turns, as plain ones do."""
    made = {}
    for shards in (False, True):
        torch.manual_seed(0)
        first: nn.Module = Model(Backbone(), 3)
        first = shard(first, True) if shards else first
        train(first, 0, shards)
        second: nn.Module = Model(first.backbone, 2)
        second = shard(second, True) if shards else second
        for number, model in enumerate((second, first, second)):
            train(model, number, shards)
        made[shards] = full_parameters(first)
    for name, param in made[False].items():
        torch.testing.assert_close(made[True][name], param, rtol=0, atol=1e-6, msg=name)


@pytest.mark.filterwarnings("ignore:parameters were tied after fully_shard")
def test_both_models_can_be_trained_on() -> None:
    run_ranks(check_shared, 2)


def check_refused() -> None:
    model = fully_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)))
    x = torch.ones(2, WIDTH)
    model(x).sum().backward()
    with pytest.raises(ValueError, match=r"sharded already, by an earlier.*shard a copy of it"):
        fully_shard(model[0])
    fully_shard(copy.deepcopy(model[0]))(x).sum().backward()
    first = model(x).sum()
    with pytest.raises(RuntimeError, match=r"copied or pickled while.*'weight', 'bias'.*between"):
        copy.deepcopy(model[0])
    tied = nn.Sequential(fully_shard(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH))
    tied[1].weight = tied[0].weight
    with pytest.raises(ValueError, match=r"sharded already, by an earlier.*tie parameters before"):
        fully_shard(tied)
    fully_shard(nn.Sequential(model))(x)
    with pytest.raises(RuntimeError, match="ran before the module became a part of another model"):
        first.backward()


def test_what_is_no_transfer_is_refused() -> None:
    run_ranks(check_refused, 2)


def check_plain_copy() -> None:
    former = shard(Model(Backbone(), 3), True, broadcast_buffers=True)
    register_fsdp_forward_method(former, "extra_repr")
    calls: list[int] = []
    former.register_forward_hook(lambda *_: calls.append(1))
    expected = full_parameters(former)
    with unsharded(former):
        made = copy.deepcopy(former)
    assert type(made) is Model
    assert fully_shard.state(made) is None
    assert_bit_equal(dict(made.named_parameters()), expected)
    kept = {key for key, value in vars(made).items() if key.endswith("_hooks") and value}
    assert kept == {"_forward_hooks"}
    assert made(torch.ones(1, WIDTH)).shape == (1, 3)
    assert calls == [1]
    with unsharded(former.backbone.blocks[0]), pytest.raises(RuntimeError, match="plain module"):
        copy.deepcopy(former)


def test_a_copy_of_what_is_unsharded_is_a_plain_module() -> None:
    run_ranks(check_plain_copy, 2)

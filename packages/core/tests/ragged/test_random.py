"""Random numbers of ragged tensors are those that one process draws for the whole tensor."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import Partial

from vescale_fsdp import RaggedShard, RaggedTensor
from vescale_fsdp.testing import run_ranks

from .helpers import make_mesh, random
from .layouts import Results, composed, counted_collectives, cuts_of, grid, layouts_of, same

DRAWN: dict[str, Callable[[Tensor], Tensor]] = {
    "normal_": lambda x: x.normal_(1.0, 2.0),
    "uniform_": lambda x: x.uniform_(-1, 3),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "bernoulli_ of probabilities": lambda x: torch.zeros_like(x).bernoulli_(x.sigmoid()),
    "random_": lambda x: x.random_(7),
    "random_ between": lambda x: x.random_(3, 900),
    "random_ of integers": lambda x: x.long().random_(),
    "exponential_": lambda x: x.exponential_(0.5),
    "cauchy_": lambda x: x.cauchy_(),
    "log_normal_": lambda x: x.log_normal_(),
    "geometric_": lambda x: x.geometric_(0.3),
    "rand_like": lambda x: torch.rand_like(x),
    "randn_like of a dtype": lambda x: torch.randn_like(x, dtype=torch.bfloat16),
    "randint_like": lambda x: torch.randint_like(x, 50),
    "randint_like between": lambda x: torch.randint_like(x, 5, 50, dtype=torch.int64),
    "bernoulli": lambda x: torch.bernoulli(x.sigmoid()),
    "bernoulli of one": lambda x: torch.bernoulli(x, 0.4),
    "dropout": lambda x: nn.functional.dropout(x, 0.4),
    "native_dropout": lambda x: torch.native_dropout(x, 0.4, True)[0],
    "trunc_normal_": lambda x: nn.init.trunc_normal_(x, std=0.5),
    "kaiming_uniform_": lambda x: nn.init.kaiming_uniform_(x, a=5**0.5),
    "kaiming_normal_": lambda x: nn.init.kaiming_normal_(x),
    "xavier_uniform_": lambda x: nn.init.xavier_uniform_(x),
    "xavier_normal_": lambda x: nn.init.xavier_normal_(x),
    "constant_": lambda x: nn.init.constant_(x, 3.0),
}


@torch.no_grad()
def check_draws() -> None:
    """The ranks are seeded differently: the first rank's state counts."""
    whole, results = random((6, 4)), Results()
    for x in layouts_of(whole):
        for name, draw in DRAWN.items():
            torch.manual_seed(11)
            expected = draw(whole.clone())
            torch.manual_seed(11 + dist.get_rank())
            drawn = draw(x.clone())
            assert type(drawn) is RaggedTensor, name
            results.add(drawn, expected, (name, x.placements))
    results.check(rtol=0)


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_numbers_are_those_of_one_process(world_size: int) -> None:
    run_ranks(check_draws, world_size)


def check_composed() -> None:
    for x in composed(torch.zeros(4, 6, 2)):
        torch.manual_seed(dist.get_rank())
        x.normal_()
        same(x, torch.zeros(4, 6, 2).normal_(generator=torch.Generator().manual_seed(0)), rtol=0)


def test_beside_other_placements() -> None:
    """Replicas get the same numbers, too."""
    run_ranks(check_composed, 4)


def states_after() -> tuple[bool, bool]:
    """Whether this rank's state is where one process would be; and where it was."""
    (x, *_) = layouts_of(torch.zeros(6, 4))
    torch.manual_seed(5)
    torch.zeros(6, 4).normal_()
    expected = torch.get_rng_state()
    torch.manual_seed(5 if dist.get_rank() < 2 else 77)
    before = torch.get_rng_state()
    with counted_collectives() as collectives:
        x.normal_()
    assert collectives == ["broadcast"]
    after = torch.get_rng_state()
    return torch.equal(after, expected), torch.equal(after, before)


def test_ranks_with_the_first_ranks_state_go_on_and_others_keep_theirs() -> None:
    assert run_ranks(states_after, 3) == [(True, False), (True, False), (False, True)]


def check_generator() -> None:
    for x in layouts_of(torch.zeros(6, 4)):
        state = torch.get_rng_state()
        with counted_collectives() as collectives:
            x.normal_(generator=torch.Generator().manual_seed(3))
        assert collectives == []
        assert torch.equal(torch.get_rng_state(), state)
        same(x, torch.zeros(6, 4).normal_(generator=torch.Generator().manual_seed(3)), rtol=0)
        drawn = torch.bernoulli(x.sigmoid(), generator=torch.Generator().manual_seed(3))
        assert type(drawn) is RaggedTensor


def test_a_generator_that_is_passed_is_used_as_it_is() -> None:
    run_ranks(check_generator, 2)


# --- modules --------------------------------------------------------------------------------------


def shard(module: nn.Module, device: str | None = None) -> nn.Module:
    """Each parameter cut unevenly; on ``meta`` if asked."""
    mesh = make_mesh()
    for owner in module.modules():
        for name, parameter in list(owner.named_parameters(recurse=False)):
            cut = cuts_of(parameter.shape, dist.get_world_size())[-1]
            data = parameter.detach()
            if device is not None:
                start, stop = cut.local_range(data.shape, dist.get_rank())
                local = torch.empty(stop - start, device=device)
                ragged = RaggedTensor.from_local(local, mesh, [cut], shape=data.shape)
            else:
                ragged = RaggedTensor.distribute(data, mesh, [cut])
            setattr(owner, name, nn.Parameter(ragged))
    return module


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Conv1d(4, 2, 3), nn.Embedding(7, 3))


def reset(module: nn.Module) -> None:
    for child in module:
        child.reset_parameters()


def check_module() -> None:
    torch.manual_seed(21)
    dense = make_model()
    torch.manual_seed(21)
    reset(dense)
    for device in (None, "meta"):
        model = shard(make_model(), device)
        if device == "meta":
            with counted_collectives() as collectives:
                reset(model)  # draws nothing
            assert collectives == []
            model = model.to_empty(device="cpu")
        torch.manual_seed(21 + dist.get_rank())
        reset(model)
        for parameter, expected in zip(model.parameters(), dense.parameters(), strict=True):
            assert type(parameter) is RaggedTensor
            assert isinstance(parameter, nn.Parameter)
            assert parameter.requires_grad
            same(parameter.detach(), expected.detach(), device, rtol=0)


@pytest.mark.parametrize("world_size", [1, 3])
def test_reset_parameters_of_sharded_modules_also_from_meta(world_size: int) -> None:
    run_ranks(check_module, world_size)


# --- errors ---------------------------------------------------------------------------------------


def check_errors() -> None:
    x = next(layouts_of(random((6, 4))))
    with pytest.raises(ValueError, match="make both ragged"):
        x.bernoulli_(torch.full((6, 4), 0.5))
    with pytest.raises(NotImplementedError, match="does not run on a RaggedTensor"):
        torch.multinomial(x.abs(), 2)
    assert dist.get_world_size() == 2


def test_what_cannot_be_drawn_is_refused() -> None:
    run_ranks(check_errors, 2)


def check_partial() -> None:
    spec = [Partial(), RaggedShard((0,), (1, 1))]
    x = RaggedTensor.from_local(torch.zeros(12), grid(), spec, shape=(6, 4))
    with pytest.raises(NotImplementedError, match="redistribute the Partial axis first"):
        x.normal_()


def test_partial_tensors_are_not_drawn() -> None:
    run_ranks(check_partial, 4)

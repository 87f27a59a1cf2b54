"""Steps of any optimizer are counted."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from vescale_fsdp import fully_shard, optim
from vescale_fsdp.checkpoint.contents import Optimizers
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_elastic.counting import StepCounter

AdamW = torch.optim.AdamW


def flat(model: nn.Module) -> Optimizers:
    optimizer = AdamW(model.parameters())
    optim.flatten_(optimizer)
    return optimizer


def offloaded(model: nn.Module) -> Optimizers:
    optimizer = AdamW(model.parameters())
    optim.offload_(optimizer)
    return optimizer


def group(model: nn.Module) -> Optimizers:
    matrices, others = optim.split_named_params(model)
    return optim.OptimizerGroup([optim.Muon(matrices), AdamW(others)])


def several(model: nn.Module) -> Optimizers:
    first, *others = model.parameters()
    return {"first": AdamW([first]), "others": torch.optim.SGD(others)}


MADE: dict[str, Callable[[nn.Module], Optimizers]] = {
    "8 bits": lambda model: optim.AdamW8bit(model.parameters()),
    "flat": flat,
    "offloaded": offloaded,
    "group": group,
    "several": several,
}


def count(name: str) -> list[int]:
    """Before, after a step, and after a step that comes when the counter is closed."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    fully_shard(model)
    made = MADE[name](model)
    counter = StepCounter(made)
    found = [sum(counter.counts)]
    for _ in range(2):
        model(torch.ones(2, 8)).sum().backward()
        for each in made.values() if isinstance(made, dict) else [made]:
            each.step()
        found.append(sum(counter.counts))
        counter.close()
    return found


def counts() -> dict[str, list[int]]:
    return {name: count(name) for name in MADE}


def test_a_step_of_any_optimizer_is_counted_until_the_counter_is_closed() -> None:
    (found,) = run_ranks(counts, 1)
    assert found.pop("several") == [0, 2, 2]
    assert found == {name: [0, 1, 1] for name in found}
    assert len(found) == len(MADE) - 1


def awaits() -> list[bool]:
    """A generator and a discriminator in turns: what the other's backward leaves is not used."""
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    optimizers = {
        "one": torch.optim.SGD(one.parameters()),
        "other": torch.optim.SGD(other.parameters()),
    }
    counter = StepCounter(optimizers)
    found = []
    for number in range(6):
        since = counter.counts
        if number % 2:  # its own gradients alone, which stay until its next turn
            optimizers["other"].zero_grad()
            other(torch.ones(1, 2)).sum().backward()
            optimizers["other"].step()
        else:  # and some of the other, which that drops in its turn
            optimizers["one"].zero_grad()
            other(one(torch.ones(1, 2))).sum().backward()
            optimizers["one"].step()
        found.append(counter.is_one_awaited(since, set()))
    counter.close()
    return found


def test_gradients_that_a_step_has_used_do_not_wait() -> None:
    assert awaits() == [True, False] * 3

"""Full state dicts on the first rank, by torch's functions: others hold a few tensors at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
)

from vescale_fsdp import fully_shard
from vescale_fsdp.testing import run_ranks
from vescale_fsdp.testing.helpers import peak_of, traced

SIZE = 128 * 128 * 4  # bytes of a matrix


def measure() -> list[tuple[int, float]]:
    """For model and optimizer: how many entries this rank gets, and the peak in matrices."""
    model = nn.Sequential(*[nn.Linear(128, 128, bias=False) for _ in range(8)])
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 128)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    gets: list[Callable[[], dict[str, Any]]] = [
        lambda: get_model_state_dict(model, options=options),
        lambda: get_optimizer_state_dict(model, optimizer, options=options),
    ]
    found = []
    for get in gets:
        kept: list[dict[str, Any]] = []
        peak, _ = peak_of(traced(lambda get=get, kept=kept: kept.append(get())))
        found.append((len(kept[0].get("state", kept[0])), peak / SIZE))
    return found


def test_the_first_rank_gets_all_and_others_hold_a_few_tensors_at_a_time() -> None:
    """Of 8 matrices, and 16 moments of AdamW. A gather makes one, and a copy of it.

    Gloo's threads let go of theirs a little later.
    """
    first, other = run_ranks(measure, 2)
    assert [count for count, _ in first] == [8, 8]
    assert first[0][1] > 8  # the premise: it is seen
    assert first[1][1] > 16
    assert [count for count, _ in other] == [0, 0]
    assert other[0][1] < 6
    assert other[1][1] < 8

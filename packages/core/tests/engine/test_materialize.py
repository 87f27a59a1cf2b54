"""``materialize``: memory and values for what is on the meta device."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from vescale_fsdp import fully_shard, materialize
from vescale_fsdp.testing import run_ranks


class Bare(nn.Module):
    """Has no way to get values."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("buffer", torch.ones(2))


class OfTransformers(nn.Module):
    """Gives values to modules of any kind, as models of ``transformers`` do."""

    def __init__(self) -> None:
        super().__init__()
        self.bare = Bare()

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, Bare):
            nn.init.constant_(module.weight, 3.0)
            nn.init.constant_(module.buffer, 4.0)


def test_what_cannot_be_given_values_is_named() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2, 2), Bare())
    with pytest.warns(UserWarning, match="Bare were made on the meta device"):
        materialize(model, torch.device("cpu"))
    assert not any(each.is_meta for each in (*model.parameters(), *model.buffers()))


def check_values() -> None:
    torch.manual_seed(0)
    expected = nn.Linear(3, 5)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 5), OfTransformers())
    kept = model[1].bare.weight = nn.Parameter(torch.zeros(2))
    fully_shard(model)
    torch.manual_seed(0)
    materialize(model, torch.device("cpu"))
    for name, param in expected.named_parameters():
        assert torch.equal(getattr(model[0], name).full_tensor(), param), name
    assert model[1].bare.buffer.tolist() == [4.0, 4.0]
    assert kept.tolist() == [0.0, 0.0]


def test_shards_get_the_values_of_whole_parameters() -> None:
    run_ranks(check_values, 2)

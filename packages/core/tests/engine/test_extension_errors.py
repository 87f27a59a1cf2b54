"""Tensor subclasses that cannot gather themselves are refused, on every rank."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard

from vescale_fsdp import RankMismatchError, fully_shard
from vescale_fsdp.testing import run_ranks

from .models import MLP, make
from .subclasses import Narrow, Wrapped, loss_of, made


def check_refusals() -> None:
    class Half(Wrapped):
        def fsdp_pre_all_gather(self, mesh: Any) -> Any:
            return self.held, None

    class Odd(Narrow):
        def fsdp_pre_all_gather(self, mesh: Any, outer_size: Any) -> Any:
            return self.held, None

    with pytest.raises(AssertionError, match="Both fsdp_pre_all_gather and"):
        fully_shard(made(Half))
    with pytest.raises(AssertionError, match="Invalid fsdp_pre_all_gather"):
        loss_of(fully_shard(made(Odd)), 0)
    with pytest.raises(NotImplementedError, match="by rows; return None or Shard"):
        fully_shard(made(Narrow), shard_placement_fn=lambda p: Shard(p.dim() - 1))
    scalar = nn.Linear(2, 2)
    scalar.scale = nn.Parameter(Narrow(torch.tensor(1.0)))
    with pytest.raises(ValueError, match="fully_shard doesn't support scalar parameters"):
        fully_shard(scalar)
    late = fully_shard(make(MLP))
    late.layers[0].weight._local_tensor.fsdp_pre_all_gather = print
    with pytest.raises(NotImplementedError, match="was given fsdp_pre_all_gather"):
        loss_of(late, 0)


def test_what_cannot_be_gathered_is_refused_before_any_collective() -> None:
    run_ranks(check_refusals, 2)


def check_sizes() -> None:
    class Unpadded(Narrow):
        pads = False

    class Unlike(Narrow):
        def fsdp_pre_all_gather(self, mesh: Any) -> Any:
            return (self.held[0].to([torch.float16, torch.float32][mesh.get_local_rank()]),), None

    # On the rank without padding too, which FSDP2 would leave waiting.
    with pytest.raises(AssertionError, match="When a parameter is unevenly sharded by FSDP") as e:
        loss_of(fully_shard(made(Unpadded, 5)), 0)
    assert "padded sharded size (3, 5)" in str(e.value)
    assert "(2, 5) torch.bfloat16" in str(e.value)
    with pytest.raises(RankMismatchError, match=r"sizes: .*float16.*float32"):
        loss_of(fully_shard(made(Unlike, 6)), 0)


def test_ranks_that_send_different_sizes_are_told_so() -> None:
    run_ranks(check_sizes, 2)

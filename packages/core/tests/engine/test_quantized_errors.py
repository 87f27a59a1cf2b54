"""What quantized gathers and reductions refuse: on every rank, before anything is sent."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import RowwiseParallel, parallelize_module

from vescale_fsdp import (
    Granularity,
    QuantizedGather,
    QuantizedReduce,
    RankMismatchError,
    combine,
    fully_shard,
)
from vescale_fsdp.optim import AdamW8bit
from vescale_fsdp.testing import run_ranks

from .models import MLP, inputs_of, make
from .recorders import Recorder
from .subclasses import Narrow, made

GATHER = QuantizedGather(block=(4, 4))


def layer(rows: int = 12, columns: int = 8) -> nn.Linear:
    return nn.Linear(columns, rows)


def all_of(option: Any) -> Any:
    return type(option)(block=option.block, policy=lambda name, param: True)


def uint8() -> nn.Module:
    module = layer()
    module.weight = nn.Parameter(torch.zeros(12, 8, dtype=torch.uint8), requires_grad=False)
    return module


def refusals() -> list[tuple[type[Exception], str, Callable[[], Any]]]:
    """The error, a part of its words, and the mistake."""
    return [
        (
            ValueError,
            r"'weight', of shape \(12, 8\), allows splits between any two blocks of 16 elements,"
            r" but it is sent as int8 in blocks of \(4, 4\), whose blocks end at multiples of 32",
            lambda: fully_shard(layer(), gather_codec=GATHER, granularity=Granularity.rows(2)),
        ),
        (
            ValueError,
            r"combine\(yours, QuantizedReduce.granularity\(\)\)",
            lambda: fully_shard(
                layer(), reduce_codec=QuantizedReduce(block=3), granularity=Granularity.elements(4)
            ),
        ),
        (
            ValueError,
            r"chose 'bias', but its shape \(12,\) has fewer elements than a block of \(4, 4\)",
            lambda: fully_shard(layer(), gather_codec=all_of(GATHER)),
        ),
        (
            ValueError,
            "chose 'weight', which is of torch.uint8",
            lambda: fully_shard(uint8(), gather_codec=all_of(GATHER)),
        ),
        (
            TypeError,
            r"returned 8 for 'weight'; expected a bool, None or a QuantizedGather",
            lambda: fully_shard(layer(), gather_codec=QuantizedGather(policy=lambda *_: 8)),  # type: ignore[arg-type, return-value]
        ),
        (
            TypeError,
            r"gather_codec must be a QuantizedGather, got 'int8'; write gather_codec=Quant",
            lambda: fully_shard(layer(), gather_codec="int8"),  # type: ignore[arg-type]
        ),
        (
            ValueError,
            r"'weight', which gathers itself, cannot be sent in blocks",
            lambda: fully_shard(made(Narrow, 6).layers[0], gather_codec=QuantizedGather(block=4)),
        ),
        (
            ValueError,
            r"'weight', which shard_placement_fn wants as Shard\(0\), cannot be sent in blocks",
            lambda: fully_shard(
                layer(), gather_codec=GATHER, shard_placement_fn=lambda _: Shard(0)
            ),
        ),
        (
            ValueError,
            "use sharding='zero1'",
            lambda: fully_shard(layer(), reduce_codec=QuantizedReduce(), sharding="ddp"),
        ),
        (
            ValueError,
            "set_custom_all_gather: parameters of this module are sent in 8 bits",
            lambda: fully_shard(layer(), gather_codec=GATHER).set_custom_all_gather(object()),
        ),
        (
            ValueError,
            "set_custom_reduce_scatter: parameters of this module are sent in 8 bits",
            lambda: fully_shard(layer(), reduce_codec=QuantizedReduce(8)).set_custom_reduce_scatter(
                0
            ),
        ),
    ]


def check_refusals() -> None:
    for error, words, mistake in refusals():
        with Recorder() as recorder, pytest.raises(error, match=words):
            mistake()
        assert not recorder.events, words


def check_tensor_parallel_cut() -> None:
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("data", "tensor"))
    model = nn.Sequential(layer(8, 12))
    parallelize_module(model, mesh["tensor"], {"0": RowwiseParallel()})  # columns: 6 and 6
    with Recorder() as recorder, pytest.raises(ValueError, match=r"which cuts blocks of \(4, 4\)"):
        fully_shard(model, mesh=mesh["data"], gather_codec=GATHER)
    assert not recorder.events


def check_device() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("vescale_fsdp.engine.quantized.is_offered", lambda dtype, _: dtype == "int8")
        with pytest.raises(
            ValueError, match=r"cpu does not have .* use QuantizedGather\(dtype='in"
        ):
            fully_shard(layer(), gather_codec=QuantizedGather("e4m3", 4))
        fully_shard(layer(), gather_codec=QuantizedGather("int8", 4))
        mixed = QuantizedGather("int8", 4, policy=lambda name, _: QuantizedGather("e4m3", 4))
        with pytest.raises(ValueError, match="use QuantizedGather"):
            fully_shard(layer(), gather_codec=mixed)


def check_joined() -> None:
    """The way out that the error names, and a granularity that needs none."""
    for granularity in (
        combine(AdamW8bit.granularity(3, min_8bit_size=1), GATHER.granularity()),
        Granularity.rows(8),
        Granularity.whole(),
    ):
        module = fully_shard(layer(), gather_codec=GATHER, granularity=granularity)
        module(torch.randn(2, 8))


def check_all() -> None:
    check_refusals()
    check_tensor_parallel_cut()
    check_device()
    check_joined()


def test_mistakes_are_refused_before_anything_is_sent() -> None:
    run_ranks(check_all, 2)


def check_disagreement(rank: int = 0) -> None:
    size = 4 + torch.distributed.get_rank()
    model = make(MLP, 1, 20)
    fully_shard(model.layers[0], gather_codec=QuantizedGather(block=(20, size)))
    fully_shard(model)
    with pytest.raises(RankMismatchError, match=r"gathered as int8 in blocks of \(20, 4\)"):
        model(inputs_of(0, 0, 20))


def test_ranks_with_other_blocks_are_told_so() -> None:
    run_ranks(check_disagreement, 2)


@pytest.mark.parametrize("block", [0, -1, 1.5, True, (4,), (4, 0), (1, 2, 3), "8", [4, 4]])
@pytest.mark.parametrize("option", [QuantizedGather, QuantizedReduce])
def test_blocks_that_are_none_are_refused(option: Any, block: object) -> None:
    with pytest.raises(ValueError, match="block must be a positive int, or"):
        option(block=block)


def test_dtypes_without_codes_are_refused() -> None:
    with pytest.raises(ValueError, match="'int8' or 'e4m3', got 'e5m2'"):
        QuantizedGather("e5m2")  # type: ignore[arg-type]

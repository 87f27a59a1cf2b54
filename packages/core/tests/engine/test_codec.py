"""Encoded gathers: what travels is what a codec writes."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from vescale_fsdp import MixedPrecisionPolicy
from vescale_fsdp.engine.unit import units_in
from vescale_fsdp.planner import ShardLayout
from vescale_fsdp.testing import run_ranks

from .helpers import full_gradients, full_parameters, shard_units
from .models import TinyGPT, gpt_loss, make, tokens_of


class Scaled:
    """Codes of 8 bits and one scale per shard: messages unlike a cast."""

    def num_bytes(self, layout: ShardLayout) -> int:
        return 16 + -(-layout.shard_size // 16) * 16

    def encode(self, layout: ShardLayout, rank: int, shard: Tensor, message: Tensor) -> None:
        scale = shard.abs().max().clamp_min(1e-12) / 127
        message[:4].view(torch.float32).copy_(scale)
        codes = (shard / scale).round().to(torch.int8)
        message[16 : 16 + layout.shard_size].view(torch.int8).copy_(codes)

    def decode(self, layout: ShardLayout, rank: int, message: Tensor, part: Tensor) -> None:
        scale = message[:4].view(torch.float32)
        part.copy_(message[16 : 16 + layout.shard_size].view(torch.int8) * scale)


class Cast:
    """The plain cast as a codec: a shard is sent in ``dtype``."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def num_bytes(self, layout: ShardLayout) -> int:
        """The shard in ``dtype``."""
        return layout.shard_size * self.dtype.itemsize

    def encode(
        self, layout: ShardLayout, rank: int, shard: torch.Tensor, message: torch.Tensor
    ) -> None:
        """One cast."""
        message.view(self.dtype).copy_(shard)

    def decode(
        self, layout: ShardLayout, rank: int, message: torch.Tensor, part: torch.Tensor
    ) -> None:
        """One cast."""
        part.copy_(message.view(self.dtype))


def train(codec: object | None, policy: MixedPrecisionPolicy) -> tuple[list[float], object]:
    model = make(TinyGPT)
    shard_units(model, model.blocks, mp_policy=policy)
    for unit in units_in(model).values():
        for group in unit.groups:
            group.codec = codec
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        loss = gpt_loss(model, tokens_of(step, dist.get_rank()))
        loss.backward()
        gradients = full_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses, (full_parameters(model), gradients)


def check_cast(dtype: torch.dtype) -> None:
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    losses, state = train(None, policy)
    encoded_losses, encoded_state = train(Cast(dtype), policy)
    assert losses == encoded_losses
    for plain, encoded in zip(state, encoded_state, strict=True):
        assert all(torch.equal(plain[name], encoded[name]) for name in plain)


def test_the_cast_as_a_codec_gives_the_same_bits() -> None:
    for world_size in (1, 2, 3):
        run_ranks(check_cast, world_size, torch.bfloat16)


def check_scaled() -> None:
    exact, _ = train(None, MixedPrecisionPolicy())
    coarse, _ = train(Scaled(), MixedPrecisionPolicy())
    assert exact != coarse
    torch.testing.assert_close(torch.tensor(coarse), torch.tensor(exact), rtol=0.02, atol=0.0)


def test_eight_bit_messages_train_nearly_alike() -> None:
    run_ranks(check_scaled, 2)

"""Bytes that each rank sends in a step: derived from the layout, counted, and beside FSDP2's."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.fsdp import fully_shard as torch_fully_shard
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vescale_fsdp import fully_shard
from vescale_fsdp.testing import run_ranks

from .models import TinyGPT, gpt_loss, make, tokens_of


class Wire(TorchDispatchMode):
    """Counts what the collectives of a rank have to send, whatever the backend makes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_bytes = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        namespace, name = func._schema.name.split("::")
        if name == "send":  # to one of the others
            self.num_bytes += args[0][0].nbytes
        elif namespace == "c10d" and name != "recv_":
            num_peers = dist.get_world_size() - 1
            output, input_ = (t for t in tree_leaves(args[:2]) if isinstance(t, torch.Tensor))
            shard_bytes = {
                "_allgather_base_": input_.nbytes,
                "_reduce_scatter_base_": output.nbytes,
                "alltoall_base_": input_.nbytes // dist.get_world_size(),
            }[name]
            self.num_bytes += num_peers * shard_bytes
        return func(*args, **(kwargs or {}))


def bytes_of_a_step(shard: Any, policy: MixedPrecisionPolicy) -> int:
    """What a rank sends in the third step."""
    model = make(TinyGPT)
    for block in model.blocks:
        shard(block, mp_policy=policy)
    shard(model, mp_policy=policy)
    for step in range(3):
        model.zero_grad()
        with Wire() as wire:
            gpt_loss(model, tokens_of(step, dist.get_rank())).backward()
    return wire.num_bytes


def bytes_of_both(policy: MixedPrecisionPolicy) -> list[int]:
    return [bytes_of_a_step(shard, policy) for shard in (fully_shard, torch_fully_shard)]


def expected(gather_bytes: int, reduce_bytes: int, world_size: int) -> float:
    """Each weight goes to the other ranks twice, in the root once; each gradient once."""
    model = make(TinyGPT)
    all_elements = sum(param.numel() for param in model.parameters())
    in_blocks = sum(param.numel() for param in model.blocks.parameters())
    per_rank = gather_bytes * (all_elements + in_blocks) + reduce_bytes * all_elements
    return per_rank * (world_size - 1) / world_size


def check(policy: MixedPrecisionPolicy, gather: int, ours: int, theirs: int) -> float:
    """Compares with the derived numbers (up to padding), and returns the ratio to FSDP2's."""
    for world_size in (2, 3):
        found = run_ranks(bytes_of_both, world_size, policy, timeout_s=60)
        mean = [sum(column) / world_size for column in zip(*found, strict=True)]
        assert (
            expected(gather, ours, world_size)
            <= mean[0]
            < 1.03 * expected(gather, ours, world_size)
        )
        assert mean[1] >= expected(gather, theirs, world_size)
    return mean[0] / mean[1]


def test_fp32_sends_what_fsdp2_has_to_send() -> None:
    assert check(MixedPrecisionPolicy(), 4, 4, 4) < 1.02  # padding of tiny tensors


@pytest.mark.usefixtures("each_alone")
def test_bf16_with_fp32_sums_sends_three_quarters_of_what_fsdp2_sends() -> None:
    # Blocks: 2 + 2 + 2 bytes against 2 + 2 + 4; the root, gathered once: 2 + 2 against 2 + 4.
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    assert check(policy, 2, 2, 4) < 0.755  # padding of tiny tensors

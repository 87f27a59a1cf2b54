"""The peak of a step, term by term from the layout, against what the allocator really gave.

A chain of equal blocks; F is a block's gathered parameters, all in the compute dtype, M its
gradients as autograd made them, G the buffer in which they travel, R the memory to receive in, s
its reduced shard in the reduce dtype, g in that of the shard. A part for one rank is long enough
for an exchange of our own, so that R is G without this rank's part; gloo's own collectives would
need memory of their own.
"""

from __future__ import annotations

import gc
import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from vescale_fsdp import MixedPrecisionPolicy, compat
from vescale_fsdp.dbuffer.transport import SHORTEST_BYTES
from vescale_fsdp.engine.unit import unit_of
from vescale_fsdp.testing import run_ranks

from ..allocations import peak_of, through_the_allocator, traced
from .helpers import shard_units

WORLD_SIZE, NUM_BLOCKS, NUM_LAYERS, WIDTH = 2, 6, 3, 512
POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16, summed in fp32": MixedPrecisionPolicy(torch.bfloat16, torch.float32),
    "bf16": MixedPrecisionPolicy(torch.bfloat16),
}
# Activations, losses, the lists of a step: of a batch of one row they are less than this.
SMALL_BYTES = 1 << 15


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layers = [nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(NUM_LAYERS)]
        self.layers = nn.ModuleList(layers)

    def forward(self, x: Tensor) -> Tensor:  # [rows, WIDTH] -> the same
        for layer in self.layers:
            x = layer(x)
        return x


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(NUM_BLOCKS)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Sizes(NamedTuple):
    """Bytes of what comes and goes, for one block; the letters are those of the module."""

    F: int
    M: int
    G: int
    R: int
    s: int
    g: int
    cast: int  # of a part in bf16, to be added to a sum in fp32


def sizes_of(chain: Chain, policy: MixedPrecisionPolicy) -> Sizes:
    """From the layout of a block."""
    unit = unit_of(chain.blocks[0])
    assert unit is not None
    (group,) = unit.groups
    layout = group.layout
    assert layout.shard_size * 2 >= SHORTEST_BYTES, "in bf16 too"
    compute = policy.param_dtype or torch.float32
    own = torch.float32 if compat.REDUCES_IN_OWN_DTYPE else compute
    reduce = policy.reduce_dtype or own
    gathered = layout.total_size * compute.itemsize
    s = layout.shard_size * reduce.itemsize
    return Sizes(
        F=gathered,
        M=NUM_LAYERS * WIDTH * WIDTH * compute.itemsize,
        G=gathered,
        R=gathered - gathered // WORLD_SIZE,
        s=s,
        g=layout.shard_size * 4,
        cast=0 if reduce == compute else s,
    )


def derived_peak(sizes: Sizes, in_flight: int) -> int:
    """The largest of the moments of a backward from block 5 to block 0."""
    F, M, G, R, s, g, cast = sizes
    half = M * math.ceil(NUM_LAYERS / 2) // NUM_LAYERS  # whole layers
    moments = []
    for block in reversed(range(NUM_BLOCKS)):
        done = NUM_BLOCKS - 1 - block
        flying = min(done, in_flight - 1)
        reduced = (done - flying) * g
        ahead = (min(in_flight, block + 1) - 1) * F
        if flying and block:  # the first half of its gradients; the reduction before it lands
            moments.append(F + half + G + R + s + cast + reduced)
        elif flying:  # nothing is left to gather: that lands when its parameters are gone
            moments += [F + M + G + R + reduced, M + G + R + s + cast + reduced]
        moments += [
            F + ahead + M + done * g,  # the second half
            ahead + M + G + done * g,  # its gradients are copied
            ahead + G + R + done * g,  # its own reduction begins
        ]
        if in_flight == 1 or block == 0:
            moments.append(ahead + G + R + s + cast + done * g)  # and lands
    return max(moments)


class Measured(NamedTuple):
    peak: int
    derived: int
    left: int


def measure(in_flight: int) -> dict[str, list[Measured]]:
    """By precision: three steps."""
    found: dict[str, list[Measured]] = {}
    with through_the_allocator():
        for name, policy in POLICIES.items():
            chain = Chain()
            shard_units(chain, chain.blocks, mp_policy=policy, in_flight=in_flight)
            x = torch.ones(1, WIDTH, requires_grad=True)

            def step(chain: Chain = chain, x: Tensor = x) -> None:
                chain(x).sum().backward()
                x.grad = None

            step()  # the order of the units is recorded
            derived = derived_peak(sizes_of(chain, policy), in_flight)
            found[name] = []
            for _ in range(3):
                chain.zero_grad()
                blocks = traced(step)
                left = [block.num_bytes for block in blocks if block.end is None]
                gradients = sum(p.grad.to_local().nbytes for p in chain.parameters())
                measured = Measured(peak_of(blocks)[0], derived, sum(left) - gradients)
                found[name].append(measured)
            # The pool would lend the next one slabs of this one's sizes.
            del chain, step
            gc.collect()
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("in_flight", [1, 2])
def test_peak_is_the_sum_of_its_terms(in_flight: int) -> None:
    for rank in run_ranks(measure, WORLD_SIZE, in_flight):
        for name, steps in rank.items():
            for step in steps:
                assert 0 <= step.peak - step.derived < SMALL_BYTES, f"{name}: {steps}"
                assert step.left == 0, f"{name}: {steps}"


def measure_tokens() -> tuple[int, int]:
    """The peak of a step on a table of embeddings, and the table's bytes."""
    with through_the_allocator():
        table = nn.Embedding(WIDTH, WIDTH)
        shard_units(table, [])
        tokens = torch.arange(4)

        def step() -> None:
            table(tokens).sum().backward()

        step()
        table.zero_grad()
        return peak_of(traced(step))[0], WIDTH * WIDTH * 4


def test_tables_are_gone_when_their_gradients_are_copied() -> None:
    """Tokens want no gradient, so that only the end of the backward tells that all are there."""
    for peak, whole in run_ranks(measure_tokens, WORLD_SIZE):
        gradients_and_buffer, received = 2 * whole, whole // WORLD_SIZE
        assert peak < gradients_and_buffer + received + SMALL_BYTES

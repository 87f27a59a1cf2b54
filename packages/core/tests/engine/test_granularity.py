"""Granularity: from the shape of a parameter to the block that is never cut, in elements."""

from __future__ import annotations

import dataclasses
import pickle
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_fsdp import Granularity, combine, fully_shard
from vescale_fsdp.engine.granularity import asked_block
from vescale_fsdp.planner import PaddingWarning
from vescale_fsdp.testing import run_ranks


def block_for(*arguments: Any) -> int:
    """The planner's block: 1 where none is asked for."""
    return asked_block(*arguments) or 1


SHAPES: list[tuple[int, ...]] = [(), (10,), (8, 6), (3, 5, 6), (2, 3, 4, 6), (0,), (4, 0)]

# One block for each of the SHAPES. A block is at most the tensor; without elements it is 1.
BLOCKS: list[tuple[Granularity, list[int]]] = [
    (Granularity.elements(1), [1, 1, 1, 1, 1, 1, 1]),
    (Granularity.elements(4), [1, 4, 4, 4, 4, 1, 1]),
    (Granularity.elements(32), [1, 10, 32, 32, 32, 1, 1]),
    (Granularity.elements(100), [1, 10, 48, 90, 100, 1, 1]),
    # A row is the last dimension, of a vector one element.
    (Granularity.rows(1), [1, 1, 6, 6, 6, 1, 1]),
    (Granularity.rows(2), [1, 2, 12, 12, 12, 1, 1]),
    (Granularity.rows(4), [1, 4, 24, 24, 24, 1, 1]),
    (Granularity.rows(16), [1, 10, 48, 90, 96, 1, 1]),
    # 2 divides 8 and 4 but not 5: the matrices of 5 x 6 stay whole.
    (Granularity.tile(2, 3), [1, 2, 12, 30, 12, 1, 1]),
    # 5 divides 5 but not 4: whole matrices of 4 x 6. A single matrix may end in a partial block.
    (Granularity.tile(5, 2), [1, 5, 30, 30, 24, 1, 1]),
    (Granularity.tile(1, 6), [1, 1, 6, 6, 6, 1, 1]),
    (Granularity.tile(100, 1), [1, 10, 48, 30, 24, 1, 1]),
    (Granularity.whole(), [1, 10, 48, 90, 144, 1, 1]),
]


@pytest.mark.parametrize(("granularity", "blocks"), BLOCKS, ids=lambda value: str(value)[:60])
def test_block_by_shape(granularity: Granularity, blocks: list[int]) -> None:
    assert [granularity.block(shape) for shape in SHAPES] == blocks
    assert [granularity.block(torch.Size(shape)) for shape in SHAPES] == blocks


def test_granularities_are_frozen_values() -> None:
    assert Granularity.rows(2) == Granularity.rows(2)
    assert hash(Granularity.rows(2)) == hash(Granularity.rows(2))
    assert Granularity.rows(2) != Granularity.rows(3)
    assert Granularity.rows(1) != Granularity.elements(1)
    assert pickle.loads(pickle.dumps(Granularity.tile(2, 3))) == Granularity.tile(2, 3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Granularity.rows(2)._parts = ()  # type: ignore[misc]


@pytest.mark.parametrize("n", [0, -1, 2.0, True, "2"])
def test_counts_are_positive_ints(n: object) -> None:
    with pytest.raises(ValueError, match="number of elements must be a positive int, got"):
        Granularity.elements(n)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="number of rows must be a positive int, got"):
        Granularity.rows(n)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="number of tile rows must be a positive int, got"):
        Granularity.tile(n, 1)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="number of tile columns must be a positive int, got"):
        Granularity.tile(1, n)  # type: ignore[arg-type]


# --- policies -------------------------------------------------------------------------------------


def only_matrices(fqn: str, param: nn.Parameter) -> Granularity | None:
    return Granularity.rows(2) if param.dim() == 2 else None


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.zeros(shape))


def test_block_of_a_granularity_a_policy_or_nothing() -> None:
    assert block_for(None, "w", parameter(8, 6)) == 1
    assert block_for(Granularity.rows(3), "w", parameter(8, 6)) == 18
    assert block_for(only_matrices, "w", parameter(8, 6)) == 12
    assert block_for(only_matrices, "b", parameter(8)) == 1


def test_policy_sees_name_and_parameter() -> None:
    seen = []

    def policy(fqn: str, param: nn.Parameter) -> Granularity | None:
        seen.append((fqn, param))
        return Granularity.whole()

    weight = parameter(8, 6)
    assert block_for(policy, "layer.weight", weight) == 48
    assert len(seen) == 1
    assert seen[0][0] == "layer.weight"
    assert seen[0][1] is weight


@pytest.mark.parametrize("returned", [4, "rows", (Granularity.rows(1),)])
def test_policy_must_return_a_granularity(returned: object) -> None:
    with pytest.raises(TypeError, match=r"returned .* for 'layer.w'; expected a Granularity"):
        block_for(lambda fqn, param: returned, "layer.w", parameter(2))  # type: ignore[arg-type,return-value]


# --- combine --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policies", "shape", "block"),
    [
        ((Granularity.elements(4), Granularity.rows(3)), (10, 6), 36),  # lcm(4, 18)
        ((Granularity.elements(4), Granularity.rows(3)), (5, 6), 30),  # 36 is more than all
        ((Granularity.rows(2), Granularity.rows(3)), (20, 5), 30),
        ((Granularity.tile(4, 2), Granularity.elements(16)), (20, 6), 48),  # lcm(24, 16)
        ((Granularity.whole(), Granularity.elements(7)), (3, 5), 15),
        ((only_matrices, Granularity.elements(5)), (10, 6), 60),  # lcm(12, 5)
        ((only_matrices, Granularity.elements(5)), (60,), 5),
        ((only_matrices, None), (10, 6), 12),
        ((only_matrices, None), (60,), 1),
        ((Granularity.rows(2),), (10, 6), 12),
        ((None,), (10, 6), 1),
        ((), (10, 6), 1),
        ((combine(Granularity.rows(2), only_matrices), Granularity.rows(5)), (20, 6), 60),
    ],
    ids=lambda value: re.sub(" at 0x[0-9a-f]+", "", str(value))[:60],
)
def test_combine_is_the_least_common_multiple(
    policies: tuple[object, ...], shape: tuple[int, ...], block: int
) -> None:
    combined = combine(*policies)  # type: ignore[arg-type]
    assert block_for(combined, "w", parameter(*shape)) == block


def test_combine_needs_nothing_where_no_policy_does() -> None:
    assert combine(only_matrices, None)("b", parameter(3)) is None


@pytest.mark.parametrize(("number", "text"), [(4, "4"), (True, "True")])
def test_combine_refuses_an_int(number: int, text: str) -> None:
    message = rf"granularity={text} does not say what it counts; use Granularity.elements"
    with pytest.raises(TypeError, match=message):
        combine(Granularity.rows(2), number)  # type: ignore[arg-type]


@pytest.mark.parametrize("other", ["rows", 2.0, (2, 3)])
def test_combine_refuses_what_is_not_a_policy(other: object) -> None:
    with pytest.raises(TypeError, match=f"or a policy .* got {type(other).__name__}"):
        combine(other)  # type: ignore[arg-type]


# --- fully_shard ----------------------------------------------------------------------------------


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 25)
        self.norm = nn.LayerNorm(7)


def check_fully_shard() -> tuple[dict[str, int], dict[str, tuple[int, int]]]:
    """What the policy saw (dimensions by name), and this rank's range of each parameter."""
    seen = {}

    def policy(fqn: str, param: nn.Parameter) -> Granularity | None:
        seen[fqn] = param.dim()
        return Granularity.rows(4) if param.dim() == 2 else Granularity.whole()

    net = Net()
    for wrong in (4, "rows"):
        with pytest.raises(TypeError, match="granularity"):
            fully_shard(net, granularity=wrong)  # type: ignore[arg-type]
        assert type(net) is Net
    fully_shard(net, granularity=policy)
    return seen, {name: param.local_range for name, param in net.named_parameters()}


def test_fully_shard_cuts_between_the_blocks_of_its_policy() -> None:
    results = run_ranks(check_fully_shard, 2)
    for seen, _ in results:
        assert seen == {"inner.weight": 2, "inner.bias": 1, "norm.weight": 1, "norm.bias": 1}
    for name, numel in {"inner.weight": 150, "inner.bias": 25, "norm.weight": 7}.items():
        (start, cut), (begin, stop) = (ranges[name] for _, ranges in results)
        assert (start, cut, stop) == (0, begin, numel)
        if name == "inner.weight":
            assert 0 < cut < 150
            assert cut % 24 == 0  # 4 rows of 6
        else:
            assert cut in (0, numel)


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(3, 512, 512))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight.sum(0)


def check_padding_warning() -> None:
    if dist.get_rank() == 0:  # three matrices on two ranks: one holds two, the other one and a gap
        with pytest.warns(PaddingWarning, match="33.3% padding over 2 ranks, .* 'weight'") as found:
            fully_shard(Stack(), granularity=Granularity.rows(512))
        assert found[0].filename == __file__
    else:
        fully_shard(Stack(), granularity=Granularity.rows(512))
    fully_shard(Stack(), granularity=Granularity.rows(1))
    small = nn.Linear(3, 3, bias=False)  # as bad, and nobody minds
    fully_shard(small, granularity=Granularity.whole())


def test_padding_that_blocks_force_is_warned_about_once() -> None:
    run_ranks(check_padding_warning, 2)

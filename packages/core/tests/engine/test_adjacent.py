"""Tensors that follow each other in memory are joined, and clipping uses it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from vescale_fsdp import clip_grad_norm_
from vescale_fsdp.engine.clip import join_adjacent
from vescale_fsdp.testing import run_ranks

from .helpers import shard_units
from .models import MLP, inputs_of, make


def lists(tensors: list[Tensor]) -> list[list[float]]:
    return [tensor.tolist() for tensor in join_adjacent(tensors)]


def test_neighbours_are_joined_in_the_order_of_memory() -> None:
    a, b, c = torch.arange(6.0).split([2, 3, 1])
    assert lists([c, a, b]) == [[0, 1, 2, 3, 4, 5]]
    assert join_adjacent([a, b])[0].data_ptr() == a.data_ptr()


def test_a_gap_is_not_joined_over() -> None:
    memory = torch.arange(6.0)
    assert lists([memory[:2], memory[3:4], memory[4:]]) == [[0, 1], [3, 4, 5]]


def test_what_overlaps_is_left_apart() -> None:
    memory = torch.arange(4.0)
    assert lists([memory[:3], memory[1:], memory[:3]]) == [[0, 1, 2], [1, 2, 3], [0, 1, 2]]


def test_empty_tensors_are_left_out() -> None:
    memory = torch.arange(4.0)
    assert lists([memory[:2], memory[2:2], memory[2:], torch.ones(0)]) == [[0, 1, 2, 3]]


@pytest.mark.parametrize("other", [torch.arange(6.0).view(2, 3).t(), torch.ones(3).to_sparse()])
def test_what_is_not_contiguous_stays_as_it_is(other: Tensor) -> None:
    assert any(tensor is other for tensor in join_adjacent([torch.ones(2), other]))


def test_neighbours_of_other_dtypes_or_storages_are_left_apart() -> None:
    memory = torch.zeros(16, dtype=torch.uint8)
    assert len(join_adjacent([memory[:8].view(torch.float32), memory[8:].view(torch.int32)])) == 2
    first, second = (torch.from_numpy(part) for part in torch.ones(4).numpy().reshape(2, 2))
    assert first.data_ptr() + 8 == second.data_ptr()
    assert lists([first, second]) == [[1, 1], [1, 1]]


def test_neighbours_by_chance_do_not_keep_others_apart() -> None:
    parts = torch.arange(6.0).numpy().reshape(3, 2)
    first = torch.from_numpy(parts[:2].reshape(-1))
    chance = torch.from_numpy(parts[2])
    assert first.data_ptr() + 16 == chance.data_ptr()
    assert lists([*first.split(2), chance]) == [[0, 1, 2, 3], [4, 5]]


class Kernels(TorchDispatchMode):
    """How many tensors the norms and the scaling get."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name.startswith("_foreach"):
            self.counts.append((name, len(args[0])))
        return func(*args, **(kwargs or {}))


def count_kernels() -> list[tuple[str, int]]:
    model = make(MLP, 3, 8)  # rank 0 holds 40 of a weight's 64 elements, rank 1 24 and the bias
    shard_units(model, model.layers)
    model(inputs_of(0, 0, 8)).sum().backward()
    with Kernels() as kernels:
        clip_grad_norm_(model, 1e-3)
    return kernels.counts


def test_clipping_runs_on_whole_shards() -> None:
    counts = [("_foreach_norm", 3), ("_foreach_mul_", 3)]  # three layers are units
    assert run_ranks(count_kernels, 2) == [counts, counts]


def test_the_order_is_that_of_the_arguments_wherever_they_are_in_memory() -> None:
    alone = sorted((torch.ones(4) * i for i in range(6)), key=torch.Tensor.data_ptr, reverse=True)
    memory = torch.arange(4.0)
    given = [*alone[:3], memory[2:], *alone[3:], memory[:2]]
    expected = [*alone[:3], memory, *alone[3:]]
    assert [each.tolist() for each in join_adjacent(given)] == [x.tolist() for x in expected]

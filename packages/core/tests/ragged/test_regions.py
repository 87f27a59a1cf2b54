"""A flat range as boxes: exhaustive over small shapes, NumPy's indexing as the oracle."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product

import numpy as np
import pytest
import torch

from vescale_fsdp.ragged import Box, contiguous_strides
from vescale_fsdp.ragged.holdings import flat_range_to_boxes

LARGEST_DIM = {0: 0, 1: 8, 2: 5, 3: 4, 4: 3}  # by ndim, to keep the number of ranges in bounds


def all_ranges(ndim: int) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """Every shape of ``ndim`` with dimensions from 1, with every range in it."""
    for shape in product(range(1, LARGEST_DIM[ndim] + 1), repeat=ndim):
        numel = math.prod(shape)
        for start in range(numel + 1):
            for stop in range(start, numel + 1):
                yield shape, start, stop


def elements_of(box: Box, flat_indices: np.ndarray) -> list[int]:
    part = tuple(
        slice(offset, offset + size) for offset, size in zip(box.offsets, box.sizes, strict=True)
    )
    return flat_indices[part].reshape(-1).tolist()


@pytest.mark.parametrize("ndim", [0, 1, 2, 3, 4])
def test_boxes_are_the_range_in_storage_order(ndim: int) -> None:
    """Each box is contiguous, begins where the one before it ends, and says where that is."""
    for shape, start, stop in all_ranges(ndim):
        flat_indices = np.arange(math.prod(shape)).reshape(shape)
        position = start
        for box in flat_range_to_boxes(shape, start, stop):
            assert len(box.offsets) == len(box.sizes) == ndim
            assert box.start == position - start, (shape, start, stop)
            numel = math.prod(box.sizes)
            assert numel > 0, (shape, start, stop)
            elements = elements_of(box, flat_indices)
            assert elements == list(range(position, position + numel)), (shape, start, stop)
            position += numel
        assert position == stop, (shape, start, stop)


@pytest.mark.parametrize("ndim", [0, 1, 2, 3, 4])
def test_at_most_one_box_for_each_side_of_each_dimension(ndim: int) -> None:
    most = max(len(flat_range_to_boxes(*one)) for one in all_ranges(ndim))
    assert most == max(1, 2 * ndim - 1)


def test_example_of_the_module() -> None:
    assert flat_range_to_boxes((4, 5), 3, 18) == [
        Box((0, 3), (1, 2), 0),
        Box((1, 0), (2, 5), 2),
        Box((3, 0), (1, 3), 12),
    ]


def test_whole_tensor_is_one_box() -> None:
    assert flat_range_to_boxes((2, 3, 4), 0, 24) == [Box((0, 0, 0), (2, 3, 4), 0)]
    assert flat_range_to_boxes((), 0, 1) == [Box((), (), 0)]


def test_whole_rows_are_one_box() -> None:
    assert flat_range_to_boxes((6, 4), 4, 16) == [Box((1, 0), (3, 4), 0)]


@pytest.mark.parametrize("shape", [(), (3,), (2, 3), (0,), (2, 0, 3)])
def test_empty_range_has_no_boxes(shape: tuple[int, ...]) -> None:
    for start in range(math.prod(shape) + 1):
        assert flat_range_to_boxes(shape, start, start) == []


@pytest.mark.parametrize("ndim", [0, 1, 2, 3, 4])
def test_strides_are_those_of_a_new_tensor(ndim: int) -> None:
    for shape in product((0, 1, 2, 3), repeat=ndim):
        assert contiguous_strides(shape) == torch.empty(shape).stride()

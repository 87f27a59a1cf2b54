"""Samples of steps: by numbers only."""

from __future__ import annotations

import itertools

import pytest

from vescale_fsdp_elastic.order import Order, Part, num_micro_batches, parts


def test_twelve_samples_on_three_ranks() -> None:
    """As in the module's docstring: two micro-batches on each rank."""
    assert parts(24, 12, 1, 3, 3) == [Part(28, 30, 2), Part(30, 32, 2)]


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4, 5, 7])
@pytest.mark.parametrize("micro_batch", [1, 2, 3, 100])
@pytest.mark.parametrize("global_batch", [1, 2, 5, 12])
def test_each_sample_of_a_step_counts_once(
    num_ranks: int, micro_batch: int, global_batch: int
) -> None:
    each = [parts(40, global_batch, rank, num_ranks, micro_batch) for rank in range(num_ranks)]
    assert {len(one) for one in each} == {num_micro_batches(global_batch, num_ranks, micro_batch)}
    found = []
    for part in itertools.chain(*each):
        size = part.stop - part.start
        assert part.num_samples in (0, size)
        assert 1 <= size <= micro_batch
        assert 40 <= part.start < part.stop <= 40 + global_batch
        found += range(part.start, part.start + part.num_samples)
    assert found == list(range(40, 40 + global_batch))


def test_an_epoch_has_every_sample_once() -> None:
    order = Order(10, seed=3)
    epochs = [list(order.indices(10 * e, 10 * e + 10)) for e in range(3)]
    assert [sorted(each) for each in epochs] == [list(range(10))] * 3
    assert epochs[0] != epochs[1]
    assert list(Order(10, seed=3).indices(7, 25)) == [*epochs[0], *epochs[1], *epochs[2]][7:25]
    assert list(Order(4).indices(2, 9)) == [2, 3, 0, 1, 2, 3, 0]

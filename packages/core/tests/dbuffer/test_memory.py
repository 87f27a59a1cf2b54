"""Regions and slabs: memory that comes and goes under addresses that stay."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch

from vescale_fsdp.dbuffer.memory import SlabPool, empty, make_region

CPU = torch.device("cpu")
MIB = 1 << 20


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("num_bytes", [1, 100_000, 2 * MIB, 5 * MIB + 3])
def test_region_keeps_its_address_and_takes_any_size(num_bytes: int) -> None:
    region = make_region(num_bytes, CPU)
    view = torch.empty(0, dtype=torch.uint8).set_(region.storage, 0, (num_bytes,), (1,))
    address = view.data_ptr()
    for value in (1, 2):
        region.materialize()
        view.fill_(value)
        assert int(view.sum(dtype=torch.int64)) == value * num_bytes
        region.release()
        assert not region.is_materialized
    assert view.data_ptr() == address


def test_region_of_no_bytes_does_nothing() -> None:
    region = make_region(0, CPU)
    region.materialize()
    region.release()
    assert region.storage.nbytes() == 0


def test_released_region_holds_no_memory() -> None:
    region = make_region(64 * MIB, CPU)
    view = torch.empty(0).set_(region.storage, 0, (16 * MIB,), (1,))
    region.materialize()
    before = resident_bytes()
    view.fill_(1.0)
    assert resident_bytes() - before > 60 * MIB
    region.release()
    assert resident_bytes() - before < 8 * MIB


def test_tensor_of_its_own_mapping_gives_its_memory_back_when_it_dies() -> None:
    before = resident_bytes()
    tensor = empty(16 * MIB, torch.float32, CPU).fill_(1.0)
    view = tensor[5:]
    del tensor
    assert resident_bytes() - before > 60 * MIB
    assert float(view[-1]) == 1.0
    del view
    gc.collect()
    assert resident_bytes() - before < 8 * MIB


def test_pool_lends_a_slab_again_after_it_came_back() -> None:
    pool = SlabPool(CPU)
    first, second = pool.take(1000, torch.float32), pool.take(1000, torch.float32)
    addresses = {first.data_ptr(), second.data_ptr()}
    assert len(addresses) == 2
    pool.give(first)
    pool.give(second)
    third = pool.take(2000, torch.bfloat16)  # as many bytes
    assert third.data_ptr() in addresses
    assert third.shape == (2000,)
    assert third.dtype == torch.bfloat16


def test_pool_does_not_collect_slabs_that_are_too_small() -> None:
    pool = SlabPool(CPU)
    for num_elements in (10, 100, 1000):
        pool.give(pool.take(num_elements, torch.float32))
    assert [region.storage.nbytes() for region in pool._idle] == [4000]


def test_trimmed_pool_holds_no_memory_and_still_lends() -> None:
    pool = SlabPool(CPU)
    slab = pool.take(16 * MIB, torch.float32).fill_(1.0)
    before = resident_bytes()
    pool.give(slab)
    pool.trim()
    assert before - resident_bytes() > 56 * MIB
    assert pool.take(16 * MIB, torch.float32).fill_(2.0)[-1] == 2.0

"""Regions whose memory comes and goes, and the pool that lends them."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable

import psutil
import pytest
import torch

from vescale_fsdp.dbuffer import SlabPool, memory, pool_for
from vescale_fsdp.dbuffer.memory import Region, make_region

from .helpers import CPU

MIB = 1 << 20
KINDS = pytest.mark.parametrize("can_map", [True, False], ids=["mapped", "resized"])


@pytest.fixture
def make(monkeypatch: pytest.MonkeyPatch, can_map: bool) -> Callable[[int], Region]:
    """Makes regions of one kind: mappings, or storages that are resized."""
    if can_map and not memory._CAN_MAP:
        pytest.skip("mappings that can be handed back need Linux")
    monkeypatch.setattr(memory, "_CAN_MAP", can_map)
    return lambda num_bytes: make_region(num_bytes, CPU)


def bytes_of(region: Region) -> torch.Tensor:
    assert region.is_materialized
    return torch.empty(0, dtype=torch.uint8).set_(region.storage)


@KINDS
def test_a_region_is_without_memory_until_materialized_and_after_release(
    make: Callable[[int], Region],
) -> None:
    region = make(1000)
    seen = [region.is_materialized]
    for change in (region.release, region.materialize, region.materialize, region.release):
        change()
        seen.append(region.is_materialized)
    assert seen == [False, False, True, True, False]


@KINDS
def test_one_storage_for_life(make: Callable[[int], Region]) -> None:
    region = make(1000)
    storage = region.storage._cdata
    region.materialize()
    assert region.storage.nbytes() == 1000
    region.release()
    region.materialize()
    assert region.storage._cdata == storage
    assert region.storage.nbytes() == 1000


@KINDS
@pytest.mark.parametrize("num_bytes", [1, 4096, 4097, 2 * MIB, 5 * MIB + 3])
def test_all_of_a_region_can_be_written_again_and_again(
    make: Callable[[int], Region], num_bytes: int
) -> None:
    region = make(num_bytes)
    for value in (1, 2):
        region.materialize()
        assert bytes_of(region).numel() == num_bytes
        bytes_of(region).fill_(value)
        region.materialize()  # does nothing: it is there
        assert bytes_of(region).eq(value).all()
        region.release()


@KINDS
def test_a_region_of_nothing(make: Callable[[int], Region]) -> None:
    region = make(0)
    region.materialize()
    assert region.is_materialized
    region.release()
    assert not region.is_materialized


def resident_mib() -> float:
    return psutil.Process(os.getpid()).memory_info().rss / MIB


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts resident pages")
@KINDS
def test_release_hands_the_memory_back_to_the_system(make: Callable[[int], Region]) -> None:
    region = make(64 * MIB)
    before = resident_mib()
    for _ in range(2):
        region.materialize()
        bytes_of(region).fill_(1)
        assert resident_mib() - before > 60
        region.release()
        assert resident_mib() - before < 4


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts resident pages")
@KINDS
def test_dropping_a_region_frees_its_memory(make: Callable[[int], Region]) -> None:
    region = make(64 * MIB)
    before = resident_mib()
    region.materialize()
    bytes_of(region).fill_(1)
    del region
    gc.collect()
    assert resident_mib() - before < 4


# --- the pool -------------------------------------------------------------------------------------


def test_a_slab_has_the_size_and_dtype_that_were_asked_for() -> None:
    pool = SlabPool(CPU)
    for num_elements, dtype in [(7, torch.float32), (5, torch.bfloat16), (0, torch.float32)]:
        slab = pool.take(num_elements, dtype)
        assert slab.shape == (num_elements,)
        assert slab.dtype == dtype
        slab.fill_(1)
        pool.give(slab)


def test_what_was_given_back_is_lent_again_in_another_dtype() -> None:
    pool = SlabPool(CPU)
    first = pool.take(8, torch.float32)
    address = first.data_ptr()
    pool.give(first)
    again = pool.take(16, torch.bfloat16)  # the same 32 bytes
    assert again.data_ptr() == address
    pool.give(again)
    assert pool.take(3, torch.float32).data_ptr() == address  # a part of it


def test_what_is_lent_is_not_lent_twice() -> None:
    pool = SlabPool(CPU)
    slabs = [pool.take(8, torch.float32) for _ in range(3)]
    for number, slab in enumerate(slabs):
        slab.fill_(number)
    assert [slab.tolist() for slab in slabs] == [[0.0] * 8, [1.0] * 8, [2.0] * 8]
    assert len({slab.data_ptr() for slab in slabs}) == 3


def test_the_smallest_slab_that_fits_is_lent() -> None:
    pool = SlabPool(CPU)
    slabs = {size: pool.take(size, torch.float32) for size in (40, 10, 20)}
    addresses = {size: slab.data_ptr() for size, slab in slabs.items()}
    for slab in slabs.values():
        pool.give(slab)
    assert pool.take(15, torch.float32).data_ptr() == addresses[20]
    assert pool.take(15, torch.float32).data_ptr() == addresses[40]


def test_slabs_that_are_too_small_are_replaced() -> None:
    """Else the pool would hold one slab of each size that ever was the largest."""
    pool = SlabPool(CPU)
    for size in range(1, 100):
        pool.give(pool.take(size, torch.float32))
    assert len(pool._idle) == 1
    assert pool._idle[0].storage.nbytes() == 99 * 4


def test_a_pool_holds_as_many_slabs_as_were_out_together() -> None:
    pool = SlabPool(CPU)
    for _ in range(5):
        slabs = [pool.take(8, torch.float32) for _ in range(3)]
        for slab in slabs:
            pool.give(slab)
    assert len(pool._idle) == 3
    assert not pool._lent


def test_trim_takes_the_memory_of_what_is_in_and_not_of_what_is_out() -> None:
    pool = SlabPool(CPU)
    out, back = pool.take(8, torch.float32), pool.take(8, torch.float32)
    out.fill_(3)
    pool.give(back)
    pool.trim()
    assert [region.is_materialized for region in pool._idle] == [False]
    assert out.tolist() == [3.0] * 8
    again = pool.take(8, torch.float32)  # has memory again
    again.fill_(4)
    assert again.tolist() == [4.0] * 8
    assert out.tolist() == [3.0] * 8


def test_a_tensor_of_somebody_else_is_not_taken_in() -> None:
    pool = SlabPool(CPU)
    pool.give(torch.zeros(8))
    assert not pool._idle


def test_groups_of_a_device_share_a_pool_for_as_long_as_one_holds_it() -> None:
    device = torch.device("cpu", 3)  # nobody else's
    pool = pool_for(device)
    assert pool_for(torch.device("cpu", 3)) is pool
    del pool
    gc.collect()
    assert device not in memory._POOLS

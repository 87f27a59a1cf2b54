"""Regions and slabs: memory that comes and goes under addresses that stay."""

from __future__ import annotations

import ctypes
import gc
import mmap
import resource
from pathlib import Path

import pytest
import torch

from vescale_fsdp.dbuffer import hand_back, memory
from vescale_fsdp.dbuffer.memory import Region, SlabPool, make_region, mapped_empty

CPU = torch.device("cpu")
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _nothing_else_is_freed_meanwhile() -> None:
    """What other tests have left would make the process smaller while one of these measures."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def num_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


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


def region_and_view(num_bytes: int = 64 * MIB) -> tuple[Region, torch.Tensor]:
    region = make_region(num_bytes, CPU)
    return region, torch.empty(0).set_(region.storage, 0, (num_bytes // 4,), (1,))


def is_all(tensor: torch.Tensor, value: float) -> bool:
    return float(tensor.min()) == float(tensor.max()) == value  # without memory for an answer


def test_what_released_regions_held_is_handed_back() -> None:
    region, view = region_and_view()
    region.materialize()
    before = resident_bytes()
    view.fill_(1.0)
    assert resident_bytes() - before > 48 * MIB
    region.release()
    hand_back()
    assert resident_bytes() - before < 8 * MIB


@pytest.mark.parametrize("num_bytes", [1_000_000, 2 * MIB, 64 * MIB, 64 * MIB + 4100])
def test_pages_go_to_the_next_region_of_the_size(num_bytes: int) -> None:
    (first, a), (second, b) = region_and_view(num_bytes), region_and_view(num_bytes)
    addresses = a.data_ptr(), b.data_ptr()
    first.materialize()
    a.fill_(3.0)
    before, faults = resident_bytes(), num_faults()
    first.release()
    second.materialize()
    assert is_all(b, 3.0)  # what was in them: nothing was cleared
    assert num_faults() - faults < 20 + num_bytes // 4096 // 4
    assert resident_bytes() - before < 2 * MIB
    first.materialize()  # both at once
    a.fill_(4.0)
    assert is_all(b, 3.0)
    assert (a.data_ptr(), b.data_ptr()) == addresses
    first.release()
    first.materialize()  # its own again
    assert is_all(a, 4.0)


def test_what_a_region_keeps_is_no_one_elses() -> None:
    (first, a), (second, b) = region_and_view(), region_and_view()
    for region in (first, second):  # the first one's are spare, and its own again
        region.materialize()
        region.release()
    first.materialize()
    a.fill_(3.0)
    before = resident_bytes()
    first.release(keeps=True)
    hand_back()
    second.materialize()
    b.fill_(1.0)
    assert is_all(a, 3.0)
    assert resident_bytes() - before > 48 * MIB  # they are two
    second.release()
    first.materialize()
    assert is_all(a, 3.0)
    first.release()
    hand_back()
    assert resident_bytes() - before < -48 * MIB


def test_what_a_resized_region_keeps_stays_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "CAN_MAP", False)
    region = make_region(1000, CPU)
    region.materialize()
    region.release(keeps=True)
    assert (region.is_materialized, region.storage.nbytes()) == (False, 1000)
    address = region.storage.data_ptr()
    region.materialize()
    assert region.storage.data_ptr() == address
    region.release()
    assert region.storage.nbytes() == 0


def test_no_more_pages_are_kept_than_were_needed_at_once() -> None:
    (large, a), (small, b) = region_and_view(64 * MIB), region_and_view(32 * MIB)
    before = resident_bytes()
    large.materialize()
    a.fill_(1.0)
    large.release()
    small.materialize()  # nothing that is spare fits
    b.fill_(1.0)
    assert resident_bytes() - before < 40 * MIB


def test_pages_of_a_region_that_is_gone_are_not_given_away() -> None:
    for _ in range(3):  # the next one may be mapped at the same address
        region, view = region_and_view()
        region.materialize()
        view.fill_(1.0)
        region.release()
        del region, view
    region, view = region_and_view()
    region.materialize()
    assert is_all(view.fill_(2.0), 2.0)


def test_a_kernel_that_moves_no_pages_costs_only_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_mremap", lambda *_: -1)
    (first, a), (second, b) = region_and_view(), region_and_view()
    before = resident_bytes()
    first.materialize()
    a.fill_(3.0)
    first.release()
    second.materialize()
    assert is_all(b.fill_(4.0), 4.0)
    assert resident_bytes() - before < 72 * MIB


def test_tensor_of_its_own_mapping_gives_its_memory_back_when_it_dies() -> None:
    before = resident_bytes()
    tensor = mapped_empty(16 * MIB, torch.float32, CPU).fill_(1.0)
    view = tensor[5:]
    del tensor
    assert resident_bytes() - before > 48 * MIB
    assert float(view[-1]) == 1.0
    del view
    gc.collect()
    assert resident_bytes() - before < 8 * MIB


def test_tensor_of_its_own_mapping_is_there_in_one_call() -> None:
    try:
        mmap.mmap(-1, mmap.PAGESIZE).madvise(memory._MADV_POPULATE_WRITE)
    except OSError:
        pytest.skip("needs Linux 5.14")
    tensor = mapped_empty(1_000_000 // 4, torch.float32, CPU)
    faults = num_faults()
    tensor.fill_(1.0)
    assert num_faults() - faults < 1_000_000 // 4096 // 4


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


def test_pool_does_not_collect_slabs_of_many_sizes() -> None:
    pool = SlabPool(CPU)
    for num_elements in range(10, 1000, 10):
        pool.give(pool.take(num_elements, torch.float32))
    assert len(pool._idle) <= 8


def test_pool_lends_no_slab_that_is_much_too_large() -> None:
    pool = SlabPool(CPU)
    pool.give(pool.take(16 * MIB, torch.float32))
    assert pool.take(4 * MIB, torch.float32).untyped_storage().nbytes() <= 20 * MIB


def test_pool_holds_no_memory_and_still_lends() -> None:
    pool = SlabPool(CPU)
    slab = pool.take(16 * MIB, torch.float32).fill_(1.0)
    before = resident_bytes()
    pool.give(slab)
    hand_back()
    assert before - resident_bytes() > 48 * MIB
    assert pool.take(16 * MIB, torch.float32).fill_(2.0)[-1] == 2.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_checked_memory_is_nan_before_it_is_written_and_after_it_is_released(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VESCALE_FSDP_CHECK_MEMORY", "1")
    region = make_region(4 * dtype.itemsize, torch.device("cpu"))
    view = torch.empty(0, dtype=dtype).set_(region.storage, 0, (4,), (1,))
    region.materialize()
    assert view.isnan().all()
    view.fill_(1.0)
    assert view.tolist() == [1.0] * 4
    region.release()
    assert view.isnan().all()


def test_a_small_region_keeps_its_memory_and_a_large_one_does_not() -> None:
    for num_bytes, stays in ((1 << 10, True), (1 << 16, False)):
        region = make_region(num_bytes, torch.device("cpu"))
        region.materialize()
        tensor = torch.empty(0, dtype=torch.uint8).set_(region.storage, 0, (num_bytes,), (1,))
        tensor.fill_(7)
        region.release()
        hand_back()
        region.materialize()
        assert bool(tensor.eq(7).all()) is stays

"""SlabPool lends each slab once, and again for about its size; with mappings and with malloc."""

from __future__ import annotations

import gc

import pytest
import torch

from vescale_fsdp.dbuffer import SlabPool, memory, pool_for

from .helpers import CPU


@pytest.fixture(params=[memory.CAN_MAP, False], ids=["default", "resized"])
def pool(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> SlabPool:
    """A pool of each kind of memory that a CPU has."""
    monkeypatch.setattr(memory, "CAN_MAP", request.param)
    return SlabPool(CPU)


def test_a_slab_has_the_size_and_dtype_that_were_asked_for(pool: SlabPool) -> None:
    for num_elements, dtype in [(7, torch.float32), (5, torch.bfloat16), (0, torch.float32)]:
        slab = pool.take(num_elements, dtype)
        assert slab.shape == (num_elements,)
        assert slab.dtype == dtype
        slab.fill_(1)
        pool.give(slab)


def storage(slab: torch.Tensor) -> int:
    return slab.untyped_storage()._cdata


def test_what_was_given_back_is_lent_again_in_another_dtype(pool: SlabPool) -> None:
    first = pool.take(8, torch.float32)
    pool.give(first)
    again = pool.take(16, torch.bfloat16)  # the same 32 bytes
    assert storage(again) == storage(first)
    pool.give(again)
    assert storage(pool.take(7, torch.float32)) == storage(first)  # most of it


def test_what_is_lent_is_not_lent_twice(pool: SlabPool) -> None:
    slabs = [pool.take(8, torch.float32) for _ in range(3)]
    for number, slab in enumerate(slabs):
        slab.fill_(number)
    assert [slab.tolist() for slab in slabs] == [[0.0] * 8, [1.0] * 8, [2.0] * 8]


def test_the_smallest_slab_that_fits_is_lent(pool: SlabPool) -> None:
    slabs = {size: pool.take(size, torch.float32) for size in (22, 10, 20)}
    storages = {size: storage(slab) for size, slab in slabs.items()}
    for slab in slabs.values():
        pool.give(slab)
    assert storage(pool.take(18, torch.float32)) == storages[20]
    assert storage(pool.take(18, torch.float32)) == storages[22]
    assert storage(pool.take(5, torch.float32)) not in storages.values()  # 10 is twice as much


def test_it_holds_as_many_slabs_as_were_out_together(pool: SlabPool) -> None:
    for _ in range(5):
        slabs = [pool.take(8, torch.float32) for _ in range(3)]
        for slab in slabs:
            pool.give(slab)
    assert len(pool._idle) == 3
    assert not pool._lent


def test_what_is_in_has_no_memory(pool: SlabPool) -> None:
    out, back = pool.take(8, torch.float32), pool.take(8, torch.float32)
    out.fill_(3)
    pool.give(back)
    assert [region.is_materialized for region in pool._idle] == [False]
    again = pool.take(8, torch.float32)
    assert all(region.is_materialized for region in pool._lent.values())
    again.fill_(4)
    assert again.tolist() == [4.0] * 8
    assert out.tolist() == [3.0] * 8


def test_a_tensor_of_somebody_else_is_not_taken_in(pool: SlabPool) -> None:
    pool.give(torch.zeros(8))
    assert not pool._idle


def test_groups_of_a_device_share_a_pool_for_as_long_as_one_holds_it() -> None:
    device = torch.device("cpu", 3)  # nobody else's
    pool = pool_for(device)
    assert pool_for(torch.device("cpu", 3)) is pool
    del pool
    gc.collect()
    assert device not in memory._POOLS

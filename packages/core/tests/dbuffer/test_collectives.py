"""Gathering a DBuffer and reducing gradients: the numbers, the places and the bytes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

from vescale_fsdp.dbuffer import Comm, DBuffer, PendingReduce, SlabPool, choose_reduction
from vescale_fsdp.dbuffer.collectives import Reduction
from vescale_fsdp.planner import plan
from vescale_fsdp.ranks import waits
from vescale_fsdp.testing import run_ranks

from .helpers import CPU, OFFSETS, SHAPES, SHARD_SIZES, is_gap, make_layout, random, random_tensors

WORLD_SIZES = pytest.mark.parametrize("world_size", [1, 2, 3])
REDUCTIONS: list[Reduction] = ["native", "all_to_all"]


def make_comm(reduction: Reduction = "all_to_all") -> Comm:
    size = dist.get_world_size()
    groups = dist.new_group(), dist.new_group()
    return Comm(*groups, rank=dist.get_rank(), size=size, reduction=reduction)


def make_buffer(full_dtype: torch.dtype) -> DBuffer:
    """A buffer that holds this rank's parts of `random_tensors(0)`."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layout = make_layout(size)
    buffer = DBuffer(
        layout, SHAPES, rank, shard_dtype=torch.float32, full_dtype=full_dtype, device=CPU
    )
    for index, (view, whole) in enumerate(
        zip(buffer.shard_views(), random_tensors(0), strict=True)
    ):
        start, stop = layout.local_range(index, rank)
        view.copy_(whole.reshape(-1)[start:stop])
    return buffer


# --- gather ---------------------------------------------------------------------------------------


def check_gather(full_dtype: torch.dtype) -> None:
    comm, buffer, size = make_comm(), make_buffer(full_dtype), dist.get_world_size()
    views = list(buffer.full.views)
    for scale in (1, 2):  # again, after a step
        work = comm.start_gather(buffer)
        if work is not None:
            work.wait()
        wholes = [(scale * whole).to(full_dtype) for whole in random_tensors(0)]
        base, itemsize = buffer.full.flat.data_ptr(), buffer.full.flat.element_size()
        for view, whole, offset in zip(views, wholes, OFFSETS, strict=True):
            assert torch.equal(view, whole)  # with nothing copied out: it is a view
            assert not view.numel() or view.data_ptr() == base + offset * itemsize
        assert buffer.full.flat[is_gap(size)].eq(0).all()
        assert buffer.shard.dtype == torch.float32
        buffer.full.release()
        assert not buffer.full.is_materialized
        buffer.shard.mul_(2)


@WORLD_SIZES
@pytest.mark.parametrize("full_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_gather_writes_every_tensor_in_place_and_leaves_gaps_zero(
    world_size: int, full_dtype: torch.dtype
) -> None:
    run_ranks(check_gather, world_size, full_dtype)


class Recorder(TorchDispatchMode):
    """Names of the operators that run, views left out."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.names.append(func._schema.name)
        return func(*args, **(kwargs or {}))


def check_gather_cost() -> None:
    """One all-gather and, where the dtypes differ, one cast: nothing per tensor."""
    comm = make_comm()
    for full_dtype, casts in ((torch.float32, []), (torch.bfloat16, ["aten::copy_"])):
        buffer = make_buffer(full_dtype)
        with CommDebugMode() as traffic, Recorder() as recorder:
            work = comm.start_gather(buffer)
            assert isinstance(work, waits.Bounded)  # under way: it is the caller who waits
            work.wait()
        assert traffic.get_total_counts() == 1
        assert [name for name in recorder.names if name.startswith("aten::")] == casts


def test_gather_is_one_asynchronous_collective_without_copies() -> None:
    run_ranks(check_gather_cost, 2)


# --- reduce ---------------------------------------------------------------------------------------


def start(comm: Comm, full: Tensor, reduce_dtype: torch.dtype) -> PendingReduce:
    return comm.start_reduce(full, reduce_dtype, SlabPool(CPU))


def start_and_finish(comm: Comm, full: Tensor, reduce_dtype: torch.dtype) -> Tensor:
    before, pool = full.clone(), SlabPool(CPU)
    result = comm.start_reduce(full, reduce_dtype, pool).finish()
    assert torch.equal(full, before)
    assert not pool._lent  # what was borrowed was given back
    assert result.dtype == reduce_dtype
    assert result.shape == (full.numel() // comm.size,)
    for region in pool._idle:  # the result is nobody else's memory
        assert result.untyped_storage()._cdata != region.storage._cdata
    assert result.untyped_storage()._cdata != full.untyped_storage()._cdata
    return result


def check_reduce(dtype: torch.dtype) -> None:
    for reduction in REDUCTIONS:
        check_reduction(reduction, dtype)


def check_reduction(reduction: Reduction, dtype: torch.dtype) -> None:
    comm, size = make_comm(reduction), dist.get_world_size()
    shard_size = SHARD_SIZES[size]
    own = slice(comm.rank * shard_size, (comm.rank + 1) * shard_size)
    for seed in (0, 100):
        of_ranks = [random(size * shard_size, seed + rank, dtype) for rank in range(size)]
        total = of_ranks[0].float()  # in fp32, in the order of the ranks
        for gradients in of_ranks[1:]:
            total = total + gradients.float()
        expected = (total * (1.0 / size))[own]
        result = start_and_finish(comm, of_ranks[comm.rank], torch.float32)
        if reduction == "all_to_all" or size <= 2:
            assert torch.equal(result, expected)
        else:  # the order in which gloo sums three is its own
            torch.testing.assert_close(result, expected, rtol=0, atol=2e-7)


@WORLD_SIZES
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_both_reductions_are_the_average_summed_in_fp32(
    world_size: int, dtype: torch.dtype
) -> None:
    run_ranks(check_reduce, world_size, dtype)


def check_order_of_sum() -> None:
    """1e8 + 1 - 1e8 is 0 in fp32, where 1e8 - 1e8 + 1 is 1."""
    comm = make_comm("all_to_all")
    mine = [1e8, 1.0, -1e8][comm.rank]
    assert start_and_finish(comm, torch.full((6,), mine), torch.float32).tolist() == [0.0, 0.0]
    mine = [1e8, -1e8, 1.0][comm.rank]
    third = torch.tensor(1.0) * (1.0 / 3)
    assert start_and_finish(comm, torch.full((6,), mine), torch.float32).tolist() == [third] * 2


def test_all_to_all_sums_in_the_order_of_ranks() -> None:
    run_ranks(check_order_of_sum, 3)


def check_sum_dtype(reduction: Reduction) -> None:
    """256 + 1 is 257 in fp32, and 256 in bf16."""
    comm = make_comm(reduction)
    mine = torch.full((4,), [256.0, 1.0][comm.rank], dtype=torch.bfloat16)
    assert start_and_finish(comm, mine, torch.float32).tolist() == [128.5, 128.5]
    assert start_and_finish(comm, mine, torch.bfloat16).tolist() == [128.0, 128.0]


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_the_sum_is_made_in_the_reduce_dtype(reduction: Reduction) -> None:
    run_ranks(check_sum_dtype, 2, reduction)


def check_bytes_and_flight(reduction: Reduction, dtype: torch.dtype, scratch: list[int]) -> None:
    """``scratch``: elements that are borrowed from the pool while the collective is in flight."""
    comm, pool = make_comm(reduction), SlabPool(CPU)
    full = torch.ones(8, dtype=dtype)
    with CommDebugMode() as traffic:
        pending = comm.start_reduce(full, torch.float32, pool)
    assert traffic.get_total_counts() == 1
    assert isinstance(pending.work, waits.Bounded)  # under way, with its buffers held
    assert [region.storage.nbytes() for region in pool._lent.values()] == scratch
    assert pending.finish().tolist() == [1.0] * 4
    assert not pool._lent


@pytest.mark.parametrize(
    ("reduction", "dtype", "scratch"),
    [
        ("native", torch.float32, []),  # sent as it is
        ("native", torch.bfloat16, [32]),  # cast before it travels: 8 elements of 4 bytes
        ("all_to_all", torch.float32, [32]),  # received
        ("all_to_all", torch.bfloat16, [16]),  # received as it was sent, at half the bytes
    ],
)
def test_one_collective_is_in_flight_and_borrows_no_more_than_it_needs(
    reduction: Reduction, dtype: torch.dtype, scratch: list[int]
) -> None:
    run_ranks(check_bytes_and_flight, 2, reduction, dtype, scratch)


def check_several_in_flight() -> None:
    comm = make_comm()
    buffer = make_buffer(torch.float32)
    pool = SlabPool(CPU)
    reductions = [
        comm.start_reduce(torch.full((6,), float(k)), torch.float32, pool) for k in range(4)
    ]
    gather = comm.start_gather(buffer)
    for k, pending in enumerate(reductions):
        assert pending.finish().tolist() == [float(k)] * 3
    assert gather is not None
    gather.wait()
    assert torch.equal(buffer.full.views[0], random_tensors(0)[0])


def test_reductions_and_a_gather_may_be_in_flight_together() -> None:
    run_ranks(check_several_in_flight, 2)


def check_one_rank() -> None:
    comm, full = make_comm(), torch.ones(5, dtype=torch.bfloat16)
    with CommDebugMode() as traffic:
        result = start_and_finish(comm, full, torch.float32)
        assert comm.start_gather(make_buffer(torch.float32)) is None
    assert traffic.get_total_counts() == 0
    result.zero_()
    assert full.tolist() == [1.0] * 5  # a copy


def test_one_rank_does_not_communicate() -> None:
    run_ranks(check_one_rank, 1)


def check_nothing() -> None:
    """Tensors without elements: a buffer of no elements."""
    comm, layout = make_comm(), plan([], 2)
    assert layout.total_size == 0
    kinds = {"shard_dtype": torch.float32, "full_dtype": torch.float32}
    buffer = DBuffer(layout, [], comm.rank, device=CPU, **kinds)
    with CommDebugMode() as traffic:
        assert comm.start_gather(buffer) is None
        assert start(comm, torch.zeros(0), torch.float32).finish().shape == (0,)
    assert traffic.get_total_counts() == 0


def test_no_elements_do_not_travel() -> None:
    run_ranks(check_nothing, 2)


def check_finish_twice() -> None:
    pending = start(make_comm(), torch.ones(4), torch.float32)
    pending.finish()
    with pytest.raises(AssertionError, match="has one of the two"):
        pending.finish()


def test_a_reduction_is_finished_once() -> None:
    run_ranks(check_finish_twice, 2)


# --- choice ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "backend", "chosen"),
    [
        (None, "gloo", "all_to_all"),
        (None, "nccl", "native"),
        ("auto", "gloo", "all_to_all"),
        ("native", "gloo", "native"),
        ("all_to_all", "nccl", "all_to_all"),
    ],
)
def test_environment_chooses_the_reduction(
    monkeypatch: pytest.MonkeyPatch, setting: str | None, backend: str, chosen: str
) -> None:
    monkeypatch.delenv("VESCALE_FSDP_REDUCE", raising=False)
    if setting is not None:
        monkeypatch.setenv("VESCALE_FSDP_REDUCE", setting)
    assert choose_reduction(backend) == chosen


def test_unknown_reduction_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VESCALE_FSDP_REDUCE", "fast")
    with pytest.raises(ValueError, match="auto, native or all_to_all, got 'fast'"):
        choose_reduction("gloo")

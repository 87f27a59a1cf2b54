"""Packing: a buffer of its own for the tensors that are not frozen, cut where parameters are."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_fsdp.dbuffer import GradientBuffer, Packing, SlabPool
from vescale_fsdp.planner import ShardLayout, TensorSpec, lay_out

from .helpers import CPU, SHAPES, make_layout, random, random_tensors


def test_nothing_frozen_is_the_layout_of_the_parameters() -> None:
    layout = make_layout(2)
    for packing in (Packing(layout), Packing(layout, [True] * 5)):
        assert packing.is_whole
        assert packing.layout is layout
        assert packing.stretches[1] == [(0, 7, 16)]
        assert packing.gaps == [(15, 16), (23, 24), (37, 40)]


def test_what_is_cut_lies_in_stretches() -> None:
    packing = Packing(make_layout(2), [False, True, True, False, True])
    # Rank 0 has 4 elements of b; rank 1 the other 3, and all of c.
    assert packing.layout.shard_size == 16
    assert packing.stretches[1] == [(0, 4, 0), (4, 7, 16)]
    assert packing.stretches[2] == [(0, 12, 20)]
    assert packing.stretches[0] == packing.stretches[3] == []
    assert packing.stretches[4] == [(0, 0, 0)]
    assert packing.gaps == [(4, 16), (19, 20)]
    assert packing.of_layout("abcde") == ["b", "b", "c"]


def test_where_nothing_is_spared_the_layout_stays() -> None:
    layout = make_layout(2)
    packing = Packing(layout, [True, True, False, False, False])  # all of the first shard
    assert packing.is_whole
    assert packing.wanted == (True, True, False, False, False)


def test_a_part_that_fills_its_section_goes_on_in_the_next_one() -> None:
    layout = lay_out([TensorSpec("a", (8,), 1), TensorSpec("b", (28,), 1)], 3, alignment=4)
    packing = Packing(layout, [False, True])
    assert layout.shard_size == packing.layout.shard_size == 12
    assert packing.is_whole
    assert len(packing.stretches[1]) == 1


@st.composite
def packings(draw: st.DrawFn) -> tuple[ShardLayout, list[bool]]:
    sizes = draw(st.lists(st.integers(0, 40), min_size=1, max_size=8))
    blocks = draw(st.lists(st.sampled_from([1, 2, 4, 6]), min_size=8, max_size=8))
    specs = [TensorSpec(f"t{i}", (n,), blocks[i]) for i, n in enumerate(sizes)]
    layout = lay_out(specs, draw(st.integers(1, 4)), alignment=draw(st.sampled_from([1, 4])))
    return layout, [draw(st.booleans()) for _ in sizes]


def buffer_of(packing: Packing, seed: int) -> torch.Tensor:
    """As a rank sends it, with a gradient of each tensor that is wanted."""
    shapes = [torch.Size(spec.shape) for spec in packing.source.specs]
    gradients = GradientBuffer(packing, shapes, torch.float32, SlabPool(CPU))
    gradients.flat.fill_(math.nan)
    for index, shape in enumerate(shapes):
        if packing.wanted[index]:
            gradients.add(index, random(shape.numel(), seed + index))
    return gradients.seal().clone()


@settings(max_examples=200, deadline=None)
@given(packings())
def test_each_rank_has_its_parts_and_nothing_else(case: tuple[ShardLayout, list[bool]]) -> None:
    layout, wanted = case
    packing = Packing(layout, wanted)
    size = packing.layout.shard_size
    flat = buffer_of(packing, 0)
    assert size <= layout.shard_size
    assert size % layout.alignment == 0
    num_elements = [0] * layout.num_shards
    for index, spec in enumerate(layout.specs):
        whole = random(spec.numel, index)
        for rank in range(layout.num_shards):
            start, stop = layout.local_range(index, rank)
            part = packing.shard_views(flat[rank * size : (rank + 1) * size], rank)[index]
            if wanted[index]:
                assert torch.equal(part, whole[start:stop])
                num_elements[rank] += -(-(stop - start) // layout.alignment) * layout.alignment
    assert size == max(num_elements) or packing.is_whole
    assert int((flat != 0).sum()) == sum(
        spec.numel for spec, flag in zip(layout.specs, wanted, strict=True) if flag
    )


@settings(max_examples=200, deadline=None)
@given(packings(), st.randoms(use_true_random=False))
def test_what_waits_is_moved(case: tuple[ShardLayout, list[bool]], rng: object) -> None:
    layout, wanted = case
    former = Packing(layout, wanted)
    packing = Packing(layout, [flag or rng.random() < 0.5 for flag in wanted])  # type: ignore[attr-defined]
    flat = buffer_of(former, 0)
    ranks = range(layout.num_shards)
    moved = packing.moved(flat, former, ranks)
    shapes = [torch.Size(spec.shape) for spec in layout.specs]
    gradients = GradientBuffer(former, shapes, torch.float32, SlabPool(CPU), waits=True)
    for index, shape in enumerate(shapes):
        if wanted[index]:
            gradients.add(index, random(shape.numel(), index))
    gradients.repack(packing)
    assert torch.equal(gradients.seal(), moved)
    size, former_size = packing.layout.shard_size, former.layout.shard_size
    for rank in ranks:
        shard = flat[rank * former_size : (rank + 1) * former_size]
        own = moved[rank * size : (rank + 1) * size]
        assert torch.equal(packing.moved(shard, former, [rank]), own)


def test_sparse_and_strided_gradients_go_to_all_stretches() -> None:
    packing = Packing(make_layout(2), [True, False, False, False, False])
    packing = Packing(make_layout(3), [True, False, True, False, False])
    gradients = GradientBuffer(packing, SHAPES, torch.float32, SlabPool(CPU))
    c = random_tensors(0)[2].permute(1, 0, 2).contiguous().permute(1, 0, 2)
    assert not c.is_contiguous()
    gradients.add(2, c)
    gradients.add(2, torch.ones(1).expand(2, 3, 2))
    flat, size = gradients.seal(), packing.layout.shard_size
    parts = [
        packing.shard_views(flat[rank * size : (rank + 1) * size], rank)[2] for rank in range(3)
    ]
    assert torch.equal(torch.cat(parts), (c + 1).reshape(-1))

"""DBuffer and shard_view: this rank's part of each tensor as a view of the shard."""

from __future__ import annotations

import pytest
import torch

from vescale_fsdp.dbuffer import DBuffer, shard_view

from .helpers import CPU, SHAPES, make_layout


def make_buffer(num_shards: int, rank: int, **options: object) -> DBuffer:
    layout = make_layout(num_shards)
    options = {"shard_dtype": torch.float32, "full_dtype": torch.float32, "device": CPU, **options}
    return DBuffer(layout, SHAPES, rank, **options)


# (offset in the shard, length) of each tensor, by number of shards and rank: see helpers.
SHARD_VIEWS = {
    (1, 0): [(0, 15), (16, 7), (24, 12), (36, 1), (0, 0)],
    (2, 0): [(0, 15), (16, 4), (0, 0), (0, 0), (0, 0)],
    (2, 1): [(0, 0), (0, 3), (4, 12), (16, 1), (0, 0)],
    (3, 0): [(0, 15), (0, 0), (0, 0), (0, 0), (0, 0)],
    (3, 1): [(0, 0), (0, 7), (8, 8), (0, 0), (0, 0)],
    (3, 2): [(0, 0), (0, 0), (0, 4), (4, 1), (0, 0)],
}


@pytest.mark.parametrize(("num_shards", "rank"), SHARD_VIEWS)
def test_shard_views_alias_the_shard_where_planned(num_shards: int, rank: int) -> None:
    buffer = make_buffer(num_shards, rank)
    views = buffer.shard_views()
    assert [(v.storage_offset(), v.numel()) for v in views] == SHARD_VIEWS[num_shards, rank]
    for view in views:
        assert view.dim() == 1
        assert view.untyped_storage()._cdata == buffer.shard.untyped_storage()._cdata


def test_shard_view_counts_from_where_the_shard_begins() -> None:
    """A shard may itself be a part of a larger tensor."""
    layout, large = make_layout(2), torch.arange(100.0)
    view = shard_view(layout, 1, large[50:70], 2)
    assert view.tolist() == list(range(54, 66))


def test_shard_views_have_versions_of_their_own() -> None:
    buffer = make_buffer(2, 0)
    view = buffer.shard_views()[0]
    before = view._version
    buffer.shard.fill_(1.0)
    assert view._version == before
    assert view.sum() == 15


def test_shard_begins_as_zeros_and_has_its_own_dtype() -> None:
    buffer = make_buffer(2, 0, full_dtype=torch.bfloat16)
    assert buffer.shard.dtype == torch.float32
    assert buffer.shard.tolist() == [0.0] * 20
    assert buffer.full.flat.dtype == torch.bfloat16
    assert buffer.full.flat.shape == (40,)
    assert not buffer.full.is_materialized


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_own_slice_is_this_ranks_part_of_the_full_buffer(rank: int) -> None:
    buffer = make_buffer(3, rank)
    buffer.full.materialize()
    own = buffer.own_slice()
    assert own.shape == (16,)
    assert own.data_ptr() == buffer.full.flat.data_ptr() + 4 * 16 * rank


def test_on_meta_there_is_a_shard_and_no_full_buffer() -> None:
    buffer = make_buffer(2, 0, device=torch.device("meta"))
    assert buffer.shard.is_meta
    assert buffer.full_face is None
    assert [view.numel() for view in buffer.shard_views()] == [15, 4, 0, 0, 0]

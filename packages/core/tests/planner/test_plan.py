"""plan() and lay_out(): exact against brute force, invariants, edge cases, refusals, warnings."""

import itertools
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_fsdp.errors import PlanError
from vescale_fsdp.planner import PaddingWarning, TensorSpec, lay_out, plan

from .naive import is_legal_start, least_shard_size


def named(sizes_and_blocks):
    return [TensorSpec(f"t{i}", (size,), block) for i, (size, block) in enumerate(sizes_and_blocks)]


def spec_lists(max_size, max_block, max_tensors):
    pair = st.tuples(st.integers(0, max_size), st.integers(1, max_block))
    return st.lists(pair, max_size=max_tensors).map(named)


def in_order(specs, num_shards, alignment=1):
    return lay_out(specs, num_shards, alignment=alignment, order="definition")


def test_exact_for_all_pairs_of_small_tensors():
    pairs = list(itertools.product(range(1, 7), range(1, 4)))
    for first, second in itertools.product(pairs, pairs):
        specs = named([first, second])
        for num_shards in (1, 2, 3, 4):
            layout = in_order(specs, num_shards)
            assert layout.exact
            assert layout.shard_size == least_shard_size(specs, num_shards), (specs, num_shards)


def test_exact_for_all_single_tensors_and_alignments():
    for size, block, num_shards, alignment in itertools.product(
        range(13), range(1, 7), range(1, 7), range(1, 5)
    ):
        specs = named([(size, block)])
        layout = in_order(specs, num_shards, alignment)
        expected = least_shard_size(specs, num_shards, alignment)
        assert layout.shard_size == expected, (specs, num_shards, alignment)


@settings(deadline=None, max_examples=300)
@given(spec_lists(16, 9, 5), st.integers(1, 8), st.integers(1, 4))
def test_exact_for_small_groups(specs, num_shards, alignment):
    layout = in_order(specs, num_shards, alignment)
    assert layout.exact
    assert layout.shard_size == least_shard_size(specs, num_shards, alignment)


@settings(deadline=None, max_examples=300)
@given(
    spec_lists(300, 70, 10),
    st.integers(1, 40),
    st.integers(1, 16),
    st.sampled_from(["definition", "auto"]),
)
def test_layout_is_legal_and_covers_each_tensor_once(specs, num_shards, alignment, order):
    layout = lay_out(specs, num_shards, alignment=alignment, order=order)
    shard_size = layout.shard_size
    assert shard_size % alignment == 0
    assert layout.total_size == num_shards * shard_size
    assert layout.padding == layout.total_size - sum(spec.numel for spec in specs)
    assert sorted(layout.order) == list(range(len(specs)))
    end = 0
    for i in layout.order:
        spec, offset = specs[i], layout.offsets[i]
        assert offset % alignment == 0
        assert offset >= end
        end = offset + spec.numel
        assert end <= layout.total_size
        assert is_legal_start(offset, spec.numel, spec.block, shard_size)
        ranges = layout.shard_ranges(i)
        assert [x for _, start, stop in ranges for x in range(start, stop)] == list(
            range(spec.numel)
        )
        # By the definition of a shard: element x of the tensor is on rank (offset + x) // S.
        assert all(
            (offset + x) // shard_size == rank
            for rank, start, stop in ranges
            for x in range(start, stop)
        )
        nonempty = {rank: (start, stop) for rank, start, stop in ranges}
        for rank in range(num_shards):
            start, stop = layout.local_range(i, rank)
            assert (start, stop) == nonempty.get(rank, (start, start))


def test_no_tensors_no_buffer():
    layout = plan([], 4, alignment=8)
    assert (layout.shard_size, layout.total_size, layout.padding) == (0, 0, 0)
    assert layout.offsets == ()
    assert layout.padding_ratio == 0.0


def test_only_empty_tensors_take_no_room():
    layout = plan(named([(0, 1), (0, 5)]), 4, alignment=8)
    assert (layout.shard_size, layout.offsets, layout.padding_ratio) == (0, (0, 0), 0.0)
    assert layout.shard_ranges(0) == []
    assert layout.local_range(0, 3) == (0, 0)


def test_empty_tensors_have_an_aligned_offset_inside_the_buffer():
    layout = plan(named([(5, 1), (0, 7), (3, 1), (0, 1)]), 1, alignment=4)
    assert layout.offsets == (0, 8, 8, 12)
    assert layout.total_size == 12


def test_scalars_take_one_element():
    specs = [TensorSpec("a", (), 1), TensorSpec("b", (), 9)]
    assert plan(specs, 2).shard_size == 1
    # Each start and S are multiples of 8.
    assert plan(specs, 2, alignment=8).offsets == (0, 8)


def test_a_block_larger_than_its_tensor_means_the_whole_tensor():
    for block in (12, 13, 10**12):
        layout = lay_out([TensorSpec("w", (3, 4), block)], 4)
        assert (layout.shard_size, layout.shard_ranges(0)) == (12, [(0, 0, 12)])


def test_the_last_block_may_be_partial():
    # 10 elements in blocks of 4 over 3 ranks: 4, 4, 2.
    layout = plan(named([(10, 4)]), 3)
    assert layout.shard_ranges(0) == [(0, 0, 4), (1, 4, 8), (2, 8, 10)]


def test_feasibility_is_not_monotone():
    # S = 3 does not fit where 2 and 4 do; a bisection from above over all S would say 4.
    assert plan([TensorSpec("w", (3, 2), 2)], 3).shard_size == 2


def test_more_shards_than_elements():
    layout = plan(named([(3, 1)]), 1000)
    assert layout.shard_size == 1
    assert layout.shard_ranges(0) == [(0, 0, 1), (1, 1, 2), (2, 2, 3)]


def test_order_is_that_of_definition_where_no_other_is_better():
    # S = 9, for the tensor of 9 must stay whole.
    layout = lay_out(named([(9, 9), (1, 1), (4, 2)]), 2)
    assert (layout.order, layout.order_name) == ((0, 1, 2), "definition")
    assert list(layout.offsets) == sorted(layout.offsets)
    assert layout.optimal


def test_offsets_are_in_the_order_of_specs_where_the_order_is_another():
    # Whole tensors: |2 2 . .|3 3| takes S = 6, |2 3|2 3| the average, 5.
    specs = named([(2, 2), (2, 2), (3, 3), (3, 3)])
    assert in_order(specs, 2).shard_size == 6
    layout = lay_out(specs, 2)
    assert (layout.shard_size, layout.order_name) == (5, "by trial")
    assert (layout.order, layout.offsets) == ((0, 2, 1, 3), (0, 5, 2, 7))
    assert layout.exact
    assert layout.optimal


def test_digest_tells_orders_apart():
    specs = named([(2, 2), (2, 2), (3, 3), (3, 3)])
    assert lay_out(specs, 2).digest != in_order(specs, 2).digest
    # The name of the order is not part of the buffer: where the order is the same, so is it.
    same = named([(5, 1), (3, 1)])
    assert lay_out(same, 2).digest == in_order(same, 2).digest


def test_same_arguments_same_layout():
    specs = named([(300, 7), (200, 11), (100, 13), (50, 50)])
    first = lay_out(specs, 12, alignment=4)
    again = lay_out(iter(specs), 12, alignment=4)
    assert again == first
    assert again.digest == first.digest


def test_plan_warns_where_blocks_force_padding_and_lay_out_does_not():
    # 4 blocks over 8 ranks: half of them hold nothing.
    specs = [TensorSpec("w", (4, 6), 6)]
    with pytest.warns(
        PaddingWarning, match="100.0% padding over 8 ranks, forced by .* 'w'"
    ) as seen:
        layout = plan(specs, 8)
    assert seen[0].filename == __file__
    assert layout == lay_out(specs, 8)


def test_plan_is_silent_where_padding_is_small_or_nothing_forces_it():
    assert plan([TensorSpec("w", (4, 6), 6)], 4).padding == 0
    # 3 elements over 1000 ranks, and 1 in units of 16: no block is to blame.
    assert plan(named([(3, 1)]), 1000).padding == 997
    assert plan(named([(1, 1)]), 1, alignment=16).padding == 15


def test_an_unknown_order_is_refused():
    with pytest.raises(PlanError, match="order is 'best', expected 'auto' or 'definition'"):
        plan(named([(4, 1)]), 2, order="best")


@pytest.mark.parametrize(
    ("num_shards", "alignment", "parts"),
    [
        (0, 1, ["num_shards is 0", "at least 1", "number of ranks"]),
        (2.0, 1, ["num_shards is 2.0", "an integer"]),
        (2, 0, ["alignment is 0", "at least 1", "pass 1"]),
        (2, None, ["alignment is None", "an integer"]),
    ],
)
def test_wrong_numbers_are_refused(num_shards, alignment, parts):
    with pytest.raises(PlanError) as caught:
        plan(named([(4, 1)]), num_shards, alignment=alignment)
    for part in parts:
        assert part in str(caught.value)


def test_a_name_given_twice_is_refused():
    specs = [TensorSpec("x", (1,), 1), TensorSpec("w", (1,), 1), TensorSpec("w", (2,), 1)]
    with pytest.raises(PlanError) as caught:
        plan(specs, 2)
    for part in ("'w'", "specs 1 and 2", "tied"):
        assert part in str(caught.value)


def test_planner_imports_no_torch():
    code = (
        "import sys, vescale_fsdp.planner; "
        "print([name for name in sys.modules if name.split('.')[0] in ('torch', 'numpy')])"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], check=True, capture_output=True, text=True
    )
    assert result.stdout == "[]\n"

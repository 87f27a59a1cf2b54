"""What forces padding and what would do: small cases by eye, real layers, and that it is true."""

import cProfile
import math
import pstats

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_fsdp.planner import TensorSpec, advise, lay_out
from vescale_fsdp.planner.api import is_forced

from .shapes import (
    ALIGNMENT,
    deepseek_v3_moe_layer,
    experts,
    gpt_oss_hf_layer,
    llama_3_layer,
    matrices,
    specs_of,
)


def advice_on(specs, num_shards, alignment=1, order="auto"):
    layout = lay_out(specs, num_shards, alignment=alignment, order=order)
    return advise(layout, order=order)


def with_blocks(specs, blocks):
    return [TensorSpec(s.name, s.shape, blocks.get(s.name, s.block)) for s in specs]


def test_the_example_of_the_docstring():
    advice = advice_on([TensorSpec("w", (28672, 8192), 128 * 8192)], 2048)
    assert round(advice.padding_ratio, 2) == 8.14
    assert advice.forced_by == ("w",)
    assert advice.num_shards == 32
    assert advice.granularity == (("w", 2 * 8192),)
    assert str(advice) == (
        "814.3% padding over 2048 ranks, forced by the blocks of 'w'. Within 5%: groups of 32 "
        "ranks (HSDP, 64 replicas), or blocks of 16384 elements for 'w'."
    )


def test_one_kind_is_blamed_if_it_is_enough():
    # Whole "big" takes S = 100 where the sum needs 50; the rows of "rows" never hurt.
    specs = [
        TensorSpec("rows", (20, 5), 5),
        TensorSpec("big", (10, 10), 100),
        TensorSpec("free", (50,), 1),
    ]
    advice = advice_on(specs, 5)
    assert advice.forced_by == ("big",)
    assert advice.num_shards is not None
    assert advice.granularity == (("big", 50),)


def test_all_kinds_that_are_needed_are_blamed_and_no_others():
    # Rows of 7 and of 11 over shards of 12 elements, on average: S = 14 for one, 22 for the other.
    specs = [
        TensorSpec("b", (5,), 1),
        TensorSpec("sevens", (60, 7), 7),
        TensorSpec("elevens", (60, 11), 11),
        TensorSpec("pairs", (10, 2), 2),
    ]
    advice = advice_on(specs, 100)
    assert advice.forced_by == ("sevens", "elevens")
    # Below a row only where no rows will do: blocks of 2 and 4 take S = 10 + 2, without padding.
    assert advice.granularity == (("sevens", 2), ("elevens", 4))
    assert advice.is_below_row


@pytest.mark.parametrize(
    ("specs", "num_shards", "alignment"),
    [
        ([TensorSpec("w", (100, 10), 10)], 10, 1),  # no padding
        (
            [TensorSpec("w", (19, 10), 10)],
            20,
            1,
        ),  # one of twenty: 10 elements each, as without blocks
        ([TensorSpec("w", (3,), 1)], 8, 1),  # fewer elements than ranks
        ([TensorSpec("w", (9,), 1)], 1, 16),  # the alignment
        ([TensorSpec("w", (3, 4), 4)], 2, 16),  # the same, and blocks add nothing
        ([], 4, 1),
    ],
)
def test_nothing_to_say(specs, num_shards, alignment):
    assert advice_on(specs, num_shards, alignment) is None


def test_no_divisor_and_blocks_below_a_row():
    """A prime number of ranks, and blocks that are single rows already."""
    advice = advice_on([TensorSpec("w", (5, 100), 100)], 11)
    assert advice.num_shards == 5
    # Blocks of 64, ..., 4 take S = 64, 64, 48, 48, 48; those of 2 take 46.
    assert advice.granularity == (("w", 2),)
    assert str(advice) == (
        "120.0% padding over 11 ranks, forced by the blocks of 'w'. Within 5%: 5 ranks, or blocks "
        "of 2 elements for 'w', which are smaller than a row."
    )


def test_blocks_below_a_row_are_powers_of_two():
    # 4 rows on 8 ranks. Half a row would do, and 512 is the next power of two below 640: S = 512
    # is 60%; 256: two of 10 blocks per rank; 128: 3 of 20; 64: 5 of 40.
    advice = advice_on([TensorSpec("experts.0.up", (4, 640), 640)], 8)
    assert advice.granularity == (("experts.0.up", 64),)
    assert advice.granularity_padding_ratio == 0
    assert advice.is_below_row


def test_what_cannot_be_within_5_percent_is_not_said_to_be():
    # 640 elements over 256 ranks: 2.5 each, so 3 and 20% without blocks; 10 rows fit 10 ranks.
    advice = advice_on([TensorSpec("w", (10, 64), 64)], 256)
    assert str(advice) == (
        "2460.0% padding over 256 ranks, forced by the blocks of 'w'. Within 5%: groups of 2 "
        "ranks (HSDP, 128 replicas). The least padding that the group allows: blocks of 1 element "
        "for 'w', which are smaller than a row (20.0%)."
    )
    assert advice.granularity_padding_ratio == pytest.approx(0.2)


def test_with_a_prime_number_of_small_ranks_nothing_is_within_5_percent():
    # 10 and 3 elements whole, on two ranks: 14 of 13 elements at least.
    advice = advice_on([TensorSpec("a", (1, 10), 10), TensorSpec("b", (1, 3), 3)], 2)
    assert (advice.num_shards, advice.num_shards_padding_ratio) == (None, None)
    assert str(advice) == (
        "53.8% padding over 2 ranks, forced by the blocks of 'a'. The least padding that the "
        "group allows: blocks of 4 elements for 'a', which are smaller than a row (7.7%)."
    )


def test_blocks_of_elements_are_halved_as_elements():
    # 96 elements over 4 ranks, in blocks of 80, no whole number of rows of 12. Blocks of 40, 20 and
    # 10 take S = 48, 40 and 30; blocks of 5 take 25, which is within 5% of 24.
    advice = advice_on([TensorSpec("w", (8, 12), 80)], 4)
    assert advice.granularity == (("w", 5),)


def test_many_tensors_are_named_in_full_and_shown_in_short():
    advice = advice_on(specs_of(deepseek_v3_moe_layer, experts, 128), 4096, ALIGNMENT)
    assert len(advice.forced_by) == 512
    assert "'mlp.experts.0.gate_proj.weight' and 511 more" in str(advice)
    assert advice.num_shards == 1024  # 2.64%


@pytest.mark.parametrize(
    ("group", "blocked", "rows", "num_shards", "forced_by", "group_size", "first_block"),
    [
        (gpt_oss_hf_layer, experts, 128, 1024, 2, 128, 16 * 5760),
        (gpt_oss_hf_layer, matrices, 1, 1024, 1, 512, 2048),
        (llama_3_layer, matrices, 16, 1024, 7, 64, 8192),
        (deepseek_v3_moe_layer, matrices, 128, 1024, 1, 512, 16 * 16384),
    ],
)
def test_advice_on_layers(group, blocked, rows, num_shards, forced_by, group_size, first_block):
    advice = advice_on(specs_of(group, blocked, rows), num_shards, ALIGNMENT)
    assert len(advice.forced_by) == forced_by
    assert advice.num_shards == group_size
    assert advice.granularity[0][1] == first_block


def test_with_another_order_there_may_be_nothing_to_say():
    # Whole tensors: |2 2 . .|3 3| or |2 3|2 3|.
    specs = [TensorSpec(str(i), (size,), size) for i, size in enumerate((2, 2, 3, 3))]
    layout = lay_out(specs, 2, order="definition")
    assert layout.padding == 2
    assert advise(layout) is None
    assert advise(layout, order="definition").forced_by


def spec_lists():
    pair = st.tuples(st.integers(1, 40), st.sampled_from([1, 3, 8]), st.integers(1, 40))
    named = st.lists(pair, min_size=1, max_size=7)
    return named.map(
        lambda found: [
            TensorSpec(str(i), (rows, row), block) for i, (rows, row, block) in enumerate(found)
        ]
    )


@settings(deadline=None, max_examples=200)
@given(
    spec_lists(),
    st.integers(2, 40),
    st.sampled_from([1, 4]),
    st.sampled_from(["definition", "auto"]),
)
def test_advice_is_true(specs, num_shards, alignment, order):
    num_elements = sum(spec.numel for spec in specs)
    units = sum(-(-spec.numel // alignment) for spec in specs)

    def ratio(blocks, ranks=num_shards):
        """Padding with these blocks, or None where it is more than there must be."""
        layout = lay_out(with_blocks(specs, blocks), ranks, alignment=alignment, order=order)
        without_blocks = -(-units // ranks) * alignment
        is_fine = layout.shard_size <= max(1.05 * num_elements / ranks, without_blocks)
        return layout.padding_ratio if is_fine else None

    advice = advice_on(specs, num_shards, alignment, order)
    assert (advice is not None) == is_forced(
        lay_out(specs, num_shards, alignment=alignment, order=order), order=order
    )
    if advice is None:
        assert ratio({}) is not None
        return
    assert ratio({}) is None
    assert ratio(dict.fromkeys(advice.forced_by, 1)) is not None
    kinds = {(s.shape, s.block) for s in specs if s.name in advice.forced_by}
    for kind in kinds if order == "definition" else ():  # none of them can be left out
        rest = [s.name for s in specs if s.name in advice.forced_by and (s.shape, s.block) != kind]
        assert ratio(dict.fromkeys(rest, 1)) is None
    if advice.num_shards is not None:
        assert ratio({}, advice.num_shards) == pytest.approx(advice.num_shards_padding_ratio)
        larger = range(advice.num_shards + 1, num_shards)
        assert all(ratio({}, ranks) is None for ranks in larger if num_shards % ranks == 0)
    finer = dict(advice.granularity)
    assert ratio(finer) == pytest.approx(advice.granularity_padding_ratio)
    assert tuple(finer) == advice.forced_by
    least = max(advice.granularity_padding_ratio, advice.num_shards_padding_ratio or 0)
    assert ("The least padding that the group allows" in str(advice)) == (least > 0.05)
    below = any(finer[spec.name] < spec.shape[-1] for spec in specs if spec.name in finer)
    assert advice.is_below_row == below


def test_advice_on_many_different_tensors_is_bounded_in_work():
    """No two alike, so that kinds and nodes are many: 900,000 calls of functions, not a billion."""
    primes = [n for n in range(2, 6000) if all(n % k for k in range(2, math.isqrt(n) + 1))][:782]
    specs = [TensorSpec(str(p), (p, 1000), 37 * p) for p in primes]
    layout = lay_out(specs, 512, alignment=ALIGNMENT)
    profile = cProfile.Profile()
    assert profile.runcall(advise, layout) is not None
    assert pstats.Stats(profile).total_calls < 2_000_000

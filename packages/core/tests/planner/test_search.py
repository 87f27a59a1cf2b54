"""Units, earliest starts, and that the search settles on sets of spanning blocks."""

from vescale_fsdp.planner.solve import Item, earliest_start, units

from .naive import is_legal_start


def test_units_round_sizes_up_and_join_blocks_with_the_alignment():
    # Cuts are multiples of 4 from the start and of 6: of 12, which is 3 units of 4.
    assert units(10, 6, 4) == Item(3, 3)
    # A block that divides the alignment is no constraint any more.
    assert units(16, 2, 8) == Item(2, 1)


def test_earliest_start_is_the_least_legal_one_for_all_small_cases():
    for shard_size in range(1, 8):
        for block in range(1, 9):
            may_span = shard_size % block == 0
            for size in range(1, 17):
                for position in range(shard_size):
                    # Legality repeats with each shard: two shards of starts are all there are.
                    expected = next(
                        (
                            start
                            for start in range(position, position + 2 * shard_size)
                            if is_legal_start(start, size, block, shard_size)
                        ),
                        None,
                    )
                    found = earliest_start(position, size, block, shard_size, may_span)
                    assert found == expected, (position, size, block, shard_size)

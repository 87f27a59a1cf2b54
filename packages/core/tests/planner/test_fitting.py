"""The greedy rule: what it builds fits, and it sees where a kind fits unusually well."""

from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_fsdp.planner.orders import best_fit
from vescale_fsdp.planner.solve import Item, solve_below

items_lists = st.lists(st.builds(Item, st.integers(0, 60), st.integers(1, 12)), max_size=12)


def test_the_example_of_the_docstring():
    gate, down = Item(112, 7), Item(112, 2)
    order, _ = best_fit([gate] * 3 + [down] * 4, 9, 88)
    # 784 units of 792: the 8 that are lost are all the slack.
    assert order == [3, 0, 1, 4, 5, 2, 6]


def test_tensors_that_may_be_cut_anywhere_fill_what_others_would_lose():
    # S = 10 has room for 2 blocks of 4. The tensor of 8 has its usual place at a start of a shard;
    # behind it, 2 of the 4 free elements are what it needs to be there again.
    whole, free = Item(8, 4), Item(2, 1)
    assert best_fit([free, whole, free, whole], 2, 10)[0] == [1, 0, 3, 2]


def test_none_where_the_gaps_are_more_than_the_slack():
    # Whole tensors of 2 in shards of 3: one each.
    assert best_fit([Item(2, 2)] * 3, 2, 3)[0] is None
    assert best_fit([Item(2, 2)] * 3, 3, 3)[0] == [0, 1, 2]


def test_none_where_a_tensor_has_no_legal_start():
    assert best_fit([Item(7, 7)], 3, 6)[0] is None


def test_equal_tensors_keep_their_order_and_empty_ones_are_left_out():
    assert best_fit([Item(4, 2), Item(0, 1), Item(4, 2), Item(4, 2)], 3, 4)[0] == [0, 2, 3]


@settings(deadline=None, max_examples=300)
@given(items_lists, st.integers(1, 20), st.integers(1, 90))
def test_an_order_that_it_builds_fits(items, num_shards, shard_size):
    order, _ = best_fit(items, num_shards, shard_size)
    if order:
        assert sorted(order) == [i for i, item in enumerate(items) if item.size]
        ordered = [items[i] for i in order]
        found = solve_below(ordered, num_shards, low=1, below=shard_size + 1)
        assert found is not None
        assert found.exact

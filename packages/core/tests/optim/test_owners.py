from collections.abc import Sequence
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vescale_fsdp.optim.owners import Job, assign_owners, lower_bound_of


def jobs_of(costs: list[int], holders: list[list[tuple[int, int]]]) -> list[Job]:
    return [Job(cost, 1, "", held) for cost, held in zip(costs, holders, strict=True)]


def loads_of(jobs: list[Job], owners: Sequence[int], num_ranks: int) -> list[int]:
    loads = [0] * num_ranks
    for job, owner in zip(jobs, owners, strict=True):
        loads[owner] += job.cost
    return loads


def test_the_example_of_the_docstring() -> None:
    jobs = jobs_of([4, 3, 2, 1], [[(0, 9)], [(0, 9)], [(0, 9)], [(1, 9)]])
    assert assign_owners(jobs, 2) == [0, 1, 1, 0]
    assert loads_of(jobs, [0, 1, 1, 0], 2) == [5, 5]
    assert lower_bound_of(jobs, [0, 0]) == pytest.approx(5.0)


def test_a_job_goes_to_the_rank_that_holds_the_most() -> None:
    # Without a holder each would go to rank 0, then 1, then 2.
    jobs = jobs_of([1, 1, 1], [[(1, 3), (2, 7)], [(0, 6), (1, 4)], [(0, 1), (1, 9)]])
    assert assign_owners(jobs, 3) == [2, 0, 1]


def test_the_second_largest_holder_is_next() -> None:
    jobs = jobs_of([2, 2, 2, 2], [[(0, 9)], [(0, 5), (2, 3), (1, 1)], [(1, 1)], [(3, 1)]])
    assert assign_owners(jobs, 4)[1] == 2  # rank 0 has the first job


def test_of_equal_holders_the_least_loaded_one_is_taken() -> None:
    replicas = [(0, 5), (1, 5)]
    assert assign_owners(jobs_of([1] * 4, [replicas] * 4), 2) == [0, 1, 0, 1]


def test_a_holder_takes_no_more_than_five_percent_above_the_lower_bound() -> None:
    # 100 jobs of cost 1 on 2 ranks, all held by rank 0: the bound is 50, the limit 52.5.
    owners = assign_owners(jobs_of([1] * 100, [[(0, 1)]] * 100), 2)
    assert owners.count(0) == 52
    owners = assign_owners(jobs_of([1] * 100, [[(0, 1)]] * 100), 2, tolerance=0.0)
    assert owners.count(0) == 50


def test_equal_jobs_are_taken_by_size_then_name_then_order() -> None:
    jobs = [Job(1, 1, "b", []), Job(1, 1, "a", []), Job(1, 2, "z", []), Job(1, 1, "a", [])]
    # In order: the large one, both "a", then "b".
    assert assign_owners(jobs, 4) == [3, 1, 0, 2]


def test_loads_that_are_there_count() -> None:
    jobs = jobs_of([1, 1, 1], [[]] * 3)
    assert assign_owners(jobs, 2, loads=[0, 3]) == [0, 0, 0]
    assert lower_bound_of(jobs, [0, 3]) == pytest.approx(3.0)


@given(
    st.lists(
        st.tuples(st.integers(1, 9), st.dictionaries(st.integers(0, 2), st.integers(1, 9))),
        min_size=1,
        max_size=5,
    ),
    st.integers(1, 3),
)
@settings(max_examples=60, deadline=None)
def test_the_bound_holds_and_no_load_is_twice_the_least_possible(
    drawn: list[tuple[int, dict[int, int]]], num_ranks: int
) -> None:
    jobs = [
        Job(cost, 1, "", [(rank, n) for rank, n in held.items() if rank < num_ranks])
        for cost, held in drawn
    ]
    loads = loads_of(jobs, assign_owners(jobs, num_ranks), num_ranks)
    best = min(
        max(loads_of(jobs, owners, num_ranks))
        for owners in product(range(num_ranks), repeat=len(jobs))
    )
    assert lower_bound_of(jobs, [0] * num_ranks) <= best
    # A holder stays within the limit; the least loaded has at most the mean before it gets more.
    assert max(loads) <= 2 * best


def test_no_jobs_are_balanced() -> None:
    assert assign_owners([], 3) == []
    assert lower_bound_of([], [0, 0, 0]) == 0

"""Random faults at any point: those that live always have the same sums, and nobody hangs."""

from __future__ import annotations

import pytest

from .simulated import Training


@pytest.mark.parametrize("replicas", [2, 3, 5])
@pytest.mark.parametrize("faults", [0.0, 0.1])
@pytest.mark.sampled(1)
def test_random_faults(replicas: int, faults: float) -> None:
    died = behind = 0
    for seed in range(12):
        training = Training(seed, replicas, until=30, deaths=0.25, faults=faults)
        training.run()
        died, behind = died + training.num_died, behind + training.num_behind
        # All replicas come to the end, and those that did not come late have the same sums.
        assert len(training.results) == replicas
        first, *others = [each for each in training.results.values() if each is not None]
        assert others == [first] * len(others), seed
        assert [step for step, *_ in first] == list(range(30)), seed
        for made in training.made.values():  # and no two members of a quorum ever had different
            assert len(made) == 1, seed
    assert died > 50
    assert behind > 0

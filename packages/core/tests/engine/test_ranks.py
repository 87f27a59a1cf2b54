"""The engine's pure core on simulated ranks: random models, users and ranks."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings

from .ranks.model import Checkpoint, Spec
from .ranks.scenarios import Scenario, Step, scenarios

NUM_EXAMPLES = 10_000
NUM_PARTS = 16  # one at each change

# A unit without parameters, whose result one rank drops, around one that is checkpointed.
DROPPED_AROUND_A_CHECKPOINT = Scenario(
    specs=[
        Spec(-1),
        Spec(0),
        Spec(0, empty=True),
        Spec(2, checkpoint=Checkpoint.AROUND),
        Spec(3),
        Spec(4),
    ],
    order=[0, 1, 2, 3, 4, 5],
    in_flight=1,
    repeats=0,
    size=2,
    steps=[(Step.TRAIN, 0, [0], [0]), (Step.TRAIN, 0, [0], [0, 4])],
)
# What a forward that was broken off has run is not what the next one has.
LEFT_OUT_AFTER_A_FAILURE = Scenario(
    specs=[Spec(-1), Spec(0), Spec(0, checkpoint=Checkpoint.AROUND)],
    order=[0, 1, 2],
    in_flight=1,
    repeats=0,
    size=2,
    steps=[
        (Step.TRAIN, 0, [0], [0]),
        (Step.FAIL_FORWARD, 0, [0], [0]),
        (Step.TRAIN, 0, [0, 4], [0]),
    ],
)


@pytest.mark.parametrize("scenario", [DROPPED_AROUND_A_CHECKPOINT, LEFT_OUT_AFTER_A_FAILURE])
def test_ranks_that_once_hung_do_not(scenario: Scenario) -> None:
    scenario.run()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "part", [0, *(pytest.param(part, marks=pytest.mark.nightly) for part in range(1, NUM_PARTS))]
)
def test_ranks_issue_the_same_wait_in_no_circle_and_leave_nothing(part: int) -> None:
    @seed(part)
    @settings(
        max_examples=NUM_EXAMPLES // NUM_PARTS,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(scenarios())
    def check(scenario: Scenario) -> None:
        scenario.run()

    check()

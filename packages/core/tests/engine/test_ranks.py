"""The engine's pure core on simulated ranks: random models, users and ranks."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, example, given, settings

from .ranks.model import Checkpoint, Spec
from .ranks.scenarios import Scenario, Step, scenarios

NUM_EXAMPLES = 10_000

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


@settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@example(DROPPED_AROUND_A_CHECKPOINT)
@example(LEFT_OUT_AFTER_A_FAILURE)
@given(scenarios())
def test_ranks_issue_the_same_wait_in_no_circle_and_leave_nothing(scenario: Scenario) -> None:
    scenario.run()

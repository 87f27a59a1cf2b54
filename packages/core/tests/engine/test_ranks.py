"""The engine's pure core on simulated ranks: random models, users and ranks."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, given, settings

from .ranks.scenarios import Scenario, scenarios

NUM_EXAMPLES = 10_000


@settings(
    max_examples=NUM_EXAMPLES,
    deadline=None,
    phases=[Phase.generate, Phase.shrink],
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
@given(scenarios())
def test_ranks_issue_the_same_wait_in_no_circle_and_leave_nothing(scenario: Scenario) -> None:
    scenario.run()

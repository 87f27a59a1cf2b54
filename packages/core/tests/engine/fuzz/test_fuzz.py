"""40 random models; ``python3 dev.py fuzz`` runs 2,000. The package says how.

When one fails, ``python3 dev.py fuzz --only SEED`` prints it as a program, as small as it gets.
"""

from __future__ import annotations

import pytest

from .cases import Case, Node, Step, Unit
from .minimise import minimised
from .programs import program_of
from .runner import REFUSED, check, drawn

TIMEOUT_S = 20


@pytest.mark.parametrize("seed", range(40))
@pytest.mark.sampled(24)
def test_like_one_process_that_plays_all_ranks(seed: int) -> None:
    program = program_of(drawn(seed))
    failure = check(program, TIMEOUT_S)
    assert failure is None or failure.kind == REFUSED, f"{failure}\n\n{program}"


def test_a_wrong_weight_is_found() -> None:
    case = Case(root=Node("n0", "Chain", (Node("n1", "Linear"),), Unit()), steps=(Step(),))
    program = program_of(case).replace(
        "    return model\n\n\nWORLD_SIZE",
        "    torch.nn.init.zeros_(model.n1.bias)\n    return model\n\n\nWORLD_SIZE",
    )
    failure = check(program, TIMEOUT_S)
    assert failure is not None
    assert failure.kind == "loss"


def test_a_case_is_made_as_small_as_it_gets() -> None:
    def fails(case: Case) -> bool:
        return "n4" in program_of(case) and any(step.before for step in case.steps)

    leaves = tuple(Node(f"n{i}", "Norm", unit=Unit(), checkpoint="True") for i in range(2, 5))
    root = Node("n0", "Residual", (Node("n1", "Chain", leaves, when="now.step > 0"),), Unit("True"))
    steps = (Step(), Step(before=(("eval", "no_grad"), ("reload", "")), passes=("sum", "plain")))
    small = minimised(Case(root, steps, in_flight=4), fails, limit_s=20)
    kept = Node("n4", "Linear")
    expected = Step(before=(("reload", ""),))
    assert small == Case(Node("n0", "Chain", (kept,), Unit()), (expected,), width=1)

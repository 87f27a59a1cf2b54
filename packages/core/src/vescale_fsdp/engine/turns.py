"""Taking turns: while an order is recorded, ranks settle whose unit is gathered next.

Each rank says through the store which unit it wants. Where they differ, the one that comes first
in the model is next (in backward: the one that ran last), and every rank takes part in it. A
rank that wanted another one asks again. So the ranks get one order of all units that any of them
runs, and none waits for a collective that another will not issue.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field

import torch.distributed as dist

from vescale_fsdp.engine.agreement import exchange
from vescale_fsdp.errors import RankMismatchError

__all__ = ["END", "Turn", "agree_on_turn"]

END = -1  # instead of a unit: this rank has nothing more to run in the pass


@dataclass(frozen=True)
class Turn:
    """What one rank says, or all of them together.

    Attributes:
        step: the pass that the rank is in, in words; the same on all.
        unit: that is wanted next, or END.
        recomputes: whether a backward wants it for running its forward again.
        complete: groups whose gradients are all there.
        late: groups that only the end of the backward completes; of any rank.
        again: groups that were reduced and have got gradients since; of any rank.
        ran: at the end of a pass, the units that ran in its forward; of all ranks together.
        wrong: what is wrong on this rank, if anything.
        failed: whether the pass has ended by an exception; on any rank.
        skips: whether a rank has left out units since the last backward; any rank.
    """

    step: str
    unit: int
    recomputes: bool = False
    complete: list[int] = field(default_factory=list)
    late: list[int] = field(default_factory=list)
    again: list[int] = field(default_factory=list)
    ran: list[int] = field(default_factory=list)
    wrong: str = ""
    failed: bool = False
    skips: bool = False


def agree_on_turn(
    mine: Turn,
    groups: Sequence[dist.ProcessGroup],
    precedence: Callable[[Turn], list[int]],
    timeout_s: float | None = None,
) -> Turn:
    """The turn that all ranks take: the unit of lowest precedence, and what is complete on all.

    Collective over each of ``groups``, one after the other; a round through the store each.

    Raises:
        RankMismatchError: on every rank, if passes differ or a rank says that something is wrong.
    """

    def merge(payloads: list[str]) -> str:
        turns = [Turn(**json.loads(payload)) for payload in payloads]
        wrong = next((turn.wrong for turn in turns if turn.wrong), "") or _difference(turns)
        wanted = [turn for turn in turns if turn.unit != END]
        everywhere = set(turns[0].complete).intersection(*(turn.complete for turn in turns))
        complete = [group for group in turns[0].complete if group in everywhere]
        first = min(wanted, key=precedence, default=turns[0])
        ran = sorted({unit for turn in turns for unit in turn.ran})
        late = sorted({group for turn in turns for group in turn.late})
        again = sorted({group for turn in turns for group in turn.again})
        merged = Turn(
            first.step,
            first.unit,
            first.recomputes,
            complete,
            late,
            again,
            ran,
            wrong,
            failed=any(turn.failed for turn in turns),
            skips=any(turn.skips for turn in turns),
        )
        return json.dumps(asdict(merged))

    answer = json.dumps(asdict(mine))
    for group in groups:
        answer = exchange("next step", answer, group, merge, timeout_s=timeout_s)
    turn = Turn(**json.loads(answer))
    if turn.wrong:
        raise RankMismatchError(
            f"ranks disagree about the next step: {turn.wrong}. Run the same passes with the same "
            "order of units on every rank; a rank may leave units out"
        )
    return turn


def _difference(turns: list[Turn]) -> str:
    for turn in turns:
        if turn.step != turns[0].step:
            return f"one rank is in {turns[0].step}, another in {turn.step}"
    return ""

"""Lightning's counters of progress, for a restart with another number of micro-batches a step.

Lightning counts batches of the loader. With other ranks a step has another number of them::

    4 ranks, step 5   batch_progress.current.ready =  5 (1 a step)
    3 ranks, step 5   batch_progress.current.ready = 10 (2 a step)
"""

from __future__ import annotations

import copy
from typing import Any

__all__ = ["as_after_a_batch", "with_micro_batches"]

_BATCHES = "epoch_loop.batch_progress"
_STATE = "epoch_loop.state_dict"
_STEPPED = "_batches_that_stepped"


def as_after_a_batch(loops: dict[str, Any]) -> dict[str, Any]:
    """Return the loops' state in the form in which ``on_train_batch_end`` sees it.

    The state is that of the beginning of a batch, when all that follows the batch before (its
    validation, and the schedulers that wait for that) is done. Lightning's restart from
    ``on_train_batch_end`` adds one to these counters, and continues with the next batch. From any
    later place it would step schedulers again. Whether a batch is the last of its epoch is known
    when it is loaded, which is before this moment.
    """
    made = copy.deepcopy(loops)
    for part in ("total", "current"):
        made["fit_loop"][_BATCHES][part]["completed"] -= 1
    made["fit_loop"][_BATCHES]["is_last_batch"] = False
    made["fit_loop"][_STATE][_STEPPED] -= 1
    return made


def with_micro_batches(loops: dict[str, Any], before: int, after: int) -> dict[str, Any]:
    """Return the loops' state for another number of micro-batches a step.

    Args:
        before: the number with which it was saved, after a whole step.
        after: the number now.
    """
    made = copy.deepcopy(loops)
    if before == after:
        return made
    for counters in (made["fit_loop"][_BATCHES]["total"], made["fit_loop"][_BATCHES]["current"]):
        num_open = counters["ready"] - counters["completed"]  # 1 after `as_after_a_batch`, else 0
        ready = counters["ready"] // before * after
        counters.update(ready=ready, started=ready, processed=ready, completed=ready - num_open)
    return made

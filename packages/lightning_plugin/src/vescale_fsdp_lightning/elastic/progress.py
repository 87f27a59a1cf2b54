"""Lightning's counters of progress, for a restart with other numbers of micro-batches or samples.

Lightning counts batches of the loader. With other ranks a step has another number of them::

    4 ranks, step 5   batch_progress.current.ready =  5 (1 a step)
    3 ranks, step 5   batch_progress.current.ready = 10 (2 a step)
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["COUNTS", "Counts", "as_after_a_batch", "with_counts"]

COUNTS = "elastic_counts"  # the key of `Counts` in Lightning's dictionary
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


@dataclass(frozen=True)
class Counts:
    """What a state's counters of batches mean. It is saved with Lightning's dictionary.

    Attributes:
        micro_batches: of a rank in a step.
        global_batch: samples of a step, of all ranks together.
        samples: that all steps have taken.
    """

    micro_batches: int
    global_batch: int
    samples: int

    @classmethod
    def of(cls, saved: Mapping[str, Any], global_batch: int, path: str = "") -> Counts:
        """Return those of a dictionary of Lightning, which another kind of training may have saved.

        Args:
            global_batch: of the training that goes on. Other trainings count as if they had taken
                as many samples a step.
            path: of the checkpoint, for errors.

        Raises:
            ValueError: it is of the middle of an epoch, and its steps had different numbers of
                batches.
        """
        own = saved.get(COUNTS)
        if own is not None:
            return cls(**own)
        loop = saved["loops"]["fit_loop"]
        steps, batches = saved["global_step"], loop[_BATCHES]["total"]["ready"]
        epoch = loop["epoch_progress"]["current"]
        if steps and batches % steps and epoch["ready"] != epoch["processed"]:
            raise ValueError(
                f"{path} has made {batches} batches in {steps} steps, and is of the middle of an "
                "epoch: an elastic training cannot tell how many steps are left in it, because "
                "its steps had different numbers of batches. Pass a ckpt_path of the end of an "
                "epoch"
            )
        return cls(max(batches // max(steps, 1), 1), global_batch, steps * global_batch)


def with_counts(
    loops: dict[str, Any], before: Counts, after: Counts, num_steps: int
) -> dict[str, Any]:
    """Return the loops' state for other numbers of micro-batches or of samples a step.

    A step that was not whole when the state was saved begins again. With another global batch, an
    epoch has as many steps left as its samples that are left make, rounded up.

    Args:
        before: with which it was saved.
        after: now.
        num_steps: of an epoch now.
    """
    made = copy.deepcopy(loops)
    epoch = made["fit_loop"][_BATCHES]
    if epoch["current"]["ready"] % before.micro_batches:
        made["fit_loop"][_STATE][_STEPPED] -= 1  # Lightning adds one for the step that it ends
    for name in ("total", "current"):
        counters = epoch[name]
        num_open = counters["ready"] - counters["completed"]  # 1 after `as_after_a_batch`, else 0
        steps = counters["ready"] // before.micro_batches
        if name == "current" and before.global_batch != after.global_batch:
            as_many = steps * before.global_batch // after.global_batch
            steps = num_steps if epoch["is_last_batch"] else min(as_many, num_steps - 1)
        ready = steps * after.micro_batches
        counters.update(ready=ready, started=ready, processed=ready, completed=ready - num_open)
    return made

"""gloo's network threads let the rank that they serve go first."""

import os
from pathlib import Path

import pytest
import torch
from torch import nn

from vescale_fsdp import fully_shard
from vescale_fsdp.dbuffer import let_ranks_go_first
from vescale_fsdp.testing import run_ranks

pytestmark = pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="Linux only")


def _network_threads() -> list[int]:
    tasks = Path("/proc/self/task").iterdir()
    return [int(task.name) for task in tasks if (task / "comm").read_text() == "gloo_tcp_loop\n"]


def _train_and_look() -> None:
    model = fully_shard(nn.Linear(8, 8))
    model(torch.ones(2, 8)).sum().backward()
    threads = _network_threads()
    assert len(threads) >= 3, "the default group's, the gathers' and the reductions'"
    assert {os.sched_getscheduler(thread) for thread in threads} == {os.SCHED_BATCH}
    assert os.sched_getscheduler(0) == os.SCHED_OTHER, "the rank itself stays as it was"


def test_after_a_step_all_of_gloos_threads_are_batch_threads_and_the_rank_is_not() -> None:
    run_ranks(_train_and_look, 2)


def _refused() -> None:
    for thread in _network_threads():  # of an earlier test in this process
        os.sched_setscheduler(thread, os.SCHED_OTHER, os.sched_param(0))

    def refuse(*_: object) -> None:
        raise PermissionError

    os.sched_setscheduler = refuse
    model = fully_shard(nn.Linear(8, 8))
    model(torch.ones(2, 8)).sum().backward()
    assert {os.sched_getscheduler(thread) for thread in _network_threads()} == {os.SCHED_OTHER}


def test_a_system_that_refuses_leaves_them_as_they_are() -> None:
    run_ranks(_refused, 2)


def test_a_process_without_communicators_changes_nothing() -> None:
    before = os.sched_getscheduler(0)
    let_ranks_go_first()
    assert os.sched_getscheduler(0) == before

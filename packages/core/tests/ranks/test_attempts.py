"""Processes that torchrun has started again do not read what those before have left."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist
from torch.distributed import TCPStore

from vescale_fsdp import checkpoint
from vescale_fsdp.ranks.attempt import AbsentError, agree_on_name


def names(store: TCPStore, world_size: int) -> set[str]:
    """What the ranks of an attempt agree on, each with a connection of its own."""
    with ThreadPoolExecutor(world_size) as pool:
        calls = [
            pool.submit(agree_on_name, store.clone(), "here", rank, world_size, 20.0)
            for rank in reversed(range(world_size))
        ]
        return {call.result() for call in calls}


def test_each_attempt_has_a_name_of_its_own_also_after_one_that_died_half_way() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    first = names(store, 3)
    # Rank 1 has asked, and was killed; rank 0 had not started.
    store.add("here/num_asked", 1)
    second, third = names(store, 3), names(store, 2)
    assert (len(first), len(second), len(third)) == (1, 1, 1)
    assert len(first | second | third) == 3


def test_a_rank_that_does_not_come_is_an_error() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    with pytest.raises(AbsentError, match=r"rank 1 has not come within 0 s"):
        agree_on_name(store, "here", 0, 2, 0.05)
    with pytest.raises(AbsentError, match=r"rank 0 has not come within 0 s"):
        agree_on_name(store, "there", 1, 2, 0.05)


def test_elsewhere_it_is_torchs_function(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(dist, "init_process_group", lambda *a, **k: calls.append((a, k)))
    checkpoint.init_process_group("gloo", group_name="x")
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    checkpoint.init_process_group("gloo", init_method="file:///x", rank=0, world_size=1)
    assert calls == [
        (("gloo",), {"group_name": "x"}),
        (("gloo",), {"init_method": "file:///x", "rank": 0, "world_size": 1}),
    ]

"""`elastic.replicas` under torchrun: two replicas of two ranks, each with an agent of its own.

A rank of one replica is killed. The other replica makes its next step in the same processes; the
lost one is started again by its agent, catches up, and both end with the same bits.
"""

from __future__ import annotations

import importlib.util
import json
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from integration_tests.torchrun import Torchrun
from torch import nn

from vescale_fsdp_elastic.order import Order, parts

SCRIPT = Path(__file__).resolve().parent / "replicas_run.py"
STEPS = 60


def script() -> Any:
    spec = importlib.util.spec_from_file_location("replicas_run", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reference(present: dict[int, list[int]]) -> dict[int, float]:
    """One process that takes the samples of the replicas that were there."""
    run = script()
    model, order, losses = run.make(), Order(100, 0), {}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02)
    for step, replicas in sorted(present.items()):
        indices: list[int] = []
        for rank in (2 * replica + rank for replica in replicas for rank in range(2)):
            (part,) = parts(step * run.GLOBAL_BATCH, run.GLOBAL_BATCH, rank, 4, 4)
            indices += order.indices(part.start, part.stop)
        x, y = (
            torch.stack(each) for each in zip(*(run.Numbers()[i] for i in indices), strict=True)
        )
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        losses[step] = float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def lines(out: Path, replica: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / f"steps-{replica}.jsonl").read_text().splitlines()]


@pytest.mark.timeout(180)
def test_a_rank_is_killed_and_the_other_replica_goes_on(tmp_path: Path) -> None:
    out, agents = tmp_path / "run", []
    out.mkdir()
    try:
        for replica, fault in enumerate(("-1 -1", "8 1")):
            agents.append(
                Torchrun(
                    *("--standalone", "--nproc-per-node", "2", "--max-restarts", "3"),
                    *(SCRIPT, out, replica, STEPS),
                    log=tmp_path / f"log-{replica}",
                    environ={"FAULT": fault},
                    preload=["vescale_fsdp_elastic"],
                )
            )
        end = time.monotonic() + 150
        for replica, agent in enumerate(agents):
            text = (tmp_path / f"log-{replica}").read_text
            assert agent.wait(end - time.monotonic()) == 0, text()
    finally:
        for agent in agents:
            agent.kill()

    stays, returns = lines(out, 0), lines(out, 1)
    assert [line["step"] for line in stays] == list(range(STEPS)), "no step is lost or repeated"
    assert len({line["pid"] for line in stays}) == 1, "in the same process"
    assert len({line["pid"] for line in returns}) == 2
    present = {line["step"]: line["present"] for line in stays}
    alone = [step for step, replicas in present.items() if replicas == [0]]
    assert alone == list(range(8, max(alone) + 1))
    assert [line["step"] for line in returns] == [s for s in range(STEPS) if s not in alone]
    assert returns[8]["source"] == "replica"

    expected = reference(present)
    for line in stays + returns:
        assert line["loss"] == pytest.approx(expected[line["step"]], abs=1e-6), line
    for rank in range(2):
        digests = {(out / f"end-{replica}-{rank}").read_text() for replica in range(2)}
        assert len(digests) == 1

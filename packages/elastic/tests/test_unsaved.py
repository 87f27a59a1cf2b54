"""What no saved state contains: gradients that wait, modes, objects that a loop holds, workers."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.data import DataLoader

import vescale_fsdp_elastic as elastic
from vescale_fsdp.checkpoint.saving import finish_saves
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_elastic import batches as batches_module
from vescale_fsdp_elastic.batches import WorkerInit
from vescale_fsdp_elastic.unsaved import ModesBySteps, put

from .helpers import Numbers, Stop, make

WINDOW, UNTIL = 4, 12


def own_loop(root: Path, stop_at: int | None, options: dict[str, Any]) -> list[Any]:
    """Accumulates over several of ``run.steps``, and draws numbers before the loop."""
    model, optimizer, _ = make(dropout=0.3)
    losses: list[Any] = []
    memory = root / f"host{dist.get_rank()}"
    try:
        with elastic.training(
            root / "run", model, optimizer, memory_directory=memory, signals=(), **options
        ) as run:
            iter(DataLoader(Numbers()))  # draws a number, as in each epoch of a loop of one's own
            for number in run.steps(until=UNTIL):
                if number == stop_at:
                    run._keeper.finish()
                    finish_saves()()
                    raise Stop
                x, y = Numbers()[2 * number + dist.get_rank()]
                model.set_requires_gradient_sync((number + 1) % WINDOW == 0)  # type: ignore[operator]
                loss = nn.functional.mse_loss(model(x), y)
                (loss / WINDOW).backward()
                if (number + 1) % WINDOW == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                losses.append((number, loss.item()))
            losses += [param.full_tensor().tolist() for param in model.parameters()]  # type: ignore[attr-defined]
    except Stop:
        pass
    return losses


@pytest.mark.parametrize(
    ("options", "begins"),
    [({"every": 3, "every_on_disk": None}, 4), ({"every": 100, "every_on_disk": 3}, 4)],
    ids=["memory", "disk"],
)
def test_no_state_is_saved_while_gradients_wait_for_the_optimizer(
    tmp_path: Path, options: dict[str, Any], begins: int
) -> None:
    quiet = run_ranks(own_loop, 2, tmp_path / "quiet", None, options)
    run_ranks(own_loop, 2, tmp_path / "torn", 7, options)
    torn = run_ranks(own_loop, 2, tmp_path / "torn", None, options)
    for found, expected in zip(torn, quiet, strict=True):
        assert found == expected[begins:]


def two_optimizers(root: Path, stop_at: int | None) -> list[Any]:
    """One of them steps in each of ``run.steps``, the other accumulates over several."""
    model, *_ = make()
    slow = torch.optim.SGD(model[0].parameters(), lr=0.1)  # type: ignore[index]
    fast = torch.optim.SGD(model[2:].parameters(), lr=0.1)  # type: ignore[index]
    with (
        contextlib.suppress(Stop),
        elastic.training(
            root / "run",
            model,
            {"slow": slow, "fast": fast},
            memory_directory=root / f"host{dist.get_rank()}",
            signals=(),
            every=3,
        ) as run,
    ):
        first = run.step
        for number in run.steps(until=UNTIL):
            if number == stop_at:
                run._keeper.finish()
                raise Stop
            x, y = Numbers()[2 * number + dist.get_rank()]
            nn.functional.mse_loss(model(x), y).backward()
            for optimizer in (fast, slow) if (number + 1) % WINDOW == 0 else (fast,):
                optimizer.step()
                optimizer.zero_grad()
    return [first, *(param.full_tensor().tolist() for param in model.parameters())]  # type: ignore[attr-defined]


def test_each_optimizer_is_waited_for(tmp_path: Path) -> None:
    quiet = run_ranks(two_optimizers, 2, tmp_path / "quiet", None)
    run_ranks(two_optimizers, 2, tmp_path / "torn", 7)
    torn = run_ranks(two_optimizers, 2, tmp_path / "torn", None)
    assert [each[0] for each in torn] == [4, 4]
    assert [each[1:] for each in torn] == [each[1:] for each in quiet]


def never_steps(root: Path) -> int:
    model, optimizer, _ = make()
    steps = 105
    with (
        contextlib.suppress(Stop),
        elastic.training(
            root / "run", model, optimizer, memory_directory=root / "m", signals=(), every=10
        ) as run,
    ):
        for number in run.steps(until=200):
            if number == steps:
                run._keeper.finish()
                raise Stop
            model(torch.ones(6)).sum().backward()
    assert run.last_kept is not None
    return run.last_kept.step


def test_a_loop_that_trains_by_other_means_is_saved_after_all(tmp_path: Path) -> None:
    assert run_ranks(never_steps, 1, tmp_path) == [100]


def test_dicts_and_lists_stay_the_same_objects() -> None:
    extra: dict[str, Any] = {"losses": [1, 2, 3], "best": {"step": 3, "all": [1]}, "new": 1}
    losses, best, every = extra["losses"], extra["best"], extra["best"]["all"]
    put(extra, {"losses": [1], "best": {"step": 1, "all": []}, "name": "a"})
    assert extra == {"losses": [1], "best": {"step": 1, "all": []}, "name": "a"}
    assert losses is extra["losses"]
    assert best is extra["best"]
    assert every is best["all"]


def test_modes_are_restored() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(), nn.BatchNorm1d(2).eval())
    model[0].bias.requires_grad_(False)
    modes = ModesBySteps([model], 0)
    modes.note(2)
    model[0].bias.requires_grad_(True)  # in step 3, on purpose
    modes.note(4)
    model.eval()  # and a rank is lost
    model.requires_grad_(False)
    model.append(nn.Linear(2, 2))
    for step, bias in ((4, True), (3, False), (0, False)):
        modes.restore(step)
        assert [module.training for module in model] == [True, True, False, True]
        flags = [p.requires_grad for p in model.parameters()]
        assert flags == [True, bias, True, True, True, True]


def test_a_worker_is_ended_by_the_end_of_its_rank_alone() -> None:
    """torchrun sends SIGTERM to it too. At exit multiprocessing waits until it has ended."""
    loader = DataLoader(Numbers(), num_workers=1, worker_init_fn=WorkerInit(None))
    batches: Any = iter(loader)
    next(batches)
    (worker,) = batches._workers
    worker.terminate()
    time.sleep(0.5)
    assert worker.is_alive()
    next(batches)
    flag = batches_module._has_ended()
    flag.fill_(True)
    try:
        worker.terminate()
        worker.join(20)
        assert not worker.is_alive()
    finally:
        flag.fill_(False)


SCRIPT = """
import subprocess, sys, torch
from torch.utils.data import DataLoader
from vescale_fsdp_elastic import batches as batches_module
from vescale_fsdp_elastic.batches import WorkerInit

class Decoded(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        decoder = subprocess.Popen(["sleep", "100"])
        decoder.terminate()
        decoder.wait()
        return index

if __name__ == "__main__":
    how = sys.argv[1]
    options = {"multiprocessing_context": "spawn"} if how == "spawn" else {}
    loader = DataLoader(Decoded(), num_workers=1, worker_init_fn=WorkerInit(None), **options)
    batches = iter(loader)  # and so the worker lives when this process ends
    print(next(batches))
    if how == "raise":
        raise SystemExit(3)
"""


@pytest.mark.parametrize("how", ["fork", "spawn", "raise"])
@pytest.mark.sampled(1)
def test_a_process_ends_although_workers_live_and_so_do_what_they_start(
    tmp_path: Path, how: str
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = subprocess.run([sys.executable, tmp_path / "script.py", how], timeout=60, check=False)
    assert done.returncode == (3 if how == "raise" else 0)

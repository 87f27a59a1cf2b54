"""Loops that are left before their end, and what the context does when it is left."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import vescale_fsdp_elastic as elastic
from vescale_fsdp import CheckpointExistsError, checkpoint
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_elastic import Run, Step, leaving

from .helpers import GLOBAL_BATCH, Numbers, make

Body = Callable[[Run, Callable[[Step], None]], Any]


def in_context(root: Path, body: Body, **options: Any) -> Any:
    """Call ``body`` with a run and a function that makes a step. Returns what it returns."""
    model, optimizer, _ = make()
    options = {"every": 3, "every_on_disk": None, **options}

    def make_step(step: Step) -> None:
        for x, y in step:
            step.backward(torch.nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()

    with elastic.training(
        root / "run", model, optimizer, memory_directory=root / "memory", signals=(), **options
    ) as run:
        return body(run, make_step)


def steps_of(run: Run, until: int) -> Any:
    return run.batches(Numbers(), global_batch=GLOBAL_BATCH, until=until)


def loss_after(run: Run, make_step: Callable[[Step], None]) -> tuple[int, float]:
    """The number of the next step, and its loss."""
    for step in steps_of(run, 100):
        make_step(step)
        return step.number, step.mean_loss()
    raise AssertionError("no step was left")


def leaves_in_between(run: Run, make_step: Callable[[Step], None]) -> list[int]:
    found = []
    while run.step < 9:
        for step in steps_of(run, 9):
            make_step(step)
            found.append(step.number)
            if step.number % 3 == 1:
                break
        if found[-1] == 8:
            break
    return [*found, run.step]


def test_a_loop_that_is_left_after_a_step_goes_on_with_the_next_one(tmp_path: Path) -> None:
    (found,) = run_ranks(in_context, 1, tmp_path, leaves_in_between)
    assert found == [*range(9), 9]


def leaves_early(run: Run, make_step: Callable[[Step], None]) -> int:
    for step in steps_of(run, 100):
        make_step(step)
        if step.number == 4:
            break
    return run.step


def never_leaves(run: Run, make_step: Callable[[Step], None]) -> int:
    for step in steps_of(run, 5):
        make_step(step)
    return run.step


def test_a_training_that_is_left_early_is_on_disk_with_its_last_step(tmp_path: Path) -> None:
    run_ranks(in_context, 2, tmp_path, leaves_early)
    assert [each.name for each in (tmp_path / "run").glob("step-*")] == ["step-5-attempt-1"]
    assert not list(tmp_path.glob("memory/*/*")), "its memory is free"
    (tmp_path / "quiet").mkdir()
    run_ranks(in_context, 2, tmp_path / "quiet", never_leaves)
    expected = run_ranks(in_context, 2, tmp_path / "quiet", loss_after)
    assert run_ranks(in_context, 2, tmp_path, loss_after) == expected
    assert expected[0][0] == 5


def leaves_before_the_optimizer(run: Run, make_step: Callable[[Step], None]) -> list[int]:
    found = []
    for step in steps_of(run, 6):
        if step.number == 2:
            break
        make_step(step)
    for step in steps_of(run, 6):
        make_step(step)
        found.append(step.number)
    return found


def test_a_step_that_no_optimizer_has_made_comes_again(tmp_path: Path) -> None:
    assert run_ranks(in_context, 1, tmp_path, leaves_before_the_optimizer) == [[2, 3, 4, 5]]


def own_data(run: Run, make_step: Callable[[Step], None]) -> list[int]:
    found = []
    for epoch in range(3):
        for number in run.steps(until=4 * (epoch + 1)):
            run._options.optimizer.step()
            found.append(number)
            if number % 4 == 2:
                break
    return [*found, run.step]


def test_loops_over_own_data_are_counted_too(tmp_path: Path) -> None:
    assert run_ranks(in_context, 1, tmp_path, own_data) == [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 10]]


class HostError(Exception):
    pass


def fails(run: Run, make_step: Callable[[Step], None]) -> None:
    for step in steps_of(run, 100):
        make_step(step)
        if step.number == 7:
            raise HostError


def lost(root: Path) -> None:
    with pytest.raises(HostError):
        in_context(root, fails)


def makes_none(run: Run, make_step: Callable[[Step], None]) -> tuple[str, int]:
    for step in steps_of(run, 4):
        make_step(step)
    return run.source, run.step


def test_a_loop_without_steps_does_not_lose_the_state(tmp_path: Path) -> None:
    run_ranks(lost, 1, tmp_path)
    assert not list((tmp_path / "run").glob("step-*")), "it is in memory only"
    assert run_ranks(in_context, 1, tmp_path, makes_none) == [("memory", 6)]
    assert run_ranks(in_context, 1, tmp_path, makes_none) == [("disk", 6)]


def two_loops(run: Run, make_step: Callable[[Step], None]) -> None:
    for one, _other in zip(steps_of(run, 9), steps_of(run, 9), strict=True):
        make_step(one)


def two_passes(run: Run, make_step: Callable[[Step], None]) -> None:
    for step in steps_of(run, 9):
        make_step(step)
        make_step(step)


def own_backward(run: Run, make_step: Callable[[Step], None]) -> None:
    for step in steps_of(run, 9):
        list(step)
        step.mean_loss()


def backward_after_the_loop(run: Run, make_step: Callable[[Step], None]) -> None:
    for step in run.batches(Numbers(), global_batch=GLOBAL_BATCH, micro_batch=5, until=9):
        list(step)
        step.backward(torch.zeros((), requires_grad=True))


def refused(root: Path, body: Body, text: str) -> None:
    with pytest.raises((RuntimeError, TypeError), match=text):
        in_context(root, body)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (two_loops, "two loops over the steps"),
        (two_passes, "have been taken"),
        (backward_after_the_loop, "inside of the loop"),
        (own_backward, r"call step.backward\(loss\)"),
    ],
)
def test_errors_say_what_a_loop_must_not_do(tmp_path: Path, body: Body, text: str) -> None:
    run_ranks(refused, 1, tmp_path, body, text)


def own_parts(run: Run, make_step: Callable[[Step], None]) -> None:
    own = torch.utils.data.Subset(Numbers(), range(40 + dist.get_rank()))
    next(run.batches(own, global_batch=GLOBAL_BATCH, until=9))


class Stream(torch.utils.data.IterableDataset[int]):
    def __len__(self) -> int:
        return 9

    def __iter__(self) -> Iterator[int]:
        return iter(range(9))


def stream(run: Run, make_step: Callable[[Step], None]) -> None:
    next(run.batches(Stream(), global_batch=GLOBAL_BATCH, until=9))


def test_data_that_cannot_be_divided_is_refused_on_all_ranks(tmp_path: Path) -> None:
    run_ranks(refused, 2, tmp_path, own_parts, r"len\(data\) is 40 on rank 0 and 41 on rank 1")
    run_ranks(refused, 2, tmp_path, stream, r"needs data with __len__ and __getitem__, got Stream")


def saves_its_own(run: Run, make_step: Callable[[Step], None]) -> None:
    options = run._options
    for step in steps_of(run, 8):
        make_step(step)
        checkpoint.save(options.directory / f"best-{step.number}", options.model)


def test_checkpoints_of_the_user_are_left_alone(tmp_path: Path) -> None:
    root = tmp_path / "run"
    run_ranks(keeps_its_own, 2, tmp_path)
    names = sorted(each.name for each in root.iterdir() if each.is_dir())
    assert names == [*(f"best-{i}" for i in range(8)), "step-6-attempt-1", "step-8-attempt-1"]
    assert run_ranks(in_context, 2, tmp_path, loss_after)[0][0] == 8


def keeps_its_own(root: Path) -> None:
    in_context(root, saves_its_own, every_on_disk=2)


def saves_every_step(run: Run, make_step: Callable[[Step], None], name: str = "own-{0}") -> None:
    options = run._options
    for step in steps_of(run, 8):
        make_step(step)
        path = name.format(step.number, run.attempt)
        checkpoint.save(options.directory.parent / path, options.model)
        if step.number == 4 and run.attempt == 1:
            raise HostError


def saves_with_its_attempt(run: Run, make_step: Callable[[Step], None]) -> None:
    saves_every_step(run, make_step, "own-{0}-{1}")


def saves_again(root: Path) -> list[str]:
    """In steps that a restart repeats."""
    for body, name in ((saves_every_step, "a"), (saves_with_its_attempt, "b")):
        with pytest.raises(HostError):
            in_context(root / name, body)
    with pytest.raises(CheckpointExistsError, match=r"put run\.attempt into the name"):
        in_context(root / "a", saves_every_step)
    in_context(root / "b", saves_with_its_attempt)
    return sorted(each.name for each in (root / "b").glob("own-*"))


def test_checkpoints_of_the_user_have_names_with_the_attempt(tmp_path: Path) -> None:
    first, second = [f"own-{i}-1" for i in range(5)], [f"own-{i}-2" for i in range(3, 8)]
    assert run_ranks(saves_again, 1, tmp_path) == [sorted([*first, *second])]


def attempt(root: Path, body: Body, restarts: int, job: str = "job") -> Any:
    """An attempt of a job under torchrun. Rank 0 may be on a host that torchrun has not counted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(leaving, "_BEGUN", set())  # each attempt is a process of its own
        patch.setenv("TORCHELASTIC_RUN_ID", job)
        is_last = dist.get_rank() == dist.get_world_size() - 1
        patch.setenv("TORCHELASTIC_RESTART_COUNT", str(restarts if is_last else 0))
        return in_context(root, body)


def has_had_enough(run: Run, make_step: Callable[[Step], None]) -> list[int]:
    """Stops early, after three steps of this process."""
    found = []
    for step in steps_of(run, 30):
        make_step(step)
        found.append(step.number)
        if len(found) == 3:
            break
    return found


def test_a_restart_does_not_train_on_after_a_loop_that_was_left(tmp_path: Path) -> None:
    assert run_ranks(attempt, 2, tmp_path, has_had_enough, 0) == [[0, 1, 2]] * 2
    for restarts in (1, 1, 2):  # a rank is killed after the context
        assert run_ranks(attempt, 2, tmp_path, has_had_enough, restarts) == [[]] * 2
    assert run_ranks(attempt, 2, tmp_path, has_had_enough, 0) == [[3, 4, 5]] * 2
    assert run_ranks(attempt, 2, tmp_path, has_had_enough, 1, "another") == [[6, 7, 8]] * 2


def lost_at_once(root: Path) -> None:
    with pytest.raises(HostError):
        attempt(root, fails_at_once, 0)


def fails_at_once(run: Run, make_step: Callable[[Step], None]) -> None:
    raise HostError


def test_a_job_that_is_submitted_again_trains_on_also_after_its_restart(tmp_path: Path) -> None:
    assert run_ranks(attempt, 1, tmp_path, has_had_enough, 0) == [[0, 1, 2]]
    run_ranks(lost_at_once, 1, tmp_path)
    assert run_ranks(attempt, 1, tmp_path, has_had_enough, 1) == [[3, 4, 5]]


def test_loops_to_one_end_are_left_one_after_the_other(tmp_path: Path) -> None:
    """The script begins three loops to step 9, and they have no steps. Then it may decide anew."""
    assert run_ranks(attempt, 1, tmp_path, three_loops, 0) == [[0, 1, 2]]
    assert run_ranks(attempt, 1, tmp_path, three_loops, 1) == [[]]
    assert run_ranks(attempt, 1, tmp_path, four_loops, 1) == [[3]]


def three_loops(run: Run, make_step: Callable[[Step], None], count: int = 3) -> list[int]:
    found = []
    for _ in range(count):
        for number in run.steps(until=9):
            run._options.optimizer.step()
            found.append(number)
            break
    return found


def four_loops(run: Run, make_step: Callable[[Step], None]) -> list[int]:
    return three_loops(run, make_step, 4)


def test_a_loop_is_left_although_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "run" / "left.json").mkdir(parents=True)
    assert run_ranks(attempt, 1, tmp_path, has_had_enough, 0) == [[0, 1, 2]]
    assert run_ranks(attempt, 1, tmp_path, has_had_enough, 1) == [[3, 4, 5]]

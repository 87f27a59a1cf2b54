"""Ranks and hosts come and go: the losses are those of a run that nobody disturbs."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import vescale_fsdp_elastic as elastic
from vescale_fsdp import fully_shard
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_elastic import worlds

from .helpers import GLOBAL_BATCH, Losses, Numbers, make, train


def attempt(
    root: Path, until: int, stop_at: int | None, hosts: list[str]
) -> tuple[Losses, str, int]:
    return train(root, until, stop_at=stop_at, hosts=hosts)


def test_from_4_to_3_to_2_to_4_ranks(tmp_path: Path) -> None:
    quiet = run_ranks(attempt, 4, tmp_path / "quiet", 12, None, ["a", "b"])[0][0]
    root, found = tmp_path / "torn", {}
    sources = []
    for ranks, stop_at, hosts in (
        (4, 4, ["a", "b"]),
        (3, 7, ["b", "c"]),  # a is lost, c is new
        (2, 10, ["c"]),
        (4, None, ["a", "c"]),  # a comes back
    ):
        losses, source, _ = run_ranks(attempt, ranks, root, 12, stop_at, hosts)[0]
        found |= losses
        sources.append((source, min(losses)))
    assert sources == [("start", 0), ("memory", 4), ("memory", 6), ("memory", 10)]
    assert found.keys() == quiet.keys() == set(range(12))
    for step, loss in quiet.items():
        assert found[step] == pytest.approx(loss, abs=1e-6), step


def bitwise(root: Path, until: int, stop_at: int | None) -> Losses:
    return train(root, until, stop_at=stop_at, ranks_per_host=1, dropout=0.3)[0]


def test_two_ranks_go_on_to_the_bit_with_random_numbers(tmp_path: Path) -> None:
    quiet = run_ranks(bitwise, 2, tmp_path / "quiet", 12, None)
    for stop_at in (3, 8, None):
        torn = run_ranks(bitwise, 2, tmp_path / "torn", 12, stop_at)
        for found, expected in zip(torn, quiet, strict=True):
            assert found
            assert found == {step: expected[step] for step in found}


def test_one_rank(tmp_path: Path) -> None:
    (quiet,) = run_ranks(bitwise, 1, tmp_path / "quiet", 8, None)
    (first,) = run_ranks(bitwise, 1, tmp_path / "torn", 8, 5)
    (second,) = run_ranks(bitwise, 1, tmp_path / "torn", 8, None)
    assert first == {step: quiet[step] for step in range(5)}
    assert second == {step: quiet[step] for step in range(4, 8)}


def phases(root: Path, ends: list[int]) -> list[list[int]]:
    """The steps of several loops in one context."""
    model, optimizer, _ = make()
    found: list[list[int]] = []
    with elastic.training(root, model, optimizer, memory_directory=root / "m", signals=()) as run:
        for end in ends:
            found.append([])
            for step in run.batches(Numbers(), global_batch=GLOBAL_BATCH, until=end):
                for x, y in step:
                    step.backward(torch.nn.functional.mse_loss(model(x), y))
                optimizer.step()
                optimizer.zero_grad()
                found[-1].append(step.number)
    return found


def test_several_loops_in_one_context(tmp_path: Path) -> None:
    (found,) = run_ranks(phases, 1, tmp_path, [3, 5])
    assert found == [[0, 1, 2], [3, 4]]


def goes_on(root: Path, uses_with: bool) -> bool:
    """Whether the process would go on in a meeting, after a step."""
    model, optimizer, _ = make()
    with elastic.training(root, model, optimizer, memory_directory=root / "m", signals=()) as run:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(worlds, "current", lambda: object())
            for step in run.batches(Numbers(), global_batch=GLOBAL_BATCH, until=9):
                if run.step == 1:
                    break
                with step if uses_with else nullcontext():
                    for x, y in step:
                        step.backward(torch.nn.functional.mse_loss(model(x), y))
                    optimizer.step()
                    optimizer.zero_grad()
        return run._goes_on


@pytest.mark.parametrize("uses_with", [False, True])
def test_a_process_goes_on_only_if_the_loop_can_repeat_a_step(
    tmp_path: Path, uses_with: bool
) -> None:
    assert run_ranks(goes_on, 1, tmp_path, uses_with) == [uses_with]


def refused(root: Path) -> None:
    """In a meeting: another backend than gloo, and a model that cannot move."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    model = fully_shard(torch.nn.Linear(8, 8), mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worlds, "current", lambda: object())
        with (
            pytest.raises(NotImplementedError, match="leave VESCALE_FSDP_MEETING out"),
            elastic.training(root / "run", model, optimizer, memory_directory=root / "m"),
        ):
            pass
        for name, value in (("MEETING", str(root / "meeting")), ("HOSTS", "1")):
            patch.setenv(f"VESCALE_FSDP_{name}", value)
        rank = dist.get_rank()
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR"):  # the meeting sets them
            patch.setenv(name, "")
        patch.setenv("LOCAL_RANK", str(rank))
        patch.setenv("LOCAL_WORLD_SIZE", "4")
        patch.setenv("TORCHELASTIC_RUN_ID", "host")
        patch.setattr(worlds, "_joined", worlds._Joined())
        patch.setattr(worlds, "current", lambda: None)
        dist.destroy_process_group()
        with pytest.raises(ValueError, match="is set, and the backend is gloo"):
            elastic.init_process_group("gloo")


def test_what_cannot_go_on_in_a_process_is_refused(tmp_path: Path) -> None:
    run_ranks(refused, 4, tmp_path)

"""Hosts are lost, copies are damaged: from memory as long as a copy is whole, else from disk."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import signal
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch.distributed as dist

import vescale_fsdp_elastic as elastic
from vescale_fsdp import CheckpointMismatchError, CheckpointWriteError, checkpoint
from vescale_fsdp.spi import waits
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_elastic import keeping, memory
from vescale_fsdp_elastic.run import Run

from .helpers import Losses, make, train

Result = tuple[Losses, str, int]


def attempt(root: Path, until: int, stop_at: int | None, options: dict[str, Any]) -> Result:
    return train(root, until, stop_at=stop_at, **options)


def run(root: Path, stop_at: int | None, ranks: int = 4, **options: Any) -> Result:
    result: Result = run_ranks(attempt, ranks, root, 12, stop_at, options)[0]
    return result


def generations(root: Path, host: str) -> dict[str, Path]:
    """The generations that a host has, by attempt and step, oldest first."""
    found = sorted((root / host).glob("run-*/*/*-*"))
    return {"{}-{}".format(*map(int, each.name.split("-"))): each for each in found}


def damage(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 4
    file.write_bytes(data)


def test_two_generations_are_kept_and_none_after_the_end(tmp_path: Path) -> None:
    run(tmp_path, 9)
    for host in ("host0", "host1"):
        found = generations(tmp_path, host)
        assert list(found) == ["1-6", "1-8"]
        names = sorted(each.name for each in found["1-8"].iterdir())
        assert names == ["manifest.json", *(f"rank-{rank:05d}.bin" for rank in range(4))]
    assert run(tmp_path, None)[1] == "memory"
    for host in ("host0", "host1"):
        assert [each.name for each in (tmp_path / host).iterdir()] == ["host"]


def test_without_replicas_a_host_has_its_own_files_only(tmp_path: Path) -> None:
    run(tmp_path, 3, replicas=0)
    names = {each.name for each in generations(tmp_path, "host1")["1-2"].iterdir()}
    assert names == {"manifest.json", "rank-00002.bin", "rank-00003.bin"}
    losses, source, number = run(tmp_path, 5, replicas=0)
    assert (min(losses), source, number) == (2, "memory", 2)


def names_after(root: Path, ranks: int) -> list[set[str]]:
    """The files of each host after a restart, each rank a host, without replicas."""
    run(root, 5, ranks, ranks_per_host=1, replicas=0, every=4)
    assert run(root, 5, ranks, ranks_per_host=1, replicas=0)[1] == "memory"
    return [
        {each.name for each in generations(root, f"host{rank}")["1-4"].iterdir()}
        for rank in range(ranks)
    ]


def test_a_host_gets_what_its_ranks_read_and_no_more(tmp_path: Path) -> None:
    found = names_after(tmp_path, 4)
    for rank, names in enumerate(found):
        assert {"manifest.json", f"rank-{rank:05d}.bin"} <= names
        assert names <= {"manifest.json", "rank-00000.bin", f"rank-{rank:05d}.bin"}


@pytest.mark.parametrize("lost", ["host0", pytest.param("host1", marks=pytest.mark.nightly)])
def test_a_host_is_lost_and_another_takes_its_place(tmp_path: Path, lost: str) -> None:
    run(tmp_path, 7)
    shutil.rmtree(tmp_path / lost)
    losses, source, _ = run(tmp_path, None)
    assert (min(losses), source) == (6, "memory")


def test_more_is_lost_than_copies_cover_so_the_disk_is_used(tmp_path: Path) -> None:
    run(tmp_path, 7, every_on_disk=4)
    shutil.rmtree(tmp_path / "host0")
    shutil.rmtree(tmp_path / "host1")
    losses, source, number = run(tmp_path, 8)
    assert (min(losses), source, number) == (4, "disk", 2)


def test_nothing_is_left_so_it_begins_again(tmp_path: Path) -> None:
    run(tmp_path, 7)
    shutil.rmtree(tmp_path / "host0")
    shutil.rmtree(tmp_path / "host1")
    losses, source, number = run(tmp_path, 3)
    assert (min(losses), source, number) == (0, "start", 2)


def test_a_host_is_lost_without_replicas(tmp_path: Path) -> None:
    run(tmp_path, 7, every_on_disk=4, replicas=0)
    shutil.rmtree(tmp_path / "host1")
    losses, source, _ = run(tmp_path, 8, replicas=0)
    assert (min(losses), source) == (4, "disk")


def test_the_disk_is_used_if_it_is_newer(tmp_path: Path) -> None:
    run(tmp_path, 6, every=4, every_on_disk=5)
    losses, source, _ = run(tmp_path, 7)
    assert (min(losses), source) == (5, "disk")


def test_a_damaged_file_is_replaced_by_its_copy(tmp_path: Path) -> None:
    run(tmp_path, 7)
    damage(generations(tmp_path, "host0")["1-6"] / "rank-00001.bin")
    (generations(tmp_path, "host1")["1-6"] / "rank-00002.bin").unlink()
    losses, source, _ = run(tmp_path, None)
    assert (min(losses), source) == (6, "memory")


def test_both_copies_are_damaged_so_the_generation_before_is_used(tmp_path: Path) -> None:
    run(tmp_path, 7)
    for host in ("host0", "host1"):
        damage(generations(tmp_path, host)["1-6"] / "rank-00001.bin")
    losses, source, _ = run(tmp_path, None)
    assert (min(losses), source) == (4, "memory")


@pytest.mark.parametrize("what", ["damaged", pytest.param("deleted", marks=pytest.mark.nightly)])
def test_a_manifest_is_damaged_on_one_host(tmp_path: Path, what: str) -> None:
    run(tmp_path, 7)
    file = generations(tmp_path, "host0")["1-6"] / "manifest.json"
    damage(file) if what == "damaged" else file.unlink()
    losses, source, _ = run(tmp_path, None)
    assert (min(losses), source) == (6, "memory")


def test_a_host_that_comes_back_with_an_old_state_does_not_win(tmp_path: Path) -> None:
    """Host 0 has step 8 of attempt 1. Host 1 has lost that, went on alone from step 6 to step 9."""
    run(tmp_path, 9)
    shutil.rmtree(generations(tmp_path, "host1")["1-8"])
    (tmp_path / "host0").rename(tmp_path / "away")
    losses, _, number = run(tmp_path, 9, ranks=2, hosts=["host1"])
    assert (min(losses), number) == (6, 2)
    shutil.rmtree(generations(tmp_path, "host1")["2-8"])
    assert list(generations(tmp_path, "host1")) == ["1-6"]

    # What is left on host 1 is older than step 8 of host 0: nothing is lost by taking that one.
    (tmp_path / "away").rename(tmp_path / "host0")
    losses, source, number = run(tmp_path, 11)
    assert (min(losses), source, number) == (8, "memory", 3)

    # Now host 1 goes on alone to step 6 of attempt 5; host 0 has step 10 of attempt 3.
    (tmp_path / "host0").rename(tmp_path / "away")
    shutil.rmtree(generations(tmp_path, "host1")["3-10"])
    losses, _, number = run(tmp_path, 11, ranks=2, hosts=["host1"])
    assert (min(losses), number) == (8, 4)
    (tmp_path / "away").rename(tmp_path / "host0")
    assert "3-10" in generations(tmp_path, "host0")
    losses, source, number = run(tmp_path, None)
    assert (min(losses), source, number) == (10, "memory", 5)


def test_a_new_folder_is_a_new_run(tmp_path: Path) -> None:
    run(tmp_path, 7)
    shutil.rmtree(tmp_path / "run")
    losses, source, number = run(tmp_path, 3)
    assert (min(losses), source, number) == (0, "start", 1)
    assert "1-6" not in generations(tmp_path, "host0")


def with_another_model(root: Path) -> None:
    model, optimizer, schedule = make(hidden=8)
    memory = root / f"host{dist.get_rank() // 2}"
    others = {"schedule": schedule}
    with (
        pytest.raises(CheckpointMismatchError),
        elastic.training(
            root / "run", model, optimizer, stateful=others, signals=(), memory_directory=memory
        ),
    ):
        raise AssertionError("it must not be entered")


def test_another_model_is_an_error_and_not_a_reason_for_the_disk(tmp_path: Path) -> None:
    run(tmp_path, 7)
    run_ranks(with_another_model, 4, tmp_path)


def logged(root: Path, until: int, stop_at: int, **options: Any) -> list[str]:
    texts: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            texts.append(record.getMessage())

    logger = logging.getLogger("vescale_fsdp_elastic")
    handler = Handler()
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        train(root, until, stop_at=stop_at, **options)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    return texts


def test_the_log_says_on_one_line_what_was_chosen_and_why(tmp_path: Path) -> None:
    run(tmp_path, 7, every_on_disk=4)
    shutil.rmtree(tmp_path / "host0")
    (generations(tmp_path, "host1")["1-6"] / "rank-00001.bin").unlink()
    (generations(tmp_path, "host1")["1-4"] / "rank-00002.bin").unlink()
    (line,) = run_ranks(logged, 4, tmp_path, 12, 5)[0]
    assert line == (
        "attempt 2 begins on 4 ranks of 2 hosts with step 4, from disk (step 6 in memory lacks "
        "1 of 4 files (rank-00001.bin): no host that is here has them whole; step 4 in memory "
        "lacks 1 of 4 files (rank-00002.bin): no host that is here has them whole)"
    )


def test_the_log_says_which_steps_are_dropped(tmp_path: Path) -> None:
    """Host 0 has step 8. Host 1 has lost its files, and has begun alone, from the disk."""
    run(tmp_path, 9, every_on_disk=4)
    (tmp_path / "host0").rename(tmp_path / "away")
    shutil.rmtree(tmp_path / "host1")
    shutil.rmtree(next((tmp_path / "run").glob("step-8-*")))
    assert min(run(tmp_path, 7, ranks=2, hosts=["host1"])[0]) == 4
    (tmp_path / "away").rename(tmp_path / "host0")
    (line,) = run_ranks(logged, 4, tmp_path, 12, 7)[0]
    assert line == (
        "attempt 3 begins on 4 ranks of 2 hosts with step 6, from memory (step 8 of attempt 1 is "
        "in memory and is dropped: a later attempt has begun without the hosts that have it "
        "(--nnodes of torchrun says with how few hosts it may begin))"
    )


def full_for_a_while(root: Path) -> tuple[list[str], int]:
    """Steps 4 to 6: a file of rank 1 may have 1,000 bytes at most, which stands for full memory."""
    ages: list[int] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def before(run: elastic.Run, step: int) -> None:
        if step in (4, 7):
            run._keeper.finish()
            assert run.last_kept is not None
            ages.append(run.last_kept.step)
        if dist.get_rank() == 1 and step in (4, 7):
            limit = 1_000 if step == 4 else soft
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))

    texts = logged(root, 12, 11, before=before)
    return [text for text in texts if text.startswith("no memory")], ages[1]


def test_training_goes_on_if_the_memory_of_a_host_is_full(tmp_path: Path) -> None:
    texts, last = run_ranks(full_for_a_while, 4, tmp_path)[0]
    assert last == 4  # that of step 6 failed
    assert len(texts) == 1
    assert texts[0].startswith("no memory checkpoint of step 6 (the last one is that of step 4):")
    assert list(generations(tmp_path, "host0")) == ["1-8", "1-10"]


def starts_in_full_memory(root: Path, options: dict[str, Any]) -> Result:
    """No file of rank 2 may have a byte until the first step: its memory is full."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def free(run: elastic.Run, step: int) -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    if dist.get_rank() == 2:
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        return train(root, 12, stop_at=8, before=free, **options)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("replicas", "source", "step"),
    [(1, "memory", 6), pytest.param(0, "disk", 4, marks=pytest.mark.nightly)],
)
def test_training_restarts_where_memory_is_full(
    tmp_path: Path, replicas: int, source: str, step: int
) -> None:
    options = {"every_on_disk": 4, "replicas": replicas}
    run(tmp_path, 7, **options)
    losses, found, _ = run_ranks(starts_in_full_memory, 4, tmp_path, options)[0]
    assert (found, min(losses)) == (source, step)


def starts_without_room(root: Path, options: dict[str, Any], cuts: bool) -> Any:
    """The memory of host 1 has no room for what comes; with ``cuts``, its disk neither."""

    def full(*_: Any) -> Any:
        raise CheckpointWriteError("no space left on device")

    with pytest.MonkeyPatch.context() as patch:
        if dist.get_rank() >= 2:
            patch.setattr(memory, "has_room", lambda *_: False)
            if cuts:
                patch.setattr(memory, "reserve", full)
        try:
            return train(root, 12, stop_at=8, **options)
        except CheckpointWriteError as error:
            return str(error)


def test_copies_are_on_disk_where_memory_has_no_room(tmp_path: Path) -> None:
    options = {"replicas": 0}
    run(tmp_path, 7, **options)
    before = {host: list(generations(tmp_path, host)) for host in ("host0", "host1")}
    results = run_ranks(starts_without_room, 4, tmp_path, options, True)
    for text in results:  # not from the beginning, although nothing is on disk
        assert "a state is whole in the memory of the hosts, and could not be loaded" in text
    assert {host: list(generations(tmp_path, host)) for host in before} == before
    losses, source, _ = run_ranks(starts_without_room, 4, tmp_path, options, False)[0]
    assert (source, min(losses)) == ("memory", 6)
    assert not list(Path(tempfile.gettempdir()).glob("vescale-fsdp-*/rank-*.bin"))


def stops(root: Path, is_full: bool, every_on_disk: int | None) -> tuple[int, int]:
    """All ranks are asked to leave, as for a host that joins.

    Returns the exit code and the number of steps made. ``is_full``: the memory of rank 1, then.
    """
    made: list[int] = []

    def full(*_: Any) -> Any:
        raise CheckpointWriteError("no space left on device")

    with pytest.MonkeyPatch.context() as patch:

        def before(run: elastic.Run, step: int) -> None:
            made.append(step)
            if step == 5 and dist.get_rank() == 0:
                assert run._stop is not None
                run._stop.ask()
            if step == 5 and dist.get_rank() == 1 and is_full:
                patch.setattr(keeping, "_leisurely", full)

        options = {"every": 100, "every_on_disk": every_on_disk}
        try:
            train(root, 12, signals=(signal.SIGTERM,), before=before, **options)
        except SystemExit as error:
            return int(error.code or 0), made[-1] + 1
    return 0, 0


@pytest.mark.parametrize(
    ("is_full", "every_on_disk"), [(True, None), (False, 1)], ids=["memory is full", "it is time"]
)
def test_ranks_do_not_leave_before_the_state_is_saved_on_disk(
    tmp_path: Path, is_full: bool, every_on_disk: int | None
) -> None:
    results = run_ranks(stops, 4, tmp_path, is_full, every_on_disk)
    assert len({*results}) == 1
    code, step = results[0]
    assert code != 0
    saved = {each.name for each in (tmp_path / "run").glob("step-*")}
    assert f"step-{step}-attempt-1" in saved
    shutil.rmtree(tmp_path / "host0")
    shutil.rmtree(tmp_path / "host1")
    losses, source, _ = run(tmp_path, 10)
    assert (min(losses), source) == (step, "disk")


def ended_by_a_signal(root: Path) -> int:
    def before(run: elastic.Run, step: int) -> None:
        if step == 4 and dist.get_rank() == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        train(root, 30, every=100, signals=(signal.SIGTERM,), before=before)
    except SystemExit as error:
        return int(error.code or 0)
    return 0


def test_a_signal_to_one_rank_loses_no_step(tmp_path: Path) -> None:
    codes = run_ranks(ended_by_a_signal, 4, tmp_path)
    assert codes == [143] * 4
    (saved,) = (tmp_path / "run").glob("step-*")
    step = int(saved.name.split("-")[1])
    assert step in (5, 6)
    losses, source, _ = run(tmp_path, 8)
    assert (min(losses), source) == (step, "memory")
    shutil.rmtree(tmp_path / "host0")
    shutil.rmtree(tmp_path / "host1")
    losses, source, _ = run(tmp_path, 8)
    assert (min(losses), source) == (step, "disk")


def test_a_signal_that_comes_while_a_world_is_left_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It was forgotten, so that torchrun waited for 30 s, and then killed the process."""
    run = object.__new__(Run)
    run._own = cast(Any, SimpleNamespace(give_up=lambda: None))
    run._stop = checkpoint.StopOnSignal()
    signals = [signal.SIGTERM]
    monkeypatch.setattr(waits, "abort", lambda _: os.kill(os.getpid(), signals.pop()))
    with pytest.raises(SystemExit) as ended:
        run._leave_world(RuntimeError("rank 1 has died"))
    assert ended.value.code == 128 + signal.SIGTERM

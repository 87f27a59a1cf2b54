"""Stage, seal, publish; which checkpoint is the last one; which go."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

from vescale_fsdp import (
    CheckpointExistsError,
    CheckpointIncompleteError,
    CheckpointMismatchError,
    CheckpointValueError,
    CheckpointWriteError,
    RankMismatchError,
    checkpoint,
)
from vescale_fsdp.checkpoint import contents, files, seal
from vescale_fsdp.checkpoint.manifest import NAME
from vescale_fsdp.testing import RankError, run_ranks

from .helpers import everything, flip_bit, make, train


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def save_plain(path: Path, step: int | None = None, **options: Any) -> None:
    """Without ranks: all of this works in one process."""
    model = nn.Linear(2, 3)
    extra = None if step is None else {"step": step}
    checkpoint.save(path, model, extra=extra, **options)


# latest and keep_last


def test_latest_goes_by_the_order_of_saves_and_says_what_it_passes_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert checkpoint.latest(tmp_path / "none") is None
    for step in (90, 100, 60, 70, 80):  # taken back from 100 to 50
        save_plain(tmp_path / f"step-{step}", step)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-80"
    (tmp_path / f"step-95.tmp-{'0' * 32}").mkdir()
    (tmp_path / "notes").mkdir()
    flip_bit(tmp_path / "step-80" / NAME, 8 * 500)  # of the body
    (tmp_path / "step-70" / "rank-00000.bin").unlink()
    with caplog.at_level(logging.WARNING):
        assert checkpoint.latest(str(tmp_path)) == tmp_path / "step-60"
    said = "\n".join(record.getMessage() for record in caplog.records)
    assert "tmp-0000" in said
    assert "notes: it has no manifest.json" in said
    assert "step-80/manifest.json is damaged" in said
    assert "step-70/rank-00000.bin is missing" in said


def test_keep_last_deletes_the_oldest_of_ours_and_never_the_last_two(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / NAME).write_text("{}")
    for step in (1, 2, 3, 4):
        save_plain(tmp_path / f"step-{step}", keep_last=3)
    assert names(tmp_path) == ["mine", "step-2", "step-3", "step-4"]
    save_plain(tmp_path / "step-0", keep_last=2)  # the newest, whatever its name
    assert names(tmp_path) == ["mine", "step-0", "step-4"]
    with pytest.raises(ValueError, match="at least 2 checkpoints are kept"):
        save_plain(tmp_path / "step-9", keep_last=1)
    assert names(tmp_path) == ["mine", "step-0", "step-4"]


def test_keep_last_deletes_nothing_that_somebody_put_into_a_checkpoint(tmp_path: Path) -> None:
    for step in (1, 2):
        save_plain(tmp_path / f"step-{step}")
    (tmp_path / "step-1" / "notes.txt").write_text("mine")
    save_plain(tmp_path / "step-3", keep_last=2)
    assert len(list(tmp_path.glob("step-1*/notes.txt"))) == 1
    assert checkpoint.latest(tmp_path) == tmp_path / "step-3"


def test_keep_last_leaves_links_alone_and_counts_them_for_nothing(tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    save_plain(tmp_path / "kept" / "gold", 0)
    runs.mkdir()
    (runs / "best").symlink_to(tmp_path / "kept" / "gold")
    last = runs / "last"
    for step in (1, 2, 3, 4):
        save_plain(runs / f"step-{step}", step, keep_last=2)
        last.unlink(missing_ok=True)
        last.symlink_to(f"step-{step}")
    assert names(runs) == ["best", "last", "step-3", "step-4"]
    assert checkpoint.verify(runs / "best").seal.step == 0
    assert checkpoint.verify(last).seal.step == 4
    assert checkpoint.verify(runs / "step-3").seal.step == 3


def test_keep_last_does_not_delete_what_a_link_beside_it_leads_to(tmp_path: Path) -> None:
    save_plain(tmp_path / "step-1", 1)
    (tmp_path / "best").symlink_to("step-1")
    for step in (2, 3, 4):
        save_plain(tmp_path / f"step-{step}", step, keep_last=2)
    assert names(tmp_path) == ["best", "step-1", "step-3", "step-4"]
    assert checkpoint.verify(tmp_path / "best").seal.step == 1


# Stages


def test_a_stage_that_nobody_holds_is_deleted_and_one_that_is_held_is_not(tmp_path: Path) -> None:
    left, held, other = (tmp_path / f"step-{i}.tmp-{str(i) * 32}" for i in (1, 2, 3))
    for stage in (left, held, other):
        stage.mkdir()
        (stage / "rank-00000.bin").write_bytes(b"half")
    (other / "thesis.txt").write_text("not ours")
    descriptor = os.open(held, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    save_plain(tmp_path / "step-9")
    assert names(tmp_path) == ["step-2.tmp-" + "2" * 32, "step-3.tmp-" + "3" * 32, "step-9"]
    assert names(other) == ["thesis.txt"]
    os.close(descriptor)


def test_a_folder_that_a_crash_left_before_it_was_locked_is_deleted_too(tmp_path: Path) -> None:
    left, held, other = (tmp_path / f".step-{i}.new-{str(i) * 32}" for i in (1, 2, 3))
    for folder in (left, held, other):
        folder.mkdir()
    (other / "thesis.txt").write_text("not ours")
    descriptor = os.open(held, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    save_plain(tmp_path / "step-9")
    assert names(tmp_path) == [held.name, other.name, "step-9"]
    os.close(descriptor)


def test_a_stage_is_made_again_if_another_job_deletes_it_before_it_is_locked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lock, is_first = seal._lock, [True]

    def late(path: Path) -> int | None:
        if is_first:
            is_first.clear()
            seal.clean(tmp_path)  # of the other job
        return lock(path)

    monkeypatch.setattr(seal, "_lock", late)
    stage = seal.Stage(tmp_path / "step-1")
    assert names(tmp_path) == [stage.path.name]
    stage.abandon()


def test_two_jobs_with_one_target_do_not_mix(tmp_path: Path) -> None:
    target = tmp_path / "step-1"
    slow = seal.Stage(target)
    save_plain(target)
    before = (target / NAME).read_bytes()
    with pytest.raises(CheckpointExistsError, match=r"another job has written .*step-1 meanwhile"):
        slow.publish(b"late")
    slow.abandon()
    assert (target / NAME).read_bytes() == before
    assert names(tmp_path) == ["step-1"]
    with pytest.raises(FileExistsError, match="never overwritten"):
        save_plain(target)
    checkpoint.verify(target)


@pytest.mark.parametrize("name", [f"best.tmp-{'0' * 32}", f".best.new-{'0' * 32}"])
def test_names_that_the_next_save_would_delete_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CheckpointWriteError, match="which the next save would delete"):
        save_plain(tmp_path / name)
    assert names(tmp_path) == []


def test_a_file_in_the_way_is_an_error_of_ours(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointWriteError, match=r"file/step-1.* cannot be made"):
        save_plain(tmp_path / "file" / "step-1")


def test_a_place_without_folders_is_said(tmp_path: Path) -> None:
    message = (
        r"/proc/nope.* cannot be made: (no folder can be made in /proc|there is no permission)"
    )
    with pytest.raises(CheckpointWriteError, match=message):  # the second if we are not root
        save_plain(Path("/proc/nope"))


# Failures on ranks: clear on every rank, nothing left behind


class Full:
    """A stream on a disk that takes so many bytes."""

    def __init__(self, stream: Any, room: int) -> None:
        self._stream, self._room = stream, room
        self.raw = stream.raw

    def write(self, data: Any) -> int:
        self._room -= len(data)
        if self._room < 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        written: int = self._stream.write(data)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def save_on_full_disk(root: Path) -> None:
    model, optimizer = make()
    train(model, optimizer, range(1))
    checkpoint.save(root / "step-1", model, optimizer)

    def opened(path: Any, *args: Any, **options: Any) -> Any:
        stream = open(path, *args, **options)  # noqa: SIM115
        return Full(stream, 300) if "00001" in str(path) else stream

    files.open = opened  # type: ignore[attr-defined]
    try:
        for async_ in (False, True):
            message = r"tensor '.*' cannot be written to .*rank-00001.bin: the disk is full"
            with pytest.raises(CheckpointWriteError, match=message) as error:
                checkpoint.save(root / "step-2", model, optimizer, async_=async_).wait()
            assert str(error.value).startswith("on rank 1: ") == (dist.get_rank() != 1)
            assert names(root) == ["step-1"]
    finally:
        del files.open  # type: ignore[attr-defined]
    checkpoint.load(checkpoint.latest(root) or "", model, optimizer)
    checkpoint.save(root / "step-2", model, optimizer)
    assert names(root) == ["step-1", "step-2"]


def test_a_full_disk_on_one_rank_is_said_on_all_and_leaves_nothing(tmp_path: Path) -> None:
    run_ranks(save_on_full_disk, 3, tmp_path)


class Odd:
    def state_dict(self) -> dict[str, Any]:
        return {"f": print} if dist.get_rank() else {"f": None}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise NotImplementedError


def refuse_to_save(root: Path) -> None:
    rank = dist.get_rank()
    model, _ = make()
    net = nn.Linear(2 + rank, 2)
    sparse = nn.Module()
    sparse.register_buffer("pairs", torch.eye(2).to_sparse())
    cases: list[tuple[nn.Module, dict[str, Any], type[Exception], str]] = [
        (model, {"stateful": {"odd": Odd()}}, CheckpointValueError, r"stateful.odd\['f'\] is a"),
        (model, {"stateful": {"odd": 3}}, CheckpointValueError, "is a int without state_dict"),
        (model, {"extra": {"s": {1}}}, CheckpointValueError, r"extra\['s'\] is a builtins.set"),
        (sparse, {}, CheckpointValueError, "'model.pairs' has the layout torch.sparse_coo"),
        (nn.Linear(1, 1, device="meta"), {}, CheckpointValueError, "is on the meta device"),
        (net, {}, CheckpointMismatchError, r"float32 \[2, 3\] on rank 1, and float32 \[2, 2\] on"),
        (
            model,
            {"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())},
            CheckpointMismatchError,
            "optimizer '0' has a parameter of shape .* that the model does not have",
        ),
    ]
    for each, options, kind, message in cases:
        with pytest.raises(kind, match=message):
            checkpoint.save(root / "step-1", each, **options)
    with pytest.raises(CheckpointWriteError, match="must be the same on every rank"):
        checkpoint.save(root / f"step-{rank}", model)
    assert names(root) == []


def test_what_cannot_be_saved_is_said_on_every_rank_before_anything_is_written(
    tmp_path: Path,
) -> None:
    run_ranks(refuse_to_save, 2, tmp_path)


def save_false_shards(root: Path) -> None:
    """3 and 2 rows that claim to be even: DCP saves them, and can never load them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (2,))
    local = torch.ones(1 + 3 * dist.get_rank(), 2)
    model = nn.Module()
    weight = DTensor.from_local(local, mesh, [Shard(0)], shape=torch.Size((5, 2)), stride=(2, 1))
    model.weight = nn.Parameter(weight)
    with pytest.raises(CheckpointMismatchError, match=r"'model.weight' of shape \[5, 2\] should"):
        checkpoint.save(root / "step-1", model)
    assert names(root) == []


def test_shards_of_other_sizes_than_they_claim_are_not_saved(tmp_path: Path) -> None:
    run_ranks(save_false_shards, 2, tmp_path)


# In the background


def save_in_the_background(root: Path) -> None:
    model, optimizer = make()
    train(model, optimizer, range(2))
    expected = everything(model, optimizer)
    may_write, write = threading.Event(), files.DataWriter.write

    def late(self: files.DataWriter, data: memoryview, label: str) -> Any:
        may_write.wait()
        return write(self, data, label)

    files.DataWriter.write = late  # type: ignore[method-assign]
    handles = [checkpoint.save(root / "step-1", model, optimizer, async_=True)]
    train(model, optimizer, range(2, 6))  # steps and collectives meanwhile
    assert not handles[0].is_done
    assert not (root / "step-1").exists()
    may_write.set()
    handles.append(checkpoint.save(root / "step-2", model, optimizer, async_=True))
    assert handles[0].is_done  # the second waits for the first
    later = everything(model, optimizer)
    checkpoint.load(root / "step-2", model, optimizer)  # and so does a load
    for step, state in ((1, expected), (2, later)):
        checkpoint.load(root / f"step-{step}", model, optimizer)
        found = everything(model, optimizer)
        assert all(torch.equal(found[name], value) for name, value in state.items())
    failing = checkpoint.save(root / "step-3", model, optimizer, async_=True)
    failing.wait()
    if dist.get_rank() == 0:
        shutil.rmtree(root / "step-3")
    dist.barrier()
    original, seal.Stage.publish = seal.Stage.publish, _no_publish  # type: ignore[method-assign]
    try:
        failing = checkpoint.save(root / "step-3", model, optimizer, async_=True)
        if dist.get_rank() == 0:  # the others learn of it from the next save
            with pytest.raises(CheckpointWriteError, match="not today"):
                failing.wait()
        with pytest.raises(CheckpointWriteError, match="not today"):
            checkpoint.save(root / "step-4", model, optimizer)
        failing.wait()  # was raised once
    finally:
        seal.Stage.publish = original  # type: ignore[method-assign]
        files.DataWriter.write = write  # type: ignore[method-assign]
    assert names(root) == ["step-1", "step-2"]


def _no_publish(self: seal.Stage, data: bytes) -> None:
    raise CheckpointWriteError("not today")


def test_a_save_in_the_background_holds_what_was_there_when_it_began(tmp_path: Path) -> None:
    run_ranks(save_in_the_background, 2, tmp_path)


# Killed


def kill(*_: Any, **__: Any) -> Any:
    os.kill(os.getpid(), signal.SIGKILL)


def die_somewhere(root: Path, where: str, victim: int) -> None:
    model = nn.Linear(4, 4)
    checkpoint.save(root / "step-1", model)
    if dist.get_rank() == victim:
        holder, name = {
            "plan": (contents.LocalPlan, "offer"),
            "write": (files.DataWriter, "write"),
            "flush": (files.DataWriter, "finish"),
            "seal": (seal.Stage, "publish"),
        }[where]
        setattr(holder, name, kill)
    start = time.monotonic()
    with pytest.raises(RankMismatchError, match=f"rank {victim} did not answer"):
        checkpoint.save(root / "step-2", model)
    assert time.monotonic() - start < 20


@pytest.mark.parametrize(
    ("where", "victim"), [("plan", 1), ("write", 1), ("flush", 0), ("seal", 0)]
)
def test_a_killed_rank_leaves_an_exception_on_others_and_no_checkpoint(
    tmp_path: Path, where: str, victim: int
) -> None:
    with pytest.raises(RankError) as error:
        run_ranks(die_somewhere, 3, tmp_path, where, victim)
    failed = [(failure.rank, failure.type_name) for failure in error.value.failures]
    assert failed == [(victim, "RankDied")], str(error.value)
    assert checkpoint.latest(tmp_path) == tmp_path / "step-1"
    assert not (tmp_path / "step-2").exists()
    with pytest.raises(CheckpointIncompleteError, match="there is no whole checkpoint"):
        checkpoint.load(tmp_path / "step-2", nn.Linear(4, 4))
    save_plain(tmp_path / "step-2")
    assert names(tmp_path) == ["step-1", "step-2"]


class Queued:
    """A send as gloo leaves it when the other side has died with it in the queue."""

    def wait(self, *_: Any) -> None:
        threading.Event().wait()


def save_beside_one_that_dies(root: Path, victim: int) -> None:
    checkpoint.save(root / "step-1", nn.Linear(4, 4))
    isend, send, offer = dist.isend, dist.send, contents.LocalPlan.offer

    def lost(data: torch.Tensor, *_: Any, group_dst: int, **others: Any) -> Any:
        if group_dst == victim:
            return Queued()
        return isend(data, group_dst=group_dst, **others)

    def waited(data: torch.Tensor, *_: Any, group_dst: int, **others: Any) -> Any:
        return lost(data, group_dst=group_dst, **others).wait()

    def offers(plan: contents.LocalPlan) -> Any:  # when all have come to the save
        if dist.get_rank() == victim:
            kill()
        dist.isend, dist.send = lost, waited
        return offer(plan)

    contents.LocalPlan.offer = offers  # type: ignore[method-assign]
    try:
        with pytest.raises(RankMismatchError, match=f"rank {victim} did not answer"):
            checkpoint.save(root / "step-2", nn.Linear(4, 4))
    finally:
        dist.isend, dist.send, contents.LocalPlan.offer = isend, send, offer  # type: ignore[method-assign]


@pytest.mark.parametrize("victim", [0, 1])
def test_no_rank_waits_for_a_send_to_one_that_has_died(tmp_path: Path, victim: int) -> None:
    with pytest.raises(RankError) as error:
        run_ranks(save_beside_one_that_dies, 3, tmp_path, victim, timeout_s=30)
    failed = [(failure.rank, failure.type_name) for failure in error.value.failures]
    assert failed == [(victim, "RankDied")], str(error.value)

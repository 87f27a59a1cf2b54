"""Disks that are full or read-only, targets that exist, and two jobs with one target.

File systems are mounted in a mount namespace of their own: a process that ``unshare`` starts, and
that ends with its mounts, whatever happens. It runs the scenario and writes the trials to a file.
"""

from __future__ import annotations

import errno
import os
import pickle
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed import FileStore  # type: ignore[attr-defined]

from vescale_fsdp import VeScaleError

from .engines import FOLDERS, OURS, STOCK, digest, load, make, newest, save, train
from .harness import Scenario, Skipped, Trial, observe, write_whole

CLEAR = "clear error, old one intact, nothing left"
UNCLEAR = "error that does not say so"
NO_OLD = "old one lost"
LEFT = "error, old one intact, files left"
SUCCEEDED = "no error, old one overwritten"
ONE, MIXED, NONE = "one job's, whole; the other gets an error", "a mix of two jobs", "neither loads"
ROOT = Path(__file__).resolve().parents[2]
SIZE = 8 << 20  # of the file system; a checkpoint has 1.2 MB


# In a namespace


def unshared(name: str, engine: str, num_trials: int, folder: Path) -> Iterator[Trial]:
    """Run a function of this file where it may mount."""
    disk, result = folder / "disk", folder / "trials"
    disk.mkdir()
    code = f"from {__name__} import run_here; run_here({name!r}, {engine!r}, {num_trials})"
    command = [*namespace(), sys.executable, "-c", code, str(disk), str(result)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=200, check=False
    )
    if not result.exists():
        raise RuntimeError(f"{command} ended with {done.returncode}: {done.stdout}{done.stderr}")
    yield from pickle.loads(result.read_bytes())


def namespace() -> list[str]:
    """The command that gives a process mounts of its own."""
    reasons = []
    for options in (["--mount"], ["--user", "--map-root-user", "--mount"]):
        command = ["unshare", *options]
        try:
            test = ["sh", "-c", 'mount -t tmpfs -o size=64k none "$0"', "/tmp"]
            subprocess.run([*command, *test], check=True, capture_output=True, text=True)
        except FileNotFoundError:
            raise Skipped("there is no unshare command here") from None
        except subprocess.CalledProcessError as error:
            reasons.append(error.stderr.strip())
        else:
            return command
    raise Skipped(f"no file system can be mounted here: {'; '.join(reasons)}")


def run_here(name: str, engine: str, num_trials: int) -> None:
    """In the namespace: mount, run, write the trials."""
    disk, result = Path(sys.argv[1]), Path(sys.argv[2])
    mount("-t", "tmpfs", "-o", f"size={SIZE}", "none", str(disk))
    function: Callable[..., Iterator[Trial]] = {"full": full, "read-only": read_only}[name]
    write_whole(result, pickle.dumps(list(function(engine, num_trials, disk))))
    os._exit(0)  # ends the idle ranks as well


def mount(*options: str) -> None:
    subprocess.run(["mount", *options], check=True)


# Full, read-only


def first_save(engine: str, root: Path) -> str:
    model, optimizer = make(engine)
    train(model, optimizer, 1)
    save(engine, root, 1, model, optimizer)
    return digest(model, optimizer)


def second_save(engine: str, root: Path) -> None:
    model, optimizer = make(engine)
    train(model, optimizer, 1)
    train(model, optimizer, 2)
    save(engine, root, 2, model, optimizer)


def load_newest(engine: str, root: Path) -> tuple[int, str]:
    model, optimizer = make(engine, seed=1)
    step = load(engine, newest(engine, root), model, optimizer)
    return step, digest(model, optimizer)


def full(engine: str, num_trials: int, disk: Path) -> Iterator[Trial]:
    """Saves with room for less and less of a checkpoint."""
    root, ballast = disk / "runs", disk / "ballast"
    expected = observe(first_save, 2, engine, root)[0].value
    size = sum(file.stat().st_size for file in root.rglob("*") if file.is_file())
    before = names(root)
    for number in range(num_trials):
        room = int(size * (number + 0.5) / (num_trials + 0.5))  # a bit less than all at most
        fill(ballast, disk, room)
        evidence = probe(disk, room + (1 << 16), errno.ENOSPC)
        ends = observe(second_save, 2, engine, root)
        yield judged(engine, root, ends, expected, before, evidence, ("full", "space left"))
        ballast.unlink()
        if names(root) != before or engine != OURS:  # start again
            shutil.rmtree(root)
            observe(first_save, 2, engine, root)
    if engine == OURS:
        ends = observe(second_save, 2, engine, root)
        outcome = CLEAR if ends[0].how == "returned" else "no save when there is room again"
        yield Trial(outcome, "there is room again", detail=ends[0].message)


def fill(ballast: Path, disk: Path, room: int) -> None:
    """Take all of the disk but some bytes."""
    with open(ballast, "wb", buffering=0) as stream:
        stream.write(bytes(shutil.disk_usage(disk).free - room))


def probe(disk: Path, num_bytes: int, expected: int) -> str:
    """Evidence that so many bytes cannot be written."""
    path = disk / "probe"
    try:
        with open(path, "wb", buffering=0) as stream:
            left = num_bytes
            while left:
                left -= stream.write(bytes(left))
    except OSError as error:
        name = errno.errorcode[error.errno or 0]
        return f"a write of {num_bytes:,} bytes gave {name}" if error.errno == expected else ""
    finally:
        if path.exists():
            path.unlink()
    return ""


def read_only(engine: str, num_trials: int, disk: Path) -> Iterator[Trial]:
    root = disk / "runs"
    expected = observe(first_save, 2, engine, root)[0].value
    before = names(root)
    mount("-o", "remount,ro", str(disk))
    evidence = probe(disk, 1, errno.EROFS)
    for _ in range(num_trials):
        ends = observe(second_save, 2, engine, root)
        yield judged(engine, root, ends, expected, before, evidence, ("read-only", "Read-only"))


def judged(
    engine: str,
    root: Path,
    ends: list[Any],
    expected: str,
    before: list[str],
    evidence: str,
    words: tuple[str, ...],
) -> Trial:
    after = names(root)
    (found,) = observe(load_newest, 1, engine, root)
    is_clear = all(
        end.how == "raised"
        and (end.is_ours or engine != OURS)
        and any(word in end.message for word in words)
        for end in ends
    )
    if any(end.how == "returned" for end in ends):
        outcome = SUCCEEDED
    elif found.how != "returned" or found.value != (1, expected):
        outcome = NO_OLD
    elif after != before:
        outcome = LEFT
    else:
        outcome = CLEAR if is_clear else UNCLEAR
    text = "; ".join(f"rank {end.rank} {end.how} {end.kind}: {end.message[-200:]}" for end in ends)
    return Trial(outcome, evidence, detail=f"{text}; {sorted(set(after) - set(before))}")


def names(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*"))


def on_a_full_disk(engine: str, num_trials: int, folder: Path) -> Iterator[Trial]:
    return unshared("full", engine, num_trials, folder)


def on_a_read_only_disk(engine: str, num_trials: int, folder: Path) -> Iterator[Trial]:
    return unshared("read-only", engine, num_trials, folder)


# A target that exists


def save_over(engine: str, root: Path) -> None:
    model, optimizer = make(engine, seed=3)
    train(model, optimizer, 7)
    save(engine, root, 1, model, optimizer)


def onto_another(engine: str, num_trials: int, folder: Path) -> Iterator[Trial]:
    expected = observe(first_save, 2, engine, folder)[0].value
    before = names(folder)
    ends = observe(save_over, 2, engine, folder)
    evidence = f"{before[0]} was there"
    yield judged(engine, folder, ends, expected, before, evidence, ("exists already",))


# Two jobs


def one_of_two_jobs(engine: str, root: Path, store: Path) -> tuple[Any, ...]:
    """Ranks 0 and 1 are a job, and so are 2 and 3. Both save to one target at one time."""
    job, rank = divmod(dist.get_rank(), 2)
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", store=FileStore(f"{store}-{job}", 2), rank=rank, world_size=2)
    model, optimizer = make(engine, seed=job)
    train(model, optimizer, 1)
    mine = digest(model, optimizer)
    write_whole(Path(f"{store}-{job}-{rank}.ready"), b"")
    while len(list(store.parent.glob(f"{store.name}-*.ready"))) < 4:
        time.sleep(0.0005)
    error, is_ours, begin = "", False, time.monotonic()
    try:
        save(engine, root, 1, model, optimizer)
    except BaseException as caught:  # noqa: BLE001  it is observed; DCP's is no Exception
        error, is_ours = f"{type(caught).__name__}: {caught}", isinstance(caught, VeScaleError)
    return job, mine, error, is_ours, begin, time.monotonic()


def two_jobs(engine: str, num_trials: int, folder: Path) -> Iterator[Trial]:
    for number in range(num_trials):
        root, store = folder / f"{number}", folder / f"store-{number}"
        ends = observe(one_of_two_jobs, 4, engine, root, store)
        if any(end.how != "returned" for end in ends):
            yield Trial("a crash", "two jobs", detail=str(ends)[:500])
            continue
        values = [end.value for end in ends]
        begin, end = max(each[4] for each in values), min(each[5] for each in values)
        evidence = f"both were saving for {end - begin:.3f} s" if end > begin else ""
        (found,) = observe(load_newest, 1, engine, root)
        failed = {each[0] for each in values if each[2]}
        told = [each for each in values if each[0] in failed]
        if found.how != "returned":
            outcome = NONE
        elif found.value[1] not in {each[1] for each in values}:
            outcome = MIXED
        elif len(failed) != 1 or len(told) != 2:
            outcome = "one job's, whole; the other gets no error"
        elif found.value[1] in {each[1] for each in told}:
            outcome = "that of the job that was told that it failed"
        elif any("tmp-" in name or ".new-" in name for name in names(root)):
            outcome = LEFT
        else:
            is_clear = all(each[3] or engine != OURS for each in told)
            outcome = ONE if is_clear else UNCLEAR
        yield Trial(outcome, evidence, detail="; ".join(each[2][:150] for each in told))


GROUP = "disks and targets"
SCENARIOS = [
    Scenario(
        GROUP,
        "the disk is full",
        on_a_full_disk,
        frozenset({CLEAR}),
        short=1,
        full=12,
        engines=(OURS, FOLDERS),  # in one folder the old files make room for the new ones
    ),
    Scenario(
        GROUP,
        "the disk is read-only",
        on_a_read_only_disk,
        frozenset({CLEAR}),
        short=None,
        full=1,
        engines=(OURS, STOCK, FOLDERS),
    ),
    Scenario(GROUP, "the target exists", onto_another, frozenset({CLEAR}), 1, 1),
    Scenario(GROUP, "two jobs, one target", two_jobs, frozenset({ONE}), 1, 12),
]

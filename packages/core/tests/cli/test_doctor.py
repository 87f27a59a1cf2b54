"""``vescale-fsdp doctor`` as a user types it, and its self-test with healthy and sick processes."""

from __future__ import annotations

import io
import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from vescale_fsdp import compat
from vescale_fsdp.cli import main
from vescale_fsdp.cli.checkup import processes, rank, selftest
from vescale_fsdp.cli.checkup.findings import Section, look
from vescale_fsdp.cli.checkup.processes import Outcome, run_steps
from vescale_fsdp.testing import run_ranks

Capture = pytest.CaptureFixture[str]
GOOD_LOOKS: dict[str, Any] = {
    "import torch": {
        "version": "2.13.0",
        "cuda": None,
        "hip": None,
        "debug": False,
        "threads": 2,
        "distributed": True,
        "backends": ["gloo"],
    },
    "devices": {"type": None, "devices": [], "complaint": ""},
}


@pytest.fixture(scope="module")
def healthy() -> tuple[Outcome, list[str]]:
    """One real self-test, and the files that it has left behind."""
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", folder)
        patch.setenv("GLOO_SOCKET_IFNAME", loopback())
        outcome, only_over = selftest.self_test(dict(os.environ))
        assert only_over == ""
        return outcome, [path.name for path in Path(folder).iterdir()]


def loopback() -> str:
    return next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))


def give(monkeypatch: pytest.MonkeyPatch, outcome: Outcome) -> None:
    """Let this be the outcome of every self-test."""
    monkeypatch.setattr(selftest, "self_test", lambda environ: (outcome, ""))
    monkeypatch.setattr(selftest, "look_at_torch", lambda environ: outcome)


# The command


def test_the_self_test_passes_here(healthy: tuple[Outcome, list[str]]) -> None:
    outcome, left_behind = healthy
    assert (outcome.failed, outcome.error) == (None, "")
    assert list(outcome.values) == list(rank.STEPS)
    assert min(outcome.values["bandwidth"].values()) > 0
    assert outcome.values["import torch"]["version"] == torch.__version__
    assert left_behind == []
    assert not [each for each in psutil.Process().children() if "checkup" in str(each.cmdline())]


def test_text_fits_80_columns_and_a_screen(
    healthy: tuple[Outcome, list[str]], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    give(monkeypatch, healthy[0])
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == ""
    assert max(len(line) for line in lines) <= 80
    assert len(lines) <= 60
    titles = [line for line in lines if line in ("software", "devices", "machine", "self-test")]
    assert titles == ["software", "devices", "machine", "self-test"]
    speeds = r"bandwidth all-gather [\d,]+ MB/s, all-to-all [\d,]+ MB/s: what a rank"
    assert re.search(speeds, " ".join(out.split()))  # a large number takes another line
    assert re.search(r"training step +same weights as one process, \d", out)
    assert lines[-1].startswith("Everything works")


def test_json_has_everything(
    healthy: tuple[Outcome, list[str]], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    give(monkeypatch, healthy[0])
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema_version"] == 1
    assert report["works"] is True
    assert report["software"]["torch"] == torch.__version__
    assert report["devices"]["torch_build"]["version"] == torch.__version__
    assert report["machine"]["memory"]["total_bytes"] > 0
    assert set(report["self_test"]) == {
        "import_vescale_fsdp",
        "connect",
        "all_gather",
        "all_to_all",
        "bandwidth",
        "training_step",
        "checkpoint",
        "total",
    }
    bandwidth = report["self_test"]["bandwidth"]
    assert bandwidth["message_bytes"] == 16 * 1024 * 1024
    assert bandwidth["all_gather_mb_per_s"] == healthy[0].values["bandwidth"]["all_gather_mb_per_s"]


def test_something_broken_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    values = {**GOOD_LOOKS, "import vescale_fsdp": None}
    seconds = dict.fromkeys(values, 0.1)
    give(monkeypatch, Outcome(values, seconds, "connect", "rank 1: RuntimeError: no way", 1.0))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "does not work: connect: rank 1: RuntimeError: no way\n" in out
    assert "export GLOO_SOCKET_IFNAME" in out
    assert re.search(r"connect +FAILED *\n +all-gather +not tried", out)
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["works"] is False
    assert {"about": "self-test", "level": "broken"}.items() <= report["findings"][-1].items()


def test_without_the_self_test_nothing_is_claimed(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(selftest, "self_test", None)  # not called
    outcome = Outcome(GOOD_LOOKS, dict.fromkeys(GOOD_LOOKS, 0.1))
    monkeypatch.setattr(selftest, "look_at_torch", lambda environ: outcome)
    assert main(["doctor", "--no-self-test"]) == 0
    out = capsys.readouterr().out
    assert "self-test" not in out
    assert out.splitlines()[-1].startswith("No fault seen, without a test")


def test_a_broken_torch_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('libtorch.so: not found')")
    monkeypatch.syspath_prepend(tmp_path)
    assert main(["doctor"]) == 1
    out, err = capsys.readouterr()
    assert err == ""
    assert "Traceback" not in out
    assert "does not work: import torch: rank 0: ImportError: libtorch.so: not found\n" in out
    assert "see pytorch.org/get-started" in out
    assert out.count("not tried") == 1


def test_no_place_for_temporary_files_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "does not work: start: FileNotFoundError: " in out
    assert "TMPDIR=... names another" in out


@pytest.mark.parametrize("arguments", [["--fast"], ["now"]])
def test_bad_arguments_are_exit_code_2(arguments: list[str], capsys: Capture) -> None:
    assert main(["doctor", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1


def test_what_cannot_be_looked_at_is_a_finding() -> None:
    def fill(section: Section) -> None:
        section.add("first", "1")
        raise PermissionError("closed")

    section = look("machine", fill)
    assert section.as_json() == {"first": "1"}
    (finding,) = section.findings
    assert finding.what == "could not look further at the machine: PermissionError: closed"


# Processes that are not well


def run_code(
    monkeypatch: pytest.MonkeyPatch, code: str, limit_s: float = 20.0
) -> tuple[Outcome, float]:
    """Two processes with this code for what comes after their first step."""
    start = (
        "import json, os, signal, sys, time\n"
        "path, rank, world_size, folder, steps = json.loads(sys.argv[1])\n"
        "report = open(f'{folder}/report-{rank}.jsonl', 'a')\n"
        "def done(step, **more):\n"
        "    print(json.dumps({'step': step, **more}), file=report, flush=True)\n"
        "done('one', value=rank, seconds=0.5 + rank)\n"
    )
    monkeypatch.setattr(processes, "_CODE", start + code)
    monkeypatch.setattr(processes, "_GRACE_S", 0.3)
    begin = time.monotonic()
    outcome = run_steps(["one", "two", "three"], 2, limit_s=limit_s)
    left = [each for each in psutil.Process().children() if "report-" in str(each.cmdline())]
    assert left == []
    return outcome, time.monotonic() - begin


def test_values_are_of_the_first_rank_and_times_of_the_slowest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = "done('two', value='x', seconds=1)\ndone('three', value=None, seconds=0)"
    outcome, _ = run_code(monkeypatch, code)
    assert outcome.failed is None
    assert outcome.values == {"one": 0, "two": "x", "three": None}
    assert outcome.seconds == {"one": 1.5, "two": 1, "three": 0}


def test_processes_that_hang_in_a_step_are_killed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "time.sleep(1.2)\ndone('two', value=None, seconds=1.2)\ntime.sleep(60)"
    outcome, seconds = run_code(monkeypatch, code, limit_s=2.0)
    assert 3.2 <= seconds < 20.0  # the limit is for each step, not for all
    assert (outcome.failed, outcome.error) == ("three", "rank 0: no answer within 2 s")
    assert outcome.values == {"one": 0, "two": None}


def test_a_crash_is_told_by_its_signal_and_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "if rank == 0: time.sleep(60)\n"
        "print('terminate called:\\n  address in use', file=sys.stderr, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    outcome, seconds = run_code(monkeypatch, code)
    assert seconds < 10.0
    assert outcome.failed == "two"
    assert outcome.error == "rank 1: its process ended with signal SIGKILL: address in use"


def test_an_exception_is_told_rather_than_who_waits_for_that_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    code = "if rank == 0: time.sleep(60)\ndone('two', error='OSError: No\\nspace')"
    outcome, _ = run_code(monkeypatch, code)
    assert (outcome.failed, outcome.error) == ("two", "rank 1: OSError: No space")


def test_a_rank_ends_with_the_process_that_started_it(tmp_path: Path) -> None:
    code = (
        "import time\n"
        "from vescale_fsdp.cli.checkup import rank\n"
        "rank.STEPS['sleep'] = lambda place: time.sleep(60)\n"
        f"rank.main(0, 1, {str(tmp_path)!r}, ['sleep'])\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    assert process.stdin is not None
    process.stdin.close()  # as the end of this process would
    assert process.wait(20) == 1


def outcomes(monkeypatch: pytest.MonkeyPatch, over: str) -> Iterator[Section]:
    """What is shown if processes meet only where ``GLOO_SOCKET_IFNAME`` is ``over``."""

    def run(steps: list[str], world_size: int, environ: dict[str, str], limit_s: float) -> Outcome:
        meets = environ.get("GLOO_SOCKET_IFNAME") == over
        done = steps if meets else steps[: steps.index("connect")]
        values: dict[str, Any] = dict.fromkeys(done)
        if meets:
            values["bandwidth"] = {"all_gather_mb_per_s": 1e3, "all_to_all_mb_per_s": 50.0}
        failed = None if meets else "connect"
        return Outcome(values, dict.fromkeys(done, 0.1), failed, "rank 0: refused", 1.0)

    monkeypatch.setattr(selftest, "run_steps", run)
    outcome, only_over = selftest.self_test({})
    section = Section("self-test")
    selftest.look_at_self_test(section, outcome, only_over)
    yield section


def test_the_loopback_is_tried_where_nothing_else_connects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (section,) = outcomes(monkeypatch, over=loopback())
    slow, alone = section.findings
    assert alone.level == "broken"
    assert alone.change.startswith(f"export GLOO_SOCKET_IFNAME={loopback()};")
    assert section.as_json()["checkpoint"]["ok"] is True
    assert section.as_json()["total"]["seconds"] == 2.0
    assert slow.level == "better"
    assert slow.what == "processes exchange only 50 MB/s within this machine"


def test_if_the_loopback_does_not_help_the_first_failure_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (section,) = outcomes(monkeypatch, over="elsewhere")
    (finding,) = section.findings
    assert finding.what == "connect: rank 0: refused"


def test_a_crash_after_all_is_done_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    died = "rank 0: its process ended with signal SIGABRT"
    monkeypatch.setattr(selftest, "run_steps", lambda *_: Outcome({}, {}, "disconnect", died))
    assert selftest.self_test({}) == (Outcome(), "")


# Faults that the steps must find


def place() -> rank.Place:
    return rank.Place(dist.get_rank(), 2, Path(tempfile.gettempdir()))


def check_wrong_numbers() -> None:
    rank._all_gather(place())
    rank._all_to_all(place())

    class Done:
        def wait(self) -> None: ...

    def keep(output: torch.Tensor, input: torch.Tensor, group: Any) -> Done:
        output.fill_(1.0)
        return Done()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compat, "all_gather_single", keep)
        patch.setattr(compat, "all_to_all_single", keep)
        with pytest.raises(AssertionError, match=r"received \[1\.0, 1\.0, .* instead of \[0\.0, "):
            rank._all_gather(place())
        with pytest.raises(AssertionError, match=r"received \[1\.0, 1\.0, .* instead of \["):
            rank._all_to_all(place())


def test_wrong_numbers_are_found() -> None:
    run_ranks(check_wrong_numbers, 2)


def check_wrong_training() -> None:
    rank._train(place())
    with pytest.MonkeyPatch.context() as patch:
        original = rank._make_sharded_model

        def summing() -> Any:
            model = original()
            model.set_gradient_divide_factor(1.0)  # the sum, not the mean
            return model

        patch.setattr(rank, "_make_sharded_model", summing)
        with pytest.raises(AssertionError, match=r"is off by .* after two steps"):
            rank._train(place())


def test_a_training_step_with_another_result_is_found() -> None:
    run_ranks(check_wrong_training, 2)


def check_wrong_checkpoint(folder: str) -> None:
    from torch.distributed.checkpoint import state_dict_loader

    good, bad = (rank.Place(dist.get_rank(), 2, Path(folder) / name) for name in ("a", "b"))
    rank._checkpoint(good)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_dict_loader, "load", lambda state, checkpoint_id: None)
        with pytest.raises(AssertionError, match=r"0\.weight is not what was saved"):
            rank._checkpoint(bad)


def test_a_checkpoint_that_does_not_come_back_is_found(tmp_path: Path) -> None:
    run_ranks(check_wrong_checkpoint, 2, str(tmp_path))


def test_a_step_that_raises_ends_the_rank_with_a_report(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rank.os, "_exit", lambda code: None)
        patch.setattr(rank, "_exit_without_parent", lambda: None)
        patch.setattr(sys, "stderr", io.StringIO())
        patch.setitem(rank.STEPS, "bad", lambda place: 1 / 0)
        rank.main(0, 1, str(tmp_path), ["bad", "never"])
    (line,) = (tmp_path / "report-0.jsonl").read_text().splitlines()
    assert json.loads(line)["error"] == "ZeroDivisionError: division by zero"

"""``vescale-fsdp doctor`` as a user types it, and its self-test with healthy and sick processes."""

from __future__ import annotations

import json
import os
import re
import socket
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from vescale_fsdp.cli import doctor, main
from vescale_fsdp.cli.checkup import Section, devices, look, steps
from vescale_fsdp.cli.checkup.devices import Outcome, ask_torch
from vescale_fsdp.ranks import collectives
from vescale_fsdp.testing import RankError, RankFailure, run_ranks

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
    run_ranks(nothing, 2)  # the ranks stay for other tests, and so do their files
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(tempfile, "tempdir", folder)
        patch.setenv("GLOO_SOCKET_IFNAME", loopback())
        outcome = ask_torch()
        assert doctor.self_test(outcome) == ""
        return outcome, [path.name for path in Path(folder).iterdir()]


def nothing() -> None: ...


def loopback() -> str:
    return next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))


def give(monkeypatch: pytest.MonkeyPatch, outcome: Outcome) -> None:
    """Let this be the outcome of every self-test."""
    monkeypatch.setattr(devices, "ask_torch", lambda: outcome)
    monkeypatch.setattr(doctor, "self_test", lambda outcome: "")


# The command


def test_the_self_test_passes_here(healthy: tuple[Outcome, list[str]]) -> None:
    outcome, left_behind = healthy
    assert (outcome.failed, outcome.error) == (None, "")
    looks = ["import torch", "devices", "import vescale_fsdp", "connect"]
    assert list(outcome.values) == [*looks, *steps.STEPS]
    assert min(outcome.values["bandwidth"].values()) > 0
    assert outcome.values["import torch"]["version"] == torch.__version__
    assert left_behind == []


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
    give(monkeypatch, Outcome(GOOD_LOOKS, dict.fromkeys(GOOD_LOOKS, 0.1)))
    monkeypatch.setattr(doctor, "self_test", None)  # not called
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
    assert "does not work: import torch: ImportError: libtorch.so: not found\n" in out
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
    assert finding.what == "could not finish the check of the machine: PermissionError: closed"


# Processes that are not well


def ask(monkeypatch: pytest.MonkeyPatch, code: str, limit_s: float = 60.0) -> Outcome:
    """What is known of a torch whose import ends with this code, after a first step."""
    start = """
import json, os, signal, sys, time
print("noise")
print(json.dumps({"step": "import torch", "value": 1, "seconds": 0.5}), flush=True)
"""
    monkeypatch.setattr(devices, "_CODE", start + code)
    outcome = ask_torch(limit_s)
    assert outcome.values == {"import torch": 1}
    assert outcome.failed == "devices"
    return outcome


@pytest.mark.nightly
def test_a_torch_that_hangs_is_ended_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    outcome = ask(monkeypatch, "time.sleep(60)", limit_s=5.0)
    assert outcome.error == "no answer within 5 s"
    assert not [each for each in psutil.Process().children() if "noise" in str(each.cmdline())]


def test_a_crash_is_told_by_its_signal_and_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "print('terminate:\\n  no driver', file=sys.stderr, flush=True)\nos.kill(os.getpid(), 9)"
    assert ask(monkeypatch, code).error == "its process ended with signal SIGKILL: no driver"


def test_a_step_that_raises_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "print(json.dumps({'step': 'devices', 'error': 'OSError: No\\nspace'}))"
    assert ask(monkeypatch, code).error == "OSError: No space"


def test_reports_end_with_the_first_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    wrong = {"good": lambda: 3, "bad": lambda: 1 / 0, "never": lambda: None}
    monkeypatch.setattr(devices, "_STEPS", wrong)
    devices.report()
    good, bad = (json.loads(line) for line in capsys.readouterr().out.split("\n") if line)
    assert (good["step"], good["value"]) == ("good", 3)
    assert bad == {"step": "bad", "error": "ZeroDivisionError: division by zero"}


def outcomes(monkeypatch: pytest.MonkeyPatch, over: str) -> Section:
    """What is shown if ranks meet only over this interface."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "eth7")

    def run(
        fn: Any, world_size: int, step: str, folder: str, wanted: str | None, timeout_s: float
    ) -> list[tuple[Any, float]]:
        assert os.environ.get("GLOO_SOCKET_IFNAME") is None
        if (wanted or loopback()) != over:
            raise RankError([RankFailure(0, "RuntimeError", "refused", "")], 2)
        speeds = {"all_gather_mb_per_s": 1e3, "all_to_all_mb_per_s": 50.0, "message_bytes": 1}
        return [(speeds if step == "bandwidth" else None, 0.1)] * 2

    monkeypatch.setattr(steps, "run_ranks", run)
    outcome = Outcome(dict(GOOD_LOOKS), dict.fromkeys(GOOD_LOOKS, 0.1))
    only_over = doctor.self_test(outcome)
    section = Section("self-test")
    doctor.look_at_self_test(section, outcome, only_over)
    assert os.environ["GLOO_SOCKET_IFNAME"] == "eth7"
    return section


def test_the_loopback_is_tried_where_nothing_else_connects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    section = outcomes(monkeypatch, over=loopback())
    slow, alone = section.findings
    assert alone.level == "broken"
    assert alone.change.startswith(f"export GLOO_SOCKET_IFNAME={loopback()};")
    assert section.as_json()["checkpoint"]["ok"] is True
    assert slow.level == "better"
    assert slow.what == "processes exchange only 50 MB/s within this machine"


def test_if_the_loopback_does_not_help_the_failure_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (finding,) = outcomes(monkeypatch, over="elsewhere").findings
    assert finding.what == "connect: rank 0: RuntimeError: refused"


def test_a_second_try_over_the_loopback_that_was_named_proves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one was slow, for example because other work kept the machine busy."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", loopback())
    monkeypatch.setattr(steps, "run_steps", lambda outcome, limit_s: True)
    assert doctor.self_test(Outcome()) == ""


def test_an_interface_that_does_not_exist_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By real ranks, which go on over the loopback."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing7")
    monkeypatch.setattr(steps, "STEPS", {})
    outcome = Outcome()
    assert steps.run_steps(outcome) is True
    assert (outcome.failed, list(outcome.values)) == (None, ["connect"])


# Faults that the steps must find


FOLDER = Path(tempfile.gettempdir())


def check_wrong_numbers() -> None:
    steps._all_gather(FOLDER)
    steps._all_to_all(FOLDER)

    class Done:
        def wait(self) -> None: ...

    def keep(output: torch.Tensor, input: torch.Tensor, group: Any) -> Done:
        output.fill_(1.0)
        return Done()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(collectives, "all_gather_single", keep)
        patch.setattr(collectives, "all_to_all_single", keep)
        with pytest.raises(AssertionError, match=r"received \[1\.0, 1\.0, .* instead of \[0\.0, "):
            steps._all_gather(FOLDER)
        with pytest.raises(AssertionError, match=r"received \[1\.0, 1\.0, .* instead of \["):
            steps._all_to_all(FOLDER)


def test_wrong_numbers_are_found() -> None:
    run_ranks(check_wrong_numbers, 2)


def check_wrong_training() -> None:
    steps._train(FOLDER)
    with pytest.MonkeyPatch.context() as patch:
        original = steps._make_sharded_model

        def summing() -> Any:
            model = original()
            model.set_gradient_divide_factor(1.0)  # the sum, not the mean
            return model

        patch.setattr(steps, "_make_sharded_model", summing)
        with pytest.raises(AssertionError, match=r"is off by .* after two steps"):
            steps._train(FOLDER)


def test_a_training_step_with_another_result_is_found() -> None:
    run_ranks(check_wrong_training, 2)


def check_wrong_checkpoint(folder: str) -> None:
    steps._checkpoint(Path(folder) / "a")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(steps.state_dict_loader, "load", lambda state, checkpoint_id: None)
        with pytest.raises(AssertionError, match=r"0\.weight differs from the saved value"):
            steps._checkpoint(Path(folder) / "b")


def test_a_checkpoint_that_does_not_come_back_is_found(tmp_path: Path) -> None:
    run_ranks(check_wrong_checkpoint, 2, str(tmp_path))

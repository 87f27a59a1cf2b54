"""``vescale-fsdp doctor`` as a user types it, and its self-test with healthy and sick processes."""

from __future__ import annotations

import importlib.metadata
import json
import os
import re
import socket
import tempfile
from pathlib import Path
from typing import Any

import psutil
import pytest

from vescale_fsdp.cli import main
from vescale_fsdp.cli.checkup import Section, devices, look, steps
from vescale_fsdp.testing import RankError, RankFailure, run_ranks
from vescale_fsdp.testing.ranks import close_pools

Capture = pytest.CaptureFixture[str]
TORCH: dict[str, Any] = {
    "version": "2.13.0",
    "cuda": None,
    "hip": None,
    "backends": ["gloo"],
    "type": None,
    "devices": [],
}


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch is not asked in a process of its own, and the self-test is one that has passed."""

    def passed(section: Section, limit_s: float) -> None:
        section.add("connect", "done, 0.10 s", {"ok": True, "seconds": 0.1})

    monkeypatch.setattr(devices, "ask_torch", lambda: TORCH)
    monkeypatch.setattr(steps, "look_at_self_test", passed)


def nothing() -> None: ...


def loopback() -> str:
    return next(name for _, name in socket.if_nameindex() if name in ("lo", "lo0"))


# The command


def test_it_passes_here_and_fits_a_screen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    run_ranks(nothing, 2)  # the server that ranks are forked from stays, and so do its files
    capsys.readouterr()  # what threads of earlier tests have written to them since
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", loopback())
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["doctor"]) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert err == ""
    assert max(len(line) for line in lines) <= 80
    assert len(lines) <= 60
    titles = [line for line in lines if line in ("software", "devices", "machine", "self-test")]
    assert titles == ["software", "devices", "machine", "self-test"]
    assert re.search(r"connect +done, \d", out)
    assert re.search(r"training step +same weights as one process, \d", out)
    assert lines[-1].startswith("Everything works")
    close_pools()  # new ranks have started if gloo aborted one at the end of a call
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("quick")
def test_json_has_everything(capsys: Capture) -> None:
    assert main(["doctor", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["schema_version"] == 2
    assert report["works"] is True
    assert report["software"]["torch"] == importlib.metadata.version("torch")  # without the build
    assert report["devices"]["torch_build"] == TORCH
    assert report["machine"]["shared_memory"]["total_bytes"] > 0
    assert report["self_test"] == {"connect": {"ok": True, "seconds": 0.1}}


@pytest.mark.usefixtures("quick")
def test_something_broken_is_exit_code_1(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    def broken(section: Section, limit_s: float) -> None:
        section.broken("connect: rank 1: RuntimeError: no way", "name the network interface")

    monkeypatch.setattr(steps, "look_at_self_test", broken)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "does not work: connect: rank 1: RuntimeError: no way\n" in out
    assert "name the network interface" in out
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["works"] is False
    assert {"about": "self-test", "level": "broken"}.items() <= report["findings"][-1].items()


@pytest.mark.usefixtures("quick")
def test_without_the_self_test_nothing_is_claimed(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr(steps, "look_at_self_test", None)  # not called
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
    assert "ImportError: libtorch.so: not found" in " ".join(out.split())
    assert "see pytorch.org/get-started" in " ".join(out.split())
    assert "self-test" not in out


def test_no_place_for_temporary_files_is_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "absent"))
    section = Section("self-test")
    steps.look_at_self_test(section, 60.0)
    *_, finding = section.findings  # under load ranks may need more than one try to connect
    assert finding.what.startswith("start: FileNotFoundError: ")
    assert finding.change.endswith("TMPDIR=... names another")


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


def ask(monkeypatch: pytest.MonkeyPatch, code: str, limit_s: float = 60.0) -> object:
    """What is known of a torch whose import ends with this code."""
    start = "import json, os, sys, time\nprint('noise', flush=True)\n"
    monkeypatch.setattr(devices, "_CODE", start + code)
    return devices.ask_torch(limit_s)


def test_a_torch_that_answers_is_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(monkeypatch, "print(json.dumps({'version': '2.13.0'}))") == {"version": "2.13.0"}


@pytest.mark.nightly
def test_a_torch_that_hangs_is_ended_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    assert ask(monkeypatch, "time.sleep(60)", limit_s=5.0) == "no answer within 5 s"
    assert not [each for each in psutil.Process().children() if "noise" in str(each.cmdline())]


def test_a_crash_is_told_by_its_signal_and_last_words(monkeypatch: pytest.MonkeyPatch) -> None:
    code = "print('terminate:\\n  no driver', file=sys.stderr, flush=True)\nos.kill(os.getpid(), 9)"
    assert ask(monkeypatch, code) == "its process ended with signal SIGKILL: no driver"


def test_a_torch_that_raises_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    found = ask(monkeypatch, "raise OSError('No space')")
    assert found == "its process ended with exit code 1: OSError: No space"


def outcomes(monkeypatch: pytest.MonkeyPatch, over: str, named: str = "eth7") -> Section:
    """What is shown if ranks meet only over the interface ``over``."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)

    def run(fn: Any, world_size: int, *args: str, timeout_s: float) -> None:
        assert os.environ.get("GLOO_SOCKET_IFNAME") is None
        if (args[1] if fn is steps.connect else loopback()) != over:
            raise RankError([RankFailure(0, "RuntimeError", "refused", "")], 2)

    monkeypatch.setattr(steps, "run_ranks", run)
    section = Section("self-test")
    steps.look_at_self_test(section, 60.0)
    assert os.environ["GLOO_SOCKET_IFNAME"] == named
    return section


def test_the_loopback_is_tried_where_nothing_else_connects(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    section = outcomes(monkeypatch, over=loopback())
    (alone,) = section.findings
    assert alone.level == "broken"
    assert alone.change.startswith(f"export GLOO_SOCKET_IFNAME={loopback()};")
    assert section.as_json()["training_step"]["ok"] is True


def test_if_the_loopback_does_not_help_the_failure_is_told(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    section = outcomes(monkeypatch, over="elsewhere")
    (finding,) = section.findings
    assert finding.what == "connect: rank 0: RuntimeError: refused"
    assert "export GLOO_SOCKET_IFNAME" in finding.change
    assert section.as_json() == {"connect": {"ok": False}}


def test_a_second_try_over_the_loopback_that_was_named_proves_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first one was slow, for example because other work kept the machine busy."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", loopback())
    tries: list[Any] = []

    def run(fn: Any, world_size: int, *args: str, timeout_s: float) -> None:
        tries.append(fn)
        if len(tries) == 1:
            raise RankError([RankFailure(0, "RuntimeError", "slow", "")], 2)

    monkeypatch.setattr(steps, "run_ranks", run)
    section = Section("self-test")
    steps.look_at_self_test(section, 60.0)
    assert (len(tries), section.findings) == (3, [])


def test_an_interface_that_does_not_exist_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """By real ranks, which go on over the loopback."""
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nothing7")
    section = Section("self-test")
    steps.look_at_self_test(section, 60.0)
    (finding,) = section.findings
    assert finding.what.endswith("find each other only over the loopback")
    assert section.as_json()["training_step"]["ok"] is True


def test_a_wrong_value_of_our_variables_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VESCALE_FSDP_REDUCE", "fast")
    section = Section("self-test")
    steps.look_at_self_test(section, 60.0)
    (finding,) = section.findings
    assert "VESCALE_FSDP_REDUCE must be auto, native or all_to_all" in finding.what
    assert finding.change.startswith("do what it says")


def check_wrong_training() -> None:
    steps.train()
    with pytest.MonkeyPatch.context() as patch:
        original = steps.shard

        def summing(model: Any) -> Any:
            model = original(model)
            model.set_gradient_divide_factor(1.0)  # the sum, not the mean
            return model

        patch.setattr(steps, "shard", summing)
        with pytest.raises(AssertionError, match=r"is off by .* after two steps"):
            steps.train()


def test_a_training_step_with_another_result_is_found() -> None:
    run_ranks(check_wrong_training, 2)

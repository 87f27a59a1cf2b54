"""The commands as a whole: help, version, and what plug-ins add."""

from __future__ import annotations

from importlib.metadata import EntryPoint
from typing import Any

import pytest
import typer

import vescale_fsdp
from vescale_fsdp.cli import app, main

Capture = pytest.CaptureFixture[str]


def good(application: typer.Typer) -> None:
    """A plug-in with one command."""
    application.command("greet")(lambda: print("hello"))


def raises(application: typer.Typer) -> None:
    """A plug-in that fails half-way."""
    application.command("half")(lambda: None)
    raise RuntimeError("something\nis missing")


def strange(application: typer.Typer) -> None:
    """A plug-in whose command typer cannot read."""

    def command(value: NoSuchType) -> None: ...  # noqa: F821

    application.command("strange")(command)


def with_plugins(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let these functions of this module, or names of nothing, be installed plug-ins."""
    found = [EntryPoint(name, f"{__name__}:{name}", app.PLUGINS) for name in names]
    loaded = {"good": good, "raises": raises, "strange": strange}

    def load(self: EntryPoint) -> Any:
        if self.name not in loaded:
            raise ModuleNotFoundError(f"No module named {self.name!r}")
        return loaded[self.name]

    monkeypatch.setattr(EntryPoint, "load", load)
    monkeypatch.setattr(app, "entry_points", lambda group: found if group == app.PLUGINS else [])


def test_plugins_add_commands(monkeypatch: pytest.MonkeyPatch, capsys: Capture) -> None:
    with_plugins(monkeypatch, "good")
    assert main(["greet"]) == 0
    assert capsys.readouterr() == ("hello\n", "")


def test_broken_plugins_are_warned_of_and_left_out(
    monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    with_plugins(monkeypatch, "absent", "raises", "strange", "good")
    assert main(["greet"]) == 0
    out, err = capsys.readouterr()
    assert out == "hello\n"
    lines = err.splitlines()
    assert [line.split(" (")[0] for line in lines] == [
        f"vescale-fsdp: warning: the plug-in '{name}'" for name in ("absent", "raises", "strange")
    ]
    assert lines[1].endswith("is ignored, RuntimeError: something is missing")
    assert main(["half"]) == 2
    assert "No such command 'half'" in capsys.readouterr().err


def test_without_arguments_the_help_is_shown(capsys: Capture) -> None:
    assert main([]) == 0
    out, err = capsys.readouterr()
    words = " ".join(out.split())  # columns are as wide as the longest command, of adapters too
    assert "doctor Show what this machine has" in words
    assert "checkpoint Check, show and convert checkpoints." in words
    assert err == ""


def test_version(capsys: Capture) -> None:
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"vescale-fsdp {vescale_fsdp.__version__}\n"


def test_an_unknown_command_is_one_line(capsys: Capture) -> None:
    assert main(["plon"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("vescale-fsdp: No such command 'plon'")
    assert err.count("\n") == 1


@pytest.mark.parametrize("arguments", [["plan", "llama", "--ranks", "8"], ["tune", "--help"]])
def test_commands_of_a_companion_say_what_to_install(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    with_plugins(monkeypatch)
    assert main(arguments) == 2
    expected = (
        f"vescale-fsdp: {arguments[0]} is a command of vescale-fsdp-tune, which is not loaded: "
        'pip install "vescale-fsdp[tune]"\n'
    )
    assert capsys.readouterr() == ("", expected)

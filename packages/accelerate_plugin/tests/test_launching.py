"""What the launcher's command line names, and what of the launcher changes for it."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FunctionType
from typing import Any

import accelerate.commands.launch as launcher
import pytest
from accelerate.commands.config.config_args import BaseConfig

from vescale_fsdp_accelerate import launching
from vescale_fsdp_accelerate.options import GUARD

OURS = "distributed_type: FSDP\nfsdp_config: {fsdp_version: 2, fsdp_engine: vescale}\n"


@pytest.fixture(autouse=True)
def undo(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launcher, "launch_command", launcher.launch_command)
    monkeypatch.setattr(BaseConfig, "process_config", staticmethod(BaseConfig.process_config))
    monkeypatch.setattr(launcher, "default_config_file", "nowhere.yaml")


def look(monkeypatch: pytest.MonkeyPatch, *words: str) -> list[str]:
    """Import the launcher with a command line. Returns what has become of it."""
    monkeypatch.setattr(sys, "argv", ["accelerate", *words])
    launching.look(launcher)
    return sys.argv[1:]


@pytest.mark.parametrize("text", ["distributed_type: FSDP\nfsdp_config: {}", "- 1", "a: [", ""])
@pytest.mark.parametrize("option", ["--config", "--config_file"])
def test_a_yaml_without_a_key_of_ours_changes_nothing(
    text: str, option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "other.yaml").write_text(text)
    before = [*vars(launcher).items(), *vars(BaseConfig).items()]
    words = ["launch", option, str(tmp_path / "other.yaml"), "train.py"]
    assert look(monkeypatch, *words) == words
    assert [*vars(launcher).items(), *vars(BaseConfig).items()] == before


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("launch --config YAML train.py", "launch --config_file YAML train.py"),
        ("launch --config=YAML train.py", "launch --config_file=YAML train.py"),
        ("--cpu --num-processes 2 --config YAML x.py", None),  # accelerate-launch
        ("launch --num_processes=2 -q --config-file YAML x.py", None),
        ("launch x.py --config YAML", "nothing"),  # of the script
        ("launch --main_training_function --config x.py", "nothing"),  # a value of another option
        ("env --config_file YAML", "nothing"),
        ("launch --config", "nothing"),
        ("", "nothing"),
    ],
)
def test_the_yaml_is_found_in_the_launchers_own_words(
    words: str, expected: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vescale.yaml").write_text(OURS)
    given = words.replace("YAML", str(tmp_path / "vescale.yaml")).split()
    left = look(monkeypatch, *given)
    is_ours = hasattr(launcher.launch_command, "__wrapped__")
    assert is_ours == (expected != "nothing")
    if expected == "nothing":
        assert left == given
    elif expected is not None:
        assert left == expected.replace("YAML", str(tmp_path / "vescale.yaml")).split()
    else:
        assert left[left.index("--config_file") + 1] == str(tmp_path / "vescale.yaml")


@pytest.mark.parametrize(
    ("program", "words", "is_found"),
    [
        ("/bin/trl", "sft --accelerate_config YAML --lr 1", True),
        ("/bin/trl", "sft --accelerate_config", False),
        ("/bin/trl", "sft --accelerate_config fsdp2", False),  # a name, which is of trl
        ("train.py", "sft --accelerate_config YAML", False),
    ],
)
def test_the_yaml_of_trls_own_command_is_looked_at(
    program: str, words: str, is_found: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vescale.yaml").write_text(OURS)
    given = words.replace("YAML", str(tmp_path / "vescale.yaml")).split()
    monkeypatch.setattr(sys, "argv", [program, *given])
    launching.look(launcher)
    assert sys.argv[1:] == given
    assert hasattr(launcher.launch_command, "__wrapped__") == is_found


def test_the_default_yaml_is_looked_at_where_none_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "default.yaml").write_text(f"distributed_type: FSDP\n{GUARD}: true\n")
    monkeypatch.setattr(launcher, "default_config_file", str(tmp_path / "default.yaml"))
    look(monkeypatch, "launch", "train.py")
    assert GUARD not in BaseConfig.process_config({"distributed_type": "FSDP", GUARD: True})
    args = launcher.launch_command_parser().parse_args(["train.py"])
    with pytest.raises(ValueError, match="and does not turn veScale-FSDP on"):
        launcher.launch_command(args)


def test_a_launch_by_another_yaml_is_accelerates_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A program that has imported the launcher with our yaml may start other jobs too."""
    (tmp_path / "vescale.yaml").write_text(OURS)
    started: list[Any] = []
    monkeypatch.setattr(launcher, "launch_command", started.append)
    look(monkeypatch, "launch", "--config", str(tmp_path / "vescale.yaml"), "train.py")
    assert isinstance(launcher.launch_command, FunctionType)
    args = launcher.launch_command_parser().parse_args(["--config_file", "other.yaml", "x.py"])
    launcher.launch_command(args)
    assert started == [args]


@pytest.mark.parametrize("option", ["--use_deepspeed", "--use_megatron_lm", "--tpu"])
def test_another_engine_beside_our_yaml_is_refused(
    option: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vescale.yaml").write_text(OURS)
    words = ["--config_file", str(tmp_path / "vescale.yaml"), option, "train.py"]
    look(monkeypatch, *words)
    args = launcher.launch_command_parser().parse_args(words)
    with pytest.raises(ValueError, match=f"{option} and 'fsdp_engine: vescale' in the yaml ask"):
        launcher.launch_command(args)

"""The documentation's commands and settings are those of the programs.

Needs all packages (tox: integration). Commands are parsed by the programs' own parsers and not run.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import inspect
import re
import runpy
import shlex
import tomllib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import accelerate.commands.launch
import pytest
import torch.distributed.run
import typer
import yaml
from accelerate.commands.config.config_args import ClusterConfig
from lightning.pytorch import Trainer

from vescale_fsdp.cli import app, main
from vescale_fsdp_accelerate.options import GUARD, Options
from vescale_fsdp_accelerate.yaml_file import check_file

from .blocks import FENCE, ROOT, TEXTS, blocks

DEV = runpy.run_path(str(ROOT / "dev.py"))
NOT_OURS = {"cd", "echo", "export", "git"}


def commands() -> Iterator[tuple[str, str]]:
    """Page and text of each command in a block of bash, or after a prompt."""
    for page, _, text in blocks("bash"):
        for line in text.replace("\\\n", " ").splitlines():
            yield page, line
    for page, _, text in blocks(""):
        yield from ((page, line[2:]) for line in text.splitlines() if line.startswith("$ "))


def mentions() -> Iterator[tuple[str, str]]:
    """Page and text of each command in the middle of a sentence."""
    program = re.compile(r"`((?:vescale-fsdp|python3?|accelerate launch|torchrun) [^`\n]+)`")
    for page, text in TEXTS.items():
        if page != "CHANGELOG.md":  # which may name what is no more
            for command in program.findall(FENCE.sub("", text)):
                yield page, re.sub(r"\bN\b", "2", command.replace("FORMAT", "dcp"))


def check(command: str) -> None:
    """Raise unless the program knows all that the command names."""
    words = shlex.split(command, comments=True)
    match words[1:] if words[:1] == ["srun"] else words:
        case [] | ["vescale-fsdp", "COMMAND", *_]:
            pass
        case ["vescale-fsdp", *arguments]:
            parse_ours(arguments)
        case ["accelerate", "launch", *arguments]:
            # Ours reads --config, and --config_file in its place, if the yaml is ours.
            words = ["--config_file" if word == "--config" else word for word in arguments]
            accelerate.commands.launch.launch_command_parser().parse_args([*words, "train.py"])
            check_files(arguments)
        case ["torchrun", *arguments]:
            torch.distributed.run.get_args_parser().parse_args([*arguments, "train.py"])
            check_files(arguments)
        case ["python3", "dev.py", *arguments]:
            known = re.findall(r"^  (\w[\w-]*)", DEV["USAGE"], re.M)
            assert set(arguments[:1]) <= {*known, *DEV["TESTED"]}, f"unknown: {arguments[0]}"
        case ["python" | "python3", "-m", module, *_]:
            assert importlib.util.find_spec(module) is not None, f"no module {module}"
        case ["python" | "python3", script, *arguments]:
            assert (ROOT / script).is_file(), f"no file {script}"
            options = {word for word in arguments if word.startswith("--")}
            assert all(f'"{o}"' in (ROOT / script).read_text() for o in options), options
        case ["pip", "install", *targets]:
            for target in targets:
                check_distribution(target)
        case [name, *_]:
            assert name in NOT_OURS or "=$(" in name, f"{name} is not known to this test"


def parse_ours(arguments: list[str]) -> None:
    """With the parsers of the commands, down to the innermost one."""
    name, command, context = "vescale-fsdp", typer.main.get_command(app.make_app()), None
    while arguments and hasattr(command, "resolve_command"):
        context = command.make_context(name, list(arguments), parent=context)
        name, command, arguments = command.resolve_command(context, arguments)
    if not hasattr(command, "resolve_command"):
        command.make_context(name, arguments, parent=context)


def check_files(arguments: list[str]) -> None:
    for word in arguments:
        if word.endswith(".py") and "/" in word:  # one without a folder is the reader's
            assert (ROOT / word).is_file(), f"no file {word}"


def check_distribution(target: str) -> None:
    """A folder of this repository, or one of our names, with extras that it has."""
    name, _, extras = target.rstrip("]").partition("[")
    projects = [path.parent for path in DEV["PROJECTS"]]
    (folder,) = [
        folder
        for folder in projects
        if (ROOT / name).resolve() == folder or name == load(folder)["name"]
    ]
    declared = load(folder).get("optional-dependencies", {})
    assert set(filter(None, extras.split(","))) <= set(declared)


def load(folder: Path) -> dict[str, object]:
    project: dict[str, object] = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    return project


@pytest.mark.parametrize(("page", "command"), [*commands()])
def test_command_of_a_block_can_be_parsed(page: str, command: str) -> None:
    check(command)


@pytest.mark.parametrize(("page", "command"), [*mentions()])
def test_command_in_a_sentence_can_be_parsed(page: str, command: str) -> None:
    try:
        check(command)
    except Exception as error:
        if type(error).__name__ != "MissingParameter":  # a sentence may leave arguments out
            raise


def test_files_of_settings_for_accelerate_have_known_keys(tmp_path: Path) -> None:
    check_file(ROOT / "examples" / "accelerate" / "vescale.yaml")
    known = {field.name for field in dataclasses.fields(ClusterConfig)} | {GUARD}
    for page, _, text in blocks("yaml"):
        if page == "docs/accelerate.md":
            assert set(yaml.safe_load(text)) <= known
    named = set(re.findall(r"fsdp_vescale_\w+[a-z]", " ".join(TEXTS.values())))
    assert named <= {f"fsdp_vescale_{field.name}" for field in fields(Options)}


def test_settings_for_lightning_have_known_keys() -> None:
    (text,) = [block.text for block in blocks("yaml") if block.page == "docs/lightning.md"]
    trainer = yaml.safe_load(text)["trainer"]
    assert set(trainer) <= set(inspect.signature(Trainer).parameters)
    module, _, name = trainer["strategy"]["class_path"].rpartition(".")
    strategy = getattr(importlib.import_module(module), name)
    assert set(trainer["strategy"]["init_args"]) <= set(inspect.signature(strategy).parameters)


def test_the_shapes_file_can_be_planned(tmp_path: Path) -> None:
    ((_, _, text),) = blocks("json")
    (tmp_path / "model.json").write_text(text)
    assert main(["plan", str(tmp_path / "model.json"), "--ranks", "2"]) == 0


def test_the_entry_point_is_that_of_plug_ins() -> None:
    ((_, _, text),) = blocks("toml")
    assert list(tomllib.loads(text)["project"]["entry-points"]) == [app.PLUGINS]

"""``vescale-fsdp checkpoint``: what is shown, and exit codes that a script can use."""

from __future__ import annotations

import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from vescale_fsdp import checkpoint
from vescale_fsdp.cli import main, text
from vescale_fsdp.errors import CheckpointCorruptError, CheckpointExistsError

Capture = pytest.CaptureFixture[str]


def save(path: Path, step: int) -> None:
    """One process, 2 tensors of the model, 2 momenta, no state of generators: all sizes known."""
    torch.manual_seed(step)
    model = nn.Linear(4, 8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    checkpoint.save(path, model, optimizer, extra={"step": step}, rng=False)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three checkpoints; the last that was made has the lowest step."""
    root = tmp_path_factory.mktemp("saved")
    for step in (20, 30, 10):
        save(root / f"step-{step}", step)
    return root


@pytest.fixture
def root(saved: Path, tmp_path: Path) -> Path:
    """A copy, to be damaged."""
    return Path(shutil.copytree(saved, tmp_path / "runs"))


def run(capsys: Capture, *arguments: str | Path) -> tuple[int, str, str]:
    code = main(["checkpoint", *map(str, arguments)])
    return code, *capsys.readouterr()


def flip_bit(file: Path, offset: int = 10) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 4
    file.write_bytes(data)


# verify


def test_a_whole_checkpoint_is_one_line_and_code_0(saved: Path, capsys: Capture) -> None:
    code, out, err = run(capsys, "verify", saved / "step-20")
    num_bytes = (saved / "step-20" / "rank-00000.bin").stat().st_size
    assert out == f"{saved}/step-20: whole, {num_bytes} B in 1 file, 4 tensors\n"
    assert (code, err) == (0, "")


def test_damage_is_named_by_file_and_tensor_and_is_code_1(root: Path, capsys: Capture) -> None:
    flip_bit(root / "step-20" / "rank-00000.bin")
    code, out, _ = run(capsys, "verify", root / "step-20")
    first, fault = out.splitlines()
    assert code == 1
    assert first == f"{root}/step-20: NOT WHOLE"
    assert fault.startswith(f"  {root}/step-20/rank-00000.bin is damaged in tensor 'model.")
    assert "Nothing was loaded" not in fault


DAMAGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "cut": (lambda path: os.truncate(path / "rank-00000.bin", 20), "has 20 bytes, expected"),
    "data gone": (lambda path: (path / "rank-00000.bin").unlink(), "rank-00000.bin is missing"),
    "manifest gone": (lambda path: (path / "manifest.json").unlink(), "; it has no manifest.json"),
    "manifest": (lambda path: flip_bit(path / "manifest.json", 300), "manifest.json is damaged"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_the_worst_of_a_folder_is_the_code(name: str, root: Path, capsys: Capture) -> None:
    damage, message = DAMAGES[name]
    damage(root / "step-30")
    code, out, _ = run(capsys, "verify", root)
    assert code == 1
    assert out.count(": whole, ") == 2
    assert message in out
    assert out.endswith("2 of 3 checkpoints whole\n")


def test_an_unfinished_save_beside_them_is_no_fault(root: Path, capsys: Capture) -> None:
    stage = root / f"step-40.tmp-{'0' * 32}"
    stage.mkdir()
    code, out, _ = run(capsys, "verify", root)
    assert code == 0
    assert f"{stage}: skipped, a save that is under way or did not finish\n" in out
    assert run(capsys, "verify", stage)[0] == 1  # when it is named


def test_a_folder_is_listed_in_the_order_in_which_they_were_made(
    saved: Path, capsys: Capture
) -> None:
    code, out, _ = run(capsys, "verify", saved, "--json")
    reports = json.loads(out)["checkpoints"]
    assert code == 0
    assert [report["step"] for report in reports] == [20, 30, 10]


@pytest.mark.parametrize("command", ["verify", "show"])
def test_what_is_no_checkpoint_is_one_line_and_code_2(
    command: str, tmp_path: Path, capsys: Capture
) -> None:
    stock, weights = tmp_path / "a" / "stock", tmp_path / "weights"
    for file in (stock / ".metadata", weights / "model.safetensors", tmp_path / "file"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    to_vescale = r"convert .* TARGET --to vescale"
    for path, message in (
        (tmp_path / "absent", r"there is nothing at .*absent"),
        (tmp_path / "file", r"file is not a directory"),
        (tmp_path, r"is not a checkpoint, and contains none; weights is safetensors"),
        (tmp_path / "a", r"contains none; stock is a directory of torch.distributed.checkpoint"),
        (stock, rf"stock is a directory of torch.distributed.checkpoint, which .* {to_vescale}"),
        (weights, rf"weights is safetensors, which has no checksums .* {to_vescale}"),
    ):
        code, out, err = run(capsys, command, path)
        assert (code, out) == (2, "")
        assert err.count("\n") == 1
        assert re.search(message, err), err


# show


def test_show_lists_parts_files_and_tensors(saved: Path, capsys: Capture) -> None:
    code, out, err = run(capsys, "show", saved / "step-20")
    assert (code, err) == (0, "")
    rows = [line.split() for line in out.splitlines()]
    # 8 x 4 weights and 8 biases in fp32: 160 bytes, and as much momentum; with the frames' texts.
    assert next(row for row in rows if row[:1] == ["model"])[1:3] == ["2", "40"]
    assert next(row for row in rows if row[:1] == ["optimizer.0"])[1:3] == ["2", "40"]
    assert ["model.weight", "float32", "8x4", "1", "128", "B"] in rows
    assert ["model.bias", "float32", "8", "1", "32", "B"] in rows


def test_show_as_json_has_all_tensors(saved: Path, capsys: Capture) -> None:
    _, out, _ = run(capsys, "show", saved / "step-20", "--json")
    found = json.loads(out)
    assert (found["step"], found["sequence"], found["world_size"]) == (20, 1, 1)
    assert {each["name"]: each["part"] for each in found["tensors"]} == {
        "model.bias": "model",
        "model.weight": "model",
        "optimizer.0.state.bias.momentum_buffer": "optimizer.0",
        "optimizer.0.state.weight.momentum_buffer": "optimizer.0",
    }
    assert [value["name"] for value in found["values"]] == ["extra", "model", "optimizer.0"]


def test_long_lists_are_cut_unless_all_is_asked_for(tmp_path: Path, capsys: Capture) -> None:
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(14)))
    checkpoint.save(tmp_path / "one", model, rng=False)
    _, out, _ = run(capsys, "show", tmp_path / "one")
    assert out.count(".weight") == 12
    assert "... and 2 more tensors: --all shows them" in out
    _, out, _ = run(capsys, "show", tmp_path / "one", "--all")
    assert out.count(".weight") == 14
    assert "more" not in out


def test_show_of_a_folder_has_a_line_each_and_code_1_for_a_damaged_manifest(
    root: Path, capsys: Capture
) -> None:
    code, out, _ = run(capsys, "show", root)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[2:5]] == ["step-20", "step-30", "step-10"]
    flip_bit(root / "step-30" / "manifest.json", 300)
    code, out, _ = run(capsys, "show", root)
    assert code == 1
    assert "NOT WHOLE" in out
    assert run(capsys, "show", root / "step-30")[0] == 1


def test_names_cannot_steer_a_terminal(tmp_path: Path, capsys: Capture) -> None:
    model = nn.ModuleDict({"[red]\x1b[2Jx": nn.Linear(1, 1)})
    checkpoint.save(tmp_path / "a\x1b[2Jb", model)
    for arguments in (["verify"], ["show"], ["show", "--all"]):
        code, out, _ = run(capsys, *arguments, tmp_path / "a\x1b[2Jb")
        assert code == 0
        assert "\x1b" not in out
    assert "[red]" in out


# convert


def stand_in(error: Exception | None = None) -> Callable[..., list[str]]:
    def convert(source: Path, target: Path, *, to: str, **options: Any) -> list[str]:
        if error is not None:
            raise error
        target.mkdir()
        (target / to).write_bytes(bytes(2048))
        return []

    return convert


def test_convert_says_what_it_made(
    saved: Path, tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "convert", stand_in())
    target = tmp_path / "made"
    code, out, _ = run(capsys, "convert", saved / "step-20", target, "--to", "safetensors")
    assert (code, out) == (0, f"{target}: 2.00 KiB, from {saved}/step-20\n")
    assert (target / "safetensors").exists()


@pytest.mark.parametrize(
    ("error", "expected"),
    [(CheckpointCorruptError("it is damaged"), 1), (CheckpointExistsError("it exists"), 2)],
)
def test_a_damaged_source_is_code_1_and_a_taken_target_code_2(
    error: Exception,
    expected: int,
    saved: Path,
    tmp_path: Path,
    capsys: Capture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(checkpoint, "convert", stand_in(error))
    code, out, err = run(capsys, "convert", saved / "step-20", tmp_path / "x", "--to", "dcp")
    assert (code, out, err) == (expected, "", f"vescale-fsdp: {error}\n")


def test_convert_wants_one_checkpoint_and_a_known_format(saved: Path, capsys: Capture) -> None:
    code, _, err = run(capsys, "convert", saved, "x", "--to", "dcp")
    assert (code, err.count("\n")) == (2, 1)
    assert f"name one of them: {saved}/step-" in err
    assert run(capsys, "convert", saved / "step-20", "x", "--to", "gguf")[0] == 2


def test_convert_removes_a_prefix_and_renames(tmp_path: Path, capsys: Capture) -> None:
    model = nn.ModuleDict({"net": nn.ModuleDict({"a": nn.Linear(1, 1)}), "b": nn.Linear(1, 1)})
    checkpoint.save(tmp_path / "saved", model, rng=False)
    convert = ("convert", tmp_path / "saved", tmp_path / "new", "--to")
    options = ("--prefix", "net", "--rename", "a.bias=c", "--rename", "a=d")
    for words, message in (
        (("dcp", *options), "--prefix and --rename are for --to safetensors, not for --to dcp"),
        (("safetensors", "--rename", "a"), "--rename is 'a', expected OLD=NEW"),
        (("safetensors", "--prefix", "model"), "no tensor of the model has the prefix 'model.'"),
    ):
        code, _, err = run(capsys, *convert, *words)
        assert (code, err.count("\n")) == (2, 1)
        assert message in err
    code, out, _ = run(capsys, *convert, "safetensors", *options)
    assert code == 0
    assert out.endswith("left out, without the prefix: b.weight, b.bias\n")
    assert sorted(checkpoint.read(tmp_path / "new")["model"]) == ["c", "d.weight"]


# As a command among others


def test_help_and_a_wrong_path_load_no_torch() -> None:
    code = (
        "import sys; from vescale_fsdp.cli import main\n"
        "for words in (['--help'], ['checkpoint', '--help'], ['checkpoint', 'verify', '--help'],\n"
        "              ['checkpoint', 'show', 'absent'], ['checkpoint', 'convert', '--help']):\n"
        "    main(words)\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "vescale-fsdp: there is nothing at absent\n")
    assert "0 if all are whole, 1 if one is not" in done.stdout


def test_a_reader_that_leaves_ends_it_quietly(saved: Path) -> None:
    code = "import sys; from vescale_fsdp.cli import main; sys.exit(main(sys.argv[1:]))"
    command = f"{sys.executable} -c '{code}' checkpoint show {saved}/step-20"
    script = f"{command} | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.stderr == ""
    assert done.returncode == 128 + signal.SIGPIPE


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("step_s", "is_shown"), [(2.0, True), (0.0, False)])
def test_long_work_shows_bytes_on_a_terminal(
    step_s: float, is_shown: bool, saved: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticks = itertools.count(0.0, step_s)
    stream = Terminal()
    monkeypatch.setattr(text.time, "monotonic", lambda: next(ticks))
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("TERM", "xterm")
    assert main(["checkpoint", "verify", str(saved / "step-20")]) == 0
    assert ("checking step-20" in stream.getvalue()) == is_shown

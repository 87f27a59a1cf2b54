"""``vescale-fsdp tune`` as a user types it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vescale_fsdp.cli import main
from vescale_fsdp_tune.commands.settings import Settings
from vescale_fsdp_tune.commands.tuning import Work, machine_of, problem_of
from vescale_fsdp_tune.costs.choice_file import read_choice
from vescale_fsdp_tune.costs.problem import Division, Extra

from .tiny import shapes_file

Capture = pytest.CaptureFixture[str]
LAYER = [["attn.weight", [512, 2048]], ["mlp.experts.0.up.weight", [2048, 2048]], ["norm", [2048]]]
MODEL = {
    "model": "small",
    "groups": [
        {"name": "layer", "count": 6, "tensors": LAYER},
        {
            "name": "root",
            "tensors": [["embed.weight", [4096, 2048]], ["head.weight", [4096, 2048]]],
        },
    ],
}
SOURCE = f"{__name__}:gpt"


def gpt() -> Any:
    from .training import GPT

    return GPT(4)


def tokens() -> Any:
    import torch

    return torch.zeros(8, 8, dtype=torch.long)


def run(capsys: Capture, *arguments: str) -> str:
    code = main(["tune", *arguments])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def refuse(capsys: Capture, *arguments: str) -> str:
    assert main(["tune", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err


def as_json(capsys: Capture, *arguments: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(run(capsys, *arguments, "--json", "-"))
    return found


def test_tables_fit_80_columns(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    path = shapes_file(tmp_path, MODEL)
    out = run(capsys, path, "--ranks", "16", "--batch", "1x512", "--budget", "400MB")
    assert max(len(line) for line in out.splitlines()) <= 80
    words = " ".join(out.split())
    assert "small: 48.2 M parameters in 7 units, 16 ranks of h100, budget 381 MiB" in words
    assert "2 operations for each parameter and token" in words
    assert "activations are not counted" in words
    assert "chosen" in words
    assert "too large by" in words
    assert "the model: fully_shard(model, sharding=" in words


def test_all_figures_are_in_the_json(tmp_path: Path, capsys: Capture) -> None:
    path = shapes_file(tmp_path, MODEL)
    found = as_json(capsys, path, "--ranks", "16", "--batch", "1x512", "--budget", "400MB")
    chosen, *others = found["candidates"]
    assert found["chosen"] == chosen
    assert chosen["why_not"] is None
    assert all(each["why_not"] for each in others)
    assert {each["settings"]["sharding"] for each in found["candidates"]} == {
        *("ddp", "zero1", "zero2", "zero3", "hsdp", "hsdp_zero1")
    }
    for each in found["candidates"]:
        assert sum(each["peak_parts_bytes"].values()) == each["peak_bytes"]
        assert sum(each["seconds"].values()) == pytest.approx(each["step_s"])
    assert found["budget_bytes"] == 400_000_000


def test_times_follow_the_hardware_and_the_experts(tmp_path: Path, capsys: Capture) -> None:
    arguments = [shapes_file(tmp_path, MODEL), "--ranks", "2", "--batch", "4x4096"]
    # 512 and 2048 rows of 2048 in six layers, and the head: 39.8 M, 6 operations, 16,384 tokens.
    all_s = as_json(capsys, *arguments)["chosen"]["seconds"]["compute"]
    assert all_s == pytest.approx(6 * 39_845_888 * 16384 / (0.5 * 989.4e12))
    some_s = as_json(capsys, *arguments, "--experts", "1/4")["chosen"]["seconds"]["compute"]
    experts = 6 * 2048 * 2048
    assert some_s == pytest.approx(all_s * (39_845_888 - 0.75 * experts) / 39_845_888)
    other = as_json(capsys, *arguments, "--gpu", "b200")["chosen"]["seconds"]["compute"]
    assert other == pytest.approx(all_s * 989.4 / 2250)


def test_a_model_is_run_without_values(capsys: Capture, tmp_path: Path) -> None:
    out = tmp_path / "choice.yaml"
    arguments = [SOURCE, "--ranks", "4", "--inputs", f"{__name__}:tokens"]
    text = run(capsys, *arguments, "--out", str(out), "--granularity", "rows:2")
    assert "counted in a forward without values" in " ".join(text.split())
    choice = read_choice(out)
    assert (choice.model, choice.num_ranks) == (SOURCE, 4)
    assert {len(unit) for unit in choice.candidate.units} <= {1, 2, 4}
    assert choice.candidate.units[0][0] == "blocks.0"
    assert out.read_text().startswith("# Written by vescale-fsdp tune")


def test_operations_are_those_of_matrix_products(capsys: Capture) -> None:
    found = as_json(capsys, SOURCE, "--ranks", "2", "--inputs", f"{__name__}:tokens")
    # 64 tokens; matrices of four blocks, 24 x 24 and two of 24 x 96, and a head of 131 x 24.
    forward = 2 * 64 * (4 * (24 * 24 + 2 * 24 * 96) + 131 * 24)
    assert found["chosen"]["seconds"]["compute"] == pytest.approx(3 * forward / (0.5 * 989.4e12))
    assert found["chosen"]["peak_parts_bytes"]["activations"] > 0


@pytest.mark.parametrize("measures", [False, True])
def test_large_blocks_are_tried_as_their_children_too(*, measures: bool) -> None:
    from vescale_fsdp_tune.commands.sources import load

    settings = Settings(num_ranks=4, inputs=f"{__name__}:tokens")
    machine, nothing = machine_of("h100", None, None), frozenset[Extra]()
    work = Work(settings, measures=measures)

    def divisions(budget_bytes: int) -> tuple[Division, ...]:
        model = load(SOURCE, None)
        return problem_of(model, work, machine, budget_bytes, 1, nothing, [])[0].divisions

    assert len(divisions(1 << 30)) == 1
    usual, smaller = divisions(100_000)  # a block has 10.7 kB, more than a sixteenth
    assert usual.model.modules[1] == ("blocks.0",)
    assert smaller.model.modules[1:5] == tuple(
        (f"blocks.0.{name}",) for name in ("norm", "mix", "up", "down")
    )
    assert smaller.model.num_parameters == usual.model.num_parameters
    dtypes = {group.dtype.name for unit in smaller.model.units for group in unit.groups}
    assert dtypes == {"float32"}
    assert set(smaller.traces) == set(usual.traces) == {"keep", "recompute"}
    if not measures:
        whole = sum(usual.times[index].forward_s for index in usual.model.order)
        parts = sum(smaller.times[index].forward_s for index in smaller.model.order)
        assert parts == pytest.approx(whole)


def test_blocks_are_measured(capsys: Capture) -> None:
    found = as_json(capsys, SOURCE, "--ranks", "2", "--inputs", f"{__name__}:tokens", "--measure")
    assert found["times_of_blocks"].startswith("measured on ")
    assert found["chosen"]["seconds"]["compute"] > 1e-5


def test_a_budget_that_is_too_small_names_the_least(tmp_path: Path, capsys: Capture) -> None:
    path = shapes_file(tmp_path, MODEL)
    error = refuse(capsys, path, "--ranks", "2", "--batch", "1x512", "--budget", "10MiB")
    assert "nothing fits in 10.0 MiB on 2 ranks: the least is" in error
    assert "with zero3" in error
    assert "or allow int8 or offload" in error


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "tune needs --batch"),
        (["--batch", "1x512", "--gpu", "a100"], "--gpu is 'a100', expected one of h100"),
        (["--batch", "1x512", "--budget", "much"], "--budget is 'much', expected a size"),
        (["--batch", "1x512", "--budget", "0%"], "--budget is '0%', expected a size"),
        (["--batch", "1x512", "--allow", "fp4"], "--allow is 'fp4', expected int8, offload"),
        (["--batch", "1x512", "--experts", "9/8"], "--experts is '9/8', expected those"),
        (["--batch", "1x512", "--micro-batches", "0"], "--micro-batches is 0, expected at least"),
        (["--batch", "1x512", "--ranks-per-node", "0"], "--ranks-per-node is 0, expected at"),
        (["--batch", "1x512", "--bandwidth", "fast"], "--bandwidth is 'fast'"),
        (["--batch", "1x512", "--out", "x.yaml"], "--out needs the names of modules"),
        (["--inputs", "a:b"], "--inputs needs the code of the model"),
    ],
)
def test_what_is_wrong_is_named(
    arguments: list[str], message: str, tmp_path: Path, capsys: Capture
) -> None:
    path = shapes_file(tmp_path, MODEL)
    assert message in refuse(capsys, path, "--ranks", "16", *arguments)


def test_a_shapes_file_is_tuned_without_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from vescale_fsdp.cli import main\n"
        f"code = main(['tune', {shapes_file(tmp_path, MODEL)!r}, '--ranks', '64', "
        "'--batch', '1x512'])\n"
        "assert code == 0 and 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")

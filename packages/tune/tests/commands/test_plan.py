"""``vescale-fsdp plan`` as a user types it: what it prints, writes and refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from vescale_fsdp.cli import main
from vescale_fsdp.cli.text import color_system
from vescale_fsdp_tune.commands import sources

from .tiny import TINY, shapes_file

Capture = pytest.CaptureFixture[str]
HERE = str(Path(__file__).parent)


def run(capsys: Capture, *arguments: str) -> str:
    """The output of a plan that must succeed without a word on stderr."""
    code = main(["plan", *arguments])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    return out


def group(name: str, *tensors: Any, count: int = 1) -> dict[str, Any]:
    return {"name": name, "count": count, "tensors": list(tensors)}


def as_json(capsys: Capture, *arguments: str) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(run(capsys, *arguments, "--json", "-"))
    return report


def test_tables_fit_80_columns(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    names = [f"model.layers.{i}.mlp.experts.up_proj.weight" for i in range(40)]
    groups = [{"name": "a.long.name.of.a.unit", "tensors": [[n, [100, 1000]] for n in names]}]
    path = shapes_file(tmp_path, {"groups": groups})
    out = run(capsys, path, "--ranks", "64", "--granularity", "whole", "--replicas", "2")
    assert max(len(line) for line in out.splitlines()) <= 80
    # 40 matrices on 32 ranks: two on some, so 64 places for 40.
    assert re.search(r"a\.long\.name\.of\.a\.unit +1 +40 +4\.00 M +200 K +60\.0% +definition", out)
    text = " ".join(out.split())
    assert "padding is forced by model.layers.*.mlp.experts.up_proj.weight (40), in" in text
    assert "(1) --replicas" in text
    assert "their layouts in our engine, which do not keep the blocks of --granularity" in text


def test_figures_of_a_tiny_model(tmp_path: Path, capsys: Capture) -> None:
    # Shards of 264 / 4 -> 72 elements (with the alignment to 8) and of 544 / 4 = 136.
    report = as_json(capsys, shapes_file(tmp_path), "--ranks", "8", "--replicas", "2")
    assert report["schema_version"] == 1
    assert report["model"] == {"name": "tiny", "num_parameters": 1072, "num_units": 3}
    assert [(g["name"], g["count"], g["shard_elements"]) for g in report["groups"]] == [
        ("root", 1, 136),
        ("layer", 2, 72),
    ]
    ours = report["per_rank"]["vescale_fsdp"]
    assert ours["shard_elements"] == 136 + 2 * 72
    assert ours["padding_elements"] == 4 * (136 + 2 * 72) - 1072
    assert ours["weights_bytes"] == ours["gradients_bytes"] == 280 * 4
    assert ours["optimizer_states_bytes"] == 280 * 8
    assert ours["sent_bytes"] == {
        "gather_forward_bytes": 3 * 280 * 2,
        "gather_backward_bytes": 3 * 144 * 2,
        "reduce_bytes": 3 * 280 * 4,
        "replicate_bytes": 280 * 4,  # 2 (R - 1) / R = 1
        "total_bytes": 3 * 280 * 2 + 3 * 144 * 2 + 3 * 280 * 4 + 280 * 4,
    }
    assert ours["communication_s"] == ours["sent_bytes"]["total_bytes"] / 50e9
    assert ours["peak_bytes"] == sum(ours["peak_parts_bytes"].values())
    # FSDP2 pads 34 rows of 16 to 36, and 16 and 8 elements to nothing more.
    assert report["per_rank"]["fsdp2"]["shard_elements"] == 9 * 16 + 2 * (4 * 16 + 2)
    assert set(report["per_rank"]) == {"vescale_fsdp", "fsdp2", "megatron_fsdp_v2"}


def test_gloo_sends_reductions_in_the_compute_dtype(tmp_path: Path, capsys: Capture) -> None:
    sent = {
        backend: as_json(capsys, shapes_file(tmp_path), "--ranks", "4", "--backend", backend)[
            "per_rank"
        ]["vescale_fsdp"]["sent_bytes"]["reduce_bytes"]
        for backend in ("nccl", "gloo")
    }
    assert sent == {"nccl": 3 * 280 * 4, "gloo": 3 * 280 * 2}


@pytest.mark.parametrize(
    ("optimizer", "num_bytes"),
    [
        ("adamw", 1072 * 8),
        ("sgd", 1072 * 4),
        ("none", 0),
        # one state for the layers' matrices, two for their norms and the root
        ("muon", 2 * 256 * 4 + (544 + 2 * 8) * 8),
        ("adamw8bit", 1072 * 8),  # all tensors are below 4,096 elements
    ],
)
def test_optimizer_states(optimizer: str, num_bytes: int, tmp_path: Path, capsys: Capture) -> None:
    report = as_json(capsys, shapes_file(tmp_path), "--ranks", "1", "--optimizer", optimizer)
    assert report["per_rank"]["vescale_fsdp"]["optimizer_states_bytes"] == num_bytes


def test_large_tensors_have_8_bit_states(tmp_path: Path, capsys: Capture) -> None:
    content = {"groups": [{"name": "layer", "tensors": [["w", [64, 100]]]}]}
    path = shapes_file(tmp_path, content)
    report = as_json(capsys, path, "--ranks", "1", "--optimizer", "adamw8bit")
    # Two codes each, and two scales for each of 25 blocks of 256.
    states = report["per_rank"]["vescale_fsdp"]["optimizer_states_bytes"]
    assert states == 2 * 6400 + 2 * 4 * 25


def test_replicas_shard_over_fewer_ranks(tmp_path: Path, capsys: Capture) -> None:
    path = shapes_file(tmp_path)
    whole = as_json(capsys, path, "--ranks", "4")
    halves = as_json(capsys, path, "--ranks", "8", "--replicas", "2")
    assert whole["groups"] == halves["groups"]


def test_order_of_definition_can_be_had(tmp_path: Path, capsys: Capture) -> None:
    # One whole matrix in the middle of what may be cut: only another order needs no padding.
    tensors = [["a", [30]], ["b", [4, 10]], ["c", [10]]]
    path = shapes_file(tmp_path, {"groups": [{"name": "g", "tensors": tensors}]})
    arguments = (path, "--ranks", "2", "--granularity", "whole")
    defined = as_json(capsys, *arguments, "--order", "definition")["groups"][0]
    chosen = as_json(capsys, *arguments)["groups"][0]
    assert defined["order"] == "definition"
    assert chosen["shard_elements"] <= defined["shard_elements"]


def test_suggestions_are_options_that_work(tmp_path: Path, capsys: Capture) -> None:
    content = {"groups": [group("g", ["experts.0.up", [4, 640]])]}
    path = shapes_file(tmp_path, content)
    arguments = [path, "--ranks", "8", "--granularity", "rows:1"]
    suggestion = as_json(capsys, *arguments)["suggestion"]
    assert [each["name"] for each in suggestion["groups"]] == ["g"]
    # 4 rows cannot be on 8 ranks.
    assert [each["options"] for each in suggestion["alternatives"]] == [
        ["--replicas", "2"],
        ["--granularity", "experts.*.up=elements:64"],
    ]
    for alternative in suggestion["alternatives"]:
        report = as_json(capsys, *arguments, *alternative["options"])
        assert report["per_rank"]["vescale_fsdp"] == alternative["per_rank"]
        assert report["suggestion"] is None


def test_suggestions_treat_all_groups_and_names_with_brackets(
    tmp_path: Path, capsys: Capture
) -> None:
    """And the blocks of one group that the rules for another one make smaller, too."""
    groups = [
        group("a", ["w[0].x", [12, 64]], ["*.0", [7, 64]]),
        group("b", ["w[0].x", [36, 64]], ["v", [64]]),
        group("fine", ["u", [64, 64]]),
    ]
    arguments = [shapes_file(tmp_path, {"groups": groups}), "--ranks", "8"]
    arguments += ["--granularity", "rows:4"]
    suggestion = as_json(capsys, *arguments)["suggestion"]
    assert {each["name"] for each in suggestion["groups"]} == {"a", "b"}
    assert any("w[[]0].x=" in each["options"][1] for each in suggestion["alternatives"])
    for alternative in suggestion["alternatives"]:
        assert alternative["keeps_padding_limit"]
        report = as_json(capsys, *arguments, *alternative["options"])
        assert report["per_rank"]["vescale_fsdp"] == alternative["per_rank"]
        assert report["suggestion"] is None


def test_what_a_suggestion_costs_is_said(tmp_path: Path, capsys: Capture) -> None:
    # Groups of 2 ranks need 128 replicas, and blocks of an element are what 256 ranks allow.
    path = shapes_file(tmp_path, {"groups": [group("g", ["w", [10, 64]])]})
    out = " ".join(run(capsys, path, "--ranks", "256", "--granularity", "rows:1").split())
    assert "Suggestion for g: " in out
    assert "add these options to yours and run again: (1) --replicas" in out
    assert "(1): less padding, but" in out
    assert "times the weights and states on each rank" in out
    assert "(2): some of these blocks are smaller than a row." in out


def test_the_alignment_is_named_where_no_block_is_to_blame(tmp_path: Path, capsys: Capture) -> None:
    out = " ".join(run(capsys, shapes_file(tmp_path), "--ranks", "256").split())
    assert "root: its padding does not come from blocks" in out
    assert "multiples of 16 bytes in the narrowest dtype that is sent (8 elements)" in out
    assert "nothing to suggest" in out


def test_columns_never_touch(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """FSDP2 holds 1,000 rows of 4,096 elements on each of 4,096 ranks, 4,096 times our part."""
    monkeypatch.setenv("COLUMNS", "80")
    names = [f"w{i}" for i in range(1000)]
    path = shapes_file(tmp_path, {"groups": [group("g", *([n, [1, 4096]] for n in names))]})
    out = run(capsys, path, "--ranks", "4096")
    (line,) = [line for line in out.splitlines() if line.startswith("weights ")]
    assert re.fullmatch(r"weights +3\.9\d KiB +15\.6 MiB +4,096x +\S+ \wiB +\S+ *", line), line


def test_names_cannot_steer_the_terminal(tmp_path: Path, capsys: Capture) -> None:
    content = {"model": "a\x1b[31mX", "groups": [group("l\x1b[2J", ["w\x07", [4, 640]])]}
    path = shapes_file(tmp_path, content)
    out = run(capsys, path, "--ranks", "8", "--granularity", "rows:1")
    assert not {"\x1b", "\x07"} & set(out)
    assert "a\\x1b[31mX: 2.56 K parameters in 1 unit, ranks: 8" in out


def test_no_color_means_no_escapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    assert color_system() is None
    monkeypatch.setenv("NO_COLOR", "")
    assert color_system() == "auto"


def test_scalars_are_noted_as_fsdp2_refuses_them(tmp_path: Path, capsys: Capture) -> None:
    path = shapes_file(tmp_path, {"groups": [group("g", ["scale", []], ["w", [64, 64]])]})
    assert "FSDP2 refuses scalars (scale)" in run(capsys, path, "--ranks", "2")


def test_a_rule_that_fits_nothing_is_warned_of(tmp_path: Path, capsys: Capture) -> None:
    rule = "*.expert*=rows:8"
    assert main(["plan", shapes_file(tmp_path), "--ranks", "2", "--granularity", rule]) == 0
    assert capsys.readouterr().err == (
        f"vescale-fsdp: warning: --granularity {rule} matches no tensor; "
        "names here are like 'embed.weight'\n"
    )


@pytest.mark.parametrize(("option", "begin"), [("--svg", "<svg"), ("--html", "<!DOCTYPE html>")])
def test_pictures_can_go_to_stdout(
    option: str, begin: str, tmp_path: Path, capsys: Capture
) -> None:
    out = run(capsys, shapes_file(tmp_path), "--ranks", "4", option, "-")
    assert out.startswith(begin)
    assert "per rank   " not in out


@pytest.mark.parametrize(
    ("output", "code", "message"),
    [
        (">/dev/full", 2, "vescale-fsdp: cannot write the output: No space left on device\n"),
        (">&-", 2, "vescale-fsdp: cannot write the output: stdout is closed\n"),
        ("| :", 141, ""),
    ],
)
def test_stdout_that_cannot_be_written(
    output: str, code: int, message: str, tmp_path: Path
) -> None:
    script = "import sys; from vescale_fsdp.cli import main; sys.exit(main())"
    tool = f'"{sys.executable}" -c "{script}" plan {shapes_file(tmp_path)} --ranks 1'
    line = f"{{ sleep 0.2; {tool}; }} {output}" if "|" in output else f"{tool} {output}"
    done = subprocess.run(
        ["bash", "-c", f"{line}; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (code, message)


def test_files_are_written_and_tables_still_printed(tmp_path: Path, capsys: Capture) -> None:
    files = {kind: tmp_path / f"plan.{kind}" for kind in ("json", "html", "svg")}
    options = [part for kind, path in files.items() for part in (f"--{kind}", str(path))]
    out = run(capsys, shapes_file(tmp_path), "--ranks", "4", *options)
    assert "tiny: 1.07 K parameters in 3 units, ranks: 4" in out
    assert json.loads(files["json"].read_text())["model"]["name"] == "tiny"
    assert ElementTree.fromstring(files["svg"].read_text()).tag.endswith("svg")
    page = files["html"].read_text()
    assert '"sent_bytes"' in page
    assert '"layer, 2 times"' in page


def test_a_function_of_the_current_folder(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(HERE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    report = as_json(capsys, "tiny:Tied", "--ranks", "2")
    assert report["model"]["num_parameters"] == 80 + 2 * (64 + 8 + 8) + 16 + 4 + 4
    assert {group["dtype"] for group in report["groups"]} == {"float32", "bfloat16"}


def test_what_a_function_prints_does_not_mix_with_the_json(
    capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(HERE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert main(["plan", "tiny:chatty", "--ranks", "2", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["model"]["num_parameters"] == 6
    assert err == "building\n"


def test_numbers_end_with_their_unit(tmp_path: Path, capsys: Capture) -> None:
    ends = ("_bytes", "_elements", "_s", "_ratio", "_version", "_ranks", "_replicas", "_shards")
    counts = ("num_parameters", "num_units", "num_tensors", "count", "in_flight")

    def check(name: str, value: object) -> None:
        if isinstance(value, dict):
            for key, item in value.items():
                check(name if name == "peak_parts_bytes" else key, item)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            assert name.endswith(ends) or name in counts, name

    report = as_json(capsys, shapes_file(tmp_path), "--ranks", "2")
    for name in ("model", "settings", "per_rank"):
        check(name, report[name])
    for group in report["groups"]:
        check("group", {key: item for key, item in group.items() if key != "tensors"})


BAD_SHAPES: dict[str, tuple[Any, str]] = {
    "no groups": ({"groups": []}, "groups is [], expected a list of groups"),
    "another format": ({"layers": 3}, "neither model_type"),
    "a list": ([1, 2], "has a list, expected a JSON object"),
    "no tensors": ({"groups": [{"name": "a"}]}, "expected a name, count and tensors"),
    "count": (
        {"groups": [{"name": "a", "count": 0, "tensors": []}]},
        "group 0 (a): count is 0, expected an integer of at least 1",
    ),
    "a large count": (
        {"groups": [{"name": "a", "count": 10**9, "tensors": []}]},
        "group 0 (a): count is 1000000000, expected up to 100,000",
    ),
    "a tensor": (
        {"groups": [{"name": "a", "tensors": [["w", 3]]}]},
        "group 0 (a): tensor ['w', 3], expected [name, [dimension, ...]]",
    ),
    "a dimension": (
        {"groups": [{"name": "a", "tensors": [["w", [3, -1]]]}]},
        "a dimension of 'w' is -1, expected an integer of at least 0",
    ),
    "too large": (
        {"groups": [{"name": "a", "tensors": [["w", [2**40, 2**40]]]}]},
        "is larger than any memory",
    ),
    "twice": (
        {"groups": [{"name": "a", "tensors": [["w", [3]], ["w", [4]]]}]},
        "group 0 (a): tensor 'w' is given twice",
    ),
    "total": ({**TINY, "total_params": 7}, "total_params is 7, but the tensors have 1072"),
    "a key": ({**TINY, "layers": 3}, "unknown key 'layers', expected model, note, total_params"),
    "a key of a group": (
        {"groups": [{"name": "a", "repeat": 3, "tensors": []}]},
        "group 0: unknown key 'repeat', expected name, count, tensors",
    ),
    "two roots": (
        {"groups": [{"name": "root", "count": 2, "tensors": []}]},
        "there can be one group named root",
    ),
}


def refuse(capsys: Capture, *arguments: str) -> str:
    """The one line on stderr of a command that must fail with exit code 2."""
    code = main(arguments)
    out, err = capsys.readouterr()
    assert code == 2
    assert out == ""
    assert err.startswith("vescale-fsdp: ")
    assert err.count("\n") == 1, err
    return err


@pytest.mark.parametrize("name", BAD_SHAPES)
def test_a_malformed_shapes_file(name: str, tmp_path: Path, capsys: Capture) -> None:
    content, message = BAD_SHAPES[name]
    assert message in refuse(capsys, "plan", shapes_file(tmp_path, content), "--ranks", "2")


def test_files_that_cannot_be_read(tmp_path: Path, capsys: Capture) -> None:
    broken, binary = tmp_path / "broken.json", tmp_path / "binary.json"
    broken.write_text('{"groups": [')
    binary.write_bytes(b"\xff\xfe\x00")
    for path, message in (
        (broken, "is not JSON"),
        (binary, "is not JSON"),
        (tmp_path / "none.json", "there is no file"),
        (tmp_path, "there is no config.json in the folder"),
    ):
        assert message in refuse(capsys, "plan", str(path), "--ranks", "2")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ([], "Missing option '--ranks'"),
        (["--ranks", "0"], "--ranks is 0, expected 1 to 1,048,576"),
        (["--ranks", "-4"], "--ranks is -4, expected 1 to"),
        (["--ranks", "1000000000000"], "expected 1 to 1,048,576"),
        (["--ranks", "many"], "'--ranks'"),
        (["--ranks", "8", "--replicas", "3"], "cannot be divided"),
        (["--ranks", "8", "--replicas", "0"], "--replicas is 0"),
        (["--ranks", "8", "--granularity", "128"], "'128' is none of elements:256"),
        (["--ranks", "8", "--param-dtype", "int4"], "--param-dtype is 'int4'"),
        (["--ranks", "8", "--bandwidth", "fast"], "--bandwidth is 'fast'"),
        (["--ranks", "8", "--optimizer", "adam"], "'--optimizer'"),
        (["--ranks", "8", "--svg", "x", "--html", "./x"], "--html and --svg are both 'x'"),
        (["--ranks", "8", "--svg", "-", "--json", "-"], "--json and --svg are both '-'"),
        (["--ranks", "8", "--wrong"], "No such option: --wrong"),
        (["--ranks", "8", "--svg", "/no/such/folder/x.svg"], "cannot write /no/such/folder/x.svg"),
    ],
)
def test_bad_options(options: list[str], message: str, tmp_path: Path, capsys: Capture) -> None:
    assert message in refuse(capsys, "plan", shapes_file(tmp_path), *options)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("tiny:raises", "tiny:raises raised ValueError: no such width and more lines ("),
        ("tiny:returns_a_list", "tiny:returns_a_list returned a list, expected a torch.nn.Module"),
        ("tiny:no_such", "'tiny' has no 'no_such'"),
        ("tiny:NOT_A_FUNCTION", "tiny:NOT_A_FUNCTION is a int, expected a function"),
        ("tiny:leaves", "tiny:leaves raised SystemExit: 3"),
        ("tiny:empty", "tiny:empty has no parameters"),
        ("no_such_module:f", "cannot import 'no_such_module': ModuleNotFoundError"),
    ],
)
def test_bad_functions(
    function: str, message: str, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(HERE)
    monkeypatch.setattr(sys, "path", list(sys.path))
    assert message in refuse(capsys, "plan", function, "--ranks", "2")


def test_a_name_needs_transformers(capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    error = refuse(capsys, "plan", "llama", "--ranks", "2")
    assert "'llama' is not a file or a module:function" in error
    assert "pip install transformers" in error


def test_a_config_needs_transformers(
    tmp_path: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    shapes_file(tmp_path, {"model_type": "llama"}, "config.json")
    assert "transformers is needed" in refuse(capsys, "plan", str(tmp_path), "--ranks", "2")


def test_a_shapes_file_is_planned_without_torch(tmp_path: Path) -> None:
    """And so are the package and its help loaded."""
    code = (
        "import sys; from vescale_fsdp.cli import main\n"
        "assert not {'torch', 'typer', 'rich'} & set(sys.modules)\n"
        "main(['plan', '--help'])\n"
        "assert 'torch' not in sys.modules\n"
        f"assert main(['plan', {shapes_file(tmp_path)!r}, '--ranks', '10240']) == 0\n"
        "assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "ranks: 10,240" in done.stdout


_BLOCK = [["up.weight", [256, 128]], ["output.weight", [64, 64]]]
_ENDS = [["embed.weight", [512, 128]], ["lm_head.weight", [512, 128]]]
WIDE = {
    "groups": [
        {"name": "layer", "count": 2, "tensors": _BLOCK},
        {"name": "root", "tensors": _ENDS},
    ]
}


def test_what_travels_in_8_bits(tmp_path: Path, capsys: Capture) -> None:
    path = shapes_file(tmp_path, WIDE)
    common = (path, "--ranks", "2", "--reshard", "--backend", "gloo")
    report = as_json(capsys, *common, "--gather-codec", "e4m3:128x128", "--reduce-codec", "int8:64")
    assert report["settings"]["gather_codec"] == "e4m3:128x128"
    assert report["settings"]["reduce_codec"] == "int8:64"
    # Of a layer 256 x 128 is coded, 64 x 64 has fewer elements than a tile. A rank has 16,384
    # codes and one scale (to 16 bytes), and one of them 4,096 elements of bf16 besides.
    sent = report["per_rank"]["vescale_fsdp"]["sent_bytes"]
    layer, root = 16 + 16384 + 2 * 4096, 512 * 128 * 2
    assert sent["gather_forward_bytes"] == 2 * layer + root
    # In blocks of 64 all is coded: the rank with 64 x 64 sends a code and a 16th of a byte each.
    numbers = 16384 + 4096
    assert sent["reduce_bytes"] == 2 * (numbers + numbers // 16) + 65536 + 65536 // 16
    out = run(capsys, *common, "--gather-codec", "int8:32x32")
    assert "gathered int8:32x32 or bfloat16, reduced float32" in out
    way_out = "Tiles of int8:128x128 keep strips of rows in full width together"
    assert way_out not in " ".join(out.split())
    out = run(capsys, path, "--ranks", "8", "--gather-codec", "int8:128x128")
    assert way_out in " ".join(out.split())
    assert "gathered int8:256 or" in run(capsys, path, "--ranks", "8", "--gather-codec", "int8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gather-codec", "fp8"], "--gather-codec is 'fp8', expected int8 or e4m3, and a block"),
        (["--reduce-codec", "e4m3"], "--reduce-codec is 'e4m3', expected int8, and a block"),
        (["--gather-codec", "int8:0"], "--gather-codec is 'int8:0'"),
        (
            ["--gather-codec", "int8:128x128", "--granularity", "rows:8"],
            "blocks of 1024 elements of 'up.weight', of shape [256, 128], but it is sent as int8",
        ),
    ],
)
def test_bad_codes(arguments: list[str], message: str, tmp_path: Path, capsys: Capture) -> None:
    path = shapes_file(tmp_path, WIDE)
    assert message in refuse(capsys, "plan", path, "--ranks", "2", *arguments)


def test_heads_are_those_of_the_engine() -> None:
    from vescale_fsdp.engine import granularity

    assert sources.HEADS == granularity.HEADS


def test_host_memory_of_elastic_training(tmp_path: Path, capsys: Capture) -> None:
    path = shapes_file(tmp_path)
    report = as_json(capsys, path, "--ranks", "4", "--elastic", "2")
    ours = report["per_rank"]["vescale_fsdp"]
    part = ours["weights_bytes"] + ours["optimizer_states_bytes"]
    assert report["memory_checkpoints"] == {
        "replicas": 2,
        "part_bytes": part,
        "host_bytes": 6 * part,
    }
    out = " ".join(run(capsys, path, "--ranks", "4", "--elastic", "2").split())
    assert "Elastic training with replicas=2 keeps 2 x (1 + 2) x" in out
    assert as_json(capsys, path, "--ranks", "4")["memory_checkpoints"] is None


def test_a_negative_number_of_replicas(tmp_path: Path, capsys: Capture) -> None:
    assert main(["plan", shapes_file(tmp_path), "--ranks", "4", "--elastic", "-1"]) == 2
    assert "--elastic is -1, expected at least 0" in capsys.readouterr().err

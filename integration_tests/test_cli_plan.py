"""``vescale-fsdp plan`` with the architectures and configs of ``transformers``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from vescale_fsdp.cli import main

Capture = pytest.CaptureFixture[str]

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "vocab_size": 100,
}
# Per layer: q and o 64 x 64, k and v 32 x 64, three of 64 x 96, two norms.
LAYER = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 64 * 96 + 2 * 64


def plan(capsys: Capture, *arguments: str) -> dict[str, Any]:
    code = main(["plan", *arguments, "--json", "-"])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    report: dict[str, Any] = json.loads(out)
    return report


def refuse(capsys: Capture, *arguments: str) -> str:
    assert main(["plan", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1, err
    return err


@pytest.mark.parametrize(
    ("name", "num_parameters", "groups"),
    [
        ("gpt2", 124_439_808, [("root", 1), ("transformer.h.0-11", 12)]),
        ("llama", 6_738_415_616, [("root", 1), ("model.layers.0-31", 32)]),
        ("gpt_oss", 116_829_156_672, [("root", 1), ("model.layers.0-35", 36)]),
        # Less 58 x 256 biases of the router, which are buffers here.
        (
            "deepseek_v3",
            671_026_419_200 - 58 * 256,
            [("root", 1), ("model.layers.0-2", 3), ("model.layers.3-60", 58)],
        ),
        (
            "t5",
            60_506_624,
            [
                ("root", 1),
                ("encoder.block.0", 1),
                ("encoder.block.1-5", 5),
                ("decoder.block.0", 1),
                ("decoder.block.1-5", 5),
            ],
        ),
    ],
)
def test_architectures_by_name(
    name: str, num_parameters: int, groups: list[tuple[str, int]], capsys: Capture
) -> None:
    report = plan(capsys, name, "--ranks", "10240")
    assert report["model"]["num_parameters"] == num_parameters
    assert [(group["name"], group["count"]) for group in report["groups"]] == groups


@pytest.mark.parametrize("given", ["file", "folder"])
def test_a_config_file(given: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    report = plan(capsys, str(path if given == "file" else tmp_path), "--ranks", "4")
    root, layer = report["groups"]
    assert (root["num_elements"], root["num_tensors"]) == (100 * 64 + 64, 2)  # tied: once
    assert (layer["num_elements"], layer["count"]) == (LAYER, 3)
    assert layer["dtype"] == "float32"


def test_shards_can_have_another_dtype(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    report = plan(capsys, str(tmp_path), "--ranks", "4", "--param-dtype", "bf16")
    elements = sum(group["shard_elements"] * group["count"] for group in report["groups"])
    assert report["per_rank"]["vescale_fsdp"]["weights_bytes"] == 2 * elements


def test_granularity_by_name_of_a_tensor(capsys: Capture) -> None:
    report = plan(
        capsys, "gpt_oss", "--ranks", "1024", "--granularity", "*.experts.*_proj=rows:128"
    )
    layer = report["groups"][1]
    blocks = {t["name"]: t["block_elements"] for t in layer["tensors"] if t["block_elements"] > 1}
    assert blocks == {
        "mlp.experts.gate_up_proj": 128 * 5760,
        "mlp.experts.down_proj": 128 * 2880,
    }
    assert layer["padding_ratio"] == pytest.approx(0.1748, abs=0.0001)
    assert set(layer["forced_by"]) <= set(blocks)
    assert report["suggestion"]["alternatives"]


def test_unknown_architecture(capsys: Capture) -> None:
    error = refuse(capsys, "gpt_osss", "--ranks", "2")
    assert "unknown model 'gpt_osss'" in error
    assert "did you mean gpt_oss" in error


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_type": "no_such_type"}, "model_type 'no_such_type' is no architecture"),
        ({"hidden_size": "wide"}, "transformers cannot build"),
        ({"num_attention_heads": 0}, "transformers cannot build"),
    ],
)
def test_bad_configs(change: dict[str, Any], message: str, tmp_path: Path, capsys: Capture) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**LLAMA, **change}))
    assert message in refuse(capsys, str(path), "--ranks", "2")

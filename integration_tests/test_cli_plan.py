"""``vescale-fsdp plan`` with the architectures and configs of ``transformers``."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from vescale_fsdp import MixedPrecisionPolicy, fully_shard, repeated_blocks
from vescale_fsdp.cli import main
from vescale_fsdp.testing import run_ranks

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
try:
    from packages.core.tests.allocations import peak_of, through_the_allocator, traced
finally:
    sys.path.remove(str(ROOT))

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


@pytest.mark.parametrize("name", ["gpt2", "bert", "qwen3_moe"])
def test_activations_of_architectures(name: str, tmp_path: Path, capsys: Capture) -> None:
    """They run on the meta device. Offload keeps two units, recomputation one; both keep less."""
    config = {"model_type": name, "num_hidden_layers": 6}
    (tmp_path / "config.json").write_text(json.dumps(config))
    report = plan(capsys, str(tmp_path), "--ranks", "8", "--batch", "16x512")
    kept = report["per_rank"]["vescale_fsdp"]["peak_bytes"]
    others = report["activations"]["alternatives"]
    assert [each["options"][1] for each in others] == ["recompute", "offload"]
    assert all(each["per_rank"]["peak_bytes"] < kept for each in others)


def test_a_mixture_of_experts_by_loops_depends_on_values(tmp_path: Path, capsys: Capture) -> None:
    config = {"model_type": "qwen3_moe", "num_hidden_layers": 2, "experts_implementation": "eager"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    error = refuse(capsys, str(tmp_path), "--ranks", "8", "--batch", "2x128")
    assert "cannot run on the meta device" in error


BATCH, LENGTH = 4, 128


def peak_of_llama() -> int:
    """Bytes of a real step of Llama on this rank, beside the shards and AdamW's states."""
    import transformers

    config = transformers.LlamaConfig.from_dict({**LLAMA, "vocab_size": 1000})
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)

    def step() -> None:
        tokens = torch.zeros(BATCH, LENGTH, dtype=torch.long)
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        time.sleep(0.1)  # until gloo's threads have let go of what they send

    with through_the_allocator():
        for module in [*repeated_blocks(model), model]:
            fully_shard(module, mp_policy=policy)
        for _ in range(2):
            step()
            model.zero_grad()
        return peak_of(traced(step))[0]


def test_the_peak_of_a_transformer_is_that_of_a_real_step(tmp_path: Path, capsys: Capture) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, "vocab_size": 1000}))
    options = "--ranks", "2", "--backend", "gloo", "--batch", f"{BATCH}x{LENGTH}"
    figures = plan(capsys, str(tmp_path), *options)["per_rank"]["vescale_fsdp"]
    planned = figures["peak_bytes"] - figures["weights_bytes"] - figures["optimizer_states_bytes"]
    assert planned == pytest.approx(run_ranks(peak_of_llama, 2)[0], rel=0.005)

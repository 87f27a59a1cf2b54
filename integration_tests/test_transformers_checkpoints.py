"""What ranks write from shards, ``transformers`` loads, and what it writes goes into shards."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vescale_fsdp import CheckpointIncompleteError, checkpoint, fully_shard
from vescale_fsdp.testing import run_ranks

transformers: Any = pytest.importorskip("transformers")

TOKENS = torch.arange(12).view(2, 6) % 32


def config(*, tied: bool) -> Any:
    return transformers.LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        tie_word_embeddings=tied,
    )


def make(seed: int, *, tied: bool) -> Any:
    torch.manual_seed(seed)
    model = transformers.LlamaForCausalLM(config(tied=tied))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    return model


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(TOKENS).logits


def save(root: Path) -> dict[str, Tensor]:
    found = {}
    for name, options in [("tied", {}), ("apart", {}), ("parts", {"max_file_bytes": 3000})]:
        model = make(1, tied=name == "tied")
        (root / name).mkdir(exist_ok=True)
        model.config.save_pretrained(root / name)  # beside the weights, before or after them
        checkpoint.save_safetensors(root / name, model, **options)
        found[name] = logits(model)
    return found


def test_transformers_loads_what_ranks_have_written(tmp_path: Path) -> None:
    expected = run_ranks(save, 2, tmp_path)[0]
    assert len(list((tmp_path / "parts").glob("*.safetensors"))) > 2
    for name, value in expected.items():
        model, info = transformers.LlamaForCausalLM.from_pretrained(
            tmp_path / name, output_loading_info=True, dtype=torch.float32
        )
        assert not any(info.values()), info
        torch.testing.assert_close(logits(model), value, rtol=0, atol=1e-6)


def load(root: Path) -> dict[str, Tensor]:
    found = {}
    for name in ("tied", "apart"):
        model = make(2, tied=name == "tied")
        checkpoint.load_safetensors(root / name, model)
        found[name] = logits(model)
    return found


def test_shards_take_what_transformers_has_written(tmp_path: Path) -> None:
    expected = {}
    for name in ("tied", "apart"):
        torch.manual_seed(3)
        model = transformers.LlamaForCausalLM(config(tied=name == "tied"))
        model.save_pretrained(tmp_path / name, max_shard_size="5KB")
        expected[name] = logits(model)
    for name, value in run_ranks(load, 2, tmp_path)[0].items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=1e-6)


def load_from_meta(root: Path) -> Tensor:
    """The recipe of docs/checkpoints.md."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config(tied=False))
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.to_empty(device="cpu")
    with pytest.raises(CheckpointIncompleteError, match=r"rotary_emb\.inv_freq"):
        checkpoint.load_safetensors(root, model)
    for module in model.modules():
        if module._non_persistent_buffers_set:
            model._init_weights(module)
    checkpoint.load_safetensors(root, model)
    return logits(model)


def test_a_llama_of_meta_has_its_rotary_frequencies(tmp_path: Path) -> None:
    torch.manual_seed(2)
    plain = transformers.LlamaForCausalLM(config(tied=False))
    plain.save_pretrained(tmp_path)
    for found in run_ranks(load_from_meta, 2, tmp_path):
        torch.testing.assert_close(found, logits(plain))

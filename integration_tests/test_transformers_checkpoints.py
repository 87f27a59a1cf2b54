"""What ranks write from shards, ``transformers`` loads, and what it writes goes into shards."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from vescale_fsdp import CheckpointIncompleteError, checkpoint, fully_shard, unsharded
from vescale_fsdp.cli import main
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


def train_with_lightning(root: Path) -> tuple[Tensor, Tensor]:
    """Logits of two models, after training: one in ``net``, and one of two, in ``student``."""
    import lightning.pytorch as pl

    class Lit(pl.LightningModule):
        def __init__(self, *names: str) -> None:
            super().__init__()
            for name in names:
                torch.manual_seed(4)
                setattr(self, name, transformers.LlamaForCausalLM(config(tied=True)))
            self.scale = torch.nn.Parameter(torch.ones(()))
            self.name = names[0]

        def training_step(self, batch: Tensor, index: int) -> Tensor:
            loss = getattr(self, self.name)(batch, labels=batch).loss
            assert isinstance(loss, Tensor)
            return loss * self.scale

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.AdamW(self.parameters(), lr=0.1)

    os.environ["LOCAL_RANK"] = str(torch.distributed.get_rank())
    found = []
    for names in (("net",), ("student", "teacher")):
        model = Lit(*names)
        trainer = pl.Trainer(
            strategy="vescale_fsdp",
            accelerator="cpu",
            devices=2,
            max_steps=2,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
        )
        trainer.fit(model, torch.utils.data.DataLoader(TOKENS, batch_size=1, shuffle=False))
        trainer.save_checkpoint(root / f"{names[0]}.ckpt")
        trained: Any = getattr(model, names[0])
        with unsharded(model):
            found.append(logits(trained))
        trained.config.save_pretrained(root)
    return found[0], found[1]


def test_the_export_of_a_checkpoint_of_lightning_is_the_model_that_was_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By the command of docs/lightning.md, which finds the model's prefix, and with --prefix."""
    net, student = run_ranks(train_with_lightning, 2, tmp_path)[0]
    page = Path(__file__).parents[1] / "docs" / "lightning.md"
    found = re.search(
        r"^vescale-fsdp (checkpoint convert .* --to safetensors)$", page.read_text(), re.M
    )
    assert found is not None
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    Path("net.ckpt").rename("runs/last.ckpt")
    assert main(shlex.split(found[1])) == 0
    assert capsys.readouterr().out.endswith("left out, without the prefix: scale\n")
    convert = ["checkpoint", "convert", "student.ckpt", "--to", "safetensors"]
    assert main([*convert, "student", "--prefix", "student"]) == 0
    for folder, expected in (("exported", net), ("student", student)):
        shutil.copy("config.json", folder)
        model, info = transformers.LlamaForCausalLM.from_pretrained(
            folder, output_loading_info=True, dtype=torch.float32
        )
        assert not any(info.values()), info
        torch.testing.assert_close(logits(model), expected, rtol=0, atol=1e-6)

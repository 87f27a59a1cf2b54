"""torchtune's full and LoRA recipes, with ``fully_shard`` swapped, beside stock FSDP2."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
import torch.distributed as dist
from omegaconf import OmegaConf
from torch.distributed.fsdp import fully_shard

import vescale_fsdp
from vescale_fsdp.ragged import distribute_tensor
from vescale_fsdp.testing import run_ranks

from .helpers import Steps, check, random_tokens

# isort: split
import torchtune.training._distributed  # after the helpers, which let torchvision be imported
from torchtune.models.llama3 import llama3
from torchtune.modules.peft import get_adapter_params

SIZES = {
    "vocab_size": 64, "num_layers": 2, "num_heads": 2, "num_kv_heads": 2, "embed_dim": 16,
    "intermediate_dim": 32, "max_seq_len": 32,
}  # fmt: skip
MODEL = "model-00001-of-00001.bin"
LORA = {
    "lora_attn_modules": ["q_proj", "v_proj"], "apply_lora_to_mlp": True, "lora_rank": 2,
    "lora_alpha": 4,
}  # fmt: skip


def load_recipe(name: str) -> Any:
    """Load a recipe as ``tune run`` does: the folder is no package."""
    path = Path(torchtune.__file__).parents[1] / "recipes" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.init_process_group = lambda *_: None  # type: ignore[attr-defined]  # the ranks have one
    for name in ("cleanup_before_training", "get_memory_stats", "log_memory_stats"):  # not for CPU
        setattr(module.training, name, lambda *_, **__: {})
    return module


def save_inputs(root: Path) -> None:
    """Save a model, a tokenizer and a file of texts."""
    root.mkdir()
    torch.manual_seed(0)
    torch.save(llama3(**SIZES).state_dict(), root / "model.pt")
    texts = [" ".join(f"w{n}" for n in row) for row in random_tokens(16, 8).tolist()]
    (root / "texts.json").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    with (root / "tokenizer.model").open("wb") as file:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(texts), model_writer=file, vocab_size=64, model_type="word",
            hard_vocab_limit=False, minloglevel=2,
        )  # fmt: skip


def make_config(root: Path, engine: str, kind: str, *, resume: bool) -> Any:
    """The recipe's config, as it would be in its yaml file."""
    models = "torchtune.models.llama3"
    base = f"epoch_0/{MODEL}" if resume and kind == "full" else "model.pt"  # adapters start from it
    model = {"_component_": f"{models}.llama3"}
    if kind == "lora":
        model = {"_component_": f"{models}.lora_llama3", **LORA}
    return OmegaConf.create({
        "output_dir": str(root / engine), "device": "cpu", "dtype": "fp32", "seed": 1,
        "shuffle": True, "epochs": 2, "batch_size": 2, "max_steps_per_epoch": None,
        "gradient_accumulation_steps": 2, "clip_grad_norm": 1.0, "resume_from_checkpoint": resume,
        "log_every_n_steps": 1, "enable_activation_checkpointing": True,
        "custom_sharded_layers": ["tok_embeddings", "output"], "model": model | SIZES,
        "tokenizer": {
            "_component_": "torchtune.models.llama2.llama2_tokenizer",
            "path": str(root / "base/tokenizer.model"),
        },
        "dataset": {
            "_component_": "torchtune.datasets.text_completion_dataset", "source": "json",
            "data_files": str(root / "base/texts.json"), "cache_dir": str(root / "cache"),
        },
        "checkpointer": {
            "_component_": "torchtune.training.FullModelTorchTuneCheckpointer",
            "checkpoint_dir": str(root / "base"), "checkpoint_files": [base],
            "output_dir": str(root / engine), "model_type": "LLAMA3",
        },
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 1e-2, "fused": True},
        "lr_scheduler": {
            "_component_": "torchtune.training.lr_schedulers.get_cosine_schedule_with_warmup",
            "num_warmup_steps": 1,
        },
        "loss": {"_component_": "torchtune.modules.loss.CEWithChunkedOutputLoss"},
        "metric_logger": {
            "_component_": "torchtune.training.metric_logging.DiskLogger",
            "log_dir": str(root / engine), "filename": "resumed.txt" if resume else "straight.txt",
        },
    })  # fmt: skip


def fill_adapters(model: torch.nn.Module) -> None:
    """Give adapters the same first values: under stock FSDP2 each rank draws its own part's."""
    torch.manual_seed(0)
    with torch.no_grad():
        for param in get_adapter_params(model).values():
            values = 0.1 * torch.randn(param.shape)
            param.copy_(distribute_tensor(values, param.device_mesh, param.placements))


def run(root: Path, engine: str, kind: str, *, resume: bool = False) -> None:
    swapped = {"vescale": vescale_fsdp.fully_shard, "fsdp2": fully_shard}[engine]
    torchtune.training._distributed.fully_shard = swapped
    torchtune.training._distributed.distribute_tensor = distribute_tensor  # it loads by this one
    config = make_config(root, engine, kind, resume=resume)
    module = load_recipe(f"{kind}_finetune_distributed")
    names = {"full": "FullFinetuneRecipeDistributed", "lora": "LoRAFinetuneRecipeDistributed"}
    recipe = getattr(module, names[kind])(config)
    recipe.setup(config)
    assert isinstance(recipe._model, vescale_fsdp.FSDPModule) == (engine == "vescale")
    if not resume:
        fill_adapters(recipe._model)
    recipe.train()


def train_and_resume(root: Path, kind: str) -> None:
    """Two epochs, then the second one once more."""
    for engine in ("vescale", "fsdp2"):
        run(root, engine, kind)
        dist.barrier()
        if dist.get_rank() == 0:
            (root / engine / "epoch_1").rename(root / engine / "straight")
        dist.barrier()
        run(root, engine, kind, resume=True)


def read_log(path: Path) -> Steps:
    """The losses and the gradients' norms."""
    found = re.findall(r"loss:(\S+) .*grad_norm:(\S+)", path.read_text())
    return [(float(loss), float(norm)) for loss, norm in found]


@pytest.mark.parametrize("kind", ["full", "lora"])
def test_recipes_train_and_resume_as_under_fsdp2(kind: str, tmp_path: Path) -> None:
    save_inputs(tmp_path / "base")
    run_ranks(train_and_resume, 2, tmp_path, kind, timeout_s=100)
    ours, theirs = tmp_path / "vescale", tmp_path / "fsdp2"
    steps = read_log(ours / "straight.txt")
    check(steps, read_log(theirs / "straight.txt"), rel=1e-5)
    check(read_log(ours / "resumed.txt"), steps[2:], rel=1e-5)
    for name in [MODEL] + ["adapter_model.pt"] * (kind == "lora"):
        found, expected, resumed = (
            torch.load(path / name)
            for path in (ours / "straight", theirs / "straight", ours / "epoch_1")
        )
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
        torch.testing.assert_close(resumed, found, rtol=0, atol=1e-5)

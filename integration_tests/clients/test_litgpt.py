"""litgpt's pretraining and LoRA, with a Fabric of ours in place of a DDP one."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from vescale_fsdp.testing import run_ranks

from .helpers import Steps, check, make_tokenizer, random_tokens, read_csv

# isort: split
import lightning  # after the helpers, which let torchvision be imported
import litgpt.data
import litgpt.lora
import litgpt.prompts

SIZES = {
    "name": "tiny", "block_size": 32, "vocab_size": 64, "padded_vocab_size": 64, "n_layer": 2,
    "n_head": 2, "n_embd": 16, "intermediate_size": 32, "mlp_class_name": "LLaMAMLP",
    "norm_class_name": "RMSNorm", "bias": False, "parallel_residual": False,
}  # fmt: skip
MERGED = "final/lit_model.pth"
LORA = {"lora_r": 2, "lora_alpha": 4, "lora_query": True, "lora_value": True, "lora_mlp": True}


class RandomText(litgpt.data.DataModule):  # type: ignore[misc]
    def connect(self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int = 0) -> None:
        from torchdata.stateful_dataloader import StatefulDataLoader  # as litgpt's have a state

        self.loader = StatefulDataLoader(
            random_tokens(24, max_seq_length + 1), batch_size=batch_size
        )

    def train_dataloader(self) -> Any:
        return self.loader

    def val_dataloader(self) -> Any:
        return self.loader


class RandomAnswers(litgpt.data.DataModule):  # type: ignore[misc]
    prompt_style = litgpt.prompts.Default()

    def connect(self, tokenizer: Any = None, batch_size: int = 1, max_seq_length: int = 0) -> None:
        words = [[f"w{n}" for n in row] for row in random_tokens(32, 8).tolist()]
        rows = [{"instruction": " ".join(w[:3]), "output": " ".join(w[3:])} for w in words]
        self.test_dataset = litgpt.data.SFTDataset(rows, tokenizer, self.prompt_style)
        self.loader = torch.utils.data.DataLoader(
            self.test_dataset, batch_size=batch_size, collate_fn=litgpt.data.get_sft_collate_fn()
        )

    def train_dataloader(self) -> Any:
        return self.loader

    def val_dataloader(self) -> Any:
        return self.loader


def make_fabric(strategy: str, root: Path) -> Any:
    rank, size = dist.get_rank(), dist.get_world_size()
    os.environ |= {"LOCAL_RANK": str(rank), "NODE_RANK": "0", "WORLD_SIZE": str(size)}
    logger = lightning.fabric.loggers.CSVLogger(
        root / strategy, name="", flush_logs_every_n_steps=1
    )
    fabric = lightning.Fabric(
        accelerator="cpu", devices=size, strategy=strategy, precision="32-true", loggers=[logger]
    )
    fabric.launch()
    return fabric


def losses(root: Path) -> Steps:
    return read_csv(root / "version_0" / "metrics.csv", ["loss"])


def pretrain(strategy: str, root: Path) -> None:
    import litgpt.pretrain as recipe

    torch.compiler.set_stance("force_eager")  # the recipe compiles; that takes minutes on CPU
    sys.argv = ["litgpt", "pretrain", "tiny"]  # parsed once more for hyperparameters.yaml
    recipe.main(
        fabric=make_fabric(strategy, root), devices=2, seed=1,
        initial_checkpoint_dir=None, resume=False, config=litgpt.Config(**SIZES),
        data=RandomText(), out_dir=root / strategy, tokenizer_dir=None, tokenizer=None,
        optimizer="AdamW",
        train=litgpt.args.TrainArgs(
            save_interval=None, global_batch_size=8, micro_batch_size=2, max_tokens=2 * 12 * 2 * 32,
            max_norm=1.0, lr_warmup_steps=1,
        ),
        eval=litgpt.args.EvalArgs(max_iters=2),
    )  # fmt: skip


def test_pretraining_is_that_of_ddp(tmp_path: Path) -> None:
    for strategy in ("vescale_fsdp", "ddp"):
        run_ranks(pretrain, 2, strategy, tmp_path, timeout_s=60)
    check(losses(tmp_path / "vescale_fsdp"), losses(tmp_path / "ddp"), rel=1e-5)


def save_base(root: Path) -> None:
    """Save what ``litgpt download`` would, under its names, and the adapters' first values.

    Under DDP the recipe leaves those as it finds the memory.
    """
    torch.manual_seed(0)
    model = litgpt.lora.GPT(litgpt.lora.Config(**SIZES, **LORA))
    state = {name.replace("linear.", ""): value for name, value in model.state_dict().items()}
    root.mkdir()
    torch.save(state, root / "lit_model.pth")
    litgpt.utils.save_config(litgpt.Config(**SIZES), root)
    make_tokenizer().save_pretrained(root)


def fine_tune(strategy: str, root: Path) -> None:
    import litgpt.finetune.lora as recipe

    # The recipe parses this once more for hyperparameters.yaml, by which it merges the adapters.
    options = [f"--{key}={str(value).lower()}" for key, value in LORA.items()]
    sys.argv = ["litgpt", "finetune_lora", str(root / "base"), *options]
    recipe.main(
        fabric=make_fabric(strategy, root), devices=2, seed=1,
        config=litgpt.lora.Config(**SIZES, **LORA), data=RandomAnswers(),
        checkpoint_dir=root / "base", out_dir=root / strategy, optimizer="AdamW",
        train=litgpt.args.TrainArgs(
            save_interval=2, global_batch_size=8, micro_batch_size=2, epochs=1, max_steps=3,
            lr_warmup_steps=1,
        ),
        eval=litgpt.args.EvalArgs(interval=2, max_iters=2, max_new_tokens=100),
    )  # fmt: skip


def saved(path: Path) -> dict[str, torch.Tensor]:
    found: dict[str, Any] = torch.load(path)
    return found.get("model", found)


def test_lora_is_that_of_ddp(tmp_path: Path) -> None:
    save_base(tmp_path / "base")
    for strategy in ("vescale_fsdp", "ddp"):
        run_ranks(fine_tune, 2, strategy, tmp_path, timeout_s=60)
    ours, theirs = tmp_path / "vescale_fsdp", tmp_path / "ddp"
    check(losses(ours), losses(theirs), rel=1e-5)
    for name in ("step-000002/lit_model.pth.lora", "final/lit_model.pth.lora", MERGED):
        torch.testing.assert_close(saved(ours / name), saved(theirs / name), rtol=0, atol=1e-6)
    base, merged = saved(tmp_path / "base/lit_model.pth"), saved(ours / MERGED)
    name = "transformer.h.0.attn.qkv.weight"
    assert base[name].shape == merged[name].shape
    assert not torch.equal(base[name], merged[name])

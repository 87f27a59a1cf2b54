"""litgpt's pretraining, with a Fabric of ours in place of a DDP one."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from vescale_fsdp.testing import run_ranks

from .helpers import Steps, check, random_tokens, read_csv

litgpt = pytest.importorskip("litgpt")
pytest.importorskip("litgpt.data")

SIZES = {
    "name": "tiny", "block_size": 32, "vocab_size": 64, "padded_vocab_size": 64, "n_layer": 2,
    "n_head": 2, "n_embd": 16, "intermediate_size": 32, "mlp_class_name": "LLaMAMLP",
    "norm_class_name": "RMSNorm", "bias": False, "parallel_residual": False,
}  # fmt: skip


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


def make_fabric(strategy: str, root: Path) -> Any:
    import lightning

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


def losses(root: Path, strategy: str) -> Steps:
    return read_csv(root / strategy / "version_0" / "metrics.csv", ["loss"])


def pretrain(strategy: str, root: Path) -> None:
    import litgpt.pretrain as recipe

    torch.compiler.set_stance("force_eager")  # the recipe compiles; that takes minutes on CPU
    recipe.save_hyperparameters = lambda *_: None  # it parses litgpt's command line
    recipe.main(
        fabric=make_fabric(strategy, root), devices=2, seed=1, initial_checkpoint_dir=None,
        resume=False, config=litgpt.Config(**SIZES), data=RandomText(), out_dir=root / strategy,
        tokenizer_dir=None, tokenizer=None, optimizer="AdamW",
        train=litgpt.args.TrainArgs(
            save_interval=None, global_batch_size=8, micro_batch_size=2, max_tokens=2 * 12 * 2 * 32,
            max_norm=1.0, lr_warmup_steps=1,
        ),
        eval=litgpt.args.EvalArgs(max_iters=2),
    )  # fmt: skip


def test_pretraining_is_that_of_ddp(tmp_path: Path) -> None:
    for strategy in ("vescale_fsdp", "ddp"):
        run_ranks(pretrain, 2, strategy, tmp_path, timeout_s=60)
    check(losses(tmp_path, "vescale_fsdp"), losses(tmp_path, "ddp"), rel=1e-5)

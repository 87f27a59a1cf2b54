"""Fine-tune a `transformers` model on two CPU processes with Lightning, fully sharded.

    python examples/finetune_transformers_lightning.py

The model is a small Llama made from a config, so nothing is downloaded. For a real model, call
``from_pretrained`` instead. The decoder layers become units, because the model names them in
``_no_split_modules``. All but the last layers and the head are frozen; frozen and trained
parameters may be in one unit. The result is saved as one file that Lightning reads on any machine,
and with ``save_pretrained``.
"""

import argparse
import warnings
from pathlib import Path

import lightning.pytorch as pl
import torch
from gpt import load_text
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import LlamaConfig, LlamaForCausalLM

from vescale_fsdp import unsharded
from vescale_fsdp_lightning import Throughput, VeScaleFSDPStrategy

for advice in (".*does not have many workers", "Checkpoint directory .* exists and is not empty"):
    warnings.filterwarnings("ignore", advice)


class FineTuning(pl.LightningModule):
    """A causal language model of which some layers are trained."""

    def __init__(self, vocabulary_size: int, trained_layers: int = 2) -> None:
        super().__init__()
        config = LlamaConfig(
            vocab_size=vocabulary_size,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            max_position_embeddings=128,
        )
        self.llama = LlamaForCausalLM(config)  # or LlamaForCausalLM.from_pretrained(...)
        self.llama.requires_grad_(False)
        for module in (*self.llama.model.layers[-trained_layers:], self.llama.lm_head):
            module.requires_grad_(True)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        tokens, targets = batch
        logits = self.llama(input_ids=tokens.long(), use_cache=False).logits
        loss = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1).float(), targets.long().flatten()
        )
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [param for param in self.parameters() if param.requires_grad]
        return torch.optim.AdamW(trained, lr=1e-3)


def main() -> None:
    """Train in this process and in those that Lightning starts."""
    parser = argparse.ArgumentParser(description="Fine-tune a small Llama, sharded.")
    parser.add_argument("--devices", type=int, default=2, help="number of processes")
    parser.add_argument("--precision", default="bf16-mixed")
    parser.add_argument("--max-steps", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("checkpoints") / "llama")
    args = parser.parse_args()
    torch.set_num_threads(1)  # the processes share the cores
    pl.seed_everything(0)  # the same weights on all processes
    vocabulary, data, _ = load_text()
    model = FineTuning(len(vocabulary.tokens))
    trainer = pl.Trainer(
        strategy=VeScaleFSDPStrategy(state_dict_type="full", activation_checkpointing=True),
        accelerator="cpu",
        devices=args.devices,
        precision=args.precision,
        max_steps=args.max_steps,
        callbacks=[ModelCheckpoint(dirpath=args.out, filename="last"), Throughput(every_n_steps=5)],
        logger=False,
        enable_model_summary=False,
    )
    trainer.fit(model, DataLoader(data, batch_size=4, shuffle=True, drop_last=True))
    with unsharded(model):  # all processes unshard, the first one writes
        if trainer.is_global_zero:
            model.llama.save_pretrained(args.out / "pretrained")
    trainer.strategy.barrier()
    trainer.print(f"saved {args.out / 'last.ckpt'} and {args.out / 'pretrained'}")


if __name__ == "__main__":
    main()

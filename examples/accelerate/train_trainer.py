"""Train a small Llama with ``transformers.Trainer``. It has no code for veScale-FSDP.

    accelerate launch --config examples/accelerate/vescale.yaml examples/accelerate/train_trainer.py

Add ``--resume`` to continue from the last checkpoint.
"""

from __future__ import annotations

import argparse

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments, set_seed


class Counting(Dataset):
    """Sentences that count up, each with its own start and step."""

    def __init__(self, sentences: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        start, step = torch.randint(1, 64, (2, sentences, 1), generator=generator)
        self.tokens = (start + step * torch.arange(32)) % 256

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def make_model() -> LlamaForCausalLM:
    """A Llama with 4 layers and its embedding tied to its head."""
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=True,
    )
    return LlamaForCausalLM(config)


def main() -> None:
    """Train, evaluate and save."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--output", default="runs/trainer")
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="as use_cpu: true in the yaml")
    args = parser.parse_args()
    set_seed(0)
    arguments = TrainingArguments(
        output_dir=args.output,
        max_steps=args.steps,
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        learning_rate=1e-3,
        logging_steps=5,
        save_steps=10,
        report_to=[],
        disable_tqdm=True,
        use_cpu=args.cpu,
        dataloader_pin_memory=torch.cuda.is_available(),
    )
    trainer = Trainer(
        model=make_model(),
        args=arguments,
        train_dataset=Counting(1024, 1),
        eval_dataset=Counting(64, 2),
    )
    trainer.train(resume_from_checkpoint=args.resume)
    trainer.evaluate()
    if trainer.is_fsdp_enabled:  # the Trainer saves whole models in this format only
        trainer.accelerator.state.fsdp_plugin.set_state_dict_type("FULL_STATE_DICT")
    trainer.save_model(f"{args.output}/final")


if __name__ == "__main__":
    main()

"""trl's SFT, DPO and GRPO trainers, each whole and with LoRA, beside DDP and stock FSDP2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import peft
import pytest
import trl

from vescale_fsdp.testing import run_ranks

from .helpers import (
    ARGUMENTS,
    Steps,
    check,
    make_llama,
    make_tokenizer,
    random_tokens,
    train,
    trainer_engine,
)

WORDS = [[f"w{n}" for n in row] for row in random_tokens(16, 8).tolist()]
TEXTS = [{"text": " ".join(row)} for row in WORDS]
PROMPTS = [{"prompt": " ".join(row[:3])} for row in WORDS]
PAIRS = [
    {"prompt": " ".join(row[:3]), "chosen": " ".join(row[3:]), "rejected": " ".join(row[5:])}
    for row in WORDS
]


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(ids) / 100 for ids in completion_ids]


def make_trainer(method: str, lora: bool, root: Path) -> Any:
    config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="gaussian")
    common = {"processing_class": make_tokenizer(), "peft_config": config if lora else None}
    options = {"output_dir": str(root / "out"), **ARGUMENTS}
    from_list = datasets.Dataset.from_list
    if method == "sft":
        args = trl.SFTConfig(max_length=16, **options)
        return trl.SFTTrainer(
            model=make_llama(), args=args, train_dataset=from_list(TEXTS), **common
        )
    if method == "dpo":
        args = trl.DPOConfig(max_length=16, **options)
        reference = None if lora else make_llama()
        return trl.DPOTrainer(
            model=make_llama(), ref_model=reference, args=args, train_dataset=from_list(PAIRS),
            **common,
        )  # fmt: skip
    options["per_device_train_batch_size"] = 4
    args = trl.GRPOConfig(num_generations=4, beta=0.1, max_completion_length=4, **options)
    return trl.GRPOTrainer(
        model=str(root / "llama"), reward_funcs=reward, args=args,
        train_dataset=from_list(PROMPTS), **common,
    )  # fmt: skip


def fine_tune(method: str, lora: bool, root: Path) -> dict[str, Steps]:
    found = {}
    for engine in ("vescale", "ddp", "fsdp2"):
        with trainer_engine(engine):
            found[engine] = train(make_trainer(method, lora, root))
    return found


@pytest.mark.parametrize("lora", [False, True], ids=["whole", "lora"])
@pytest.mark.parametrize("method", ["sft", "dpo", "grpo"])
def test_trl_trains_as_under_ddp_and_fsdp2(method: str, lora: bool, tmp_path: Path) -> None:
    make_llama().save_pretrained(tmp_path / "llama")  # GRPO makes its reference from the path
    found = run_ranks(fine_tune, 2, method, lora, tmp_path, timeout_s=110)[0]
    # GRPO's losses are near zero: a sum of advantages, whose mean is zero
    tolerance = {"rel": 1e-5, "abs": 1e-6} if method == "grpo" else {"rel": 1e-5}
    check(found["vescale"], found["ddp"], **tolerance)
    check(found["vescale"], found["fsdp2"], **tolerance)

"""``trl``'s SFTTrainer, unmodified, on texts that it tokenizes itself, with LoRA, beside DDP."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator, PartialState

from vescale_fsdp.testing import run_ranks
from vescale_fsdp_accelerate import VeScaleAccelerator
from vescale_fsdp_accelerate.options import Options, to_environment

from . import test_trainer
from .helpers import accelerator

trl = pytest.importorskip("trl")
peft = pytest.importorskip("peft")


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{f"w{n}": n for n in range(3, 64)}}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def fine_tune(cls: Any, folder: Path, lora: Any) -> list[tuple[float, float]]:
    import datasets

    with accelerator(PartialState):
        if cls is VeScaleAccelerator:
            os.environ |= to_environment(Options(), {})
            os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
            del os.environ["FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"]
        test_trainer.use(cls)
        try:
            tokens = test_trainer.Sentences().tokens.clamp(min=3).tolist()
            texts = [{"text": " ".join(f"w{n}" for n in row)} for row in tokens]
            arguments = trl.SFTConfig(
                output_dir=str(folder), per_device_train_batch_size=2, max_steps=3, report_to=[],
                logging_steps=1, save_strategy="no", use_cpu=True, learning_rate=1e-2, bf16=False,
                disable_tqdm=True, gradient_checkpointing=False, max_length=16, seed=0,
            )  # fmt: skip
            trainer = trl.SFTTrainer(
                model=test_trainer.make_llama(), args=arguments, processing_class=make_tokenizer(),
                train_dataset=datasets.Dataset.from_list(texts), peft_config=lora,
            )  # fmt: skip
            trainer.train()
            assert type(trainer.accelerator) is cls
            logs = [log for log in trainer.state.log_history if "loss" in log]
            return [(log["loss"], float(log["grad_norm"])) for log in logs]
        finally:
            test_trainer.use(Accelerator)


def fine_tune_all(root: Path) -> list[list[tuple[float, float]]]:
    warnings.simplefilter("ignore")  # of trl, datasets and peft
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(root)}
    lora = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights="gaussian")
    return [
        fine_tune(cls, root, each)
        for each in (None, lora)
        for cls in (VeScaleAccelerator, Accelerator)
    ]


def test_the_sft_trainer_trains_as_under_ddp(tmp_path: Path) -> None:
    found, expected, lora, expected_lora = run_ranks(fine_tune_all, 2, tmp_path, timeout_s=110)[0]
    for ours, theirs in ((found, expected), (lora, expected_lora)):
        assert len(ours) == 3
        for (loss, norm), (expected_loss, expected_norm) in zip(ours, theirs, strict=True):
            assert loss == pytest.approx(expected_loss, rel=1e-6)
            assert norm == pytest.approx(expected_norm, rel=1e-5)
    assert found != lora

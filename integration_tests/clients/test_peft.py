"""peft's LoRA and DoRA in the Trainer, beside DDP and stock FSDP2; saved, and loaded by peft."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers

from vescale_fsdp.testing import run_ranks

from .helpers import ARGUMENTS, Steps, check, make_llama, random_tokens, train, trainer_engine

ROWS = [{"input_ids": row, "labels": row} for row in random_tokens(16, 8)]
BATCH = random_tokens(2, 8)


def make_adapted(method: str) -> Any:
    config = peft.LoraConfig(
        r=2,
        target_modules=["q_proj", "up_proj"],
        init_lora_weights="gaussian",
        use_dora=method == "dora",
    )
    return peft.get_peft_model(make_llama(), config)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model.eval()(BATCH).logits
    return result


def fine_tune(method: str, root: Path) -> tuple[dict[str, Steps], dict[str, torch.Tensor]]:
    steps, outputs = {}, {}
    for engine in ("vescale", "ddp", "fsdp2"):
        with trainer_engine(engine):
            args = transformers.TrainingArguments(str(root / engine), **ARGUMENTS)
            trainer = transformers.Trainer(make_adapted(method), args, train_dataset=ROWS)
            steps[engine] = train(trainer)
            outputs[engine] = logits(trainer.model_wrapped)
            if engine == "vescale":
                trainer.save_model()
    return steps, outputs


@pytest.mark.parametrize("method", ["lora", "dora"])
def test_adapters_train_as_under_ddp_and_load_in_peft(method: str, tmp_path: Path) -> None:
    steps, outputs = run_ranks(fine_tune, 2, method, tmp_path, timeout_s=110)[0]
    for engine in ("ddp", "fsdp2"):
        check(steps["vescale"], steps[engine], rel=1e-5)
        torch.testing.assert_close(outputs["vescale"], outputs[engine], rtol=0, atol=1e-5)

    assert not list((tmp_path / "vescale").glob("model*.safetensors"))  # the adapters alone
    loaded = peft.PeftModel.from_pretrained(make_llama(), tmp_path / "vescale")
    torch.testing.assert_close(logits(loaded), outputs["vescale"], rtol=0, atol=1e-6)
    assert not torch.equal(logits(loaded), logits(make_llama()))

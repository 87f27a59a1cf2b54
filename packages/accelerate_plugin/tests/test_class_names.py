"""What transformers and peft look up by the name of a model's class, beside DDP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator

from vescale_fsdp.testing import run_ranks
from vescale_fsdp_accelerate import VeScaleAccelerator

from . import test_peft, test_trainer
from .helpers import accelerator

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = test_peft.pytestmark


def smooth_labels(root: Path) -> list[dict[str, Any]]:
    """The Trainer shifts the labels of causal models, which it knows by the class' name."""
    return [
        test_trainer.run(cls, root / kind, ours=ours, make=make, label_smoothing_factor=0.2)
        for make, of in ((test_trainer.make_llama, "llama"), (test_peft.make_lora, "lora"))
        for cls, kind, ours in (
            (VeScaleAccelerator, f"{of}-ours", test_trainer.FULL),
            (Accelerator, f"{of}-ddp", None),
        )
    ]


def test_label_smoothing_of_causal_models_is_as_under_ddp(tmp_path: Path) -> None:
    llama, llama_ddp, lora, lora_ddp = run_ranks(smooth_labels, 2, tmp_path, timeout_s=110)[0]
    for found, expected in ((llama, llama_ddp), (lora, lora_ddp)):
        assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
        assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
        assert found["after"] == pytest.approx(expected["after"], rel=1e-6)


def look_up(folder: Path) -> dict[str, Any]:
    with accelerator() as acc:
        lora, llama = acc.prepare(test_peft.make_lora(), test_trainer.make_llama())
        state = acc.get_state_dict(lora)
        lora.save_pretrained(folder, state_dict=state, is_main_process=acc.is_main_process)
        acc.wait_for_everyone()
        names = transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
        return {
            "adapter": json.loads((folder / "adapter_config.json").read_text())["auto_mapping"],
            "status": lora.get_model_status().base_model_type,
            "is causal": llama.__class__.__name__ in names.values(),
        }


def test_transformers_and_peft_find_the_class_of_a_sharded_model(tmp_path: Path) -> None:
    found = run_ranks(look_up, 2, tmp_path)[0]
    assert found["is causal"]
    assert found["status"] == "LlamaForCausalLM"
    assert found["adapter"] == {
        "base_model_class": "LlamaForCausalLM",
        "parent_library": "transformers.models.llama.modeling_llama",
    }

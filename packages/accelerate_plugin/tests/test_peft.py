"""LoRA of ``peft`` on frozen weights: plain Accelerate and ``transformers.Trainer``, beside DDP."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.distributed.checkpoint import FileSystemReader

from vescale_fsdp import MixedPrecisionPolicy, RaggedTensor, checkpoint
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_accelerate import VeScaleAccelerator

from . import test_trainer
from .helpers import accelerator, full

peft = pytest.importorskip("peft")
pytest.importorskip("transformers")
# peft 0.21 asks transformers 5 in the old way; in the ranks, too.
OLD_WAY = ".*is_gradient_checkpointing"
pytestmark = pytest.mark.filterwarnings(f"ignore:{OLD_WAY}:FutureWarning")


def make_lora(dtype: torch.dtype = torch.float32) -> Any:
    base = test_trainer.make_llama().to(dtype)
    config = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=["q_proj", "up_proj"], init_lora_weights="gaussian"
    )
    torch.manual_seed(1)
    warnings.filterwarnings("ignore", OLD_WAY, FutureWarning)
    return peft.get_peft_model(base, config)


def train(cls: type[Accelerator], model: Any, folder: Path | None, **options: Any) -> Any:
    with accelerator(cls, **options) as acc:
        optimizer: Any = torch.optim.AdamW(
            [p for p in model.parameters() if p.requires_grad], lr=1e-2
        )
        model, optimizer = acc.prepare(model, optimizer)
        tokens = test_trainer.Sentences(4).tokens[2 * acc.process_index :][:2]
        losses = []
        for step in range(4):
            if step == 2 and folder is not None:
                acc.save_state(folder)
            loss = model(input_ids=tokens, labels=tokens).loss
            acc.backward(loss)
            acc.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        found = {"losses": losses, "params": {}, "sharded": True}
        for name, param in acc.unwrap_model(model).named_parameters():
            found["params"][name] = full(param)
            found["sharded"] &= isinstance(param, RaggedTensor) == (cls is VeScaleAccelerator)
        if folder is not None:
            acc.load_state(folder)
            loss = model(input_ids=tokens, labels=tokens).loss
            found["resumed"] = loss.item()
            state = acc.get_state_dict(model)
            model.save_pretrained(
                folder / "adapter", state_dict=state, is_main_process=acc.is_main_process
            )
            acc.wait_for_everyone()
        return found


def train_both(folder: Path) -> tuple[Any, Any]:
    return (
        train(VeScaleAccelerator, make_lora(), folder),
        train(Accelerator, make_lora(), None),
    )


def test_lora_trains_as_under_ddp_and_saves_its_adapter(tmp_path: Path) -> None:
    found, expected = run_ranks(train_both, 2, tmp_path)[0]
    assert found["sharded"]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert found["params"].keys() == expected["params"].keys()
    for name, param in expected["params"].items():
        torch.testing.assert_close(found["params"][name], param, rtol=0, atol=1e-5, msg=name)
    assert found["resumed"] == found["losses"][2]
    adapter = peft.PeftModel.from_pretrained(test_trainer.make_llama(), tmp_path / "adapter")
    sentences = test_trainer.Sentences(4).tokens[:2]
    with torch.no_grad():
        loss = adapter(input_ids=sentences, labels=sentences).loss.item()
    assert loss == pytest.approx(found["losses"][2], rel=1e-6)


class Packed(torch.nn.Module):
    """A frozen layer of 8-bit codes with a scale for each row, as QLoRA keeps its weights."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        scale = weight.abs().amax(1, keepdim=True) / 127
        self.scale = torch.nn.Parameter(scale, requires_grad=False)
        codes = (weight / scale).round().to(torch.int8)
        self.codes = torch.nn.Parameter(codes, requires_grad=False)
        self.down = torch.nn.Parameter(torch.randn(2, weight.shape[1]) / 8)
        self.up = torch.nn.Parameter(torch.zeros(weight.shape[0], 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.codes.to(x.dtype) * self.scale.to(x.dtype)
        return torch.nn.functional.linear(x, weight + self.up @ self.down)


def make_packed() -> Any:
    model = test_trainer.make_llama().requires_grad_(False)
    torch.manual_seed(1)
    for layer in model.model.layers:
        for name in ("gate_proj", "up_proj", "down_proj"):
            setattr(layer.mlp, name, Packed(getattr(layer.mlp, name)))
    return model


def train_packed() -> tuple[Any, Any]:
    return train(VeScaleAccelerator, make_packed(), None), train(Accelerator, make_packed(), None)


def test_adapters_train_on_packed_weights_as_under_ddp() -> None:
    found, expected = run_ranks(train_packed, 2)[0]
    assert found["sharded"]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    for name, param in expected["params"].items():
        assert found["params"][name].dtype == param.dtype
        torch.testing.assert_close(found["params"][name], param, rtol=0, atol=1e-5, msg=name)


def train_in_bf16() -> tuple[list[float], dict[str, str]]:
    with accelerator(mixed_precision="bf16") as acc:
        model: Any = acc.prepare(make_lora(torch.bfloat16))
        tokens = test_trainer.Sentences(2).tokens
        acc.backward(model(input_ids=tokens, labels=tokens).loss)
        kinds = {
            name: f"{param.dtype} {None if param.grad is None else param.grad.dtype}"
            for name, param in model.named_parameters()
        }
        assert isinstance(acc.state.fsdp_plugin.mixed_precision_policy, MixedPrecisionPolicy)
        return sorted(set(kinds.values())), {k: v for k, v in kinds.items() if "lora" in k}


def test_under_bf16_frozen_weights_stay_in_16_bits_and_adapters_are_in_fp32() -> None:
    kinds, adapters = run_ranks(train_in_bf16, 2)[0]
    assert set(adapters.values()) == {"torch.float32 torch.float32"}
    assert kinds == ["torch.bfloat16 None", "torch.float32 torch.float32"]


def run_trainer(root: Path) -> dict[str, Any]:
    def run(cls: Any, folder: str, **more: Any) -> Any:
        return test_trainer.run(cls, root / folder, make=make_lora, **more)

    ours, full_, sharded = VeScaleAccelerator, test_trainer.FULL, test_trainer.SHARDED
    return {
        "ddp": run(Accelerator, "ddp"),
        "ours": run(ours, "full", ours=full_),
        "resumed": run(ours, "full", ours=full_, resume="checkpoint-2"),
        "sharded": run(ours, "sharded", ours=sharded),
        "resumed sharded": run(ours, "sharded", ours=sharded, resume="checkpoint-2"),
        "sealed": run(ours, "sealed", ours=sharded, sealed=True),
        "resumed sealed": run(ours, "sealed", ours=sharded, sealed=True, resume="checkpoint-2"),
    }


def test_the_trainer_trains_resumes_and_saves_the_adapter_alone(tmp_path: Path) -> None:
    found = run_ranks(run_trainer, 2, tmp_path, timeout_s=110)[0]
    expected = found.pop("ddp")
    for kind, each in found.items():
        assert each["losses"] == pytest.approx(expected["losses"], rel=1e-6), kind
        assert each["norms"] == pytest.approx(expected["norms"], rel=1e-5), kind
        assert each["after"] == pytest.approx(expected["after"], rel=1e-6), kind
        assert each["tokens"] == expected["tokens"], kind
        assert each["plug-in"] == "VeScaleFSDPPlugin"
    adapter = peft.PeftModel.from_pretrained(test_trainer.make_llama(), tmp_path / "full" / "final")
    sentences = test_trainer.Sentences(8).tokens
    with torch.no_grad():
        loss = adapter(input_ids=sentences, labels=sentences).loss.item()
    assert loss == pytest.approx(found["ours"]["after"], rel=1e-6)
    state = torch.load(tmp_path / "full" / "checkpoint-2" / "pytorch_model_fsdp.bin")
    assert state
    assert [name for name in state if "lora_" not in name] == []
    wanted = {f"model.{name}" for name in state}
    sealed, sharded = (
        tmp_path / folder / "checkpoint-2" / "pytorch_model_fsdp_0"
        for folder in ("sealed", "sharded")
    )
    assert set(checkpoint.verify(sealed).tensors) == wanted
    assert set(FileSystemReader(sharded).read_metadata().state_dict_metadata) == wanted

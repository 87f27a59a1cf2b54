"""What ``Trainer.save_model`` and ``load_best_model_at_end`` leave, beside DDP."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator, PartialState
from safetensors.torch import load_file

from vescale_fsdp.testing import run_ranks
from vescale_fsdp_accelerate import VeScaleAccelerator, trainer
from vescale_fsdp_accelerate.options import Options, to_environment

from . import test_peft, test_trainer
from .helpers import accelerator

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = test_peft.pytestmark

BEST = {
    "eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
}  # fmt: skip


def make_prompts() -> Any:
    config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    torch.manual_seed(1)
    return peft.get_peft_model(test_trainer.make_llama(), config)


def make_two_adapters() -> Any:
    """One that is trained, and one that is not; and a head that is trained as a whole."""
    config = {"r": 2, "target_modules": ["q_proj"], "init_lora_weights": "gaussian"}
    torch.manual_seed(1)
    base = test_trainer.make_llama()
    model = peft.get_peft_model(base, peft.LoraConfig(modules_to_save=["norm"], **config))
    model.add_adapter("other", peft.LoraConfig(**config))
    return model


def save(kind: str, folder: Path, make: Any, sealed: bool = False, **more: Any) -> dict[str, Any]:
    """Train, save, and say what the model's loss is."""
    with accelerator(PartialState):
        if kind != "ddp":
            os.environ |= to_environment(Options(sealed=sealed), {})
            os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
            os.environ["FSDP_STATE_DICT_TYPE"] = kind
            del os.environ["FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"]
        test_trainer.use(Accelerator if kind == "ddp" else VeScaleAccelerator)
        try:
            found = test_trainer.make_trainer(folder, make(), **more)
            found.train()
            best = found.state.best_model_checkpoint
            found.save_model(str(folder / "final"))
            files = sorted(str(f.relative_to(folder)) for f in folder.glob("*/*"))
            return {
                "loss": found.evaluate()["eval_loss"],
                "best": best and Path(best).name,
                "files": files,  # on each process, as soon as save_model has returned
            }
        finally:
            test_trainer.use(Accelerator)


SHARDED, FULL = "SHARDED_STATE_DICT", "FULL_STATE_DICT"


def save_all(root: Path) -> dict[str, dict[str, Any]]:
    llama, first = test_trainer.make_llama, {**BEST, "greater_is_better": True}
    runs: dict[str, dict[str, Any]] = {
        "last is best": {"make": llama, **BEST},
        "first is best": {"make": llama, **first},
        "lora": {"make": test_peft.make_lora, **first},
        "two adapters": {"make": make_two_adapters},
        "prompts": {"make": make_prompts},
    }
    kinds: dict[str, dict[str, Any]] = {
        "ddp": {"kind": "ddp"},
        "sharded": {"kind": SHARDED},
        "full": {"kind": FULL},
        "sealed": {"kind": SHARDED, "sealed": True},
    }
    return {
        f"{name} {kind}": save(folder=root / kind / name, **how, **run)
        for name, run in runs.items()
        for kind, how in kinds.items()
    }


Runs = tuple[list[dict[str, dict[str, Any]]], Path]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    root = tmp_path_factory.mktemp("saves")
    return run_ranks(save_all, 2, root, timeout_s=110), root


def loss_of(model: Any) -> float:
    sentences = test_trainer.Sentences(8).tokens
    with torch.no_grad():
        return float(model(input_ids=sentences, labels=sentences).loss)


KINDS = ["sharded", "full", "sealed"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["last is best", "first is best", "lora"])
def test_the_best_model_is_loaded_and_saved(runs: Runs, name: str, kind: str) -> None:
    ranks, root = runs
    expected = ranks[0][f"{name} ddp"]
    assert expected["best"] == ("checkpoint-4" if name == "last is best" else "checkpoint-2")
    for found in (rank[f"{name} {kind}"] for rank in ranks):
        assert found["best"] == expected["best"]
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    final = root / kind / name / "final"
    model = (
        peft.PeftModel.from_pretrained(test_trainer.make_llama(), final)
        if name == "lora"
        else transformers.LlamaForCausalLM.from_pretrained(final)
    )
    assert loss_of(model) == pytest.approx(expected["loss"], rel=1e-6)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["last is best", "lora", "two adapters", "prompts"])
def test_save_model_writes_the_files_of_ddp(runs: Runs, name: str, kind: str) -> None:
    ranks, root = runs
    expected = root / "ddp" / name / "final"
    files = {f.relative_to(expected) for f in expected.rglob("*.*")}
    for rank in ranks:
        there = {Path(file) for file in rank[f"{name} {kind}"]["files"]}
        assert {Path("final") / file for file in files if len(file.parts) == 1} <= there
    final = root / kind / name / "final"
    assert {f.relative_to(final) for f in final.rglob("*.*")} == files
    for file in files:
        if file.suffix == ".safetensors":
            ours, theirs = load_file(final / file), load_file(expected / file)
            assert ours.keys() == theirs.keys()
            for key, value in theirs.items():
                torch.testing.assert_close(ours[key], value, rtol=0, atol=1e-5, msg=key)


@pytest.mark.parametrize("kind", KINDS)
def test_each_checkpoint_of_an_adapter_is_one_for_peft(runs: Runs, kind: str) -> None:
    adapter = runs[1] / kind / "lora" / "checkpoint-4"
    model = peft.PeftModel.from_pretrained(test_trainer.make_llama(), adapter)
    assert math.isfinite(loss_of(model))


def names_to_gather() -> list[str]:
    with accelerator() as acc:
        model = acc.prepare(make_two_adapters())
        return sorted(trainer._state_of_adapters(model))


def test_of_a_model_with_adapters_nothing_else_is_gathered() -> None:
    for names in run_ranks(names_to_gather, 2):
        # q_proj of two layers has two matrices in each of two adapters
        assert len([name for name in names if ".q_proj.lora_" in name]) == 8
        norms = [name for name in names if name.endswith("norm.modules_to_save.default.weight")]
        assert len(norms) == 5  # two in each layer, and the last one
        assert len(names) == 8 + 5


class Encoder(torch.nn.Module):
    """As of sentence-transformers: no model of transformers, and saves one that it contains."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = test_trainer.make_llama()

    def forward(self, input_ids: Any, labels: Any) -> Any:
        return self.inner(input_ids=input_ids, labels=labels)

    def save_pretrained(self, folder: str) -> None:
        self.inner.save_pretrained(folder)


class EncoderTrainer(transformers.Trainer):
    """Takes no notice of the state dict, and expects to be called in one process."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.args.push_to_hub = True  # later: the constructor would look for the hub

    def push_to_hub(self, *_: Any, **options: Any) -> None:
        Path(self.args.output_dir, f"pushed-{self.args.process_index}").touch()

    def _push_from_checkpoint(self, *_: Any) -> None:
        pass

    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        self.model.save_pretrained(output_dir)
        Path(str(output_dir), f"by-{self.args.process_index}").touch()


def save_encoder(root: Path) -> float:
    more: dict[str, Any] = {"label_names": ["labels"], "trainer": EncoderTrainer}
    loss: float = save(SHARDED, root, Encoder, **more)["loss"]
    return loss


def test_a_trainer_that_ignores_the_state_dict_saves_whole_weights(tmp_path: Path) -> None:
    loss, _ = run_ranks(save_encoder, 2, tmp_path, timeout_s=110)
    assert sorted(file.name for file in tmp_path.rglob("pushed-*")) == ["pushed-0", "pushed-1"]
    for folder in ("final", "checkpoint-4"):
        assert [file.name for file in (tmp_path / folder).glob("by-*")] == ["by-0"]
        model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / folder)
        assert loss_of(model) == pytest.approx(loss, rel=1e-6)

"""An unmodified ``transformers.Trainer``, against the same under DDP."""

from __future__ import annotations

import copy
import json
import os
from pathlib import Path
from typing import Any

import accelerate
import pytest
import torch
import torch.distributed as dist
from torch.utils.data import Dataset

from vescale_fsdp import FSDPModule, unsharded
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_accelerate import VeScaleAccelerator, VeScaleFSDPPlugin
from vescale_fsdp_accelerate.options import Options, to_environment
from vescale_fsdp_tune import tuning_of

from .helpers import accelerator, full

transformers = pytest.importorskip("transformers")


class Sentences(Dataset[dict[str, torch.Tensor]]):
    """Tokens that are their own labels."""

    def __init__(self, count: int = 16) -> None:
        self.tokens = torch.randint(64, (count, 8), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


def make_llama() -> Any:
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=32,
        tie_word_embeddings=True,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def make_trainer(folder: Path, model: Any, *, trainer: Any = None, **more: Any) -> Any:
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=2, max_steps=4, save_steps=2,
        logging_steps=1, report_to=[], use_cpu=True, learning_rate=1e-2, disable_tqdm=True,
        gradient_accumulation_steps=2, max_grad_norm=0.5, seed=0, **more,
    )  # fmt: skip
    return (trainer or transformers.Trainer)(
        model=model, args=arguments, train_dataset=Sentences(), eval_dataset=Sentences(8)
    )


def use(cls: type[accelerate.Accelerator]) -> None:
    import transformers.trainer

    transformers.trainer.Accelerator = cls


def use_environment(options: Options, environment: dict[str, str]) -> None:
    os.environ |= to_environment(options, {})
    os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", **environment}
    del os.environ["FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"]


def run(cls: Any, folder: Path, *, ours: dict[str, Any] | None = None, resume: str | None = None,
        evaluates_first: bool = False, sealed: bool = False, budget: str | None = None,
        make: Any = make_llama, **more: Any) -> dict[str, Any]:  # fmt: skip
    with accelerator(accelerate.PartialState):
        if ours is not None:
            use_environment(Options(sealed=sealed, budget=budget), ours)
        use(cls)
        try:
            trainer = make_trainer(folder, make(), **more)
            found = {"before": trainer.evaluate()["eval_loss"]} if evaluates_first else {}
            trainer.train(resume_from_checkpoint=resume and str(folder / resume))
            logs = [log for log in trainer.state.log_history if "loss" in log]
            found["losses"] = [log["loss"] for log in logs]
            found["norms"] = [float(log["grad_norm"]) for log in logs]
            found["after"] = trainer.evaluate()["eval_loss"]
            found["predictions"] = torch.tensor(trainer.predict(Sentences(4)).predictions)
            model = trainer.model
            found["tokens"] = model.generate(
                torch.tensor([[1, 2, 3]]), max_new_tokens=4, do_sample=False
            ).tolist()
            trainer.save_model(str(folder / "final"))
            tuning = tuning_of(model)
            found["chosen"] = None if tuning is None else tuning.chosen.memory
            found["plug-in"] = type(
                getattr(trainer.accelerator.state, "fsdp_plugin", None)
            ).__name__
            return found
        finally:
            use(accelerate.Accelerator)


def on_a_copy(cls: Any, folder: Path, **environment: str) -> list[float]:
    """A second training, of a plain copy of the model that was trained."""
    with accelerator(accelerate.PartialState):
        if environment:
            use_environment(Options(), environment)
        use(cls)
        try:
            first = make_trainer(folder, make_llama())
            first.train()
            with unsharded(first.model):
                model = copy.deepcopy(first.model)
            # What `generate` asks, which would wait for the other ranks.
            assert not getattr(model, "_is_fsdp_managed_module", False)
            trainer = make_trainer(folder, model)
            trainer.train()
            assert isinstance(model, FSDPModule) == bool(environment)
            return [log["loss"] for log in trainer.state.log_history if "loss" in log]
        finally:
            use(accelerate.Accelerator)


def run_on_copies(root: Path) -> tuple[list[float], list[float]]:
    expected = on_a_copy(accelerate.Accelerator, root / "ddp")
    return on_a_copy(VeScaleAccelerator, root / "ours", **FULL), expected


def test_a_copy_of_a_trained_model_trains_in_another_trainer(tmp_path: Path) -> None:
    for found, expected in run_ranks(run_on_copies, 2, tmp_path):
        assert found == pytest.approx(expected, rel=1e-5)


FULL = {"FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT"}
SHARDED = {"FSDP_STATE_DICT_TYPE": "SHARDED_STATE_DICT"}


def load_whole_shards(root: Path) -> bool:
    """Shards of whole weights in torch's older format, as `save_pretrained` wrote them."""
    model = make_llama()
    with torch.no_grad():
        model.model.norm.weight.fill_(3.0)
    state = model.state_dict()
    if dist.get_rank() == 0:
        torch.save(state, root / "pytorch_model-00001-of-00001.bin")
        index = {"weight_map": dict.fromkeys(state, "pytorch_model-00001-of-00001.bin")}
        (root / "pytorch_model.bin.index.json").write_text(json.dumps({"metadata": {}, **index}))
    with accelerator(accelerate.PartialState):
        use_environment(Options(), FULL)
        use(VeScaleAccelerator)
        try:
            trainer = make_trainer(root / "out", make_llama())
            trainer.train()
            trainer._load_from_checkpoint(str(root))
            whole = full(trainer.model.model.norm.weight)
            return bool((whole == 3.0).all())
        finally:
            use(accelerate.Accelerator)


def test_shards_of_whole_weights_are_loaded(tmp_path: Path) -> None:
    assert run_ranks(load_whole_shards, 2, tmp_path) == [True, True]


def run_all(root: Path) -> dict[str, dict[str, Any]]:
    ours = VeScaleAccelerator
    first = run(ours, root / "full", ours=FULL, evaluates_first=True)
    return {
        "ddp": run(accelerate.Accelerator, root / "ddp"),
        "ours": first,
        "resumed": run(ours, root / "full", ours=FULL, resume="checkpoint-2"),
        "sharded": run(ours, root / "sharded", ours=SHARDED, activation_checkpointing=True),
        "resumed sharded": run(ours, root / "sharded", ours=SHARDED, resume="checkpoint-2"),
        "sealed": run(ours, root / "sealed", ours=FULL, sealed=True),
        "resumed sealed": run(ours, root / "sealed", ours=FULL, sealed=True, resume="checkpoint-2"),
        "arguments": run(ours, root / "args", ours={}, fsdp=True,
                         fsdp_config={"transformer_layer_cls_to_wrap": ["LlamaDecoderLayer"]}),
        "bf16": run(ours, root / "bf16", ours=FULL, bf16=True),
        "budget": run(ours, root / "budget", ours=FULL, budget="auto"),
    }  # fmt: skip


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    root = tmp_path_factory.mktemp("trainer")
    return run_ranks(run_all, 2, root, timeout_s=110)[0], root


KINDS = [
    "ours",
    "resumed",
    "sharded",
    "resumed sharded",
    "sealed",
    "resumed sealed",
    "arguments",
    "budget",
]


def test_a_budget_knows_the_batches_of_the_trainer(runs: tuple[dict[str, Any], Path]) -> None:
    assert runs[0]["budget"]["chosen"]["activations"] > 0
    assert runs[0]["ours"]["chosen"] is None


@pytest.mark.parametrize("kind", KINDS)
def test_the_trainer_trains_evaluates_predicts_and_generates_as_under_ddp(
    runs: tuple[dict[str, Any], Path], kind: str
) -> None:
    found, expected = runs[0][kind], runs[0]["ddp"]
    assert found["losses"] == pytest.approx(expected["losses"], rel=1e-6)
    assert found["norms"] == pytest.approx(expected["norms"], rel=1e-5)
    assert found["after"] == pytest.approx(expected["after"], rel=1e-6)
    torch.testing.assert_close(found["predictions"], expected["predictions"], rtol=0, atol=1e-5)
    assert found["tokens"] == expected["tokens"]
    assert found["plug-in"] == "VeScaleFSDPPlugin"


def test_it_can_evaluate_before_it_trains(runs: tuple[dict[str, Any], Path]) -> None:
    sentences = Sentences(8).tokens
    with torch.no_grad():
        loss = make_llama()(input_ids=sentences, labels=sentences).loss.item()
    assert runs[0]["ours"]["before"] == pytest.approx(loss, rel=1e-6)


def test_bf16_is_near_fp32(runs: tuple[dict[str, Any], Path]) -> None:
    found, expected = runs[0]["bf16"], runs[0]["ddp"]
    assert found["losses"] == pytest.approx(expected["losses"], rel=2e-3)
    assert found["losses"] != expected["losses"]


def test_from_pretrained_reads_what_save_model_wrote(runs: tuple[dict[str, Any], Path]) -> None:
    found, root = runs
    model = transformers.LlamaForCausalLM.from_pretrained(root / "full" / "final")
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert model.lm_head.weight is model.model.embed_tokens.weight
    sentences = Sentences(8).tokens
    with torch.no_grad():
        loss = model(input_ids=sentences, labels=sentences).loss.item()
    assert loss == pytest.approx(found["ours"]["after"], rel=1e-6)


def test_an_old_plug_in_of_fsdp1_is_upgraded() -> None:
    stock = accelerate.FullyShardedDataParallelPlugin(sharding_strategy="SHARD_GRAD_OP")
    made = VeScaleFSDPPlugin.upgraded(stock)
    assert (made.fsdp_version, made.reshard_after_forward) == (2, False)
    stock = accelerate.FullyShardedDataParallelPlugin(sharding_strategy="HYBRID_SHARD")
    with pytest.raises(ValueError, match="HYBRID_SHARD; set fsdp_version: 2, and fsdp_vescale_"):
        VeScaleFSDPPlugin.upgraded(stock)


class Penalized(transformers.Trainer):
    """With a penalty on a weight of the root, computed after the forward."""

    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, **more: Any
    ) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True, **more)
        weight = self.accelerator.unwrap_model(model).lm_head.weight
        loss = loss + 0.1 * weight.pow(2).mean() + 0.1 * (weight @ weight.T).mean()
        return (loss, outputs) if return_outputs else loss


def penalize(root: Path) -> list[dict[str, Any]]:
    stock, transformers.Trainer = transformers.Trainer, Penalized
    try:
        return [
            run(VeScaleAccelerator, root / "ours", ours=FULL, evaluates_first=True),
            run(accelerate.Accelerator, root / "ddp"),
        ]
    finally:
        transformers.Trainer = stock


def test_a_weight_of_the_root_is_whole_after_a_forward_without_gradients(tmp_path: Path) -> None:
    found, expected = run_ranks(penalize, 2, tmp_path)[0]
    for key in ("losses", "norms", "after"):
        assert found[key] == pytest.approx(expected[key], rel=1e-5), key


def make_t5() -> Any:
    transformers.set_seed(0)
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=8, d_ff=32, num_layers=2, num_heads=2,
        decoder_start_token_id=0, dropout_rate=0.0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def generate(folder: Path, ours: bool, moments: str) -> list[Any]:
    """What is predicted before and after training: the encoder runs before the model ever has."""
    with accelerator(accelerate.PartialState):
        if ours:
            os.environ |= to_environment(Options(), {})
            os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
            del os.environ["FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"]
        use(VeScaleAccelerator if ours else accelerate.Accelerator)
        try:
            arguments = transformers.Seq2SeqTrainingArguments(
                output_dir=str(folder), per_device_train_batch_size=2, max_steps=2, use_cpu=True,
                per_device_eval_batch_size=2, report_to=[], disable_tqdm=True, save_strategy="no",
                predict_with_generate=True, generation_max_length=6,
            )  # fmt: skip
            trainer = transformers.Seq2SeqTrainer(
                model=make_t5(), args=arguments, train_dataset=Sentences(8)
            )
            found = [trainer.predict(Sentences(4))] if "before" in moments else []
            trainer.train()
            found.append(trainer.predict(Sentences(4)))
            return [[each.predictions.tolist(), each.metrics["test_loss"]] for each in found]
        finally:
            use(accelerate.Accelerator)


def test_sequences_are_generated_before_and_after_training(tmp_path: Path) -> None:
    found = run_ranks(generate, 2, tmp_path, True, "before and after")
    # Under DDP, a Trainer that has predicted first reduces no gradients (transformers 5.23).
    before, _ = run_ranks(generate, 2, tmp_path, False, "before and after")[0]
    (after,) = run_ranks(generate, 2, tmp_path, False, "after")[0]
    for rank in range(2):
        for mine, theirs in zip(found[rank], (before, after), strict=True):
            assert mine[0] == theirs[0]
            assert mine[1] == pytest.approx(theirs[1], rel=1e-6)

"""Reference models that ``trl`` shards itself, and follows, beside DDP."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from accelerate import Accelerator, PartialState

from vescale_fsdp import RaggedTensor
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_accelerate import VeScaleAccelerator
from vescale_fsdp_accelerate.options import Options, to_environment

from . import test_trainer, test_trl
from .helpers import accelerator

trl = pytest.importorskip("trl")
pytest.importorskip("peft")

ARGUMENTS: dict[str, Any] = {
    "max_steps": 3, "report_to": [], "logging_steps": 1, "save_strategy": "no", "use_cpu": True,
    "learning_rate": 1e-2, "bf16": False, "disable_tqdm": True, "gradient_checkpointing": False,
    "seed": 0, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5,
}  # fmt: skip


@contextmanager
def engine(ours: bool) -> Iterator[None]:
    with accelerator(PartialState):
        if ours:
            os.environ |= to_environment(Options(), {})
            os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
            del os.environ["FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD"]
        test_trainer.use(VeScaleAccelerator if ours else Accelerator)
        try:
            yield
        finally:
            test_trainer.use(Accelerator)


def preferences() -> list[dict[str, str]]:
    rows = test_trainer.Sentences().tokens.clamp(min=3).tolist()
    words = [[f"w{n}" for n in row] for row in rows]
    return [
        {"prompt": " ".join(row[:3]), "chosen": " ".join(row[3:]), "rejected": " ".join(row[5:])}
        for row in words
    ]


def make_dpo(folder: Path) -> Any:
    import datasets

    return trl.DPOTrainer(
        model=test_trainer.make_llama(), ref_model=test_trainer.make_llama(),
        args=trl.DPOConfig(str(folder), per_device_train_batch_size=2, max_length=16, **ARGUMENTS),
        processing_class=test_trl.make_tokenizer(),
        train_dataset=datasets.Dataset.from_list(preferences()),
    )  # fmt: skip


def reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(ids) / 100 for ids in completion_ids]


def make_grpo(folder: Path) -> Any:
    import datasets

    arguments = trl.GRPOConfig(
        str(folder), per_device_train_batch_size=4, num_generations=4, beta=0.1,
        max_completion_length=4, **ARGUMENTS,
    )  # fmt: skip
    return trl.GRPOTrainer(
        model=str(folder / "llama"), reward_funcs=reward, args=arguments,
        processing_class=test_trl.make_tokenizer(),
        train_dataset=datasets.Dataset.from_list([{"prompt": p["prompt"]} for p in preferences()]),
    )  # fmt: skip


def train(make: Callable[[Path], Any], folder: Path, ours: bool) -> dict[str, Any]:
    with engine(ours):
        trainer = make(folder)
        trainer.train()
        kinds = {isinstance(param, RaggedTensor) for param in trainer.ref_model.parameters()}
        logs = [log for log in trainer.state.log_history if "loss" in log]
        keys = ("loss", "grad_norm", "kl", "rewards/margins")
        return {
            "sharded": kinds,
            "logs": [{key: float(log[key]) for key in keys if key in log} for log in logs],
        }


def train_all(root: Path) -> dict[str, dict[str, Any]]:
    warnings.simplefilter("ignore")  # of trl and datasets
    os.environ |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(root)}
    test_trainer.make_llama().save_pretrained(root / "llama")
    return {
        f"{make.__name__} {name}": train(make, root, ours)
        for make in (make_dpo, make_grpo)
        for name, ours in (("ours", True), ("ddp", False))
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    return run_ranks(train_all, 2, tmp_path_factory.mktemp("trl"), timeout_s=110)[0]


@pytest.mark.parametrize("make", [make_dpo, make_grpo], ids=lambda make: make.__name__)
def test_a_reference_that_follows_is_sharded_and_trains_as_under_ddp(
    runs: dict[str, dict[str, Any]], make: Callable[[Path], Any]
) -> None:
    found, expected = (runs[f"{make.__name__} {kind}"] for kind in ("ours", "ddp"))
    assert found["sharded"] == {True}
    assert len(found["logs"]) == 3
    for ours, theirs in zip(found["logs"], expected["logs"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-4, abs=1e-6)

from __future__ import annotations

import re
import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import ModelCheckpoint

from vescale_fsdp import FSDPModule, RaggedTensor, RankMismatchError
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_lightning import VeScaleFSDPStrategy

from .lit import Block, LitModel, full_parameters, loader, make_model, make_trainer

Run = tuple[list[float], dict[str, torch.Tensor]]


class Half(LitModel):
    """With an optimizer whose numbers fit into fp16: AdamW's eps is 0 there."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-2, momentum=0.9)


def fit(strategy: str, root: Path, options: dict[str, Any]) -> Run:
    model = make_model(Half if options.get("precision") == "16-true" else LitModel)
    make_trainer(strategy, root, **options).fit(model, loader(), loader())
    return model.losses, full_parameters(model)


def fit_both(root: Path, options: dict[str, Any]) -> tuple[Run, Run]:
    return fit("vescale_fsdp", root, options), fit("ddp", root, options)


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"max_steps": 20}, id="32-true"),
        pytest.param({"max_steps": 5, "precision": "64-true"}, id="64-true"),
        pytest.param({"max_steps": 8, "precision": "bf16-true"}, id="bf16-true"),
    ],
)
def test_fit_is_bit_equal_to_ddp(tmp_path: Path, options: dict[str, Any]) -> None:
    (losses, params), (expected_losses, expected) = run_ranks(fit_both, 2, tmp_path, options)[0]
    assert losses == expected_losses
    assert len(losses) == options["max_steps"]
    for name, param in expected.items():
        assert torch.equal(params[name], param), name


def test_16_true_equals_ddp_but_for_the_smallest_numbers(tmp_path: Path) -> None:
    """DDP divides gradients before it sums them; in fp16 the smallest lose bits by that."""
    options = {"max_steps": 8, "precision": "16-true"}
    (losses, params), (expected_losses, expected) = run_ranks(fit_both, 2, tmp_path, options)[0]
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    assert losses[-1] < losses[0]
    for name, param in expected.items():
        assert params[name].dtype == torch.float16
        torch.testing.assert_close(params[name], param, rtol=0, atol=1e-3, msg=name)


def test_accumulation_with_norm_clipping_equals_ddp(tmp_path: Path) -> None:
    options = {"max_steps": 6, "accumulate_grad_batches": 2, "gradient_clip_val": 0.1}
    (losses, params), (expected_losses, expected) = run_ranks(fit_both, 2, tmp_path, options)[0]
    assert losses == pytest.approx(expected_losses, rel=1e-6)
    for name, param in expected.items():
        torch.testing.assert_close(params[name], param, rtol=0, atol=1e-6, msg=name)


def fit_mixed(root: Path) -> tuple[list[float], list[float], set[str], set[str]]:
    seen: set[str] = set()

    class Looks(LitModel):
        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            loss = super().training_step(batch, batch_idx)
            # `parameters()` gives the sharded ones, also here.
            seen.update(str(m.weight.dtype) for m in self.modules() if hasattr(m, "weight"))
            return loss

    options = {"max_steps": 10}
    mixed, single = make_model(Looks), make_model()
    make_trainer("vescale_fsdp", root, precision="bf16-mixed", **options).fit(
        mixed, loader(), loader()
    )
    make_trainer("vescale_fsdp", root, **options).fit(single, loader(), loader())
    return mixed.losses, single.losses, seen, {str(p.dtype) for p in mixed.parameters()}


def test_bf16_mixed_computes_in_bf16_and_keeps_fp32_weights(tmp_path: Path) -> None:
    losses, in_fp32, while_computing, at_rest = run_ranks(fit_mixed, 2, tmp_path)[0]
    assert at_rest == {"torch.float32"}
    assert "torch.bfloat16" in while_computing
    assert losses != in_fp32
    assert losses == pytest.approx(in_fp32, abs=0.05)


def evaluate(root: Path) -> dict[str, Any]:
    model = make_model()
    trainer = make_trainer("vescale_fsdp", root, max_steps=4)
    before = trainer.validate(model, loader(), verbose=False)[0]["val_loss"]
    trainer.fit(model, loader(), loader())
    after = trainer.validate(model, loader(), verbose=False)[0]["val_loss"]
    tested = trainer.test(model, loader(), verbose=False)[0]["test_loss"]
    predictions = trainer.predict(model, loader())
    assert predictions is not None
    sharded = all(isinstance(param, RaggedTensor) for param in model.parameters())
    return {
        "before": before,
        "after": after,
        "tested": tested,
        "shape": tuple(predictions[0].shape),
        "sharded": sharded,
        "losses": model.losses,
    }


def test_validate_fit_validate_test_predict_with_one_trainer(tmp_path: Path) -> None:
    first, second = run_ranks(evaluate, 2, tmp_path)
    assert first["before"] > first["after"] == first["tested"]
    assert first["shape"] == (4, 9)
    assert first["sharded"]
    assert first["losses"] != second["losses"]  # each rank has data of its own


def interrupted(root: Path) -> tuple[list[float], list[float], int]:
    warnings.filterwarnings("ignore", "Checkpoint directory .* exists and is not empty")
    saver = ModelCheckpoint(dirpath=root / "saved", save_last=True, every_n_train_steps=4)
    epochs = {"limit_train_batches": 4}  # the loader does not resume in the middle of one
    saving: dict[str, Any] = {"enable_checkpointing": True, "callbacks": [saver], **epochs}
    whole, first, second = make_model(), make_model(), make_model()
    make_trainer("vescale_fsdp", root, max_steps=8, **epochs).fit(whole, loader(), loader())
    make_trainer("vescale_fsdp", root, max_steps=4, **saving).fit(first, loader(), loader())
    trainer = make_trainer("vescale_fsdp", root, max_steps=8, **saving)
    trainer.fit(second, loader(), loader(), ckpt_path=str(root / "saved" / "last.ckpt"))
    return whole.losses, first.losses + second.losses, trainer.global_step


def test_resume_from_a_checkpoint_is_bit_equal_to_not_stopping(tmp_path: Path) -> None:
    for expected, losses, step in run_ranks(interrupted, 2, tmp_path):
        assert step == 8
        assert losses == expected


def two_steps_in_one(root: Path) -> tuple[bool, list[float]]:
    class CallsTwice(LitModel):
        """``self(x)`` twice in a step, and a root parameter used outside of ``forward``."""

        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            assert isinstance(self, FSDPModule)
            regularizer = self.norm.weight.square().sum()
            loss = self.loss(batch) + self.loss([batch[0].flip(1)]) + 0.1 * regularizer
            self.losses.append(loss.item())
            return loss

    class PlainTwice(LitModel):
        def training_step(self, batch: list[torch.Tensor], batch_idx: int) -> torch.Tensor:
            regularizer = self.norm.weight.square().sum()
            loss = self.loss(batch) + self.loss([batch[0].flip(1)]) + 0.1 * regularizer
            self.losses.append(loss.item())
            return loss

    ours, ddp = make_model(CallsTwice), make_model(PlainTwice)
    make_trainer("vescale_fsdp", root, max_steps=6).fit(ours, loader(), loader())
    make_trainer("ddp", root, max_steps=6).fit(ddp, loader(), loader())
    return ours.losses == ddp.losses, ours.losses


def test_self_called_twice_in_a_step_and_parameters_used_outside_forward(tmp_path: Path) -> None:
    equal, losses = run_ranks(two_steps_in_one, 2, tmp_path)[0]
    assert equal, losses


def sharded_by_the_user(root: Path) -> tuple[list[str], bool]:
    from vescale_fsdp import fully_shard

    class Configures(LitModel):
        def configure_model(self) -> None:
            if not isinstance(self.blocks[0], FSDPModule):
                fully_shard(self.blocks[0])

    ours, ddp = make_model(Configures), make_model()
    make_trainer("vescale_fsdp", root, max_steps=4).fit(ours, loader(), loader())
    make_trainer("ddp", root, max_steps=4).fit(ddp, loader(), loader())
    units = [name for name, module in ours.named_modules() if isinstance(module, FSDPModule)]
    return units, ours.losses == ddp.losses


def test_what_configure_model_has_sharded_is_left_alone(tmp_path: Path) -> None:
    units, equal = run_ranks(sharded_by_the_user, 2, tmp_path)[0]
    assert units == ["", "blocks.0"]
    assert equal


def units_by_default(root: Path) -> list[str]:
    model = make_model()
    make_trainer("vescale_fsdp", root, max_steps=1).fit(model, loader(), loader())
    return [name for name, module in model.named_modules() if isinstance(module, FSDPModule)]


def test_repeated_blocks_are_units_by_default(tmp_path: Path) -> None:
    assert run_ranks(units_by_default, 2, tmp_path)[0] == ["", "blocks.0", "blocks.1"]


def optimizer_too_early(root: Path) -> str:
    class Early(LitModel):
        def __init__(self) -> None:
            super().__init__()
            self.optimizer = torch.optim.SGD(super().parameters(), lr=0.1)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return self.optimizer

    with pytest.raises(ValueError, match="made before the model was sharded") as error:
        make_trainer("vescale_fsdp", root, max_steps=1).fit(make_model(Early), loader(), loader())
    return str(error.value)


def test_an_optimizer_made_before_sharding_is_refused_on_every_rank(tmp_path: Path) -> None:
    for message in run_ranks(optimizer_too_early, 2, tmp_path):
        assert "SGD holds 15 of 15 parameters" in message
        assert "configure_optimizers" in message


def test_a_precision_that_does_not_work_is_refused_by_name() -> None:
    from lightning.pytorch.plugins import Precision

    from vescale_fsdp_lightning import VeScaleFSDPStrategy

    class Other(Precision):
        precision: Any = "transformer-engine"

    strategy = VeScaleFSDPStrategy()
    with pytest.raises(ValueError, match="32-true, 64-true, bf16-mixed, bf16-true, 16-true"):
        strategy.precision_plugin = Other()


def test_the_string_makes_the_strategy() -> None:
    from vescale_fsdp_lightning import VeScaleFSDPStrategy

    trainer = pl.Trainer(strategy="vescale_fsdp", accelerator="cpu", devices=1, logger=False)
    assert type(trainer.strategy) is VeScaleFSDPStrategy


def fit_new_blocks(strategy: str, root: Path, budget: str | None = None) -> Run:
    """A second training of a model with a new head and one block more."""
    model = make_model()
    kind: Any = strategy
    if strategy == "vescale_fsdp" and budget is not None:
        kind = VeScaleFSDPStrategy(budget=budget)
    make_trainer(kind, root, max_steps=3).fit(model, loader(), loader())
    torch.manual_seed(11)
    model.blocks.append(Block())
    model.head = torch.nn.Sequential(torch.nn.Linear(12, 12), torch.nn.Linear(12, 23))
    make_trainer(strategy, root, max_steps=4).fit(model, loader(), loader())
    return model.losses, full_parameters(model)


def fit_new_blocks_with_both(root: Path) -> list[Run]:
    kinds = [("vescale_fsdp", None), ("vescale_fsdp", "1GiB"), ("ddp", None)]
    return [fit_new_blocks(kind, root, budget) for kind, budget in kinds]


def test_modules_added_between_trainings_equal_ddp(tmp_path: Path) -> None:
    for ours, in_budget, expected in run_ranks(fit_new_blocks_with_both, 2, tmp_path):
        for losses, params in (ours, in_budget):
            assert losses == pytest.approx(expected[0], rel=1e-6)
            for name, param in expected[1].items():
                torch.testing.assert_close(params[name], param, rtol=0, atol=1e-6, msg=name)


def fit_with_a_stray(root: Path) -> None:
    model = make_model()
    trainer = make_trainer("vescale_fsdp", root, max_steps=1)
    trainer.fit(model, loader(), loader())
    model.added = torch.nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"^save_checkpoint: 'added.weight', 'added.bias' of "):
        trainer.save_checkpoint(root / "unused.ckpt")
    del model.added
    model.blocks[0].gain = torch.nn.Parameter(torch.ones(12))
    with pytest.raises(ValueError, match=r"\['blocks.0.gain'\] were added to modules"):
        make_trainer("vescale_fsdp", root, max_steps=1).fit(model, loader(), loader())


def test_a_parameter_added_to_a_sharded_module_is_named(tmp_path: Path) -> None:
    run_ranks(fit_with_a_stray, 2, tmp_path)


class Alone(pl.Callback):
    """Evaluates, or saves, in the first process only."""

    def __init__(self, what: str, root: Path) -> None:
        self.what, self.root = what, root

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        if trainer.global_step == 2 and trainer.is_global_zero:
            if self.what == "evaluation":
                with torch.no_grad():
                    pl_module(torch.zeros(1, 8, dtype=torch.long))
            else:
                trainer.save_checkpoint(self.root / "alone.ckpt")


def fit_with_something_alone(root: Path, what: str) -> str:
    kind = "full" if what == "save of one file" else "sharded"
    strategy = VeScaleFSDPStrategy(state_dict_type=kind)
    trainer = make_trainer(strategy, root, max_steps=6, callbacks=[Alone(what, root)])
    with pytest.raises(RankMismatchError if trainer.is_global_zero else RuntimeError) as error:
        trainer.fit(make_model(), loader(), loader())
    return str(error.value)


@pytest.mark.parametrize("what", ["evaluation", "save", "save of one file"])
def test_what_only_the_first_process_does_is_named_in_time(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VESCALE_FSDP_TIMEOUT_S", "2")
    # The other one waits in a broadcast of Lightning's, whose connections are closed.
    first, _ = run_ranks(fit_with_something_alone, 2, tmp_path, what, timeout_s=60)
    step = "without gradients" if what == "evaluation" else "in the save of a checkpoint"
    assert first.startswith("rank 1 did not come to compare the next step within 2 s")
    assert re.search(f"Rank 0 is .*{step}", first)
    assert "evaluate on all ranks, or inside of `unsharded`; call checkpoint.save" in first

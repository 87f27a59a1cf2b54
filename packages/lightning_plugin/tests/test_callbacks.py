"""The sharded average of weights, and what a step costs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import (
    EMAWeightAveraging,
    ModelCheckpoint,
    ModelPruning,
    StochasticWeightAveraging,
    WeightAveraging,
)
from lightning.pytorch.loggers import CSVLogger

from vescale_fsdp import Granularity, MixedPrecisionPolicy, checkpoint
from vescale_fsdp.optim import AdamW8bit, Muon, OptimizerGroup, split_named_params
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_lightning import ShardedEMA, Throughput, VeScaleFSDPStrategy
from vescale_fsdp_lightning.lifecycle import refuse_callbacks
from vescale_fsdp_lightning.throughput import count_tokens, traffic_of

from .lit import LitModel, full_parameters, loader, make_model, make_trainer

EPOCH = {"limit_train_batches": 4, "limit_val_batches": 2}


class Keeps(LitModel):
    """Remembers its whole weights after each step, and those it is validated with."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: list[torch.Tensor] = []
        self.validated: list[torch.Tensor] = []

    def whole(self) -> torch.Tensor:
        return self.blocks[0].up.weight.full_tensor().detach().clone()

    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.weights.append(self.whole())

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        if batch_idx == 0:
            self.validated.append(self.whole())
        super().validation_step(batch, batch_idx)


def averaged(root: Path) -> None:
    def fit(epochs: int, path: Any = None) -> tuple[Keeps, Any]:
        model = make_model(Keeps)
        saver = ModelCheckpoint(dirpath=root, filename=f"ema-{epochs}", save_top_k=-1)
        trainer = make_trainer(
            "vescale_fsdp",
            root,
            max_steps=-1,
            max_epochs=epochs,
            callbacks=[ShardedEMA(decay=0.75), saver],
            enable_checkpointing=True,
            **EPOCH,
        )
        trainer.fit(model, loader(), loader(), ckpt_path=path)
        return model, trainer

    whole, trainer = fit(2)
    # The weights before a step are those after the one before it.
    after = [*whole.weights[1:], None]
    average = after[0].clone()
    for weight in after[1:4]:
        average = 0.75 * average + 0.25 * weight
    torch.testing.assert_close(whole.validated[0], average, rtol=0, atol=1e-6)
    plain = make_model()
    trainer_of_plain = make_trainer("vescale_fsdp", root, max_steps=-1, max_epochs=2, **EPOCH)
    trainer_of_plain.fit(plain, loader(), loader())
    assert whole.losses == plain.losses  # training does not see the averages
    assert torch.equal(whole.whole(), whole.validated[1])  # and ends with them

    fit(1)
    resumed, _ = fit(2, root / "ema-1.ckpt")
    assert resumed.losses == whole.losses[4:]
    assert torch.equal(resumed.validated[-1], whole.validated[1])
    other = make_model(Keeps)
    states = []
    for path in (None, root / "ema-1.ckpt"):
        torch.manual_seed(1)
        trainer.test(other, loader(), ckpt_path=path, verbose=False)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)  # those that were saved are for training
    interrupted_while_validating(root)
    with pytest.raises(TypeError, match="DDPStrategy; use Lightning's EMAWeightAveraging"):
        make_trainer("ddp", root, max_steps=1, callbacks=[ShardedEMA()]).fit(
            make_model(), loader(), loader()
        )


class Stops(Keeps):
    """Its first validation fails."""

    def on_validation_batch_end(self, *_: Any) -> None:
        raise RuntimeError("enough")


def interrupted_while_validating(root: Path) -> None:
    """The weights are put back, and that is what is saved then."""
    model, plain = make_model(Stops), make_model()
    options = {"max_steps": 4, "enable_checkpointing": True}
    saver = ModelCheckpoint(root / "stopped", save_on_exception=True)
    callbacks = [ShardedEMA(decay=0.75), saver]
    trainer = make_trainer("vescale_fsdp", root, callbacks=callbacks, **options, **EPOCH)
    with pytest.raises(RuntimeError, match="enough"):
        trainer.fit(model, loader(), loader())
    make_trainer("vescale_fsdp", root, max_steps=4, **EPOCH).fit(plain, loader(), loader())
    trained = full_parameters(plain)["blocks.0.up.weight"]
    assert not torch.equal(model.validated[0], trained)  # but the averages
    assert torch.equal(model.whole(), trained)
    other = make_model()
    (path,) = (root / "stopped").iterdir()
    checkpoint.load(path, other)
    assert torch.equal(full_parameters(other)["blocks.0.up.weight"], trained)


def saved_with_weights_alone(root: Path) -> None:
    """What is saved when training ends has the weights that were trained, and the averages."""
    model = make_model(Keeps)
    saver = ModelCheckpoint(
        dirpath=root / "weights", save_last=True, save_weights_only=True, every_n_train_steps=100
    )
    callbacks = [ShardedEMA(decay=0.75), saver]
    options = {"max_steps": 3, "limit_val_batches": 1}
    trainer = make_trainer(
        "vescale_fsdp", root, callbacks=callbacks, enable_checkpointing=True, **options
    )
    trainer.fit(model, loader(), loader())
    plain = make_model()
    make_trainer("vescale_fsdp", root, **options).fit(plain, loader(), loader())
    trained = full_parameters(plain)["blocks.0.up.weight"]
    assert not torch.equal(model.whole(), trained)

    other = make_model(Keeps)
    trainer.validate(other, loader(), ckpt_path=saver.last_model_path, verbose=False)
    assert torch.equal(other.validated[0], model.whole())
    assert torch.equal(other.whole(), trained)


def measured(root: Path) -> None:
    columns = {}
    in_codes = VeScaleFSDPStrategy(reduce_codec={"block": 16})
    for name, strategy in (("vescale_fsdp", "vescale_fsdp"), ("ddp", "ddp"), ("int8", in_codes)):
        logger = CSVLogger(str(root), name=name)
        trainer = make_trainer(
            strategy,
            root,
            max_steps=8,
            logger=logger,
            log_every_n_steps=1,
            callbacks=[Throughput(every_n_steps=3, skip_steps=1)],
        )
        trainer.fit(make_model(), loader(), loader())
        columns[name] = dict(trainer.logged_metrics)
    common = {"tokens_per_s", "peak_memory_gb"}
    assert common < columns["vescale_fsdp"].keys()
    assert columns["vescale_fsdp"].keys() - columns["ddp"].keys() == {
        "padding_percent",
        "comm_gb_per_step",
    }
    assert columns["int8"].keys() == columns["vescale_fsdp"].keys() - {"comm_gb_per_step"}
    for name in common:
        assert columns["ddp"][name] > 0


def counted() -> None:
    """Two blocks of 950 elements and a root of 300, in fp32, on two processes."""
    trainer = make_trainer(
        VeScaleFSDPStrategy(granularity=Granularity.rows(1)), "unused", max_steps=1
    )
    model = make_model()
    trainer.fit(model, loader(), loader())
    elements = {"block": 24 + 12 * 36 + 36 + 36 * 12 + 12, "root": 23 * 12 + 24}
    traffic = traffic_of(model)
    assert 0 <= traffic.padding_percent < 20
    half = {name: count / 2 for name, count in elements.items()}
    # A process receives the other half: blocks twice, the root once; and each half of gradients.
    least = 4 * (2 * 2 * half["block"] + half["root"])
    assert least <= traffic.gather_bytes < 1.2 * least
    least = 4 * (2 * half["block"] + half["root"])
    assert least <= traffic.reduce_bytes < 1.2 * least

    once = traffic_of(model, reshard_after_forward=False)
    assert once.gather_bytes == traffic.reduce_bytes  # all once
    halves = traffic_of(model, MixedPrecisionPolicy(torch.bfloat16, torch.float32))
    assert halves.gather_bytes == traffic.gather_bytes // 2
    assert halves.reduce_bytes == traffic.reduce_bytes


class Structured(LitModel):
    """Matrices of the blocks with Muon, the rest with 8-bit AdamW, as one optimizer."""

    def configure_optimizers(self) -> Any:
        matrices, others = split_named_params(self)
        return OptimizerGroup(muon=Muon(matrices, lr=0.02), adamw=AdamW8bit(others, lr=1e-2))


def structured(root: Path) -> None:
    """Optimizers of ours, resumed from each format."""
    runs = [structured_run(root, "sharded", 2)]
    assert runs[0][0][-1] < runs[0][0][0]
    for kind in ("sharded", "full", "dcp"):
        structured_run(root, kind, 1)
        runs.append(structured_run(root, kind, 2, root / f"{kind}-1.ckpt"))
        assert runs[-1][0] == runs[0][0][4:], kind
        for name, param in runs[0][1].items():
            assert torch.equal(runs[-1][1][name], param), (kind, name)


def structured_run(root: Path, kind: str, epochs: int, path: Any = None) -> Any:
    model = make_model(Structured)
    saver = ModelCheckpoint(dirpath=root, filename=f"{kind}-{epochs}", save_top_k=-1)
    strategy = VeScaleFSDPStrategy(granularity="rows:16", state_dict_type=kind)
    trainer = make_trainer(
        strategy,
        root,
        max_steps=-1,
        max_epochs=epochs,
        callbacks=[saver],
        enable_checkpointing=True,
        gradient_clip_val=1.0,
        **EPOCH,
    )
    trainer.fit(model, loader(), loader(), ckpt_path=path)
    return model.losses, full_parameters(model)


class LogsNorms(LitModel):
    """Logs what is computed from sharded parameters, and runs a copy of itself after steps."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.parameters(), 0.1)
        self.log("norm", norm, sync_dist=True)
        self.log("largest", self.blocks[0].up.weight.abs().max(), sync_dist=True, reduce_fx="max")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.copied = copy.deepcopy(self)
        with torch.no_grad():
            assert torch.equal(self.copied.loss(batch), self.loss(batch))
        self.copied = None


def logged(root: Path) -> None:
    found = {}
    for strategy in ("vescale_fsdp", "ddp"):
        trainer = make_trainer(strategy, root, max_steps=2, limit_val_batches=1)
        model = make_model(LogsNorms)
        if strategy == "ddp":
            model.on_train_batch_end = lambda *_: None  # type: ignore[method-assign]
        trainer.fit(model, loader(), loader())
        metrics = trainer.callback_metrics
        found[strategy] = [metrics[name].item() for name in ("norm", "largest")]
    assert found["vescale_fsdp"] == pytest.approx(found["ddp"], rel=1e-5)


def callback_scenarios(root: Path) -> None:
    logged(root)
    import warnings

    for harmless in ("Checkpoint directory .* exists and is not empty", "The dirpath has changed"):
        warnings.filterwarnings("ignore", harmless)
    averaged(root)
    saved_with_weights_alone(root)
    measured(root)
    counted()
    structured(root)


def test_average_of_weights_throughput_and_our_optimizers(tmp_path: Path) -> None:
    run_ranks(callback_scenarios, 2, tmp_path, timeout_s=100)


@pytest.mark.parametrize(
    ("callback", "instead"),
    [
        (lambda: WeightAveraging(), "ShardedEMA"),
        (lambda: EMAWeightAveraging(), "ShardedEMA"),
        (lambda: StochasticWeightAveraging(1e-2), "ShardedEMA"),
        (lambda: ModelPruning("l1_unstructured"), "prune the model before training"),
    ],
    ids=["WeightAveraging", "EMAWeightAveraging", "StochasticWeightAveraging", "ModelPruning"],
)
def test_callbacks_that_need_whole_weights_are_refused_by_name(callback: Any, instead: str) -> None:
    refused = callback()
    with pytest.raises(NotImplementedError, match=rf"{type(refused).__name__} does not.*{instead}"):
        refuse_callbacks([ModelCheckpoint(), refused])
    refuse_callbacks([ModelCheckpoint(), ShardedEMA(), Throughput()])


def test_tokens_of_a_batch() -> None:
    tokens = torch.zeros(4, 9, dtype=torch.long)
    assert count_tokens({"weight": torch.zeros(4), "input_ids": tokens}) == 36
    assert count_tokens([torch.zeros(5, 3)]) == 5
    assert count_tokens("text") == 0


@pytest.mark.parametrize("options", [{"decay": 1.0}, {"decay": 0.9, "update_every_n_steps": 0}])
def test_wrong_values_of_the_average_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="expected at least"):
        ShardedEMA(**options)

"""Sealed directories where Lightning itself loads, and what they cannot keep, said in time."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import fsspec
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.core import saving

from vescale_fsdp import CheckpointMismatchError, CheckpointValueError
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_lightning import VeScaleFSDPStrategy

from .lit import LitModel, full_parameters, loader, make_model, make_trainer

META = {"cpu": torch.empty(0, device="meta").untyped_storage()}


class Configured(LitModel):
    """Has hyper-parameters, of which one could only be pickled."""

    def __init__(self, lr: float = 0.01, activation: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.seen: dict[str, Any] = {}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.seen = checkpoint


class Normalizer:
    """An object of the user's own."""


class Adds(Configured):
    """Its hook adds what could only be pickled, as pytorch-forecasting's models do."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["special"] = {"target": Normalizer()}
        checkpoint[self.CHECKPOINT_HYPER_PARAMS_KEY].update(checkpoint["special"])


class Holder(Callback):
    """Its state could only be pickled."""

    def state_dict(self) -> dict[str, Any]:
        return {"odd": Normalizer()}


class NotReady(Callback):
    """Has a state once training has begun."""

    def on_train_start(self, *_: Any) -> None:
        self.start = 0

    def state_dict(self) -> dict[str, Any]:
        return {"start": self.start}


def train(root: Path, model: Any, *callbacks: Any, **options: Any) -> pl.Trainer:
    saver = ModelCheckpoint(root, monitor="val_loss", enable_version_counter=False)
    trainer = make_trainer(
        VeScaleFSDPStrategy(**options),
        root,
        max_steps=4,
        limit_train_batches=4,
        enable_checkpointing=True,
        callbacks=[saver, *callbacks],
    )
    trainer.fit(model, loader(), loader())
    return trainer


def sealed(root: Path) -> str:
    model = make_model(lambda: Configured(lr=0.02))  # type: ignore[arg-type]
    trainer = train(root / "sharded", model)
    trainer.test(model, loader(), verbose=False)
    found = {**full_parameters(model), "test_loss": trainer.callback_metrics["test_loss"]}
    path = trainer.checkpoint_callback.best_model_path  # type: ignore[union-attr]
    everywhere = Configured.load_from_checkpoint(path)  # by all ranks, and by one alone
    assert torch.equal(everywhere.norm.weight, found["norm.weight"])
    if dist.get_rank() == 0:
        Configured.load_from_checkpoint(path)
        torch.save(found, root / "expected")
    train(root / "dcp", model, state_dict_type="dcp")
    return path


def test_a_sealed_directory_loads_where_lightning_loads_a_file(tmp_path: Path) -> None:
    path = run_ranks(sealed, 2, tmp_path)[0]
    expected = torch.load(tmp_path / "expected", weights_only=True)
    loss = expected.pop("test_loss")

    model = Configured.load_from_checkpoint(path)
    assert model.hparams == {"lr": 0.02, "activation": None}
    assert model.seen["global_step"] == 4
    assert len(model.seen["optimizer_states"]) == 1
    for name, param in model.named_parameters():
        assert torch.equal(param, expected[name]), name
    assert Configured.load_from_checkpoint(Path(path), lr=0.5).hparams["lr"] == 0.5
    for location in ("meta", torch.device("meta"), {"cpu": "meta"}, lambda _, place: META[place]):
        moved = saving.pl_load(path, map_location=location)["state_dict"]
        assert all(tensor.is_meta for tensor in moved.values())

    trainer = pl.Trainer(accelerator="cpu", devices=1, logger=False, limit_test_batches=4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are few workers
        tested = trainer.test(Configured(), loader(), ckpt_path=path, verbose=False)
    assert tested[0]["test_loss"] == pytest.approx(loss.item())  # 2 batches of 2 processes

    fsspec.filesystem("memory").put(path, "/bucket/last.ckpt", recursive=True)
    found = Fabric(accelerator="cpu", devices=1).load("memory://bucket/last.ckpt")
    assert torch.equal(found["state_dict"]["norm.weight"], expected["norm.weight"])

    with pytest.raises(CheckpointMismatchError, match="use python -m lightning"):
        Configured.load_from_checkpoint(next((tmp_path / "dcp").glob("*.ckpt")))
    with pytest.raises(IsADirectoryError):
        Configured.load_from_checkpoint(tmp_path)
    with pytest.raises(FileNotFoundError):
        Configured.load_from_checkpoint(tmp_path / "nothing")


def said_in_time(root: Path) -> None:
    model = make_model(lambda: Configured(activation=Normalizer()))  # type: ignore[arg-type]
    with pytest.raises(
        CheckpointValueError, match=r"\['callbacks'\]\['Holder'\]\['odd'\] is a .*Normalizer"
    ):
        train(root / "held", model, Holder())
    assert model.losses == []
    train(root / "full", make_model(Configured), Holder(), state_dict_type="full")
    model = make_model(Adds)
    with (
        pytest.warns(UserWarning, match="'target'"),
        pytest.raises(CheckpointValueError, match=r"\['special'\]\['target'\] is a .*Normalizer"),
    ):
        train(root / "added", model)
    assert model.losses == []
    assert "target" not in model.hparams

    class Stops(Callback):
        def on_train_start(self, *_: Any) -> None:
            raise InterruptedError

    advice = (
        r"'activation'.*Normalizer.*load_from_checkpoint\(path, activation=\.\.\.\).*type=\"full\""
    )
    with pytest.warns(UserWarning, match=advice), pytest.raises(InterruptedError):
        train(root / "stops", make_model(lambda: Configured(activation=Normalizer())), Stops())  # type: ignore[arg-type]
    train(root / "later", make_model(Configured), NotReady())
    options: dict[str, Any] = {"max_steps": 1, "callbacks": [Holder()]}
    make_trainer("vescale_fsdp", root, **options).fit(
        make_model(), loader(), loader()
    )  # saves none


def test_what_a_sealed_checkpoint_cannot_keep_is_said_before_training(tmp_path: Path) -> None:
    run_ranks(said_in_time, 1, tmp_path)

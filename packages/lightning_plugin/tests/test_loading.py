"""Sealed directories in other strategies, and what they cannot keep, said in time."""

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
from torch import nn

from vescale_fsdp import (
    CheckpointIncompleteError,
    CheckpointMismatchError,
    CheckpointValueError,
    RankMismatchError,
)
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_lightning import (
    SealedCheckpointIO,
    VeScaleFSDPStrategy,
    load_from_checkpoint,
)

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
    everywhere = load_from_checkpoint(Configured, path)  # by all ranks, and by one alone
    assert torch.equal(everywhere.norm.weight, found["norm.weight"])
    if dist.get_rank() == 0:
        load_from_checkpoint(Configured, path)
        torch.save(found, root / "expected")
    train(root / "dcp", model, state_dict_type="dcp")
    return path


def test_a_sealed_directory_loads_where_lightning_loads_a_file(tmp_path: Path) -> None:
    path = run_ranks(sealed, 2, tmp_path)[0]
    expected = torch.load(tmp_path / "expected", weights_only=True)
    loss = expected.pop("test_loss")

    model = load_from_checkpoint(Configured, path)
    assert model.hparams == {"lr": 0.02, "activation": None}
    assert model.seen["global_step"] == 4
    assert len(model.seen["optimizer_states"]) == 1
    for name, param in model.named_parameters():
        assert torch.equal(param, expected[name]), name
    assert load_from_checkpoint(Configured, Path(path), lr=0.5).hparams["lr"] == 0.5
    for location in ("meta", torch.device("meta"), {"cpu": "meta"}, lambda _, place: META[place]):
        moved = SealedCheckpointIO().load_checkpoint(path, location)["state_dict"]
        assert all(tensor.is_meta for tensor in moved.values())

    with pytest.raises(IsADirectoryError):
        Configured.load_from_checkpoint(path)  # Lightning's own is as it was

    trainer = pl.Trainer(
        accelerator="cpu",
        devices=1,
        logger=False,
        limit_test_batches=4,
        plugins=SealedCheckpointIO(),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there are few workers
        tested = trainer.test(Configured(), loader(), ckpt_path=path, verbose=False)
    assert tested[0]["test_loss"] == pytest.approx(loss.item())  # 2 batches of 2 processes

    fsspec.filesystem("memory").put(path, "/bucket/last.ckpt", recursive=True)
    found = Fabric(accelerator="cpu", devices=1, plugins=SealedCheckpointIO()).load(
        "memory://bucket/last.ckpt"
    )
    assert torch.equal(found["state_dict"]["norm.weight"], expected["norm.weight"])

    with pytest.raises(CheckpointMismatchError, match="use python -m lightning"):
        load_from_checkpoint(Configured, next((tmp_path / "dcp").glob("*.ckpt")))
    with pytest.raises(IsADirectoryError):
        load_from_checkpoint(Configured, tmp_path)
    with pytest.raises(FileNotFoundError):
        load_from_checkpoint(Configured, tmp_path / "nothing")


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


# Hooks that see the state dict, and change it


class Changes(LitModel):
    """Changes, renames and drops what it loads, as under DDP. Rank 0 alone looks at it."""

    strict_loading = False

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        if dist.get_rank() == 0:
            assert state["embedding.weight"].abs().sum() > 0
        state["norm.weight"] = torch.full((12,), 0.5)
        state["norm.bias"].add_(1)
        state["blocks.1.norm.weight"] = state.pop("blocks.0.norm.weight") * 2
        state["blocks.1.up.weight"] = state.pop("blocks.0.up.weight")
        for name, own in self.state_dict().items():
            if name.endswith("down.bias"):
                state[name] = own


class Strict(Changes):
    strict_loading = True


class Loads(LitModel):
    """Has a ``load_state_dict`` of its own."""

    def load_state_dict(self, state_dict: Any, *args: Any, **options: Any) -> Any:
        if "norm.weight" in state_dict:
            state_dict = {**state_dict, "norm.weight": state_dict["norm.weight"] * 3}
        return super().load_state_dict(state_dict, *args, **options)


class Saves(LitModel):
    """Changes what it saves. Whole tensors are in the first process only."""

    strict_loading = False

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        state = checkpoint["state_dict"]
        if "norm.bias" in state:
            del state["norm.bias"]
            state["norm.weight"] = state["norm.weight"] * 2


class Looks(Callback):
    """Sees the state dict after the module."""

    def on_load_checkpoint(self, trainer: Any, module: Any, checkpoint: dict[str, Any]) -> None:
        self.norm = checkpoint["state_dict"]["norm.weight"].clone()


def loaded(root: Path, cls: Any, strategy: str, path: Path) -> dict[str, torch.Tensor]:
    """The parameters after one more step, and after a load for each of the other loops."""
    model = make_model(cls)
    looks = Looks()
    trainer = make_trainer(strategy, root, max_steps=3, callbacks=[looks])
    trainer.fit(model, loader(), loader(), ckpt_path=path)
    found = {f"fit.{name}": each for name, each in full_parameters(model).items()}
    for loop in ("validate", "test", "predict"):
        model = make_model(cls)
        getattr(make_trainer(strategy, root), loop)(model, loader(), ckpt_path=path)
        found |= {f"{loop}.{name}": each for name, each in full_parameters(model).items()}
    return {**found, "seen": looks.norm}


class Forgets(LitModel):
    """Begins with new states of its optimizer."""

    how = "empty"

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        assert len(checkpoint["optimizer_states"]) == 1
        if self.how == "empty":
            checkpoint["optimizer_states"] = []
        elif self.how == "clear":
            checkpoint["optimizer_states"].clear()
        elif self.how == "pop":
            checkpoint.pop("optimizer_states")
        elif self.how == "look":
            checkpoint["optimizer_states"][0]["param_groups"]
        elif self.how == "differently" and dist.get_rank() == 0:
            checkpoint["state_dict"]["norm.weight"] = torch.ones(12)


def forgets(root: Path) -> None:
    def fit(strategy: str, kind: str, how: str) -> set[int]:
        """The numbers of steps that the optimizer's states have, after one more."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Forgets, "how", how)
            trainer = make_trainer(strategy, root, max_steps=3)
            path = root / f"{kind}.ckpt"
            trainer.fit(make_model(Forgets), loader(), loader(), ckpt_path=path)
        assert trainer.global_step == 3
        return {int(each["step"]) for each in trainer.optimizers[0].state.values()}

    for how in ("empty", "clear"):
        assert fit("ddp", "full", how) == {1}
    for kind in ("full", "sharded", "dcp"):
        assert fit("vescale_fsdp", kind, "keep") == {3}
        for how in ("empty", "clear", "pop"):
            assert fit("vescale_fsdp", kind, how) == {1}, (kind, how)
        with pytest.raises(KeyError, match=r"in on_train_start: trainer\.optimizers"):
            fit("vescale_fsdp", kind, "look")
        message = r"'norm\.weight' .* CRC32 .* on rank 0, and is unchanged on rank 1: make"
        with pytest.raises(RankMismatchError, match=message):
            fit("vescale_fsdp", kind, "differently")


def hooks(root: Path) -> None:
    warnings.filterwarnings("ignore", "You're resuming from a checkpoint that ended before")
    for kind in ("full", "sharded", "dcp"):
        trainer = make_trainer(VeScaleFSDPStrategy(state_dict_type=kind), root, max_steps=2)
        trainer.fit(make_model(), loader(), loader())
        trainer.save_checkpoint(root / f"{kind}.ckpt")
    forgets(root)
    for cls in (Changes, Loads):
        expected = loaded(root, cls, "ddp", root / "full.ckpt")
        for kind in ("full", "sharded", "dcp"):
            found = loaded(root, cls, "vescale_fsdp", root / f"{kind}.ckpt")
            assert found.keys() == expected.keys()
            for name, each in expected.items():
                torch.testing.assert_close(found[name], each, msg=f"{kind} {cls.__name__} {name}")
    for kind in ("full", "sharded", "dcp"):
        with pytest.raises((CheckpointIncompleteError, RuntimeError), match=r"blocks\.0\.norm"):
            loaded(root, Strict, "vescale_fsdp", root / f"{kind}.ckpt")


def test_hooks_change_what_is_loaded(tmp_path: Path) -> None:
    run_ranks(hooks, 2, tmp_path, timeout_s=110)


def hooks_on_save(root: Path) -> None:
    for kind in ("full", "sharded", "dcp"):
        strategy = VeScaleFSDPStrategy(state_dict_type=kind)
        trainer, model = make_trainer(strategy, root, max_steps=1), make_model(Saves)
        trainer.fit(model, loader(), loader())
        before = full_parameters(model)
        trainer.save_checkpoint(root / f"{kind}.ckpt")
        other = make_model(Saves)
        nn.init.constant_(other.norm.bias, 7.0)
        make_trainer(VeScaleFSDPStrategy(), root).validate(
            other, loader(), ckpt_path=root / f"{kind}.ckpt", verbose=False
        )
        found = full_parameters(other)
        assert torch.equal(found["norm.weight"], before["norm.weight"] * 2), kind
        assert torch.equal(found["norm.bias"], torch.full((12,), 7.0)), kind
        assert torch.equal(found["blocks.0.up.weight"], before["blocks.0.up.weight"]), kind


def test_hooks_change_what_is_saved(tmp_path: Path) -> None:
    run_ranks(hooks_on_save, 2, tmp_path, timeout_s=110)

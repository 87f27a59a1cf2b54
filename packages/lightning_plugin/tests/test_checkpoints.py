"""Checkpoints: three formats, on other numbers of processes, read by others and from others."""

from __future__ import annotations

import argparse
import datetime
import runpy
import sys
import time
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import fsspec
import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from fsspec.implementations.local import LocalFileSystem
from lightning.fabric.strategies.model_parallel import _distributed_checkpoint_save
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins import AsyncCheckpointIO
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from vescale_fsdp import (
    CheckpointExistsError,
    CheckpointIncompleteError,
    CheckpointMismatchError,
    CheckpointValueError,
    checkpoint,
)
from vescale_fsdp.ranks import Ranks
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_lightning import VeScaleFSDPStrategy, places
from vescale_fsdp_lightning.consolidate import consolidate
from vescale_fsdp_lightning.consolidate import main as consolidate_sealed
from vescale_fsdp_lightning.plain import from_plain, to_plain

from .lit import LitModel, full_parameters, loader, make_model, make_trainer

FORMATS = ("sharded", "full", "dcp")
EPOCH = {"limit_train_batches": 4, "limit_val_batches": 1}


def ours(**options: Any) -> VeScaleFSDPStrategy:
    return VeScaleFSDPStrategy(**options)


class Scheduled(LitModel):
    """Has a scheduler, hyper-parameters, and values of its own in checkpoints."""

    def __init__(self, folder: str = "data", sizes: Any = (1, 2)) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.restored: dict[str, Any] = {}

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 3)]

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["own"] = {"table": torch.arange(3), "pair": (1, None)}

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.restored = checkpoint


def train(
    strategy: Any,
    folder: str | Path,
    epochs: int,
    ckpt_path: Any = None,
    model: LitModel | None = None,
    **options: Any,
) -> tuple[Any, pl.Trainer]:
    """Train to the end of an epoch of four steps, and save what Lightning saves."""
    for harmless in ("Checkpoint directory .* exists and is not empty", "The dirpath has changed"):
        warnings.filterwarnings("ignore", harmless)
    model = make_model(Scheduled) if model is None else model
    saver = ModelCheckpoint(
        dirpath=folder,
        filename="{epoch}",
        monitor="val_loss",
        save_last=True,
        enable_version_counter=False,
        **options,
    )
    trainer = make_trainer(
        strategy,
        "unused",
        max_steps=-1,
        max_epochs=epochs,
        enable_checkpointing=True,
        callbacks=[saver],
        **EPOCH,
    )
    trainer.fit(model, loader(), loader(), ckpt_path=ckpt_path)
    return model, trainer


def resumed(strategy: Any, path: str | Path, folder: str | Path) -> list[float]:
    """The losses of the second epoch, after the first has been loaded."""
    model, trainer = train(strategy, folder, 2, path)
    assert trainer.global_step == 8
    assert model.restored["hyper_parameters"] == {"folder": "data", "sizes": (1, 2)}
    assert model.restored["own"]["table"].tolist() == [0, 1, 2]
    assert model.restored["own"]["pair"] == (1, None)
    assert "ModelCheckpoint" in "".join(model.restored["callbacks"])
    return model.losses


def by_lightnings_tool(folder: Path) -> Path:
    """Lightning's own tool, in the first process."""
    target = folder.with_suffix(".consolidated")
    if dist.get_rank() == 0:
        before, sys.argv = sys.argv, ["tool", str(folder), "--output_file", str(target)]
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                runpy.run_module(
                    "lightning.pytorch.utilities.consolidate_checkpoint", {}, "__main__"
                )
        finally:
            sys.argv = before
    dist.barrier()
    return target


def in_one_file(folder: Path) -> Path:
    """Our tool for sealed directories, in the first process."""
    if dist.get_rank() == 0:
        consolidate_sealed([str(folder)])
    dist.barrier()
    return folder.with_name(f"{folder.name}.consolidated")


class TwoOptimizers(Scheduled):
    """Has one more than was saved."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        first, *others = self.parameters()
        return [torch.optim.AdamW([first]), torch.optim.AdamW(others)]


def other_number_of_optimizers(root: Path) -> None:
    for kind in FORMATS:
        model = make_model(TwoOptimizers)
        with pytest.raises(CheckpointMismatchError, match=r"states of 1 optimizer, and.*made 2"):
            train(ours(), root / "x", 2, root / kind / "last.ckpt", model)


def stock_directory(source: Path, target: Path) -> None:
    """A directory as Lightning's model-parallel strategy saves it, by its own function."""
    found = torch.load(source, weights_only=True)
    names = list(dict(make_model().named_parameters()))
    (of_numbers,) = found.pop("optimizer_states")
    state = {
        "state_dict": found.pop("state_dict"),
        "optimizer_0": {
            "state": {names[key]: each for key, each in of_numbers["state"].items()},
            "param_groups": [{**of_numbers["param_groups"][0], "params": names}],
        },
    }
    _distributed_checkpoint_save(state, target)
    if dist.get_rank() == 0:
        torch.save(found, target / "meta.pt")
    dist.barrier()


def resumes(root: Path) -> None:
    whole, _ = train("ddp", root / "whole", 2)
    expected = whole.losses[4:]
    for kind in FORMATS:
        model, _ = train(ours(state_dict_type=kind), root / kind, 1)
        assert model.losses == whole.losses[:4]
        path = root / kind / "last.ckpt"
        assert path.is_file() == (kind == "full")
        assert resumed(ours(state_dict_type=kind), path, root / f"{kind}-2") == expected
    assert sorted(each.name for each in (root / "sharded").iterdir()) == [
        "epoch=0.ckpt",
        "last.ckpt",
    ]
    checkpoint.verify(root / "sharded" / "last.ckpt")

    train("ddp", root / "ddp", 1)
    assert resumed(ours(), root / "ddp" / "last.ckpt", root / "from-ddp") == expected
    assert resumed("ddp", root / "full" / "last.ckpt", root / "to-ddp") == expected
    stock_directory(root / "ddp" / "last.ckpt", root / "stock.ckpt")
    assert resumed(ours(), root / "stock.ckpt", root / "from-stock") == expected
    one_file = by_lightnings_tool(root / "dcp" / "last.ckpt")
    assert resumed("ddp", one_file, root / "tool-to-ddp") == expected
    assert resumed(ours(), one_file, root / "tool-to-ours") == expected
    one_file = in_one_file(root / "sharded" / "last.ckpt")
    assert resumed("ddp", one_file, root / "sealed-to-ddp") == expected
    assert resumed(ours(), one_file, root / "sealed-to-ours") == expected
    alone = Scheduled.load_from_checkpoint(one_file, weights_only=True)
    saved = torch.load(root / "ddp" / "last.ckpt", weights_only=True)["state_dict"]
    assert alone.state_dict().keys() == saved.keys()
    for name, value in alone.state_dict().items():
        assert torch.equal(value, saved[name]), name
    other_number_of_optimizers(root)


def test_every_format_resumes_bit_equal_also_from_and_in_other_strategies(tmp_path: Path) -> None:
    run_ranks(resumes, 2, tmp_path, timeout_s=110)
    run_ranks(on_one_process, 1, tmp_path)


def on_one_process(root: Path) -> None:
    """What two processes have saved; DDP's own file says what the weights are."""
    reference = torch.load(root / "ddp" / "last.ckpt", weights_only=True)["state_dict"]
    for kind in FORMATS:
        model, trainer = train(ours(), root / "one", 1, root / kind / "last.ckpt")
        assert trainer.global_step == 4  # nothing was left to train
        for name, param in full_parameters(model).items():
            assert torch.equal(param, reference[name]), name
        step = next(iter(trainer.optimizers[0].state.values()))["step"]
        assert step == 4


# Parts of a run


class Filters(Scheduled):
    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["state_dict"].pop("norm.bias", None)  # whole ones are in the first process only


class OddInFirst(Scheduled):
    """Puts an object into the dictionary, in the first process only."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        if dist.get_rank() == 0:
            checkpoint["odd"] = nn.GELU()


def best_and_weights_only(root: Path) -> None:
    model, trainer = train(ours(), root / "weights", 1, save_weights_only=True)
    before = full_parameters(model)
    tested = trainer.test(ckpt_path="best", dataloaders=loader(), verbose=False)
    assert tested[0]["test_loss"] == pytest.approx(trainer.callback_metrics["test_loss"].item())
    other = make_model(Scheduled)
    trainer.test(other, loader(), ckpt_path="best", verbose=False)
    for name, param in full_parameters(other).items():
        assert torch.equal(param, before[name])
    with pytest.raises(KeyError, match="checkpoint contains only the model"):
        train(ours(), root / "again", 2, root / "weights" / "last.ckpt")


def overwritten(root: Path) -> None:
    """A process killed between the two renames leaves the old one under another name."""
    train(ours(), root / "killed", 1)
    last = root / "killed" / "last.ckpt"
    if dist.get_rank() == 0:
        last.rename(f"{last}.old")
    dist.barrier()
    losses = resumed(ours(), last, root / "killed")
    assert len(losses) == 4
    if dist.get_rank() == 0:
        assert sorted(each.name for each in last.parent.iterdir()) == ["epoch=1.ckpt", "last.ckpt"]
        assert checkpoint.verify(last).seal.step == 8
    dist.barrier()
    with pytest.raises(CheckpointIncompleteError, match="no whole checkpoint"):
        train(ours(), root / "x", 1, root / "nothing.ckpt")
    (root / "empty.ckpt").mkdir(exist_ok=True)
    with pytest.raises(CheckpointIncompleteError, match="no whole checkpoint"):
        train(ours(), root / "x", 1, root / "empty.ckpt")


def in_the_background(root: Path) -> None:
    _, trainer = train(ours(async_save=True), root / "async", 2, save_top_k=1)
    dist.barrier()
    saver = trainer.checkpoint_callback
    assert isinstance(saver, ModelCheckpoint)
    names = sorted(each.name for each in (root / "async").iterdir())
    assert names == [Path(saver.best_model_path).name, "last.ckpt"]
    for name in names:
        checkpoint.verify(root / "async" / name)


class Slow(AsyncCheckpointIO):
    """Of Lightning; here each file takes its time."""

    def save_checkpoint(self, *args: Any, **options: Any) -> None:
        self._ensure_setup()
        self._executor.submit(time.sleep, 0.5)
        super().save_checkpoint(*args, **options)


class SavesWithTorch(pl.Callback):
    """Saves the first step's weights and states in the background; a step later it waits."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._saving = folder, None
        self._savers = dist.new_group(backend="gloo")

    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, *args: Any
    ) -> None:
        if self._saving is not None:
            self._saving.result()
            return
        weights, states = get_state_dict(pl_module, trainer.optimizers)
        state = {"model": weights, "optimizer": states}
        self._saving = dcp.async_save(state, checkpoint_id=self._folder, process_group=self._savers)
        self.saved = full_parameters(pl_module)


def by_torch_in_the_background(root: Path) -> None:
    saves = SavesWithTorch(root / "by torch")
    make_trainer(ours(), root, max_steps=2, callbacks=[saves]).fit(make_model(), loader(), loader())
    model = make_model()
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint.import_dcp(root / "by torch", model, optimizer)
    for name, param in model.named_parameters():
        assert torch.equal(param, saves.saved[name]), name
        assert optimizer.state[param]["step"] == 1


def by_a_plug_in_in_the_background(root: Path) -> None:
    trainer = make_trainer(
        ours(state_dict_type="full"),
        root,
        max_steps=2,
        plugins=[Slow()],
        enable_checkpointing=True,
        callbacks=[ModelCheckpoint(dirpath=root / "plug-in", every_n_train_steps=2)],
    )
    model = make_model()
    trainer.fit(model, loader(), loader())
    dist.barrier()
    (file,) = (root / "plug-in").iterdir()
    saved = torch.load(file, weights_only=True)["state_dict"]
    for name, param in full_parameters(model).items():
        assert torch.equal(saved[name], param), name


class Elsewhere(LocalFileSystem):
    """A file system that is not this machine's, as far as anybody can see."""

    protocol = "elsewhere"
    fails_at: tuple[str, ...] = ()  # names of files that do not arrive

    def put_file(self, path1: str, path2: str, *args: Any, **options: Any) -> None:
        if Path(path2).name in self.fails_at:
            raise OSError("the line is down")
        super().put_file(path1, path2, *args, **options)

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return str(path).removeprefix("elsewhere://")

    def unstrip_protocol(self, name: str) -> str:
        return f"elsewhere://{self._strip_protocol(name)}"


def elsewhere(root: Path) -> None:
    fsspec.register_implementation("elsewhere", Elsewhere, clobber=True)
    for kind in FORMATS:
        folder = f"elsewhere://{root}/far-{kind}"
        model, _ = train(ours(state_dict_type=kind, staging_dir=str(root)), folder, 1)
        losses = resumed(ours(state_dict_type=kind), f"{folder}/last.ckpt", folder)
        assert losses[0] != model.losses[0]
        names = sorted(each.name for each in (root / f"far-{kind}").iterdir())
        assert names == ["epoch=1.ckpt", "last.ckpt"]


def test_a_download_says_after_each_file_that_it_still_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    far = tmp_path / "last.ckpt"
    far.mkdir()
    for name in (".metadata", "__0_0.distcp", "__1_0.distcp"):
        (far / name).write_text(name)
    calls: list[Ranks] = []
    monkeypatch.setattr(Ranks, "still", lambda self: calls.append(self))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    copy = places.download(places.Place(far, Elsewhere()), 0)
    assert {each.name: each.read_text() for each in copy.iterdir()} == {
        name: name for name in (".metadata", "__0_0.distcp", "__1_0.distcp")
    }
    assert len(calls) >= 3


class Looks(pl.Callback):
    """Its hook is called after the model was loaded."""

    def __init__(self, raises: bool = False) -> None:
        self.raises = raises

    def on_load_checkpoint(
        self, trainer: pl.Trainer, pl_module: Any, checkpoint: dict[str, Any]
    ) -> None:
        self.seen = checkpoint["state_dict"]["norm.weight"].clone()
        if self.raises:
            dist.barrier()  # the first process deletes the copy without waiting for others
            raise InterruptedError


def seen_by_callbacks(root: Path) -> None:
    """The local copy stays until they have seen it, also if one of them raises."""
    copies = root / "copies"
    copies.mkdir(exist_ok=True)
    warnings.filterwarnings("ignore", "Be aware that when using `ckpt_path`, callbacks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("tempfile.tempdir", str(copies))
        for kind in FORMATS:
            path = f"elsewhere://{root}/far-{kind}/last.ckpt"
            for loop in ("fit", "validate"):
                looks = Looks()
                options: dict[str, Any] = {"max_epochs": 3, "max_steps": -1, **EPOCH}
                trainer = make_trainer(ours(), root, callbacks=[looks], **options)
                data = [loader()] * (2 if loop == "fit" else 1)
                getattr(trainer, loop)(make_model(Scheduled), *data, ckpt_path=path)
                assert looks.seen.shape == (12,)
                assert not list(copies.iterdir())
            trainer = make_trainer(ours(), root, callbacks=[Looks(raises=True)])
            with pytest.raises(InterruptedError):
                trainer.validate(make_model(Scheduled), loader(), ckpt_path=path)
            dist.barrier()
            assert not list(copies.iterdir())


def interrupted_on_the_way(root: Path) -> None:
    """What arrived of a copy that was cut short does not block its name, and is never loaded."""
    for kind in ("sharded", "dcp"):
        path, folder = f"elsewhere://{root}/cut-{kind}", root / f"cut-{kind}"
        strategy = ours(state_dict_type=kind, staging_dir=str(root))
        model, trainer = train(strategy, root / "whole", 1)
        Elsewhere.fails_at = ("manifest.json", ".metadata")
        with pytest.raises(OSError, match="the line is down"):
            trainer.save_checkpoint(path)
        Elsewhere.fails_at = ()
        assert len(list(folder.iterdir())) >= 2  # both processes have copied
        with pytest.raises(CheckpointIncompleteError, match="no whole checkpoint"):
            trainer.validate(model, loader(), ckpt_path=path, verbose=False)
        trainer.save_checkpoint(path)
        trainer.validate(model, loader(), ckpt_path=path, verbose=False)
        assert not (folder / "upload-under-way").exists()


def the_default_plug_in_is_none(root: Path) -> None:
    """Lightning makes one when it is looked at."""
    model, trainer = train(ours(), root / "looked-at", 1)
    assert trainer.strategy.checkpoint_io is not None
    trainer.validate(model, loader(), verbose=False)
    trainer.save_checkpoint(root / "looked-at" / "again.ckpt")
    assert (root / "looked-at" / "again.ckpt").is_dir()
    with pytest.raises(ValueError, match=r"AsyncCheckpointIO writes files.*\"full\""):
        make_trainer(ours(), root, plugins=[AsyncCheckpointIO()]).validate(
            make_model(), loader(), verbose=False
        )


def replaced_by_another_format(root: Path) -> None:
    """A file by a directory, and a directory by a file."""
    for kinds in (("sharded", "full"), ("full", "dcp"), ("dcp", "sharded")):
        for kind in kinds:
            model, trainer = train(ours(state_dict_type=kind), root / f"kinds-{kind}", 1)
            path = root / "-".join(kinds)
            trainer.save_checkpoint(path)
            assert path.is_file() == (kind == "full")
            trainer.validate(model, loader(), ckpt_path=path, verbose=False)


def refusals(root: Path) -> None:
    _, trainer = train(ours(), root / "filters", 1)
    (root / "mine").mkdir(exist_ok=True)
    (root / "mine" / "notes.txt").write_text("keep")
    with pytest.raises((CheckpointExistsError, OSError), match="is not a checkpoint"):
        trainer.save_checkpoint(root / "mine")
    assert (root / "mine" / "notes.txt").exists()
    with pytest.raises(TypeError, match="takes no storage_options"):
        trainer.save_checkpoint(root / "options", storage_options={})
    train(ours(), root / "filters", 1, model=make_model(Filters))
    assert "norm.bias" not in checkpoint.read(root / "filters" / "last.ckpt")["model"]
    dist.barrier()
    train(ours(state_dict_type="full"), root / "filters", 1, model=make_model(Filters))
    with pytest.raises((CheckpointValueError, OSError), match=r"\['odd'\] is a .*GELU"):
        train(ours(), root / "filters", 1, model=make_model(OddInFirst))
    if dist.get_rank() == 0:
        state = {"state_dict": {"norm.bias": torch.ones(12)}, "object": argparse.Namespace()}
        state["pytorch-lightning_version"] = pl.__version__
        torch.save(state, root / "foreign.ckpt")
    dist.barrier()
    with pytest.raises(CheckpointValueError, match=r"weights_only=False"):
        train(ours(), root / "x", 1, root / "foreign.ckpt")
    with pytest.raises(RuntimeError, match=r"Missing key"):
        train(ours(weights_only=False), root / "x", 1, root / "foreign.ckpt")


def parts(root: Path) -> None:
    best_and_weights_only(root)
    overwritten(root)
    in_the_background(root)
    by_torch_in_the_background(root)
    by_a_plug_in_in_the_background(root)
    elsewhere(root)
    seen_by_callbacks(root)
    interrupted_on_the_way(root)
    the_default_plug_in_is_none(root)
    replaced_by_another_format(root)
    refusals(root)


def test_best_weights_only_overwriting_background_and_other_file_systems(tmp_path: Path) -> None:
    run_ranks(parts, 2, tmp_path, timeout_s=110)


def test_what_is_not_to_be_consolidated_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = nn.Linear(2, 2)
    checkpoint.save(tmp_path / "plain", model)
    with pytest.raises(CheckpointMismatchError, match="is not a sealed checkpoint of Lightning"):
        consolidate(tmp_path / "plain", tmp_path / "file")
    checkpoint.convert(tmp_path / "plain", tmp_path / "dcp", to="dcp")
    with pytest.raises(CheckpointMismatchError, match="use python -m lightning"):
        consolidate(tmp_path / "dcp", tmp_path / "file")
    assert not (tmp_path / "file").exists()
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointExistsError, match="name another file"):
        consolidate(tmp_path / "plain", tmp_path / "file")
    with pytest.raises(SystemExit):
        consolidate_sealed([str(tmp_path / "nothing")])
    assert "there is no checkpoint" in capsys.readouterr().err


# Values


def test_values_of_lightning_go_through_json_and_come_back() -> None:
    given = {
        "path": Path("a/b"),
        "namespace": argparse.Namespace(lr=0.1, inner=argparse.Namespace(n=1)),
        "set": {1, 2},
        "span": datetime.timedelta(days=1, seconds=2),
        "device": torch.device("cpu"),
        "ordered": OrderedDict(a=[1, (2, 3)]),
        "keys": {1: "one", None: "none"},
        "nan": float("inf"),
    }
    assert from_plain(to_plain(given)) == given


def test_a_hyper_parameter_that_could_only_be_pickled_is_left_out_with_a_warning() -> None:
    given = {"hyper_parameters": {"lr": 0.1, "activation": nn.GELU()}}
    with pytest.warns(UserWarning, match=r"\['hyper_parameters'\]\['activation'\].*GELU"):
        assert to_plain(given) == {"hyper_parameters": {"lr": 0.1}}
    with pytest.raises(CheckpointValueError, match=r"\['callbacks'\]\['mine'\] is a .*GELU"):
        to_plain({"callbacks": {"mine": nn.GELU()}})

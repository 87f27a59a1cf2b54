"""A save happens, or it does not; sealed checkpoints are checked before anything is loaded."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate.utils import ProjectConfiguration

from vescale_fsdp import (
    CheckpointCorruptError,
    CheckpointIncompleteError,
    RankMismatchError,
    checkpoint,
)
from vescale_fsdp.ranks import Ranks
from vescale_fsdp.testing import RankError, run_ranks
from vescale_fsdp_accelerate import VeScaleFSDPPlugin, checkpoints, saving

from .helpers import accelerator, full, loss_of, make_model

TOKENS = torch.arange(10).view(2, 5)


class Script:
    """A model, an optimizer and a scheduler, which count the same steps."""

    def __init__(self, acc: Any) -> None:
        self.acc = acc
        model = make_model()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        self.model, self.optimizer, self.scheduler = acc.prepare(model, optimizer, scheduler)

    def step(self) -> None:
        self.acc.backward(loss_of(self.model, TOKENS))
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()

    def state(self) -> tuple[float, float, int]:
        first = self.optimizer.state[self.model.scale]
        step = float(first["step"]) if first else 0.0
        return full(self.model.scale).item(), step, self.scheduler.scheduler.last_epoch // 2


def save_and_die(folder: Path, at: int) -> None:
    """Save after one step and after two; the first process dies in the middle of the second."""
    with accelerator() as acc:
        script = Script(acc)
        script.step()
        acc.save_state(folder)
        script.step()
        if dist.get_rank() == 0:
            if at < 0:
                saving.flush = lambda stage: os._exit(9)
            replace, left = Path.replace, [at]

            def die(source: Path, target: Path) -> Path:
                if left[0] == 0:
                    os._exit(9)
                left[0] -= source.parent.name == ".saved"
                return replace(source, target)

            Path.replace = die  # type: ignore[assignment]
        acc.save_state(folder)


def load_and_save(folder: Path) -> tuple[tuple[float, float, int], list[str]]:
    with accelerator() as acc:
        script = Script(acc)
        acc.load_state(folder)
        state = script.state()
        acc.save_state(folder)
        return state, sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize(("at", "step"), [(-1, 1), (0, 2), (2, 2)])
def test_whoever_is_killed_in_a_save_finds_all_of_one_state(
    tmp_path: Path, at: int, step: int
) -> None:
    note = tmp_path / "notes.txt"
    note.write_text("of the user")
    with pytest.raises(RankError):
        run_ranks(save_and_die, 2, tmp_path, at)
    assert [path.name for path in tmp_path.glob(".s*")] == [".saving" if at < 0 else ".saved"]
    (_, optimizer, scheduler), names = run_ranks(load_and_save, 2, tmp_path)[0]
    assert (optimizer, scheduler) == (step, step)
    assert not [name for name in names if name.startswith(".")]
    assert note.read_text() == "of the user"


def change_format(folder: Path) -> list[str]:
    for kind in ("FULL_STATE_DICT", "SHARDED_STATE_DICT", "FULL_STATE_DICT"):
        with accelerator(fsdp_plugin=VeScaleFSDPPlugin(state_dict_type=kind)) as acc:
            script = Script(acc)
            script.step()
            acc.save_state(folder)
    return sorted(path.name for path in folder.iterdir() if "random" not in path.name)


def test_one_format_takes_the_place_of_the_other(tmp_path: Path) -> None:
    names = run_ranks(change_format, 2, tmp_path)[0]
    assert names == ["optimizer.bin", "pytorch_model_fsdp.bin", "scheduler.bin"]


def save_by_number(root: Path) -> tuple[list[str], tuple[float, float, int], list[str]]:
    config = ProjectConfiguration(str(root), automatic_checkpoint_naming=True, total_limit=2)
    with accelerator(project_config=config) as acc:
        script = Script(acc)
        for _ in range(3):
            script.step()
            acc.save_state()
        messages = []
        config.iteration = 2
        try:
            acc.save_state()
        except ValueError as error:
            messages.append(str(error))
    if dist.get_rank() == 0:  # of a save that was killed
        (root / "checkpoints" / "checkpoint_3" / ".saving").mkdir(parents=True)
    dist.barrier()
    config = ProjectConfiguration(str(root), automatic_checkpoint_naming=True)
    with accelerator(project_config=config) as acc:
        script = Script(acc)
        acc.load_state()
        names = sorted(path.name for path in (root / "checkpoints").iterdir())
        return names, script.state(), messages


def test_the_last_whole_one_of_numbered_checkpoints_is_loaded(tmp_path: Path) -> None:
    names, (_, *steps), (message,) = run_ranks(save_by_number, 2, tmp_path)[0]
    assert names == ["checkpoint_1", "checkpoint_2", "checkpoint_3"]
    assert steps == [3, 3]
    assert "checkpoint_2 exists already; set accelerator.project_configuration.iter" in message


def load_damaged(folder: Path) -> tuple[str, bool]:
    with accelerator(fsdp_plugin=VeScaleFSDPPlugin(sealed=True)) as acc:
        script = Script(acc)
        script.step()
        acc.save_state(folder)
        script.step()
        before = script.state()
        if dist.get_rank() == 0:
            file = folder / "optimizer_0" / "rank-00001.bin"
            data = bytearray(file.read_bytes())
            data[len(data) // 2] ^= 1
            file.write_bytes(data)
        acc.wait_for_everyone()
        with pytest.raises(CheckpointCorruptError) as error:
            acc.load_state(folder)
        return str(error.value), script.state() == before


def test_one_flipped_bit_is_found_before_anything_is_loaded(tmp_path: Path) -> None:
    for message, is_as_before in run_ranks(load_damaged, 2, tmp_path):
        assert "nothing was loaded" in message
        assert "optimizer_0/rank-00001.bin" in message.replace(os.sep, "/")
        assert "exp_avg" in message
        assert is_as_before


def test_a_process_that_checks_says_that_it_still_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoint.save(tmp_path / "model", torch.nn.Linear(1000, 3000))
    calls: list[Ranks] = []
    monkeypatch.setattr(Ranks, "still", lambda self: calls.append(self))
    checkpoints.verify(tmp_path)
    assert len(calls) >= 12  # of 12 MB; at most 1 MiB is read at once


def load_by_number(root: Path) -> None:
    config = ProjectConfiguration(str(root), automatic_checkpoint_naming=True)
    with accelerator(project_config=config) as acc:
        acc.prepare(make_model())
        with pytest.raises(CheckpointIncompleteError, match="has no whole checkpoint"):
            acc.load_state()


def test_no_numbered_checkpoint_is_said(tmp_path: Path) -> None:
    run_ranks(load_by_number, 2, tmp_path)


def load_what_was_replaced(folder: Path) -> tuple[list[float], list[str]]:
    """As the Trainer saves; the first process was killed between the two renamings."""
    values = []
    with accelerator() as acc:
        path = folder / "pytorch_model_fsdp_0"
        for seed, end in enumerate((".old", ".new")):
            model = acc.prepare(make_model(seed))
            checkpoints.save_model(acc, model, str(folder / end))
            if dist.get_rank() == 0:
                folder.joinpath(end, path.name).rename(f"{path}{end}")
        values.append(full(model.embed.weight).sum().item())
        acc.wait_for_everyone()
        other = acc.prepare(make_model(2))
        checkpoints.load_model(acc, other, str(folder))
        values.append(full(other.embed.weight).sum().item())
        checkpoints.save_model(acc, other, str(folder))
    return values, [path.name for path in folder.glob("pytorch*")]


def test_a_directory_that_was_being_replaced_is_found(tmp_path: Path) -> None:
    """And not the one that it was to replace."""
    (saved, loaded), names = run_ranks(load_what_was_replaced, 2, tmp_path)[0]
    assert saved == loaded
    assert names == ["pytorch_model_fsdp_0"]


def with_hooks(folder: Path, kind: str) -> None:
    plugin = VeScaleFSDPPlugin(state_dict_type=kind)
    with accelerator(fsdp_plugin=plugin) as acc:
        script = Script(acc)
        script.step()
        expected = {name: full(p) for name, p in script.model.named_parameters()}

        def on_save(models: list[Any], weights: list[Any], output_dir: str) -> None:
            assert models == [script.model]
            weights[0]["scale"] = weights[0]["scale"] * 2
            state = acc.get_state_dict(models[0])
            if acc.is_main_process:  # as scripts for diffusers
                torch.save(state, f"{output_dir}/own.pt")
                weights.pop()

        def in_main_alone(models: list[Any], weights: list[Any], output_dir: str) -> None:
            if acc.is_main_process:
                weights[0]["other"] = weights[0].pop("scale")

        handle = acc.register_save_state_pre_hook(in_main_alone)
        message = r"left differ: sharded other of model 0 on rank 0, and sharded scale .* on rank 1"
        with pytest.raises(RankMismatchError, match=message):
            acc.save_state(folder.with_name("differs"))
        handle.remove()
        acc.register_save_state_pre_hook(on_save)
        acc.save_state(folder)
    with accelerator(fsdp_plugin=plugin) as acc:
        script = Script(acc)
        acc.load_state(folder)  # a popped state is there all the same, for loads without a hook
        assert torch.equal(full(script.model.scale), expected["scale"] * 2)
        assert script.state()[1] == 1.0

        def on_load(models: list[Any], input_dir: str) -> None:
            while models:
                models.pop().load_state_dict(torch.load(f"{input_dir}/own.pt"))

        handle = acc.register_load_state_pre_hook(
            lambda models, _: models.clear() if acc.is_main_process else None
        )
        with pytest.raises(RankMismatchError, match=r"left differ: .* model 0 on rank 1\. Make"):
            acc.load_state(folder)
        handle.remove()
        handle = acc.register_load_state_pre_hook(on_load)
        acc.load_state(folder)
        for name, param in script.model.named_parameters():
            assert torch.equal(full(param), expected[name]), name
        handle.remove()
        acc.load_state(folder)
        assert torch.equal(full(script.model.scale), expected["scale"] * 2)


@pytest.mark.parametrize("kind", ["SHARDED_STATE_DICT", "FULL_STATE_DICT"])
def test_hooks_see_models_and_state_dicts(tmp_path: Path, kind: str) -> None:
    run_ranks(with_hooks, 2, tmp_path / "state", kind)

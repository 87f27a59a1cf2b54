"""save_state and load_state: both formats, other numbers of processes, Accelerate's own tools."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from accelerate.utils import load_checkpoint_in_model
from safetensors.torch import load_file
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict

from vescale_fsdp import CheckpointIncompleteError, RankMismatchError, checkpoint
from vescale_fsdp.testing import run_ranks
from vescale_fsdp_accelerate import VeScaleFSDPPlugin, trainer
from vescale_fsdp_accelerate.checkpoints import load_model, save_model

from .helpers import accelerator, full, loss_of, make_model

FORMATS = ["SHARDED_STATE_DICT", "FULL_STATE_DICT", "sealed"]
TOKENS = torch.arange(10).view(2, 5)


class Script:
    """Two models with two optimizers, one of them ours by name, as a script would have them."""

    def __init__(self, acc: Any, seed: int) -> None:
        self.acc = acc
        model, other = make_model(seed), nn.Linear(3, 3)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        also = torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9)
        found = acc.prepare(model, other, optimizer, also)
        self.model, self.other, self.optimizer, self.also = found

    def step(self) -> list[float]:
        losses = []
        for optimizer, loss in (
            (self.optimizer, loss_of(self.model, TOKENS)),
            (self.also, self.other(torch.ones(1, 3)).square().sum()),
        ):
            self.acc.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses


def plugin(kind: str, optimizer: str | None) -> VeScaleFSDPPlugin:
    if kind == "sealed":
        return VeScaleFSDPPlugin(sealed=True, optimizer=optimizer)
    return VeScaleFSDPPlugin(state_dict_type=kind, optimizer=optimizer)


def save(
    folder: Path, kind: str, optimizer: str | None
) -> tuple[list[list[float]], dict[str, Any]]:
    torch.manual_seed(0)
    with accelerator(fsdp_plugin=plugin(kind, optimizer)) as acc:
        script = Script(acc, 0)
        for again in (1, 2):
            script.step()
            acc.save_state(folder)  # the second replaces the first
            assert again
        acc.save_model(script.model, folder / "whole")
        state = {name: full(p) for name, p in script.model.state_dict().items()}
        return [script.step() for _ in range(2)], state


def load(folder: Path, kind: str, optimizer: str | None) -> list[list[float]]:
    torch.manual_seed(1)
    with accelerator(fsdp_plugin=plugin(kind, optimizer)) as acc:
        script = Script(acc, 1)
        acc.load_state(folder)
        return [script.step() for _ in range(2)]


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("optimizer", [None, "muon"])
def test_a_run_goes_on_from_its_state_at_another_number_of_processes(
    tmp_path: Path, kind: str, optimizer: str | None
) -> None:
    expected, _ = run_ranks(save, 2, tmp_path, kind, optimizer)[0]
    assert run_ranks(load, 2, tmp_path, kind, optimizer)[0] == expected
    other = FORMATS[FORMATS.index(kind) - 1]
    for found, losses in zip(
        run_ranks(load, 1, tmp_path, other, optimizer)[0], expected, strict=True
    ):
        assert found == pytest.approx(losses, rel=1e-5)


def test_accelerates_own_tools_read_what_is_saved(tmp_path: Path) -> None:
    _, state = run_ranks(save, 2, tmp_path, "SHARDED_STATE_DICT", None)[0]
    names = {path.name for path in tmp_path.iterdir()}
    assert {"pytorch_model_fsdp_0", "pytorch_model_fsdp_1", "optimizer_0", "optimizer_1"} <= names
    merge = "from accelerate.utils import merge_fsdp_weights as m; import sys; m(*sys.argv[1:])"
    source = tmp_path / "pytorch_model_fsdp_0"
    command = [sys.executable, "-W", "ignore", "-c", merge, str(source), str(tmp_path / "merged")]
    subprocess.run(command, check=True, timeout=100)
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for name, value in state.items():
        assert torch.equal(merged[name], value), name
    model = make_model(5)
    load_checkpoint_in_model(model, tmp_path / "whole", strict=False)
    for name, value in state.items():
        assert torch.equal(model.state_dict()[name], value), name


def save_in_the_background(folder: Path) -> dict[str, Any]:
    with accelerator() as acc:
        script = Script(acc, 0)
        script.step()
        weights, states = get_state_dict(script.model, script.optimizer)
        saved = {name: full(p).clone() for name, p in script.model.state_dict().items()}
        state = {"model": weights, "optimizer": states}
        savers = dist.new_group(backend="gloo")
        saving = dcp.async_save(state, checkpoint_id=folder, process_group=savers)
        script.step()  # the save has copies
        saving.result()
        return saved


def test_torch_saves_a_prepared_model_and_optimizer_in_the_background(tmp_path: Path) -> None:
    saved = run_ranks(save_in_the_background, 2, tmp_path / "saved")[0]
    model = make_model(5)
    optimizer = torch.optim.AdamW(model.parameters())
    checkpoint.import_dcp(tmp_path / "saved", model, optimizer)
    for name, value in model.state_dict().items():
        assert torch.equal(value, saved[name]), name
    assert {each["step"].item() for each in optimizer.state.values()} == {1.0}


def states_dicts() -> dict[str, Any]:
    with accelerator() as acc:
        model = acc.prepare(make_model())
        state = acc.get_state_dict(model)
        if not acc.is_main_process:
            return {"others": state}
        tied = state["head.weight"].data_ptr() == state["embed.weight"].data_ptr()
        plain = {name: type(value).__name__ for name, value in state.items()}
        return {"tied": tied, "names": set(plain), "types": set(plain.values())}


def test_get_state_dict_is_whole_and_tied_in_the_first_process() -> None:
    first, second = run_ranks(states_dicts, 2)
    assert first["names"] == set(make_model().state_dict())
    assert first["types"] == {"Tensor"}
    assert first["tied"]
    assert second == {"others": {}}


def load_nothing(folder: Path) -> str:
    with accelerator() as acc:
        model = acc.prepare(make_model())
        with pytest.raises(CheckpointIncompleteError) as error:
            load_model(acc, model, str(folder))
        return str(error.value)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    for message in run_ranks(load_nothing, 2, tmp_path):
        assert "has neither pytorch_model_fsdp_0/ nor pytorch_model_fsdp.bin" in message


def in_the_main_process(folder: Path, what: str) -> str:
    with accelerator() as acc:
        script = Script(acc, 0)
        script.step()
        if what == "load":
            acc.save_state(folder)

        def differently() -> None:
            if acc.is_main_process and what == "evaluation":
                with torch.no_grad():
                    script.model(TOKENS)
            elif acc.is_main_process and what == "save":
                acc.save_state(folder)
            elif acc.is_main_process and what == "save of a model":
                save_model(acc, script.model, str(folder))
            elif acc.is_main_process and what == "save by get_state_dict":
                acc.get_state_dict(script.model)
            elif acc.is_main_process and what == "save by a Trainer":
                plugin = SimpleNamespace(_plugin=acc.state.fsdp_plugin)
                trainer.VeScaleTrainer.save_model(plugin, str(folder))
            elif acc.is_main_process:
                acc.load_state(folder)
            script.step()

        with pytest.raises(RankMismatchError) as error:
            differently()
        return str(error.value)


@pytest.mark.parametrize(
    "what",
    [
        *("evaluation", "save", "save of a model", "save by get_state_dict", "save by a Trainer"),
        "load",
    ],
)
def test_what_only_the_main_process_does_is_named_in_time(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VESCALE_FSDP_TIMEOUT_S", "2")
    main, other = run_ranks(in_the_main_process, 2, tmp_path, what, timeout_s=60)
    step = f"in the {what.split()[0]} of a checkpoint"
    step = "without gradients" if what == "evaluation" else step
    came = r"rank 1 did not come to (compare the next step|the (save|load) of a checkpoint) within"
    assert re.match(f"{came} 2 s", main)
    assert re.search(f"Rank 0 is .*{step}", main)
    assert re.search(f"^rank 1 (has waited|was cut off) .*The others: rank 0 .*{step}", other)
    for text in (main, other):
        assert "evaluate on all ranks, or inside of `unsharded`; call checkpoint.save" in text

"""``convert`` and ``read`` of what real DeepSpeed runs have saved."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from vescale_fsdp import checkpoint, fully_shard
from vescale_fsdp.cli import main
from vescale_fsdp.testing import run_ranks

HERE = Path(__file__).parent
GLOO_ALONE = str(HERE / "gloo_alone.py")
pytestmark = pytest.mark.timeout(250)  # the first test of each run waits for it
STEPS = 3
# Ranks, stage, and whether in bf16. A run takes 10 s.
RUNS = [(1, 2, False), (2, 1, False), (4, 3, False), (2, 3, True)]
NIGHTLY = [(2, 3, False), (4, 2, False), (2, 1, True)]


@pytest.fixture(
    scope="module",
    params=[*RUNS, *(pytest.param(each, marks=pytest.mark.nightly) for each in NIGHTLY)],
    ids=lambda run: f"{run[0]} ranks, stage {run[1]}{', bf16' * run[2]}",
)
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a run, its ranks, its stage, and whether it computes in bf16."""
    ranks, stage, is_bf16 = request.param
    folder = tmp_path_factory.mktemp("run")
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    options = [str(folder), str(stage), *(["bf16"] if is_bf16 else [])]
    done = subprocess.run(
        [sys.executable, *launcher, GLOO_ALONE, str(HERE / "save.py"), *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert (folder / "losses.json").exists(), done.stdout + done.stderr
    return folder, ranks, stage, is_bf16


def weights_of(folder: Path) -> dict[str, Tensor]:
    """By the script that DeepSpeed puts beside a checkpoint."""
    spec = importlib.util.spec_from_file_location("zero_to_fp32", folder / "zero_to_fp32.py")
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    found: dict[str, Tensor] = script.get_fp32_state_dict_from_zero_checkpoint(str(folder))
    return found


def test_weights_are_those_that_deepspeed_s_own_script_finds(run: Any) -> None:
    folder, *_ = run
    found, expected = checkpoint.read(folder), weights_of(folder)
    assert set(found["model"]) == {*expected, "scale", "frozen.weight", "frozen.bias"}
    for name, tensor in expected.items():
        assert torch.equal(found["model"][name].float(), tensor.float()), name
    assert found["model"]["scale"].tolist() == [1.5]
    assert found["extra"] == {"epoch": 3, "name": "a run"}
    assert found["model"]["up.weight"].dtype is torch.float32
    groups = found["optimizer.0"]["param_groups"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert groups[1]["params"] == ["up.bias", "norm.weight", "norm.bias"]
    for name, states in found["optimizer.0"]["state"].items():
        assert states["exp_avg"].shape == found["model"][name].shape
        assert float(states["step"]) == STEPS


def go_on(source: Path) -> list[float]:
    """Losses of a run of ours that begins where the checkpoint ends."""
    sys.path.insert(0, str(HERE))
    from model import batch, groups_of, loss_of, make_model

    model: nn.Module = make_model()
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()  # all comes from the checkpoint
    fully_shard(model.up)  # type: ignore[arg-type]
    fully_shard(model)
    optimizer = torch.optim.AdamW(groups_of(model), lr=1.0)
    extra = checkpoint.load(source, model, optimizer)
    assert extra == {"epoch": 3, "name": "a run"}
    losses = []
    for step in range(STEPS, STEPS + 3):
        loss = loss_of(model, batch(step, dist.get_rank()))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_a_run_goes_on_as_deepspeed_does(run: Any, tmp_path: Path) -> None:
    folder, ranks, _, is_bf16 = run
    assert (
        main(["checkpoint", "convert", str(folder), str(tmp_path / "ours"), "--to", "vescale"]) == 0
    )
    assert checkpoint.verify(tmp_path / "ours") is not None
    expected = json.loads((folder / "losses.json").read_text())
    (losses, *_) = run_ranks(go_on, ranks, tmp_path / "ours")
    # In bf16 DeepSpeed rounds weights and activations; ours goes on in fp32 here.
    assert losses == pytest.approx(expected, abs=0.05 if is_bf16 else 1e-5)


def test_other_formats_have_the_same_tensors(run: Any, tmp_path: Path) -> None:
    folder, *_ = run
    whole = checkpoint.read(folder)
    for form in ("safetensors", "dcp"):
        checkpoint.convert(folder, tmp_path / form, to=form)
        found = checkpoint.read(tmp_path / form)
        assert set(found["model"]) == set(whole["model"])
        for name, tensor in whole["model"].items():
            assert torch.equal(found["model"][name], tensor)
        if form == "dcp":
            states = whole["optimizer.0"]["state"]
            assert set(found["optimizer.0"]["state"]) == set(states)
            for name, each in states.items():
                for key, value in each.items():
                    other = torch.as_tensor(found["optimizer.0"]["state"][name][key])
                    assert torch.equal(other, torch.as_tensor(value))


def test_universal_checkpoints_have_the_same_tensors(run: Any, tmp_path: Path) -> None:
    folder, _, stage, is_bf16 = run
    if is_bf16 or stage == 2:
        pytest.skip("two forms are enough")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "deepspeed.checkpoint.ds_to_universal"),
            *("--input_folder", str(folder / "global_step3"), "--inject_missing_state"),
            *("--output_folder", str(tmp_path / "global_step3_universal")),
            *("--num_extract_workers", "1", "--num_merge_workers", "1"),
        ],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    whole, found = checkpoint.read(folder), checkpoint.read(tmp_path / "global_step3_universal")
    assert set(found["model"]) == set(whole["model"])
    for name, tensor in whole["model"].items():
        assert torch.equal(found["model"][name], tensor), name
    for name, states in whole["optimizer.0"]["state"].items():
        for key, value in states.items():
            other = torch.as_tensor(found["optimizer.0"]["state"][name][key]).float()
            assert torch.equal(other, torch.as_tensor(value).float()), (name, key)
    assert found["optimizer.0"]["param_groups"] == whole["optimizer.0"]["param_groups"]


def test_the_example_goes_on_with_another_number_of_processes(tmp_path: Path) -> None:
    script = str(HERE.parents[1] / "examples" / "continue_from_deepspeed.py")
    said = []
    for ranks, options in ((2, ["--deepspeed"]), (1, [])):
        with_deepspeed = [GLOO_ALONE] if options else []
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
        small = ["--steps", "2", "--layers", "1", "--width", "48"]
        done = subprocess.run(
            [sys.executable, *launcher, *with_deepspeed, script, *options, *small],
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        said.append(done.stdout)
    (saved,) = re.findall(r"DeepSpeed has saved; validation loss (\S+)", said[0])
    assert f"continued from step 2; validation loss {saved}" in said[1]
    assert "after 2 more steps" in said[1]

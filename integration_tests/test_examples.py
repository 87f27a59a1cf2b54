"""The examples, as a user starts them, for a few steps: real launchers, real processes.

Of those under torchrun one has it at each change, and the others ranks that are there already.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from integration_tests.scripts import run_script

EXAMPLES = Path(__file__).resolve().parents[1] / "examples"
SMALL = ["--layers", "2", "--width", "48"]


def run_example(command: list[str], cwd: Path) -> str:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "120"}
    done = subprocess.run(
        command,
        cwd=cwd,
        env=environ,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    # torch's gloo now and then aborts when a process ends; what it printed before counts.
    assert done.returncode in (0, -signal.SIGABRT), done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.timeout(400)
def test_lightning_example_trains_saves_resumes_and_generates(tmp_path: Path) -> None:
    script = str(EXAMPLES / "train_gpt_lightning.py")
    command = [sys.executable, script, "--max-steps", "6", *SMALL, "--metrics", "metrics.json"]
    output = run_example(command, tmp_path)
    assert "resuming from" in output
    assert "class Reader" in output
    processes = json.loads((tmp_path / "metrics.json").read_text())
    assert len(processes) == 2
    assert len(processes[0]["losses"]) == 6
    assert processes[0]["losses"][-1] < processes[0]["losses"][0]


def torchrun(name: str, *options: str) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    return [*launcher, "--nproc-per-node", "2", str(EXAMPLES / name), *options]


@pytest.mark.timeout(400)
def test_plain_example_under_torchrun(tmp_path: Path) -> None:
    """Longer than 10 s: three interpreters load torch, which other tests spare themselves."""
    output = run_example(torchrun("train_gpt.py", "--max-steps", "6", *SMALL), tmp_path)
    assert "validation loss before" in output
    assert "saved checkpoints/train_gpt/step-6" in output
    assert "class Reader" in output
    assert "digest: " in output


@pytest.mark.nightly  # 20 s
@pytest.mark.timeout(400)
def test_streaming_example_gives_weights_to_an_engine(tmp_path: Path) -> None:
    options = ["--max-steps", "4", "--every", "2", *SMALL]
    output = run_example(torchrun("stream_weights.py", *options), tmp_path)
    assert output.count("the engine has new weights") == 2
    assert output.count("class Reader") == 2


@pytest.mark.nightly  # 15 s each
@pytest.mark.timeout(400)
@pytest.mark.parametrize("options", [[], ["--max-unsharded-bytes", "0"]])
def test_transformers_generate_with_other_lengths_on_each_rank(
    options: list[str], tmp_path: Path
) -> None:
    output = run_example(torchrun("generate_transformers.py", *options), tmp_path)
    assert "process 0 generated 5 tokens" in output
    assert "process 1 generated 25 tokens" in output


@pytest.mark.nightly  # 70 s
@pytest.mark.timeout(400)
def test_memory_example_has_one_loss_with_all_options(tmp_path: Path) -> None:
    script, losses = ["save_memory.py", "--steps", "2", *SMALL], []
    for options in ([], ["--activations", "recompute+offload", "--offload", "all"]):
        output = run_example(torchrun(*script, *options), tmp_path)
        losses.append(output[output.index("loss") :].split(",")[0])
    assert losses[0] == losses[1]


@pytest.mark.nightly  # 100 s; the adapters' tests of budgets run at each change
@pytest.mark.timeout(400)
def test_budget_example_writes_a_choice_and_uses_it(tmp_path: Path) -> None:
    script, losses = ["within_budget.py", "--steps", "2", *SMALL], []
    for budget, said in (("1GiB", "  chosen"), ("choice.yaml", "sharding as written")):
        output = run_example(torchrun(*script, "--budget", budget), tmp_path)
        assert said in output
        losses.append(output[output.rindex("loss") :].split(",")[0])
    assert losses[0] == losses[1]
    assert "in_flight" in (tmp_path / "choice.yaml").read_text()


@pytest.mark.nightly  # 35 s
@pytest.mark.timeout(400)
def test_profile_example_prints_a_table_and_writes_traces(tmp_path: Path) -> None:
    output = run_example(torchrun("profile_step.py", "--steps", "2", *SMALL), tmp_path)
    assert output.count("waiting for all-gathers") == 1
    assert "ms a step: " in output
    assert {each.name for each in (tmp_path / "profile_step").iterdir()} == {
        "rank-0.json",
        "rank-1.json",
    }


@pytest.mark.timeout(400)
def test_checkpoints_of_torch_with_other_processes_and_with_fsdp2(tmp_path: Path) -> None:
    def losses(output: str) -> dict[str, str]:
        found = re.findall(r"(saving|resumed from) \S*(step-\d+); validation loss: (.*)", output)
        return {f"{what} {step}": loss for what, step, loss in found}

    script, options = EXAMPLES / "stock_checkpoint.py", [*SMALL, "--save-every", "2", "--max-steps"]
    first = losses(run_script(script, *options, "4", cwd=tmp_path))
    second = losses(run_script(script, *options, "6", "--fsdp2", processes=1, cwd=tmp_path))
    assert list(first) == ["saving step-2", "saving step-4"]
    assert list(second) == ["resumed from step-4", "saving step-6"]
    assert second["resumed from step-4"] == first["saving step-4"]


@pytest.mark.timeout(400)
def test_muon_example_goes_on_when_it_is_started_again(tmp_path: Path) -> None:
    script, options = EXAMPLES / "train_gpt_muon.py", [*SMALL, "--max-steps"]
    output = run_script(script, *options, "6", cwd=tmp_path)
    assert "resumed" not in output
    assert "saved checkpoints/train_gpt_muon/step-6" in output
    output = run_script(script, *options, "8", cwd=tmp_path)
    assert "resumed from checkpoints/train_gpt_muon/step-6" in output
    assert "saved checkpoints/train_gpt_muon/step-8" in output
    assert "class Reader" in output


@pytest.mark.nightly  # 35 s; without Lightning it runs at each change
@pytest.mark.timeout(400)
def test_muon_example_with_lightning(tmp_path: Path) -> None:
    script = [str(EXAMPLES / "train_gpt_muon.py"), "--lightning", "--max-steps", "6", *SMALL]
    command = [sys.executable, *script, "--no-generate", "--metrics", "metrics.json"]
    assert "resuming from" in run_example(command, tmp_path)
    processes = json.loads((tmp_path / "metrics.json").read_text())
    assert len(processes) == 2
    assert processes[0]["losses"][-1] < processes[0]["losses"][0]


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("script", "options", "says"),
    [
        pytest.param(
            "train_gan_lightning.py",
            ["--max-steps", "8"],
            "distance from the ring",
            marks=pytest.mark.nightly,
        ),
        ("train_fabric.py", ["--max-steps", "4"], "saved and loaded"),
        ("finetune_transformers_lightning.py", ["--max-steps", "4"], "pretrained"),
    ],
)
def test_other_lightning_examples(
    tmp_path: Path, script: str, options: list[str], says: str
) -> None:
    assert says in run_example([sys.executable, str(EXAMPLES / script), *options], tmp_path)


@pytest.mark.nightly  # 20 s; the adapters' tests train such models at each change
@pytest.mark.timeout(400)
def test_experts_and_tensor_parallelism_with_accelerate(tmp_path: Path) -> None:
    folder = EXAMPLES / "accelerate"
    command = [sys.executable, "-m", "accelerate.commands.accelerate_cli", "launch", "--config"]
    command += [str(folder / "experts.yaml"), str(folder / "train_experts.py"), "--steps", "10"]
    output = run_example(command, tmp_path)
    assert "step 10: loss" in output
    assert "saved runs/experts" in output

"""The core's wheel in an environment that has none of ours beside it. Runs before `test_wheels`."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SCRIPT = """
import torch
import torch.distributed as dist
from vescale_fsdp import checkpoint, fully_shard

checkpoint.init_process_group("gloo")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
for layer in model:
    fully_shard(layer)
fully_shard(model)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
path = checkpoint.latest("saved")
start = 0 if path is None else checkpoint.load(path, model, optimizer)["step"]
for step in range(start, 6):
    inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
    loss = model(inputs).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    total = loss.detach()  # by name: a thread of gloo may drop it while Python is taken down
    dist.all_reduce(total)
    if dist.get_rank() == 0:
        print(f"step {step} loss {total.item().hex()}", flush=True)
    if step == 2 and path is None:
        checkpoint.save("saved/3", model, optimizer, extra={"step": 3})
dist.destroy_process_group()
"""


def losses(folder: Path) -> dict[int, str]:
    """The losses of the steps that two ranks made."""
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launch, "train.py"],
        cwd=folder, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return {int(step): loss for step, loss in re.findall(r"step (\d+) loss (\S+)", done.stdout)}


def test_nothing_of_ours_is_beside_it() -> None:
    companions = ("vescale_fsdp_elastic", "vescale_fsdp_tune")
    names = (*companions, "vescale_fsdp_lightning", "vescale_fsdp_accelerate")
    assert find_spec("vescale_fsdp") is not None
    assert [name for name in names if find_spec(name) is not None] == []


@pytest.mark.timeout(300)
def test_it_trains_saves_and_resumes(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    whole = losses(tmp_path)
    assert list(whole) == list(range(6))
    rest = losses(tmp_path)  # from the checkpoint of step 3
    assert rest == {step: whole[step] for step in (3, 4, 5)}  # to the bit


@pytest.mark.parametrize("arguments", [["--help"], ["checkpoint", "--help"], ["doctor", "--help"]])
def test_its_commands_are_there(arguments: list[str]) -> None:
    code = f"from vescale_fsdp.cli import main; raise SystemExit(main({arguments}))"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "warning" not in done.stderr


def test_what_has_moved_says_how_to_install_it() -> None:
    with pytest.raises(ImportError, match=r"pip install 'vescale-fsdp\[elastic\]'"):
        from vescale_fsdp import elastic  # noqa: F401

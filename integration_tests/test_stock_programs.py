"""Stock programs of the frameworks stay what they are where our packages are installed.

All modules of a framework that a program has loaded are looked at, and their classes: nothing in
them may be ours but the names of our strategies in Lightning's registries.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
LIGHTNING = """
import warnings
import lightning.pytorch as pl
import lightning.pytorch.cli, lightning.pytorch.utilities
import pytorch_lightning
from lightning.fabric import Fabric
from lightning.pytorch.demos.boring_classes import BoringModel

warnings.simplefilter("ignore")
options = {"accelerator": "cpu", "devices": 1}
pytorch_lightning.Trainer(**options, logger=False)
trainer = pl.Trainer(**options, max_steps=2, precision="16-mixed", enable_progress_bar=False)
trainer.fit(BoringModel())
BoringModel.load_from_checkpoint(trainer.checkpoint_callback.best_model_path)
fabric = Fabric(**options)
fabric.setup(BoringModel())
"""

ACCELERATE = """
import sys
import accelerate, accelerate.commands.accelerate_cli, accelerate.commands.launch as launch
import torch, transformers, transformers.trainer, transformers.trainer_seq2seq
from pathlib import Path

Path("stock.yaml").write_text(
    "compute_environment: LOCAL_MACHINE\\ndistributed_type: 'NO'\\nuse_cpu: true\\n"
    "mixed_precision: 'no'\\nnum_processes: 1\\nnum_machines: 1\\n"
)
words = ["--config_file", "stock.yaml", "x.py"]
launch._validate_launch_command(launch.launch_command_parser().parse_args(words))
accelerate.Accelerator(cpu=True).prepare(torch.nn.Linear(2, 2))
config = transformers.LlamaConfig(
    vocab_size=8, hidden_size=4, intermediate_size=4, num_hidden_layers=1, num_attention_heads=1
)
arguments = transformers.TrainingArguments("out", use_cpu=True, max_steps=1, report_to=[])
data = [{"input_ids": [1, 2], "labels": [1, 2]}] * 2
transformers.Trainer(transformers.LlamaForCausalLM(config), arguments, train_dataset=data).train()
"""

# All that is ours in modules and classes of theirs: code, classes, and what wraps either.
LOOK = """
import functools, json, sys

THEIRS = ("lightning", "pytorch_lightning", "lightning_fabric", "accelerate", "transformers")

def places(value):
    if isinstance(value, property):
        for each in (value.fget, value.fset, value.fdel):
            yield from places(each)
    if isinstance(value, functools.partial):
        yield from places(value.func)
    value = getattr(value, "__func__", value)
    yield getattr(value, "__module__", None)
    yield getattr(getattr(value, "__code__", None), "co_filename", None)
    yield type(value).__module__

seen, found = 0, {}
for name, module in list(sys.modules.items()):
    if name.partition(".")[0] not in THEIRS or module is None:
        continue
    members = {f"{name}.{key}": value for key, value in list(vars(module).items())}
    for key, value in list(members.items()):
        if isinstance(value, type) and value.__module__ == name:
            members |= {f"{key}.{label}": each for label, each in vars(value).items()}
    seen += len(members)
    for key, each in members.items():
        if "vescale_fsdp" in str([*places(each)]):
            found[key] = getattr(each, "__qualname__", str(each)).rpartition(".")[2]
ours = sorted(name for name in sys.modules if name.startswith("vescale_fsdp"))
with open("found.json", "w") as file:
    json.dump({"seen": seen, "found": found, "ours": ours, "argv": sys.argv}, file)
"""


def run(program: str, folder: Path, *arguments: str, **environ: str) -> dict[str, Any]:
    (folder / "program.py").write_text(program + LOOK)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", *(arguments or ["program.py"])],
        cwd=folder,
        env={**os.environ, "HF_HOME": str(folder), **environ},
        capture_output=True,
        text=True,
        timeout=110,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads((folder / "found.json").read_text())
    return found


@pytest.mark.parametrize("program", [LIGHTNING, ACCELERATE], ids=["lightning", "accelerate"])
def test_nothing_of_a_framework_is_ours_where_nobody_asks_for_us(
    program: str, tmp_path: Path
) -> None:
    found = run(program, tmp_path)
    assert found["seen"] > 5000
    assert found["found"] == {}
    # What waits for the frameworks, and looks at the launcher's yaml; nothing that it would load.
    accelerate = {"", "._autoload", ".launching", ".options"}
    hook = {f"vescale_fsdp_accelerate{each}" for each in accelerate}
    hook |= {"vescale_fsdp_hook", "vescale_fsdp_lightning", "vescale_fsdp_lightning._autoload"}
    hook |= {"vescale_fsdp", "vescale_fsdp.errors", "vescale_fsdp.options"}  # without torch
    assert set(found["ours"]) <= hook


# What docs/design/adapters.md lists, each with its reason.
OF_TORCH = {"distribute_tensor", "compute_local_shape_and_global_offset"}
OF_ACCELERATE = {
    "VeScaleAccelerator",
    "VeScaleTrainer",
    "VeScaleSeq2SeqTrainer",
    "__init__",  # of PartialState
}
USES_LIGHTNING = LIGHTNING.replace('precision="16-mixed"', 'strategy="vescale_fsdp"').replace(
    "BoringModel.load_from_checkpoint", "print"
)
USES_ACCELERATE = """
import accelerate, transformers, transformers.trainer, transformers.trainer_seq2seq
accelerate.Accelerator()
"""


def test_what_is_ours_in_lightning_with_our_strategy(tmp_path: Path) -> None:
    assert run(USES_LIGHTNING, tmp_path)["found"] == {}


def test_what_is_ours_in_accelerate_with_our_yaml(tmp_path: Path) -> None:
    yaml = ROOT / "examples" / "accelerate" / "vescale.yaml"
    launcher = ("-m", "accelerate.commands.accelerate_cli", "launch", "--main_process_port", "0")
    words = (*launcher, "--num_processes", "1", "--config", str(yaml), "program.py")
    found = run(USES_ACCELERATE, tmp_path, *words)["found"]
    assert set(found.values()) - OF_TORCH == OF_ACCELERATE

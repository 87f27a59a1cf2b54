"""The string must work without an import of ours, and nothing else may change. Each test looks
at a fresh interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

NAMESPACES = ("lightning.pytorch", "pytorch_lightning", "lightning.fabric", "lightning_fabric")
LOOK = """
found = getattr(registry, "StrategyRegistry", None) or registry.STRATEGY_REGISTRY
print({"vescale_fsdp", "vescale_fsdp_cpu_offload"} <= found.keys())
"""


def python(code: str, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_the_strings_are_registered_without_an_import() -> None:
    code = "\n".join(f"import {each}.strategies as registry\n{LOOK}" for each in NAMESPACES)
    assert python(code).split() == ["True"] * len(NAMESPACES)


def test_each_namespace_gets_strategies_and_callbacks_of_its_own_classes() -> None:
    code = """
import pytorch_lightning as pl
from pytorch_lightning import strategies
from lightning_fabric import Fabric, strategies as of_fabric
options = {"strategy": "vescale_fsdp", "accelerator": "cpu", "devices": 1}
trainer = pl.Trainer(**options, logger=False)
fabric = Fabric(**options)
assert type(trainer.strategy).__name__ == "VeScaleFSDPStrategy"
assert isinstance(trainer.strategy, strategies.ParallelStrategy)
assert not isinstance(trainer.strategy, strategies.ModelParallelStrategy)  # clients ask for it
assert type(fabric.strategy).__name__ == "VeScaleFabricStrategy"
assert isinstance(fabric.strategy, of_fabric.ParallelStrategy)
assert not isinstance(fabric.strategy, of_fabric.ModelParallelStrategy)
from vescale_fsdp_lightning import ShardedEMA, VeScaleFSDPStrategy
assert VeScaleFSDPStrategy is type(trainer.strategy)
assert issubclass(ShardedEMA, pl.Callback)
import sys
assert "lightning" not in sys.modules
print("fine")
"""
    assert python(code).splitlines()[-1] == "fine"


def test_processes_are_started_and_the_group_is_destroyed_at_exit() -> None:
    code = """
import atexit, os, torch
import torch.distributed as dist
atexit.register(lambda: print("at exit", dist.is_initialized(), flush=True))
import lightning.pytorch as pl
from lightning.pytorch.demos.boring_classes import BoringModel
trainer = pl.Trainer(
    strategy="vescale_fsdp", accelerator="cpu", devices=1, max_steps=1, logger=False,
    enable_checkpointing=False, enable_progress_bar=False, limit_val_batches=0,
)
trainer.fit(BoringModel())
print("after fit", dist.is_initialized(), flush=True)
"""
    lines = python(code).splitlines()
    assert lines[-2:] == ["after fit True", "at exit False"]


@pytest.mark.nightly  # 20 s
def test_switched_off_the_import_does_the_same() -> None:
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    look = f"import lightning.pytorch.strategies as registry\n{LOOK}"
    assert python(look, **off) == "False"
    assert python(f"import vescale_fsdp_lightning\n{look}", **off) == "True"
    assert python(f"{look}\nimport vescale_fsdp_lightning\n{LOOK}", **off).split() == [
        "False",
        "True",
    ]


def test_a_process_without_lightning_imports_nothing_of_it() -> None:
    code = """
import sys, torch
named = ("vescale_fsdp_lightning", "vescale_fsdp_hook", "vescale_fsdp.", "lightning")
print(*sorted(name for name in sys.modules if name.startswith(named)))
"""
    assert python(code).split() == [
        "vescale_fsdp_hook",
        "vescale_fsdp_lightning",
        "vescale_fsdp_lightning._autoload",
    ]

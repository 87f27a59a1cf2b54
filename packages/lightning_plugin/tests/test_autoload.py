"""The string must work without an import of ours, and nothing else may change. Each test looks
at a fresh interpreter."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

LOOK = "print('vescale_fsdp' in registry.StrategyRegistry)"


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


@pytest.mark.parametrize("namespace", ["lightning.pytorch", "pytorch_lightning"])
def test_the_string_is_registered_without_an_import(namespace: str) -> None:
    assert python(f"import {namespace}.strategies as registry; {LOOK}") == "True"


def test_each_namespace_gets_a_strategy_of_its_own_classes() -> None:
    code = """
import pytorch_lightning as pl
from pytorch_lightning.strategies import ModelParallelStrategy
trainer = pl.Trainer(strategy="vescale_fsdp", accelerator="cpu", devices=1, logger=False)
print(type(trainer.strategy).__name__, isinstance(trainer.strategy, ModelParallelStrategy))
"""
    assert python(code).splitlines()[-1] == "VeScaleFSDPStrategy True"


def test_switched_off_the_import_does_the_same() -> None:
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    look = f"import lightning.pytorch.strategies as registry; {LOOK}"
    assert python(look, **off) == "False"
    assert python(f"import vescale_fsdp_lightning; {look}", **off) == "True"
    assert python(f"{look}; import vescale_fsdp_lightning; {LOOK}", **off).split() == [
        "False",
        "True",
    ]


def test_a_process_without_lightning_imports_nothing_of_it() -> None:
    code = """
import sys, torch
ours = sorted(name for name in sys.modules if name.startswith(("vescale", "lightning")))
print(*ours)
"""
    assert python(code).split() == [
        "vescale_fsdp_hook",
        "vescale_fsdp_lightning",
        "vescale_fsdp_lightning._autoload",
    ]

"""What an import of the companion loads, and that every public name is there."""

from __future__ import annotations

import importlib
import subprocess
import sys

import pytest


def test_the_cost_model_does_not_load_torch() -> None:
    code = "import sys, vescale_fsdp_tune.costs; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(found.stdout.split()) & {"torch", "numpy"}


@pytest.mark.parametrize(
    "package", ["vescale_fsdp_tune", "vescale_fsdp_tune.budget", "vescale_fsdp_tune.costs"]
)
def test_every_public_name_resolves(package: str) -> None:
    module = importlib.import_module(package)
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        assert getattr(module, name) is not None

"""What the installed wheels ship. Runs where no source of ours is on the path (tox: wheels)."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

SHIPPED = {
    "vescale-fsdp": {"vescale_fsdp", "vescale_fsdp_hook"},
    "vescale-fsdp-elastic": {"vescale_fsdp_elastic"},
    "vescale-fsdp-tune": {"vescale_fsdp_tune"},
    "vescale-fsdp-lightning": {"vescale_fsdp_lightning"},
    "vescale-fsdp-accelerate": {"vescale_fsdp_accelerate"},
}


def run_python(code: str, cwd: Path) -> str:
    """Run ``code`` in a process of its own, with nothing but site-packages on its path."""
    done = subprocess.run(
        [sys.executable, "-I", "-c", code], cwd=cwd, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def shipped_files(distribution: str) -> list[str]:
    """The files of a distribution, less its metadata and the commands made from it."""
    files = [str(path) for path in metadata.files(distribution) or []]
    return [name for name in files if ".dist-info/" not in name and not name.startswith("..")]


@pytest.mark.parametrize("distribution", SHIPPED)
def test_wheel_ships_its_packages_and_nothing_else(distribution: str) -> None:
    assert {name.split("/")[0] for name in shipped_files(distribution)} == SHIPPED[distribution]


@pytest.mark.parametrize("distribution", SHIPPED)
def test_wheel_is_marked_as_typed(distribution: str) -> None:
    files = shipped_files(distribution)
    for package in SHIPPED[distribution]:
        assert f"{package}/py.typed" in files


@pytest.mark.parametrize("distribution", SHIPPED)
def test_wheel_has_its_licence(distribution: str) -> None:
    found = metadata.metadata(distribution)
    assert found["License-Expression"] == "Apache-2.0"
    assert found.get_all("License-File") == ["LICENSE", "NOTICE"]
    names = [str(path) for path in metadata.files(distribution) or []]
    assert sum(name.endswith(("licenses/LICENSE", "licenses/NOTICE")) for name in names) == 2


@pytest.mark.parametrize("distribution", [*SHIPPED][1:])
def test_others_pin_the_core_exactly(distribution: str) -> None:
    requirements = metadata.requires(distribution) or []
    assert f"vescale-fsdp=={metadata.version('vescale-fsdp')}" in requirements


def test_planner_works_without_importing_torch(tmp_path: Path) -> None:
    # 24 and 4 elements in 2 shards: the cut at 14 is no multiple of 4, so the least is 16.
    code = (
        "import sys; sys.modules['torch'] = None\n"  # importing torch now raises
        "from vescale_fsdp.planner import TensorSpec, plan\n"
        "layout = plan([TensorSpec('w', (6, 4), 4), TensorSpec('b', (4,), 1)], num_shards=2)\n"
        "print(layout.shard_size, layout.padding)"
    )
    assert run_python(code, tmp_path) == "16 4"


def test_every_public_name_of_the_core_can_be_imported(tmp_path: Path) -> None:
    code = (
        "import vescale_fsdp\n"
        "print([name for name in vescale_fsdp.__all__ if not hasattr(vescale_fsdp, name)])"
    )
    assert run_python(code, tmp_path) == "[]"


def test_command_line_plans_a_shapes_file_without_importing_torch(tmp_path: Path) -> None:
    (tmp_path / "tiny.json").write_text(
        '{"groups": [{"name": "layer", "count": 2, "tensors": [["w", [6, 4]]]}]}'
    )
    code = (
        "import sys; sys.modules['torch'] = None\n"  # importing torch now raises
        "from importlib.metadata import entry_points\n"
        "(script,) = entry_points(group='console_scripts', name='vescale-fsdp')\n"
        "print(script.load()(['plan', 'tiny.json', '--ranks', '2']))"
    )
    # 24 elements in 2 shards, with starts and sizes that are multiples of 8.
    output = run_python(code, tmp_path)
    assert "tiny.json: 48 parameters in 2 units, ranks: 2" in output
    assert output.splitlines()[-1] == "0"


def test_the_first_script_of_the_documentation_trains(tmp_path: Path) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "start.md"
    (code,) = re.findall(r'^```python title="first.py"\n(.*?)^```', page.read_text(), re.M | re.S)
    (tmp_path / "first.py").write_text(code)
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launch, "first.py"], cwd=tmp_path, capture_output=True, text=True, timeout=100
    )
    assert "rank 1 holds 248 of 512 elements" in done.stdout, done.stderr


def test_lightning_adapter_declares_its_entry_point() -> None:
    found = {
        (entry.name, entry.value)
        for entry in metadata.entry_points(group="torch.backends")
        if entry.dist is not None and entry.dist.name == "vescale-fsdp-lightning"
    }
    assert found == {("vescale_fsdp_lightning", "vescale_fsdp_lightning._autoload:install")}


@pytest.mark.parametrize("namespace", ["lightning.pytorch", "pytorch_lightning"])
def test_strategy_is_registered_without_importing_the_adapter(
    namespace: str, tmp_path: Path
) -> None:
    code = (
        f"from {namespace}.strategies import StrategyRegistry\n"
        "print('vescale_fsdp' in StrategyRegistry)"
    )
    assert run_python(code, tmp_path) == "True"

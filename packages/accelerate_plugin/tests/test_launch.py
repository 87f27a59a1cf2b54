"""``accelerate launch`` in processes of its own: with the hook, without it, with a broken one."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from vescale_fsdp.cli import main
from vescale_fsdp_accelerate.options import GUARD

HERE = Path(__file__).parent
EXAMPLES = HERE.parents[2] / "examples" / "accelerate"
YAML = EXAMPLES / "vescale.yaml"
EXPECTED = {
    "accelerator": "VeScaleAccelerator",
    "engine": "vescale_fsdp.engine.methods",
    "parameter": "RaggedTensor",
    "processes": 2,
    "device": "cpu",
    "granularity": "rows:2",
    "arguments": ["--lr", "1"],
}


def python(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", *arguments]
    env = {**os.environ, "OMP_NUM_THREADS": "1", **environ}
    return subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=110, check=False
    )


def launch(*arguments: str, **environ: str) -> subprocess.CompletedProcess[str]:
    module = "accelerate.commands.accelerate_cli"
    return python("-m", module, "launch", "--main_process_port", "0", *arguments, **environ)


def reports(done: subprocess.CompletedProcess[str]) -> list[Any]:
    lines = [line for line in done.stdout.splitlines() if line.startswith("REPORT ")]
    assert lines, done.stdout + done.stderr
    return [json.loads(line.removeprefix("REPORT ")) for line in lines]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The example, with one of our keys, and without the guard."""
    text = YAML.read_text().replace(
        "# fsdp_vescale_granularity: rows:32", "fsdp_vescale_granularity: rows:2"
    )
    file = tmp_path / "vescale.yaml"
    file.write_text(text.replace(f"{GUARD}: true", ""))
    return file


SCRIPT = str(HERE / "script.py")


def test_an_unchanged_script_runs_on_veScale_by_config(config: Path) -> None:
    config.write_text(f"{config.read_text()}\n{GUARD}: true\n")
    found = reports(launch("--config", str(config), SCRIPT, "--lr", "1"))
    assert found == [EXPECTED, EXPECTED]


TRANSFORMERS_FIRST = """
from transformers import Trainer
import transformers
found = [transformers.trainer.Accelerator.__name__]
found += [Trainer.__name__, transformers.Seq2SeqTrainer.__mro__[2].__name__]
"""
OUR_TRAINER_FIRST = """
from vescale_fsdp_accelerate.trainer import VeScaleTrainer
import transformers
found = [transformers.Trainer is VeScaleTrainer]
found += [issubclass(transformers.Seq2SeqTrainer, VeScaleTrainer)]
"""


def test_workers_may_import_transformers_or_our_file_of_the_trainer_before_all_else(
    config: Path, tmp_path: Path
) -> None:
    """One worker each of one launch, which costs as much as two workers.

    ``transformers.trainer`` imports accelerate, and so our classes, in the middle of itself. Our
    file comes first when a Trainer is unpickled in a process that has not imported transformers.
    """
    script = tmp_path / "first.py"
    script.write_text(
        "import json, os, sys\n"
        f"exec([{TRANSFORMERS_FIRST!r}, {OUR_TRAINER_FIRST!r}][int(os.environ['RANK'])])\n"
        "sys.stdout.write(f'REPORT {json.dumps(found)}\\n')\n"
    )
    found = reports(launch("--config", str(config), str(script)))
    assert sorted(found, key=len) == [
        [True, True],
        ["VeScaleAccelerator", "VeScaleTrainer", "VeScaleTrainer"],
    ]


def test_the_runner_needs_no_hook(config: Path) -> None:
    runner = ("-m", "vescale_fsdp_accelerate.run", SCRIPT, "--lr", "1")
    done = launch("--config_file", str(config), *runner, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert reports(done) == [EXPECTED, EXPECTED]


@pytest.mark.nightly
def test_a_worker_without_the_hook_does_not_train_on_another_engine(
    config: Path, tmp_path: Path
) -> None:
    script = tmp_path / "off.py"  # the launcher has the hook, and the worker has not
    script.write_text(
        "import os, sys\n"
        "if 'child' not in sys.argv:\n"
        "    os.environ['TORCH_DEVICE_BACKEND_AUTOLOAD'] = '0'\n"
        "    os.execv(sys.executable, [sys.executable, __file__, 'child'])\n"
        f"exec(open({SCRIPT!r}).read())\n"
    )
    done = launch("--config", str(config), "--num_processes", "1", str(script))
    assert done.returncode != 0
    assert "REPORT" not in done.stdout
    assert (
        "the yaml asks for veScale-FSDP, which does not run in this process: pip install"
        in done.stderr
    )


def test_a_launcher_without_the_hook_says_what_is_missing() -> None:
    done = launch("--config_file", str(YAML), SCRIPT, TORCH_DEVICE_BACKEND_AUTOLOAD="0")
    assert done.returncode != 0
    assert f"unknown keys (['{GUARD}'])" in done.stderr


def test_the_guard_line_without_the_engine_starts_no_process(config: Path) -> None:
    """Two processes trained alone, with Accelerate's own FSDP on CPUs."""
    text = re.sub(r"fsdp_engine: vescale.*", "", config.read_text())
    text = text.replace("fsdp_vescale_granularity", "# fsdp_vescale_granularity")
    config.write_text(f"{text}\n{GUARD}: true\n")
    done = launch("--config", str(config), SCRIPT)
    assert done.returncode != 0
    assert "and does not turn veScale-FSDP on: add 'fsdp_engine: vescale' under" in done.stderr
    assert "REPORT" not in done.stdout


def test_an_unknown_key_is_refused_before_a_process_starts(config: Path) -> None:
    config.write_text(
        config.read_text().replace("fsdp_vescale_granularity", "fsdp_vescale_granularity_")
    )
    done = launch("--config", str(config), SCRIPT)
    assert done.returncode != 0
    assert "unknown key 'fsdp_vescale_granularity_'; did you mean fsdp_vescale_gran" in done.stderr
    assert "REPORT" not in done.stdout


@pytest.mark.nightly
def test_processes_on_cpu_that_nobody_asked_for_do_not_train_alone(config: Path) -> None:
    config.write_text(config.read_text().replace("use_cpu: true", "use_cpu: false"))
    done = launch("--config", str(config), SCRIPT, CUDA_VISIBLE_DEVICES="")
    assert done.returncode != 0
    assert "each would train alone. On CPUs set use_cpu: true in the yaml" in done.stderr


COUNT = "import sys, torch, accelerate; print(sorted(m for m in sys.modules if 'vescale' in m))"


def test_a_process_that_did_not_ask_imports_the_hook_alone() -> None:
    done = python("-c", f"{COUNT}; print(accelerate.Accelerator.__module__)")
    assert done.returncode == 0, done.stderr
    modules, home = done.stdout.splitlines()
    allowed = {"vescale_fsdp_accelerate", "vescale_fsdp_hook", "vescale_fsdp_lightning"}
    allowed |= {f"vescale_fsdp_accelerate.{each}" for each in ("_autoload", "options")}
    allowed |= {"vescale_fsdp", "vescale_fsdp.errors", "vescale_fsdp.options"}  # without torch
    assert set(ast.literal_eval(modules)) <= {*allowed, "vescale_fsdp_lightning._autoload"}
    assert home == "accelerate.accelerator"


def test_it_survives_a_broken_hook() -> None:
    broken = "import sys; sys.modules['vescale_fsdp_hook'] = None; import torch; print('there')"
    code = f"import sys; sys.modules['vescale_fsdp_lightning'] = type(sys)('x'); {broken}"
    install = "from vescale_fsdp_accelerate._autoload import install; install()"
    off = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = python("-c", f"{code}; {install}; print('and goes on')", **off)
    assert done.stdout.split("\n")[:2] == ["there", "and goes on"], done.stderr
    asked = python("-c", f"{code}; {install}", VESCALE_FSDP_ACCELERATE="{}", **off)
    assert asked.returncode != 0
    assert "vescale_fsdp_hook" in asked.stderr


def test_accelerates_conformance_scripts_pass_and_the_launcher_may_be_run_as_a_module(
    config: Path,
) -> None:
    """One launch for both. Without the hook's care, two processes of the module trained alone."""
    launcher = ("-m", "accelerate.commands.launch", "--main_process_port", "0")
    script = str(HERE / "conformance.py")
    done = python(*launcher, "--config", str(config), script, SCRIPT, "--lr", "1")
    assert reports(done) == [EXPECTED, EXPECTED]
    # Two processes write to one stream, and not always whole lines.
    passed = sorted(re.findall(r"PASSED \w+ in process \d", done.stdout))
    names = ("test_cli", "test_ops", "test_script", "test_sync")
    assert passed == [f"PASSED {name} in process {rank}" for name in names for rank in (0, 1)], (
        done.stderr
    )
    assert set(re.findall(r"Num processes: (\d)", done.stdout)) == {"2"}


def test_the_command_writes_and_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = str(tmp_path / "new.yaml")
    assert main(["accelerate-config", file, "--cpu", "--granularity", "rows:4"]) == 0
    text = Path(file).read_text()
    Path(file).write_text(text.replace("fsdp_offload_params", "fsdp_offload_param"))
    capsys.readouterr()
    main(["accelerate-config", file, "--check"])
    checked = capsys.readouterr().out
    assert 'fsdp_vescale_granularity: "rows:4"\n' in checked
    assert "fsdp_vescale_unused" not in checked
    assert "ignores fsdp_offload_param under fsdp_config" in checked
    Path(file).write_text(Path(file).read_text().replace("rows:4", "rows"))
    assert main(["accelerate-config", file, "--check"]) == 2
    assert "fsdp_vescale_granularity: 'rows' does not work" in capsys.readouterr().err

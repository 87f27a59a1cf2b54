"""LightningCLI: the strategy and its arguments in yaml."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
import torch

pytest.importorskip("jsonargparse", reason="LightningCLI needs it")

from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from vescale_fsdp import MixedPrecisionPolicy, QuantizedGather, QuantizedReduce
from vescale_fsdp_elastic import ElasticOptions
from vescale_fsdp_lightning import VeScaleFSDPStrategy

from .test_autoload import python

CONFIG = """
trainer:
  accelerator: cpu
  devices: 1
  logger: false
  strategy:
    class_path: vescale_fsdp_lightning.VeScaleFSDPStrategy
    init_args:
      wrap: [Linear]
      granularity: rows:32
      activation_checkpointing: true
      device_mesh: [1, 1]
      gather_codec: int8
      reduce_codec: {block: 512, error_feedback: true}
      mp_policy: {class_path: MixedPrecisionPolicy, init_args: {param_dtype: torch.bfloat16}}
      state_dict_type: full
"""


def make_cli(config: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> LightningCLI:
    (folder / "config.yaml").write_text(config)
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # of what Lightning calls
    monkeypatch.setattr("sys.argv", ["train.py", f"--config={folder / 'config.yaml'}"])
    return LightningCLI(
        BoringModel, run=False, save_config_callback=None, seed_everything_default=0
    )


def test_the_strategy_and_its_arguments_in_yaml(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    strategy = make_cli(CONFIG, tmp_path, monkeypatch).trainer.strategy
    assert type(strategy) is VeScaleFSDPStrategy
    assert strategy.options.wrap == ["Linear"]
    assert strategy.options.granularity == "rows:32"
    assert strategy.options.activation_checkpointing is True
    assert list(strategy.options.device_mesh) == [1, 1]
    assert strategy.options.state_dict_type == "full"
    assert strategy.options.mp_policy == MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    travel = strategy.options.engine_options()
    assert travel["gather_codec"] == QuantizedGather("int8")
    assert travel["reduce_codec"] == QuantizedReduce(block=512, error_feedback=True)
    other = CONFIG.replace("gather_codec: int8", "gather_codec: {dtype: e4m3, block: [32, 32]}")
    strategy = make_cli(other, tmp_path, monkeypatch).trainer.strategy
    travel = strategy.options.engine_options()
    assert travel["gather_codec"] == QuantizedGather("e4m3", block=(32, 32))


def test_the_class_by_its_full_name_before_it_is_imported() -> None:
    """In a process of its own: a short name is found among the classes that are there."""
    for namespace in ("lightning.pytorch", "pytorch_lightning"):
        code = f"""
import sys
from {namespace}.cli import LightningCLI
from {namespace}.demos.boring_classes import BoringModel
sys.argv = ["train.py", "--trainer.accelerator=cpu", "--trainer.devices=1",
    "--trainer.logger=false", "--trainer.strategy=VeScaleFSDPStrategy",
    "--trainer.strategy.timeout=60", "--trainer.strategy.wrap=[Linear]"]
try:
    LightningCLI(BoringModel, run=False, save_config_callback=None)
except SystemExit:
    pass
sys.argv[4] = "--trainer.strategy=vescale_fsdp_lightning.VeScaleFSDPStrategy"
cli = LightningCLI(BoringModel, run=False, save_config_callback=None)
strategy = cli.trainer.strategy
print(type(strategy).__name__, strategy.namespace, strategy._timeout, strategy.options.wrap)
"""
        expected = f"VeScaleFSDPStrategy {namespace} 0:01:00 ['Linear']"
        assert python(code, JSONARGPARSE_DEPRECATION_WARNINGS="off").splitlines()[-1] == expected


@pytest.mark.parametrize(
    ("text", "seconds"), [("60", 60), ("1.5", 1.5), ("'0:10:00'", 600), ("null", None)]
)
def test_a_timeout_in_seconds(
    text: str, seconds: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = CONFIG.replace("state_dict_type: full", f"timeout: {text}")
    config = config.replace("vescale_fsdp_lightning.", "")
    strategy = make_cli(config, tmp_path, monkeypatch).trainer.strategy
    assert strategy._timeout == (None if seconds is None else timedelta(seconds=seconds))


def test_the_string_in_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = "trainer: {accelerator: cpu, strategy: vescale_fsdp_cpu_offload, logger: false}"
    assert make_cli(config, tmp_path, monkeypatch).trainer.strategy.options.cpu_offload


def test_a_value_that_is_none_of_the_accepted_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        make_cli(CONFIG.replace("full", "whole"), tmp_path, monkeypatch)
    assert "state_dict_type" in capsys.readouterr().err


ELASTIC = """
trainer:
  accelerator: cpu
  devices: 1
  logger: false
  strategy:
    class_path: vescale_fsdp_lightning.VeScaleFSDPStrategy
    init_args:
      elastic: {directory: runs, global_batch: 64, every_on_disk: null}
"""


def test_elastic_options_in_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    strategy = make_cli(ELASTIC, tmp_path, monkeypatch).trainer.strategy
    expected = ElasticOptions(directory="runs", global_batch=64, every_on_disk=None)
    assert strategy.options.elastic == expected

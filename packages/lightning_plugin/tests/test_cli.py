"""LightningCLI: the strategy and its arguments in yaml."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("jsonargparse", reason="LightningCLI needs it")

from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel

from vescale_fsdp import QuantizedGather, QuantizedReduce
from vescale_fsdp_lightning import VeScaleFSDPStrategy

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
      gather: int8
      reduce: {block: 512, error_feedback: true}
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
    travel = strategy.options.engine_options()
    assert travel["gather"] == QuantizedGather("int8")
    assert travel["reduce"] == QuantizedReduce(block=512, error_feedback=True)
    other = CONFIG.replace("gather: int8", "gather: {dtype: e4m3, block: [32, 32]}")
    strategy = make_cli(other, tmp_path, monkeypatch).trainer.strategy
    travel = strategy.options.engine_options()
    assert travel["gather"] == QuantizedGather("e4m3", block=(32, 32))


def test_the_string_in_yaml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = "trainer: {accelerator: cpu, strategy: vescale_fsdp_cpu_offload, logger: false}"
    assert make_cli(config, tmp_path, monkeypatch).trainer.strategy.options.cpu_offload


def test_a_value_that_is_none_of_the_accepted_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        make_cli(CONFIG.replace("full", "whole"), tmp_path, monkeypatch)
    assert "state_dict_type" in capsys.readouterr().err

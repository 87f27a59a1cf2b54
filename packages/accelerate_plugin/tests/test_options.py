"""The yaml's keys: known, unknown, wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from vescale_fsdp.options import arguments
from vescale_fsdp_accelerate import VeScaleFSDPPlugin
from vescale_fsdp_accelerate.launching import check_config
from vescale_fsdp_accelerate.options import GUARD, Options, from_config
from vescale_fsdp_accelerate.yaml_file import check_file, text_of

EXAMPLE = Path(__file__).parents[3] / "examples" / "accelerate" / "vescale.yaml"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"fsdp_vescale_granularity_": "rows:2"}, "'fsdp_vescale_granularity_'; did you mean "),
        ({"fsdp_vescale_zzz": 1}, "unknown key 'fsdp_vescale_zzz'"),
        ({"fsdp_vescale_granularity": "rows"}, "'rows' does not work; accepted: elements"),
        ({"fsdp_vescale_replicas": True}, "replicas: True does not work; accepted: an int of"),
        ({"fsdp_vescale_replicas": 0}, "replicas: 0 does not work"),
        ({"fsdp_vescale_ep_size": 0}, "ep_size: 0 does not work"),
        ({"fsdp_vescale_sync_init": "yes"}, "sync_init: 'yes' does not work; accepted: true"),
        ({"fsdp_vescale_sharding": "zero4"}, "accepted: ddp, zero1, zero2, zero3, hsdp"),
        ({"fsdp_vescale_optimizer": "sgd"}, "accepted: muon, shampoo, soap or adamw8bit"),
        ({"fsdp_vescale_optimizer_args": {"lr": 1}}, "no meaning without fsdp_vescale_optimizer"),
    ],
)  # fmt: skip
def test_a_wrong_key_is_refused_by_its_name(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        from_config(config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"fsdp_config": {"fsdp_engine": "deepspeed"}}, "fsdp_engine: 'deepspeed' does not work"),
        ({"fsdp_config": 3}, "fsdp_config must have keys and values, found 3"),
        ({"fsdp_config": {"fsdp_vescale_unused": "auto"}}, "without 'fsdp_engine: vescale'"),
        ({"distributed_type": "MULTI_GPU", "fsdp_config": {"fsdp_engine": "vescale"}},
         "needs 'distributed_type: FSDP', found 'MULTI_GPU'"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_engine": "vescale", "fsdp_version": 1}},
         "needs 'fsdp_version: 2', found 1"),
        ({"distributed_type": "FSDP", "fsdp_config": {"fsdp_engine": "vescale",
          "fsdp_sharding_strategy": "HYBRID_SHARD"}},
         "HYBRID_SHARD is of FSDP1 and does nothing here.* for HYBRID_SHARD fsdp_vescale_replicas"),
    ],
)  # fmt: skip
def test_a_yaml_that_asks_for_half_of_it_is_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        check_config(config)


def test_a_yaml_of_others_is_left_alone() -> None:
    assert check_config({"distributed_type": "FSDP", "fsdp_config": {"fsdp_version": 1}}) is None
    assert check_config({"distributed_type": "MULTI_GPU"}) is None


def test_the_example_is_right() -> None:
    assert check_file(EXAMPLE) == Options()
    assert yaml.safe_load(EXAMPLE.read_text())[GUARD] is True


def test_what_is_written_is_what_was_asked_for(tmp_path: Path) -> None:
    options = Options(granularity="rows:4", optimizer="muon", optimizer_args={"momentum": 0.9})
    settings = {
        "num_processes": 4,
        "mixed_precision": "no",
        "use_cpu": True,
        "state_dict_type": "FULL_STATE_DICT",
    }
    file = tmp_path / "my.yaml"
    file.write_text(text_of(file.name, settings, options))
    assert check_file(file) == options
    config = yaml.safe_load(file.read_text())
    assert (config["num_processes"], config["use_cpu"], config["mixed_precision"]) == (
        4,
        True,
        "no",
    )
    missing = [
        each for each in Options().options() if f"fsdp_vescale_{each}" not in file.read_text()
    ]
    assert missing == []


@pytest.mark.parametrize(
    ("text", "shape", "block"),
    [("elements:3", (8, 8), 3), ("rows:2", (8, 8), 16), ("tile:4x4", (8, 8), 32),
     ("whole", (8, 8), 64)],
)  # fmt: skip
def test_a_granularity_in_words(text: str, shape: tuple[int, int], block: int) -> None:
    made = arguments(from_config({"fsdp_vescale_granularity": text}), "granularity")
    assert made["granularity"].block(shape) == block


def test_the_plug_in_names_what_replaces_arguments_of_fsdp1() -> None:
    with pytest.raises(ValueError, match=r"SHARD_GRAD_OP set fsdp_reshard_after_forward: false"):
        VeScaleFSDPPlugin(sharding_strategy="SHARD_GRAD_OP")
    with pytest.raises(ValueError, match=r"'sharded'.* accepted: SHARDED_STATE_DICT, FULL_STATE_D"):
        VeScaleFSDPPlugin(state_dict_type="sharded")


def test_the_plug_in_takes_the_keys_as_arguments() -> None:
    assert VeScaleFSDPPlugin(granularity="rows:2", replicas=2).replicas == 2
    with pytest.raises(ValueError, match="fsdp_vescale_unused: 'never' does not work"):
        VeScaleFSDPPlugin(unused="never")
    with pytest.raises(TypeError, match="granularity_"):
        VeScaleFSDPPlugin(granularity_="rows:2")
    with pytest.raises(ValueError, match="fsdp_version=1"):
        VeScaleFSDPPlugin(fsdp_version=1)

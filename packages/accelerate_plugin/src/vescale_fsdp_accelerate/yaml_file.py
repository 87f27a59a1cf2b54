"""Writes vescale.yaml with comments, and checks it. This module does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from vescale_fsdp_accelerate.launching import check_config
from vescale_fsdp_accelerate.options import ENGINE_KEY, GUARD, PREFIX, Options

__all__ = ["check_file", "text_of"]

_HEAD = """\
# veScale-FSDP under Accelerate: accelerate launch --config {name} train.py
# "vescale-fsdp accelerate-config --check {name}" checks this file.
compute_environment: LOCAL_MACHINE
distributed_type: FSDP  # required
num_machines: 1
machine_rank: 0
num_processes: {num_processes}  # of all machines together
mixed_precision: '{mixed_precision}'  # no, bf16, or fp16 on GPUs
use_cpu: {use_cpu}  # true: train on CPUs, with gloo
main_training_function: main

fsdp_config:
  fsdp_version: 2  # required
  {engine}: vescale  # turns veScale-FSDP on

  # Accelerate's own keys mean what they mean with its FSDP2.
  fsdp_state_dict_type: {state_dict_type}  # or FULL_STATE_DICT; what save_state writes
  fsdp_reshard_after_forward: true  # reshard parameters between forward and backward
  fsdp_offload_params: false  # shards, gradients and optimizer state stay in host memory
  fsdp_activation_checkpointing: false  # recompute the units' activations in backward
  # fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP  # left out: the model's repeated blocks are units
  # fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer

  # veScale-FSDP's keys. Those behind a # have these values by default.
"""

_TAIL = """\

# Without our plug-in, Accelerate would ignore the keys above and train with its own FSDP. This line
# prevents that: Accelerate refuses a file with an unknown key here.
{guard}: true
"""


def text_of(name: str, settings: Mapping[str, Any], options: Options) -> str:
    """Return the text of a yaml.

    Args:
        name: the file's name, for the comments.
        settings: num_processes, mixed_precision, use_cpu and state_dict_type.
        options: values that differ from the defaults are set; other keys are comments.
    """
    head = _HEAD.format(
        name=name,
        engine=ENGINE_KEY,
        **{**settings, "use_cpu": str(settings["use_cpu"]).lower()},
    )
    lines = []
    for each in fields(Options):
        value = getattr(options, each.name)
        lines.append(f"  # {each.metadata['help']} ({each.metadata['accepted']})")
        is_set = value != each.default
        shown = yaml.safe_dump(value, default_flow_style=True).partition("\n")[0]
        lines.append(f"  {'' if is_set else '# '}{PREFIX}{each.name}: {shown}")
    return head + "\n".join(lines) + "\n" + _TAIL.format(guard=GUARD)


def check_file(path: Path) -> Options:
    """Return the options of an existing yaml.

    Raises:
        OSError: it cannot be read.
        ValueError: it has an error.
    """
    try:
        config = yaml.safe_load(path.read_text())
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not yaml: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a mapping of keys to values")
    found = check_config(config)
    if found is None:
        raise ValueError(
            f"{path} does not ask for veScale-FSDP: add '{ENGINE_KEY}: vescale' under fsdp_config"
        )
    return found

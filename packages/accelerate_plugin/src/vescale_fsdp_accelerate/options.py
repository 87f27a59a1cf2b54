"""The options: one record for the yaml's keys, the plug-in's arguments and their documentation.

A field ``granularity`` is the key ``fsdp_vescale_granularity`` under ``fsdp_config`` in the yaml,
and the argument ``granularity=`` of `VeScaleFSDPPlugin`. A wrong value raises in the launcher,
before a process is started, and the message names the accepted ones.

This module does not import torch, because the launcher and the command line use it.
"""

from __future__ import annotations

import difflib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from vescale_fsdp.options import (
    ACTIVATIONS,
    BUDGET,
    COUNT,
    FLAG,
    GATHER,
    GRANULARITY,
    REDUCE,
    check,
    check_budget,
    one_of,
    only,
    option,
)

__all__ = [
    "ASKED",
    "ENGINE_KEY",
    "GUARD",
    "PREFIX",
    "Options",
    "asked_for",
    "engine_of",
    "from_config",
    "from_environment",
    "real_environment",
    "refuse_strategy",
    "to_environment",
]

PREFIX = "fsdp_vescale_"
ENGINE_KEY = "fsdp_engine"
ASKED = "VESCALE_FSDP_ACCELERATE"  # a worker's variable: its yaml asks for us with these options
# A key at the top of a yaml. Accelerate refuses unknown keys there, and this name says why.
GUARD = "needs_package_vescale_fsdp_accelerate_and_no_TORCH_DEVICE_BACKEND_AUTOLOAD_0"

# Accelerate reads both when it makes its own plug-in, one as an int and one as a bool.
_SPOILED = {"FSDP_VERSION": "2", "FSDP_ACTIVATION_CHECKPOINTING_OFFLOAD": "false"}
_HELP = (
    "the yaml asks for veScale-FSDP, which does not run in this process: pip install "
    "vescale-fsdp-accelerate and unset TORCH_DEVICE_BACKEND_AUTOLOAD, or launch with -m "
    "vescale_fsdp_accelerate.run train.py"
)
# What a budget chooses, or cannot have beside it.
_CHOSEN_BY_BUDGET = (
    "sharding",
    "accumulate",
    "ep_size",
    "in_flight",
    "activations",
    "offload",
    "gather_codec",
    "reduce_codec",
)


@dataclass(kw_only=True)
class Options:
    """The options that veScale-FSDP has in addition to those of Accelerate's FSDP2.

    Attributes:
        granularity: the blocks that must not be split: ``rows:32``, ``elements:256``,
            ``tile:32x32``, ``whole``. None: those that the optimizer needs.
        sharding: which of parameters, gradients and optimizer states are sharded; a row of
            `vescale_fsdp.program.zero_table`. None: ``zero3``, and ``hsdp`` with replicas.
        accumulate: how gradients accumulate, as in ``vescale_fsdp.fully_shard``.
        replicas: groups that each hold the whole model; sharded within a group (HSDP).
        ep_size: expert parallelism: over how many processes the experts are spread. A multiple of
            the parallelism config's ``tp_size``.
        reduce_dtype: dtype in which gradients are summed under mixed precision.
        unused: as of ``vescale_fsdp.fully_shard``.
        in_flight: as of ``vescale_fsdp.fully_shard``: how many units may be unsharded or
            prefetched at a time.
        activations: as of ``vescale_fsdp.fully_shard``, for the units. By import also a policy.
            ``fsdp_activation_checkpointing`` is ``recompute``, and with
            ``fsdp_activation_checkpointing_offload`` it is ``recompute+offload``.
        offload: what stays in host memory while the optimizer steps on the device, part by part, as
            of ``vescale_fsdp.optim.offload_``. With ``fsdp_offload_params`` instead, all stays
            there, and the optimizer steps on the CPU.
        budget: the memory of a process, as of ``vescale_fsdp_tune.fully_shard``: it chooses units,
            stage, what is resharded and recomputed, and ``in_flight``. The inputs of a forward are
            the first batch of the data loader that is prepared together with the model. By import
            also a ``vescale_fsdp_tune.Budget``.
        sync_init: all processes start with the first one's values, as with DDP.
        optimizer: train with this optimizer instead of the script's.
        optimizer_args: arguments of that optimizer.
        gather_codec: send weights in 8 bits: ``int8``, ``e4m3``, or the arguments of
            ``vescale_fsdp.QuantizedGather``. By import also one of these itself.
        reduce_codec: send gradients in 8 bits: ``int8``, or the arguments of
            ``vescale_fsdp.QuantizedReduce``. By import also one of these itself.
        sealed: checkpoints are sealed, with a CRC32 of each byte, with every state dict type.

    Raises:
        ValueError: a value is not accepted; the message lists the accepted ones.
    """

    granularity: Any = option(
        GRANULARITY,
        None,
        "elements:256, rows:32, tile:32x32 or whole",
        "blocks that must not be split; left out: those that the optimizer needs",
    )
    sharding: str | None = option(
        one_of("ddp", "zero1", "zero2", "zero3", "hsdp", "hsdp_zero1"),
        None,
        "ddp, zero1, zero2, zero3, hsdp or hsdp_zero1",
        "what is sharded, by ZeRO's stages; left out: all (zero3; hsdp with replicas)",
    )
    accumulate: str | None = option(
        one_of("unsharded", "sharded"),
        None,
        "unsharded (no communication) or sharded (less memory)",
        "how gradients accumulate; left out: unsharded (zero2: sharded)",
    )
    replicas: int = option(
        COUNT,
        1,
        "an int of at least 1",
        "groups of processes that each hold the whole model (HSDP)",
    )
    ep_size: int = option(
        COUNT,
        1,
        "an int of at least 1",
        "expert parallelism: over how many processes the experts are spread",
    )
    reduce_dtype: str = option(
        one_of("fp32", "bf16", "fp16"),
        "fp32",
        "fp32, bf16 or fp16",
        "dtype in which gradients are summed under mixed precision",
    )
    unused: str = option(
        one_of("auto", "zeros"),
        "auto",
        "auto or zeros",
        "gradients of parameters that no process used: none, or zeros",
    )
    in_flight: int = option(
        COUNT,
        2,
        "an int of at least 1",
        "how many units may be unsharded or prefetched at a time",
    )
    activations: Any = option(
        ACTIVATIONS,
        None,
        "recompute, offload or recompute+offload",
        "keep the units' activations in host memory, or recompute them, or both",
    )
    offload: str | None = option(
        one_of("optimizer", "parameters", "all"),
        None,
        "optimizer (its states), parameters (and gradients) or all",
        "what stays in host memory while the optimizer steps on the device",
    )
    budget: Any = option(
        BUDGET,
        None,
        "auto (90% of what is free), 80%, 10GiB, or the path of a written choice.yaml",
        "memory of a process, for which the fastest settings are chosen that fit; left out: none",
    )
    sync_init: bool = option(
        FLAG,
        True,
        "true or false",
        "start all processes with the first one's values, as DDP does",
    )
    optimizer: str | None = option(
        one_of("muon", "shampoo", "soap", "adamw8bit"),
        None,
        "muon, shampoo, soap or adamw8bit",
        "train with this optimizer instead of the script's",
    )
    optimizer_args: dict[str, Any] | None = option(
        only(lambda value: isinstance(value, dict) and all(isinstance(key, str) for key in value)),
        None,
        "names and values",
        "arguments of that optimizer, such as {momentum: 0.9}",
    )
    gather_codec: Any = option(
        GATHER,
        None,
        "int8, e4m3, or names and values such as {dtype: e4m3, block: [32, 32]}",
        "send weights in 8 bits; left out: in the compute dtype",
    )
    reduce_codec: Any = option(
        REDUCE,
        None,
        "int8, or names and values such as {block: 256, error_feedback: true}",
        "send gradients in 8 bits; left out: in reduce_dtype",
    )
    sealed: bool = option(
        FLAG,
        False,
        "true or false",
        "checkpoints with a CRC32 of each byte, instead of torch's format",
    )

    def check_options(self) -> None:
        """Raise if a value is not accepted."""
        check(self, PREFIX + "{name}: {value!r} does not work{reason}; accepted: {accepted}")
        check_budget(
            self,
            _CHOSEN_BY_BUDGET,
            f"{PREFIX}budget: {{budget!r}} chooses {{name}}, and {PREFIX}{{name}}: {{value!r}} is "
            "set too; leave one of them out",
        )
        if self.optimizer_args and self.optimizer is None:
            raise ValueError(
                f"{PREFIX}optimizer_args has no meaning without {PREFIX}optimizer, which names one"
            )

    def options(self) -> dict[str, Any]:
        """Return the options by name, without Accelerate's."""
        return {each.name: getattr(self, each.name) for each in fields(Options)}


def engine_of(fsdp_config: Mapping[str, Any]) -> str | None:
    """Return the engine that a yaml's ``fsdp_config`` asks for.

    Raises:
        ValueError: it is unknown, or our keys are set without it.
    """
    engine = fsdp_config.get(ENGINE_KEY)
    if engine is None:
        ours = [key for key in fsdp_config if key.startswith(PREFIX)]
        if ours:
            raise ValueError(
                f"fsdp_config has {', '.join(sorted(ours))} without '{ENGINE_KEY}: vescale', which "
                "turns veScale-FSDP on"
            )
        return None
    if engine != "vescale":
        raise ValueError(f"{ENGINE_KEY}: {engine!r} does not work; accepted: vescale")
    return "vescale"


def refuse_strategy(key: str, strategy: object) -> None:
    """Raise ValueError for a sharding strategy of FSDP1, which FSDP2 does not read."""
    raise ValueError(
        f"{key}: {getattr(strategy, 'name', strategy)} is of FSDP1 and does nothing here. Leave it "
        "out for FULL_SHARD; for SHARD_GRAD_OP set fsdp_reshard_after_forward: false, for NO_SHARD "
        f"{PREFIX}sharding: ddp, for HYBRID_SHARD {PREFIX}replicas: the number of replicas"
    )


def from_config(fsdp_config: Mapping[str, Any]) -> Options:
    """Return the options in a yaml's ``fsdp_config``.

    Raises:
        ValueError: a key with our prefix is unknown, or a value is not accepted.
    """
    known = {PREFIX + each.name: each.name for each in fields(Options)}
    found: dict[str, Any] = {}
    for key, value in fsdp_config.items():
        if not key.startswith(PREFIX):
            continue
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise ValueError(f"fsdp_config has the unknown key {key!r}; {hint}")
        found[known[key]] = value
    options = Options(**found)
    options.check_options()
    return options


def to_environment(options: Options, environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables for the workers, in addition to Accelerate's ``environment``.

    Two of Accelerate's variables get values that Accelerate refuses, so that a worker without our
    hook cannot train with another engine. `real_environment` returns the real values.
    """
    real = {name: environment.get(name, default) for name, default in _SPOILED.items()}
    payload = {"options": asdict(options), "environment": real}
    return {ASKED: json.dumps(payload), **dict.fromkeys(_SPOILED, _HELP)}


def asked_for() -> bool:
    """Whether this process is a worker whose yaml asks for veScale-FSDP."""
    return ASKED in os.environ


def from_environment() -> Options:
    """Return the options from the launcher; the defaults if there are none."""
    return Options(**json.loads(os.environ.get(ASKED, "{}")).get("options", {}))


def real_environment() -> dict[str, str]:
    """Return the real values of the variables that the launcher has replaced."""
    found: dict[str, str] = json.loads(os.environ.get(ASKED, "{}")).get("environment", {})
    return found

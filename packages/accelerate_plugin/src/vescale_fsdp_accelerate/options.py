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
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any

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
_GRANULARITY = re.compile(r"elements:[1-9]\d*|rows:[1-9]\d*|tile:[1-9]\d*x[1-9]\d*|whole")


def _option(default: Any, help: str, accepted: str, **more: Any) -> Any:
    return field(
        default=default, kw_only=True, metadata={"help": help, "accepted": accepted, **more}
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
        budget: the memory of a process, as of ``vescale_fsdp.fully_shard``: it chooses units,
            stage, what is resharded and recomputed, and ``in_flight``. The inputs of a forward are
            the first batch of the data loader that is prepared together with the model. By import
            also a ``vescale_fsdp.Budget``.
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

    granularity: str | None = _option(
        None,
        "blocks that must not be split; left out: those that the optimizer needs",
        "elements:256, rows:32, tile:32x32 or whole",
    )
    sharding: str | None = _option(
        None,
        "what is sharded, by ZeRO's stages; left out: all (zero3; hsdp with replicas)",
        "ddp, zero1, zero2, zero3, hsdp or hsdp_zero1",
        choices=("ddp", "zero1", "zero2", "zero3", "hsdp", "hsdp_zero1"),
    )
    accumulate: str | None = _option(
        None,
        "how gradients accumulate; left out: unsharded (zero2: sharded)",
        "unsharded (no communication) or sharded (less memory)",
        choices=("unsharded", "sharded"),
    )
    replicas: int = _option(
        1, "groups of processes that each hold the whole model (HSDP)", "an int of at least 1"
    )
    ep_size: int = _option(
        1,
        "expert parallelism: over how many processes the experts are spread",
        "an int of at least 1",
    )
    reduce_dtype: str = _option(
        "fp32",
        "dtype in which gradients are summed under mixed precision",
        "fp32, bf16 or fp16",
        choices=("fp32", "bf16", "fp16"),
    )
    unused: str = _option(
        "auto",
        "gradients of parameters that no process used: none, or zeros",
        "auto or zeros",
        choices=("auto", "zeros"),
    )
    in_flight: int = _option(
        2, "how many units may be unsharded or prefetched at a time", "an int of at least 1"
    )
    activations: Any = _option(  # noqa: RUF009  # None by default
        None,
        "keep the units' activations in host memory, or recompute them, or both",
        "recompute, offload or recompute+offload",
        words=("recompute", "offload", "recompute+offload"),
    )
    offload: str | None = _option(
        None,
        "what stays in host memory while the optimizer steps on the device",
        "optimizer (its states), parameters (and gradients) or all",
        choices=("optimizer", "parameters", "all"),
    )
    budget: Any = _option(  # noqa: RUF009  # None by default
        None,
        "memory of a process, for which the fastest settings are chosen that fit; left out: none",
        "auto (90% of what is free), 80%, 10GiB, or the path of a written choice.yaml",
    )
    sync_init: bool = _option(
        True, "start all processes with the first one's values, as DDP does", "true or false"
    )
    optimizer: str | None = _option(
        None,
        "train with this optimizer instead of the script's",
        "muon, shampoo, soap or adamw8bit",
        choices=("muon", "shampoo", "soap", "adamw8bit"),
    )
    optimizer_args: dict[str, Any] | None = _option(  # noqa: RUF009  # None by default
        None, "arguments of that optimizer, such as {momentum: 0.9}", "names and values"
    )
    gather_codec: Any = _option(  # noqa: RUF009  # None by default
        None,
        "send weights in 8 bits; left out: in the compute dtype",
        "int8, e4m3, or names and values such as {dtype: e4m3, block: [32, 32]}",
        coding="QuantizedGather",
        arguments={"dtype": ("int8", "e4m3"), "block": None},
    )
    reduce_codec: Any = _option(  # noqa: RUF009  # None by default
        None,
        "send gradients in 8 bits; left out: in reduce_dtype",
        "int8, or names and values such as {block: 256, error_feedback: true}",
        coding="QuantizedReduce",
        arguments={"dtype": ("int8",), "block": None, "error_feedback": (False, True)},
    )
    sealed: bool = _option(
        False,
        "checkpoints with a CRC32 of each byte, instead of torch's format",
        "true or false",
    )

    def check_options(self) -> None:
        """Raise if a value is not accepted."""
        for each in fields(Options):
            value = getattr(self, each.name)
            if value is None and each.default is None:
                continue
            if not _fits(each, value):
                raise ValueError(
                    f"{PREFIX}{each.name}: {value!r} does not work; accepted: "
                    f"{each.metadata['accepted']}"
                )
        self._check_budget()
        if self.optimizer_args and self.optimizer is None:
            raise ValueError(
                f"{PREFIX}optimizer_args has no meaning without {PREFIX}optimizer, which names one"
            )

    def _check_budget(self) -> None:
        for name in _CHOSEN_BY_BUDGET if self.budget is not None else ():
            default = next(each.default for each in fields(Options) if each.name == name)
            value = getattr(self, name)
            if value != default:
                raise ValueError(
                    f"{PREFIX}budget: {self.budget!r} chooses {name}, and {PREFIX}{name}: {value!r}"
                    " is set too; leave one of them out"
                )

    def options(self) -> dict[str, Any]:
        """Return the options by name, without Accelerate's."""
        return {each.name: getattr(self, each.name) for each in fields(Options)}


def _fits(each: Any, value: Any) -> bool:
    if "choices" in each.metadata:
        return value in each.metadata["choices"]
    if "words" in each.metadata:  # in a script also what torch takes
        is_list = isinstance(value, list) and all(map(callable, value))
        return value in each.metadata["words"] or callable(value) or is_list
    if "coding" in each.metadata:
        return _is_coding(each.metadata["coding"], each.metadata["arguments"], value)
    if each.name == "granularity":
        return isinstance(value, str) and _GRANULARITY.fullmatch(value) is not None
    if each.name == "budget":
        return _is_budget(value)
    if each.name == "optimizer_args":
        return isinstance(value, dict) and all(isinstance(key, str) for key in value)
    if isinstance(each.default, bool):
        return isinstance(value, bool)
    return type(value) is int and value >= 1


def _is_coding(kind: str, arguments: Mapping[str, Any], value: Any) -> bool:
    """Whether it is a name of a dtype, a mapping of arguments, or an object of the core."""
    if not isinstance(value, dict):
        return value in arguments["dtype"] or type(value).__name__ == kind
    return all(
        key in arguments and (_is_block(each) if key == "block" else each in arguments[key])
        for key, each in value.items()
    )


def _is_budget(value: Any) -> bool:
    from vescale_fsdp.costs import Amount, is_path

    if is_path(value) or type(value).__name__ == "Budget":
        return True
    try:
        Amount.parse(value)
    except ValueError:
        return False
    return True


def _is_block(value: Any) -> bool:
    """Whether it is a number of elements, or rows and columns."""
    extents = value if isinstance(value, list | tuple) and len(value) == 2 else [value]
    return all(type(extent) is int and extent >= 1 for extent in extents)


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

"""VeScaleFSDPPlugin: Accelerate's plug-in for FSDP2, with our options in addition."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.utils import FullyShardedDataParallelPlugin  # type: ignore[import-untyped]

from vescale_fsdp import MixedPrecisionPolicy
from vescale_fsdp_accelerate.options import Options, from_environment, refuse_strategy

__all__ = ["VeScaleFSDPPlugin"]

_DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
}
_STATE_DICT_TYPES = ("SHARDED_STATE_DICT", "FULL_STATE_DICT")
# FSDP1's strategies, and whether they reshard after forward.
_RESHARDS = {"FULL_SHARD": True, "SHARD_GRAD_OP": False}


@dataclass
class VeScaleFSDPPlugin(FullyShardedDataParallelPlugin, Options):  # type: ignore[misc]
    """`Options`, and those of ``FullyShardedDataParallelPlugin`` with ``fsdp_version=2``.

    ::

        accelerator = VeScaleAccelerator(fsdp_plugin=VeScaleFSDPPlugin(granularity="rows:32"))

    Two defaults differ from Accelerate's: without ``auto_wrap_policy`` the model's repeated blocks
    become units (Accelerate: one unit of all); gradients are reduced in fp32 under mixed precision
    (Accelerate: in the compute dtype).

    Raises:
        ValueError: an option has a value that is not accepted.
    """

    fsdp_version: Any = None
    mixed_precision_policy: Any = None

    def __post_init__(self) -> None:
        self.check_options()
        if self.fsdp_version not in (None, 2):
            raise ValueError(
                f"VeScaleFSDPPlugin(fsdp_version={self.fsdp_version}) does not work; leave it out"
            )
        if self.sharding_strategy is not None:
            refuse_strategy("VeScaleFSDPPlugin(sharding_strategy=...)", self.sharding_strategy)
        kind = self.state_dict_type
        if isinstance(kind, str) and kind.upper() not in _STATE_DICT_TYPES:
            raise ValueError(
                f"VeScaleFSDPPlugin(state_dict_type={kind!r}) does not work; accepted: "
                f"{', '.join(_STATE_DICT_TYPES)}"
            )
        self.fsdp_version = 2
        policy = self.auto_wrap_policy
        self.wraps_blocks = policy is None and "FSDP_AUTO_WRAP_POLICY" not in os.environ
        # accelerate launch exports all keys; those that are not in the yaml have FSDP1's values.
        for name in ("FSDP_RESHARD_AFTER_FORWARD", "FSDP_BACKWARD_PREFETCH"):
            if os.environ.get(name, "").upper() in (*_RESHARDS, "NONE", "NO_PREFETCH"):
                del os.environ[name]
        super().__post_init__()

    @classmethod
    def from_environment(cls) -> VeScaleFSDPPlugin:
        """Make the plug-in from the options of the yaml."""
        return cls(**from_environment().options())

    @classmethod
    def upgraded(cls, plugin: FullyShardedDataParallelPlugin) -> VeScaleFSDPPlugin:
        """Convert a plug-in of Accelerate, for example from ``TrainingArguments(fsdp=...)``.

        Raises:
            ValueError: it is for FSDP1, and its strategy has no counterpart.
        """
        if isinstance(plugin, cls):
            return plugin
        made = cls.from_environment()
        wraps_blocks = plugin.auto_wrap_policy is None
        made.__dict__.update(vars(plugin))
        made.wraps_blocks = wraps_blocks
        if plugin.fsdp_version == 1:
            strategy = plugin.sharding_strategy or plugin.reshard_after_forward
            name = getattr(strategy, "name", str(strategy))
            if name not in _RESHARDS:
                raise ValueError(
                    f"veScale-FSDP has no counterpart of FSDP1's strategy {name}; set "
                    "fsdp_version: 2, and fsdp_vescale_sharding or fsdp_vescale_replicas for what "
                    "it did"
                )
            made.fsdp_version, made.reshard_after_forward = 2, _RESHARDS[name]
            made.cpu_offload = bool(getattr(plugin.cpu_offload, "offload_params", False))
            made.set_cpu_offload()
            old = plugin.mixed_precision_policy
            made.mixed_precision_policy = None
            if old is not None:
                made.set_mixed_precision(old.param_dtype)
        return made

    def set_mixed_precision(
        self, mixed_precision: Any, buffer_autocast: bool = False, override: bool = False
    ) -> None:
        """All-gather and compute in 16 bits, reduce in ``reduce_dtype``, return fp32."""
        if isinstance(self.mixed_precision_policy, dict):
            super().set_mixed_precision(mixed_precision, buffer_autocast, override)
            return
        if self.mixed_precision_policy is not None and not override:
            return
        dtype = _DTYPES.get(mixed_precision, mixed_precision)
        if dtype not in _DTYPES.values():
            raise ValueError(
                f"mixed_precision: {mixed_precision!r} does not work with veScale-FSDP; accepted: "
                "no, bf16, and fp16 on CUDA"
            )
        self.mixed_precision_policy = MixedPrecisionPolicy(
            param_dtype=dtype, reduce_dtype=_DTYPES[self.reduce_dtype]
        )

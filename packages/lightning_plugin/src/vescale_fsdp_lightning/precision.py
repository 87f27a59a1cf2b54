"""Checks Lightning's ``precision=``, and converts it to the dtypes of a unit."""

from __future__ import annotations

from typing import Any

import torch

from vescale_fsdp import MixedPrecisionPolicy

__all__ = ["check_precision", "policy_for"]

_PRECISIONS = ("32-true", "64-true", "bf16-mixed", "bf16-true", "16-true", "16-mixed (on CUDA)")
_MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def check_precision(plugin: Any) -> None:
    """Raise if a precision plug-in does not work with sharded parameters.

    Raises:
        ValueError: names the precisions that work.
    """
    accepted = [each.partition(" ")[0] for each in _PRECISIONS]
    on_cpu = plugin.precision == "16-mixed" and plugin.device == "cpu"
    if plugin.precision not in accepted or on_cpu:
        where = ', accelerator="cpu"' if on_cpu else ""
        raise ValueError(
            f'strategy="vescale_fsdp", precision={plugin.precision!r}{where} does not work; choose '
            f"one of {', '.join(_PRECISIONS)}"
        )


def policy_for(precision: str, *, is_root: bool) -> MixedPrecisionPolicy:
    """Return the dtypes of a unit.

    Mixed precisions all-gather and compute in 16 bits and reduce gradients in fp32, under the
    plug-in's autocast. Shards and optimizer states stay in fp32. With ``bf16-true``,
    ``16-true`` and ``64-true`` the parameters themselves have been converted. Inputs of the root
    are not cast.
    """
    if precision not in _MIXED:
        return MixedPrecisionPolicy()
    return MixedPrecisionPolicy(
        param_dtype=_MIXED[precision],
        reduce_dtype=torch.float32,
        cast_forward_inputs=not is_root,
    )

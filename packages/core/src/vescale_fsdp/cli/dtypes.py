"""Dtypes by name and size, so that a plan needs no torch."""

from __future__ import annotations

from dataclasses import dataclass

from vescale_fsdp.cli.errors import InputError


@dataclass(frozen=True)
class Dtype:
    """A dtype, without torch."""

    name: str  # torch's, such as "bfloat16"
    itemsize: int
    floating: bool = True


BF16, FP32 = Dtype("bfloat16", 2), Dtype("float32", 4)
_DTYPES = {
    "fp64": Dtype("float64", 8),
    "fp32": FP32,
    "bf16": BF16,
    "fp16": Dtype("float16", 2),
}


def parse_dtype(text: str, option: str) -> Dtype:
    """``fp32``, ``bf16``, ... or torch's name of it.

    Raises:
        InputError: it is none of them.
    """
    for short, dtype in _DTYPES.items():
        if text.removeprefix("torch.") in (short, dtype.name):
            return dtype
    raise InputError(f"{option} is {text!r}, expected one of {', '.join(_DTYPES)}")

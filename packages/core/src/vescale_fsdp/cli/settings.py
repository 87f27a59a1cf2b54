"""What a plan is asked for: ranks, dtypes, optimizer, wire. Parsed and checked."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from vescale_fsdp.cli.codes import AS_THEY_ARE, Codes
from vescale_fsdp.cli.dtypes import BF16, FP32, Dtype
from vescale_fsdp.cli.errors import InputError

Backend = Literal["nccl", "gloo"]


_MOST_RANKS = 1 << 20  # states are counted rank by rank


@dataclass(frozen=True)
class Settings:
    """The options of one plan."""

    num_ranks: int
    num_replicas: int = 1  # HSDP: groups of num_ranks / num_replicas
    compute_dtype: Dtype = BF16  # of what is gathered, and of gradients
    reduce_dtype: Dtype = FP32  # in which gradients are summed
    optimizer: str = "adamw"
    reshard: bool | None = None  # reshard_after_forward of all units; None: all but the root
    backend: Backend = "nccl"
    bandwidth_bytes_per_s: float = 50e9
    order: str = "auto"
    in_flight: int = 2
    codes: Codes = AS_THEY_ARE

    def __post_init__(self) -> None:
        if not 1 <= self.num_ranks <= _MOST_RANKS:
            raise InputError(f"--ranks is {self.num_ranks}, expected 1 to {_MOST_RANKS:,}")
        if self.num_replicas < 1:
            raise InputError(f"--replicas is {self.num_replicas}, expected at least 1")
        if self.num_ranks % self.num_replicas:
            raise InputError(
                f"--ranks {self.num_ranks} cannot be divided into --replicas "
                f"{self.num_replicas} equal groups; take a divisor of {self.num_ranks}"
            )

    @property
    def num_shards(self) -> int:
        """Ranks that one copy of the model is sharded over."""
        return self.num_ranks // self.num_replicas


_BANDWIDTH = re.compile(
    r"(?P<number>\d+(\.\d+)?)\s*(?P<scale>[kmgt]?)(?P<unit>bits?|bytes?|b)(/s|ps)?", re.IGNORECASE
)
_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def parse_bandwidth(text: str) -> float:
    """Bytes per second of ``400Gbit``, ``1Gbit``, ``50GB``; powers of ten.

    Case matters in one letter only: ``b`` is a bit, ``B`` a byte. In ``50gb``, where nothing
    shows that it was meant, neither is taken.

    Raises:
        InputError: it is no number with a unit, it is zero, or it may mean bits or bytes.
    """
    found = _BANDWIDTH.fullmatch(text.strip())
    if not found or not float(found["number"]):
        raise InputError(
            f"--bandwidth is {text!r}, expected a number above 0 with its unit: 400Gbit or 50GB"
        )
    number, scale, unit = found["number"], found["scale"], found["unit"]
    if unit == "b" and scale in tuple("mgt"):
        raise InputError(
            f"--bandwidth is {text!r}, which may be bits or bytes; "
            f"write {number}{scale.upper()}bit or {number}{scale.upper()}B"
        )
    is_bytes = unit == "B" or unit.lower().startswith("byte")
    return float(number) * _SCALES[scale.lower()] / (1 if is_bytes else 8)

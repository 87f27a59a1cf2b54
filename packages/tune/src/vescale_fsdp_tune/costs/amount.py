"""An amount of memory in words: ``10GiB``, ``80%``, ``auto``."""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS = {"": 1, "K": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}
_UNITS |= {f"{letter}I": 1024**power for power, letter in enumerate("KMGT", 1)}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([KMGT]?I?)B?", re.IGNORECASE)
_NUMBER = re.compile(r"\d+(?:\.\d+)?")
_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%")
_AUTO = 0.9  # of what is free

ACCEPTED = (
    'a size as "10GiB", a part of the device\'s memory as "80%", "auto", a number of bytes, or the '
    'path of a written choice as "choice.yaml"'
)


@dataclass(frozen=True)
class Amount:
    """An amount of a device's memory: bytes, a share of all, or a share of what is free.

    Attributes:
        num_bytes: if it is a size.
        of_total: share of the device's memory.
        of_free: share of the memory that is free now.
    """

    num_bytes: int | None = None
    of_total: float | None = None
    of_free: float | None = None

    @classmethod
    def parse(cls, value: object) -> Amount:
        """Parse ``"10GiB"`` (or GB, with powers of 1,000), ``"80%"``, ``"auto"`` (90% of what is
        free), or an int of bytes.

        Raises:
            ValueError: it is something else. The message lists what is accepted.
        """
        is_int = isinstance(value, int) and not isinstance(value, bool)
        text = str(value).strip() if is_int or isinstance(value, str) else ""
        if is_int and int(text) > 100:
            return cls(num_bytes=int(text))
        if _NUMBER.fullmatch(text) and float(text) > 0:
            raise ValueError(
                f"budget {value!r} has neither a percent sign nor a unit: write "
                f'"{text}%" or "{text}GiB"; bytes are an int above 100'
            )
        if text == "auto":
            return cls(of_free=_AUTO)
        if (percent := _PERCENT.fullmatch(text)) and 0 < float(percent[1]) <= 100:
            return cls(of_total=float(percent[1]) / 100)
        if (size := _SIZE.fullmatch(text)) and float(size[1]) > 0:
            return cls(num_bytes=round(float(size[1]) * _UNITS[size[2].upper()]))
        raise ValueError(f"budget {value!r} does not work; accepted: {ACCEPTED}")

    def bytes_of(self, total_bytes: int, free_bytes: int) -> int:
        """Return the bytes on a device with so much memory."""
        if self.num_bytes is not None:
            return self.num_bytes
        if self.of_total is not None:
            return int(self.of_total * total_bytes)
        assert self.of_free is not None, "one of the three"
        return int(self.of_free * free_bytes)


def is_path(value: object) -> bool:
    """Whether a budget is the path of a written choice."""
    return isinstance(value, str) and value.lower().endswith((".yaml", ".yml"))


def is_budget(value: object) -> bool:
    """Whether `vescale_fsdp_tune.Budget.of` accepts a value. Loads no torch."""
    if is_path(value) or type(value).__name__ == "Budget":
        return True
    try:
        Amount.parse(value)
    except ValueError:
        return False
    return True

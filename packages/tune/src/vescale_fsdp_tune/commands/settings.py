"""Parses and checks the options of a plan: ranks, dtypes, network, blocks, 8-bit codes.

``--granularity`` is a list of rules: ``SPEC`` (for matrices: tensors of two or more dimensions) or
``PATTERN=SPEC`` (for tensors whose name in their unit matches the shell pattern). The last rule
that matches a tensor is used. A tensor without a rule may be split anywhere.

``--gather-codec`` and ``--reduce-codec`` are ``int8``, ``int8:32x32``, ``e4m3:256``: the dtype of
the codes, then the block, rows x columns of a tile or consecutive elements.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from vescale_fsdp.cli.text import InputError
from vescale_fsdp_tune.costs import settings
from vescale_fsdp_tune.costs.model import DTYPES, Dtype, Tensor
from vescale_fsdp_tune.costs.settings import Activations, Code

_MOST_RANKS = 1 << 20  # a limit, because states are counted for each rank
_CODE = re.compile(r"(?P<dtype>\w+)(:(?P<first>[1-9]\d*)(x(?P<columns>[1-9]\d*))?)?")
_SPECS = "elements:256, rows:128, tile:32x32 or whole, after an optional PATTERN="
_SPEC = re.compile(r"elements:(\d+)|rows:(\d+)|tile:(\d+)x(\d+)|whole")

_Block = Callable[[Sequence[int]], int]  # from the shape to the block, in elements


@dataclass(frozen=True)
class Settings(settings.Settings):
    """The options of one plan."""

    batch: tuple[int, int] | None = None  # sequences and tokens of each, on one rank
    inputs: str | None = None  # module:function that returns the arguments of forward
    activations: Activations = "keep"
    elastic: int | None = None  # replicas of memory checkpoints

    def __post_init__(self) -> None:
        if not 1 <= self.num_ranks <= _MOST_RANKS:
            raise InputError(f"--ranks is {self.num_ranks}, expected 1 to {_MOST_RANKS:,}")
        if self.num_replicas < 1:
            raise InputError(f"--replicas is {self.num_replicas}, expected at least 1")
        if self.num_ranks % self.num_replicas:
            raise InputError(
                f"--ranks {self.num_ranks} cannot be divided into --replicas "
                f"{self.num_replicas} equal groups; use a divisor of {self.num_ranks}"
            )
        if self.elastic is not None and self.elastic < 0:
            raise InputError(f"--elastic is {self.elastic}, expected at least 0")
        if self.batch is not None and self.inputs is not None:
            raise InputError("--batch and --inputs are both there, expected one of them")
        if self.activations != "keep" and not self.has_inputs:
            raise InputError(f"--activations {self.activations} needs --batch or --inputs")

    @property
    def has_inputs(self) -> bool:
        """Whether a step is run to count its activations."""
        return self.batch is not None or self.inputs is not None


class BlockRules:
    """The rules of ``--granularity``. Raises InputError if one is invalid."""

    def __init__(self, rules: Sequence[str]) -> None:
        self._rules: list[tuple[str | None, _Block]] = []  # pattern None: for matrices
        for rule in rules:
            pattern, equals, spec = rule.rpartition("=")
            if equals and not pattern:
                raise InputError(f"--granularity {rule!r} has no pattern before '='")
            self._rules.append((pattern or None, _block(spec, rule)))
        self._hits = [False] * len(rules)
        self._texts = list(rules)

    def block(self, tensor: Tensor) -> int | None:
        """Return the block of a tensor in elements. None: no rule matches it."""
        found = None
        for index, (pattern, block) in enumerate(self._rules):
            if pattern is None:
                fits = len(tensor.shape) >= 2
            else:
                fits = fnmatch.fnmatchcase(tensor.name, pattern)
            if fits:
                self._hits[index] = True
                found = block(tensor.shape)
        return found

    def unmatched(self) -> list[str]:
        """Return the rules that have matched no tensor so far. Their pattern may be wrong."""
        return [text for text, hit in zip(self._texts, self._hits, strict=True) if not hit]


def _block(spec: str, rule: str) -> _Block:
    found = _SPEC.fullmatch(spec)
    if not found:
        raise InputError(f"--granularity {rule!r}: {spec!r} is none of {_SPECS}")
    from vescale_fsdp import Granularity  # loads torch

    elements, rows, tile_rows, tile_columns = (int(n) if n else None for n in found.groups())
    try:
        if elements is not None:
            return Granularity.elements(elements).block
        if rows is not None:
            return Granularity.rows(rows).block
        if tile_rows is not None and tile_columns is not None:
            return Granularity.tile(tile_rows, tile_columns).block
    except ValueError as error:
        raise InputError(f"--granularity {rule!r}: {error}") from error
    return Granularity.whole().block


def parse_dtype(text: str, option: str) -> Dtype:
    """Parse ``fp32``, ``bf16``, ... or torch's name of a dtype. Raises InputError."""
    for short, dtype in DTYPES.items():
        if text.removeprefix("torch.") in (short, dtype.name):
            return dtype
    raise InputError(f"{option} is {text!r}, expected one of {', '.join(DTYPES)}")


def parse_code(
    text: str, option: str, dtypes: tuple[str, ...], block: int | tuple[int, int]
) -> Code:
    """Parse a code of the command line.

    Args:
        dtypes: the dtypes that are allowed.
        block: the default block.
    """
    found = _CODE.fullmatch(text)
    if not found or found["dtype"] not in dtypes:
        raise InputError(
            f"{option} is {text!r}, expected {' or '.join(dtypes)}, and a block if need be: "
            f"{dtypes[0]}:128x128 or {dtypes[0]}:256"
        )
    if found["first"]:
        first = int(found["first"])
        block = (first, int(found["columns"])) if found["columns"] else first
    return Code(found["dtype"], block)  # type: ignore[arg-type]


def parse_batch(text: str) -> tuple[int, int]:
    """Parse ``8x1024``: sequences of one rank, and tokens of each. Raises InputError."""
    found = re.fullmatch(r"([1-9]\d{0,8})x([1-9]\d{0,8})", text.strip())
    if not found:
        raise InputError(
            f"--batch is {text!r}, expected sequences of one rank x tokens of each: 8x1024"
        )
    return int(found[1]), int(found[2])


_BANDWIDTH = re.compile(
    r"(?P<number>\d+(\.\d+)?)\s*(?P<scale>[kmgt]?)(?P<unit>bits?|bytes?|b)(/s|ps)?", re.IGNORECASE
)
_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def parse_bandwidth(text: str) -> float:
    """Parse ``400Gbit``, ``1Gbit`` or ``50GB`` to bytes per second. Prefixes are powers of ten.

    Case matters only for ``b`` (bit) and ``B`` (byte). ``50gb`` could mean both and is refused.

    Raises:
        InputError: it is not a number with a unit, it is zero, or it may mean bits or bytes.
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

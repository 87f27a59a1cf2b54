"""``--gather-codec`` and ``--reduce-codec``: what travels as 8-bit codes, as the engine chooses it.

``int8``, ``int8:32x32``, ``e4m3:256``: the dtype of the codes, then the block: rows x columns of a
tile, or consecutive elements.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from vescale_fsdp.cli.errors import InputError

if TYPE_CHECKING:
    from vescale_fsdp.cli.model import Group, Tensor
    from vescale_fsdp.dbuffer import Coding
    from vescale_fsdp.planner import TensorSpec

_CODE = re.compile(r"(?P<dtype>\w+)(:(?P<first>[1-9]\d*)(x(?P<columns>[1-9]\d*))?)?")


@dataclass(frozen=True)
class Code:
    """The dtype of codes, and what shares a scale."""

    dtype: Literal["int8", "e4m3"]
    block: int | tuple[int, int]

    def __str__(self) -> str:
        size = f"{self.block[0]}x{self.block[1]}" if isinstance(self.block, tuple) else self.block
        return f"{self.dtype}:{size}"

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor has as many elements as a block."""
        numel = math.prod(self.block) if isinstance(self.block, tuple) else self.block
        return tensor.numel >= numel


@dataclass(frozen=True)
class Codes:
    """How weights and gradients travel; None: as they are."""

    gather: Code | None = None
    reduce: Code | None = None

    def of(self, tensor: Tensor, group: Group) -> tuple[Coding | None, Coding | None]:
        """How one tensor travels in gathers and in reductions, by the rules of the engine."""
        if (self.gather is None and self.reduce is None) or not group.dtype.floating:
            return None, None
        from vescale_fsdp.dbuffer import Coding  # loads torch
        from vescale_fsdp.engine import is_matrix
        from vescale_fsdp.ragged import Blocks

        def coding(code: Code | None, is_chosen: bool) -> Coding | None:
            if code is None or not is_chosen or not code.fits(tensor):
                return None
            return Coding(code.dtype, Blocks(code.block, tensor.shape))

        return coding(self.gather, tensor.is_hidden), coding(self.reduce, is_matrix(tensor.shape))

    def spec(self, tensor: Tensor, group: Group, asked: int | None) -> TensorSpec:
        """A tensor for the planner, with a block that keeps those of its codes whole.

        Args:
            asked: the block of ``--granularity``; None: it asks for nothing.

        Raises:
            InputError: ``--granularity`` lets cuts go through them.
        """
        from vescale_fsdp.planner import TensorSpec

        gather, reduce = self.of(tensor, group)
        if gather is None and reduce is None:
            return TensorSpec(tensor.name, tensor.shape, 1 if asked is None else asked)
        from vescale_fsdp.engine import checked_block

        try:
            block = checked_block(tensor.name, tensor.shape, asked, gather, reduce)
        except ValueError as error:
            raise InputError(
                f"--granularity lets cuts go between any two blocks of {asked} elements of "
                f"{tensor.name!r}, of shape {list(tensor.shape)}, but it travels as "
                f"{gather or reduce}; leave it out for this tensor, and it will be what is needed"
            ) from error
        return TensorSpec(tensor.name, tensor.shape, block)


AS_THEY_ARE = Codes()


def parse_code(
    text: str, option: str, dtypes: tuple[str, ...], block: int | tuple[int, int]
) -> Code:
    """A code as it is written on the command line.

    Args:
        dtypes: that the option offers.
        block: if none is written.

    Raises:
        InputError: it is none.
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

"""What the planner needs to know of a tensor: a name, a shape and a block size.

A block is a run of elements, in storage order, that no shard boundary may go through. Blocks
are counted from the tensor's first element, and the last one may be partial::

    shape (3, 4), block 4 (a row)      |0 1 2 3|4 5 6 7|8 9 10 11|    cuts allowed at 4, 8
    shape (10,),  block 4              |0 1 2 3|4 5 6 7|8 9|          cuts allowed at 4, 8
    shape (10,),  block 10 or more     |0 1 2 3 4 5 6 7 8 9|          never cut
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from functools import cached_property

from vescale_fsdp.errors import PlanError


@dataclass(frozen=True)
class TensorSpec:
    """One tensor of a group, as the planner sees it.

    ``shape`` is the full shape, ``()`` for a scalar. ``block`` counts elements, not rows; a
    block larger than the tensor means the whole tensor.

    Raises:
        PlanError: a dimension is negative, ``block`` is below 1, or one of them is no integer.
    """

    name: str
    shape: tuple[int, ...]
    block: int

    def __post_init__(self) -> None:
        try:
            dims = tuple(self.shape)
        except TypeError:
            raise PlanError(
                f"tensor {self.name!r}: shape is {self.shape!r}, expected a tuple of integers; "
                f"pass (n,) for one dimension and () for a scalar"
            ) from None
        # torch.Size and NumPy integers become plain ones, so that digests do not depend on them.
        shape = tuple(
            checked_int(d, f"tensor {self.name!r}: dimension {i}", 0, _ASK_SHAPE)
            for i, d in enumerate(dims)
        )
        block = checked_int(self.block, f"tensor {self.name!r}: block", 1, _ASK_BLOCK)
        object.__setattr__(self, "shape", shape)
        object.__setattr__(self, "block", block)

    @cached_property
    def numel(self) -> int:
        """Number of elements: 1 for a scalar, 0 where a dimension is 0."""
        return math.prod(self.shape)


_ASK_SHAPE = "pass the tensor's full shape"
_ASK_BLOCK = "pass the number of elements that must stay together, 1 if any cut will do"


def checked_int(value: object, what: str, least: int, advice: str) -> int:
    """``value`` as a plain int of at least ``least``; the error names ``what`` and the way out.

    Raises:
        PlanError: ``value`` is no integer, or below ``least``.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise PlanError(f"{what} is {value!r}, expected an integer; {advice}") from None
    if number < least:
        raise PlanError(f"{what} is {number}, expected at least {least}; {advice}")
    return number

"""What must be the same in all replicas in each step, compared by numbers that lanes sum.

A sum of numbers shows whether they were all the same: n times the sum of squares is then the square
of the sum. Digests of 16 bits are compared so, because their squares are exact in fp64.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

_DIGESTS = 3
NUM_NUMBERS = 1 + 3 * _DIGESTS + 2


@dataclass(frozen=True)
class Facts:
    """The facts of one replica in one step.

    Attributes:
        nominal: the samples of a step in which all replicas take part.
        num_trainable: the number of parameters that are trained.
        trainable: a digest of their names, sizes and dtypes.
    """

    nominal: float
    num_trainable: int
    trainable: str

    def numbers(self, *, is_reference: bool) -> list[float]:
        """What this member adds to the sum.

        Args:
            is_reference: whether the facts of this member are those that count. One does.
        """
        own = self._digests()
        shown = [*own, self.nominal, float(self.num_trainable)]
        counted = shown if is_reference else [0.0] * len(shown)
        return [1.0, *own, *(each * each for each in own), *counted]

    def is_same(self, numbers: Sequence[float]) -> bool:
        """Whether all members had the same facts, from the sum of their numbers."""
        count, sums, squares = numbers[0], numbers[1 : 1 + _DIGESTS], numbers[1 + _DIGESTS :]
        return all(
            count * square == total * total for total, square in zip(sums, squares, strict=False)
        )

    def is_reference(self, numbers: Sequence[float]) -> bool:
        """Whether these are the facts that count."""
        first = 1 + 2 * _DIGESTS
        return list(numbers[first : first + _DIGESTS]) == self._digests()

    def _digests(self) -> list[float]:
        text = f"{float(self.nominal)} {self.num_trainable} {self.trainable}"
        whole = hashlib.sha256(text.encode()).digest()
        return [float(int.from_bytes(whole[2 * i : 2 * i + 2])) for i in range(_DIGESTS)]


def counted_in(numbers: Sequence[float]) -> tuple[float, float]:
    """The samples and the number of trainable parameters that count, from a sum of numbers."""
    nominal, num_trainable = numbers[NUM_NUMBERS - 2 : NUM_NUMBERS]
    return nominal, num_trainable


def num_members(numbers: Sequence[float]) -> int:
    """How many members are in a sum of numbers."""
    return int(numbers[0])

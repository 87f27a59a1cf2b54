"""What a rank has issued, to compare it with what others have."""

from __future__ import annotations

from typing import Literal


class Issued:
    """What this rank has issued on one axis: how many collectives, and a digest of their sizes.

    The same on all ranks that have issued the same, in the same order.
    """

    def __init__(self) -> None:
        self.subject = 0  # what is sent, beside its size: hashed too
        self._of = {"gathers": (0, 0), "reductions": (0, 0)}

    def count(self, kind: Literal["gathers", "reductions"], num_elements: int) -> None:
        """One more, on its way."""
        number, digest = self._of[kind]
        self._of[kind] = number + 1, hash((digest, num_elements, self.subject))

    def as_list(self) -> list[list[int]]:
        """Of gathers, then of reductions: the number, and the digest."""
        return [list(each) for each in self._of.values()]

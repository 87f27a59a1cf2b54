"""A reduction that is under way, and a count of all collectives that were issued."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from vescale_fsdp import devices, waiting
from vescale_fsdp.dbuffer.memory import SlabPool, mapped_empty
from vescale_fsdp.devices import Waitable


@dataclass
class PendingReduce:
    """A reduction in flight. Holds its buffers until it is finished."""

    reduce_dtype: torch.dtype
    size: int = 1
    pool: SlabPool | None = None
    work: Waitable | None = None
    parts: Sequence[torch.Tensor] | None = None  # all_to_all: from each rank, still to be summed
    sum_parts: Callable[[Sequence[torch.Tensor]], torch.Tensor] | None = None  # if encoded
    done: torch.Tensor | None = None  # native: the sum over ranks, or the average
    is_average: bool = False
    divisor: float = 1.0
    _borrowed: list[torch.Tensor] = field(default_factory=list)

    def borrow(self, num_elements: int, dtype: torch.dtype) -> torch.Tensor:
        """Scratch memory until `finish`."""
        assert self.pool is not None, "a reduction over several ranks has a pool"
        self._borrowed.append(self.pool.take(num_elements, dtype))
        return self._borrowed[-1]

    def has_arrived(self, seconds: float, device: torch.device) -> bool:
        """Whether it has ended, waiting so long at most."""
        if self.work is None:
            return True
        if not isinstance(self.work, waiting.Ending):
            self.work = waiting.Ending(self.work, has_streams=devices.has_streams(device))
        return self.work.has_ended(seconds)

    def finish(self, what: str = "a reduction") -> torch.Tensor:
        """Wait, and return the sum over ranks by the divisor: flat, ``shard_size`` elements.

        Call it once.

        Args:
            what: it is, in the words of an error.
        """
        if self.work is not None:
            waiting.wait(self.work, what)
            self.work = None
        result = self.done
        if self.parts is not None:
            # Before it is divided a sum may be too large for fp16.
            wide = torch.float32 if self.reduce_dtype == torch.float16 else self.reduce_dtype
            result = self.sum_parts(self.parts) if self.sum_parts else _sum(self.parts, wide)
        assert result is not None, "a reduction has one of the two"
        if self.divisor != 1.0 and not self.is_average:
            result.mul_(1.0 / self.divisor)
        result = result.to(self.reduce_dtype)
        while self._borrowed and self.pool is not None:
            self.pool.give(self._borrowed.pop())
        self.parts = self.sum_parts = self.done = None
        return result


def _sum(parts: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
    """In ``dtype`` and in rank order, so that the sum is the same on every run."""
    first, second, *others = parts
    result = mapped_empty(first.numel(), dtype, first.device)
    if first.dtype == dtype:
        torch.add(first, second, out=result)
    else:
        result.copy_(first).add_(second)
    for part in others:
        result.add_(part)
    return result


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

"""The order of samples, and which of them a rank takes in a step.

Both depend on numbers only: a seed, a step and the number of ranks. So a restarted job, with any
number of ranks, takes the same samples in the same steps. Example: 12 samples a step, at most 3 in
a micro-batch::

    4 ranks   | 0 1 2 | 3 4 5 | 6 7 8 | 9 10 11 |             one micro-batch on each rank
    3 ranks   | 0 1 , 2 3 | 4 5 , 6 7 | 8 9 , 10 11 |         two on each
    2 ranks   | 0 1 2 , 3 4 5 | 6 7 8 , 9 10 11 |             two on each

All ranks have the same number of micro-batches, because forward and backward are collective.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Part:
    """A micro-batch: positions in the order of samples.

    Attributes:
        start, stop: half-open; there is at least one position.
        num_samples: those that count. 0: there are more micro-batches than samples, and the one
            position is that of another micro-batch's sample.
    """

    start: int
    stop: int
    num_samples: int


def num_micro_batches(global_batch: int, num_ranks: int, micro_batch: int) -> int:
    """The fewest micro-batches a rank that have at most ``micro_batch`` samples each."""
    return -(-global_batch // (num_ranks * micro_batch))


def parts(first: int, global_batch: int, rank: int, num_ranks: int, micro_batch: int) -> list[Part]:
    """Return the micro-batches of a rank in a step. Sizes differ by one sample at most.

    Args:
        first: the position of the step's first sample.
    """
    each = num_micro_batches(global_batch, num_ranks, micro_batch)
    total, found = num_ranks * each, []
    for number in range(rank * each, (rank + 1) * each):
        start = first + number * global_batch // total
        stop = first + (number + 1) * global_batch // total
        found.append(Part(start, max(stop, start + 1), stop - start))
    return found


@dataclass
class Order:
    """An endless order of samples: each epoch has every sample once.

    Steps ignore the ends of epochs: the last step of an epoch may take samples of the next.

    Args:
        num_samples: in the data.
        seed: of the shuffles. None: samples are in the order of the data.
    """

    num_samples: int
    seed: int | None = None
    _epochs: dict[int, torch.Tensor] = field(default_factory=dict)

    def indices(self, start: int, stop: int) -> Iterator[int]:
        """Yield the indices of the samples at these positions.

        Cost: a permutation of all indices for each new epoch, 8 bytes a sample; two are kept.
        """
        for position in range(start, stop):
            epoch, place = divmod(position, self.num_samples)
            yield place if self.seed is None else int(self._permutation(epoch)[place])

    def _permutation(self, epoch: int) -> torch.Tensor:
        if epoch not in self._epochs:
            assert self.seed is not None, "there is a shuffle"
            generator = torch.Generator().manual_seed(self.seed + epoch)
            while len(self._epochs) > 1:
                del self._epochs[min(self._epochs)]
            self._epochs[epoch] = torch.randperm(self.num_samples, generator=generator)
        return self._epochs[epoch]

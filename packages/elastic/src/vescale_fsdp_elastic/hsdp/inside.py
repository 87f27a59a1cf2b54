"""The ranks of one replica among themselves: small agreements, with a communicator of their own."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from vescale_fsdp import spi
from vescale_fsdp.errors import RankMismatchError
from vescale_fsdp.spi import Ranks, is_fake, waits


class Inside:
    """All ranks of the default group, or this process alone. Collective at the first call.

    Its waits have no limit of their own: one rank of a replica may wait long for another replica,
    while the others wait for that rank. When a rank dies, they end at once.
    """

    def __init__(self) -> None:
        world = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        self.group: dist.ProcessGroup | None = None
        if world is not None and dist.get_world_size() > 1 and not is_fake():
            self.group = spi.new_gloo_group()
            if self.group is None:
                raise RuntimeError(
                    "replicas send gradients to each other by gloo, and this torch was built "
                    "without it: install one with gloo"
                )
            waits.register(self.group)
        self.ranks = Ranks.linked(self.group)
        self.rank, self.size = self.ranks.rank, self.ranks.size

    def sums(self, values: Sequence[float]) -> list[float]:
        """Sum numbers over the ranks, the same bits on all of them.

        Cost: an all-reduce of 8 bytes a number.

        Raises:
            RankMismatchError: a rank of this replica has died.
        """
        if self.group is None:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        try:
            work = dist.all_reduce(tensor, group=self.group, async_op=True)
            assert work is not None, "this rank is in the group"
            work.wait()
        except RuntimeError as error:
            raise RankMismatchError(
                f"a rank of this replica has died (rank {self.rank} was cut off from it): this "
                "replica ends, and the others go on without it. Under torchrun with "
                f"--max-restarts it is started again and joins them (gloo says: {error})"
            ) from error
        result: list[float] = tensor.tolist()
        return result

    def all(self, is_so: bool) -> bool:
        """Whether it is so on all ranks."""
        return self.sums([float(is_so)])[0] == self.size

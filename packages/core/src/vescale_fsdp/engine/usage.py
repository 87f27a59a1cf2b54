"""Which parameters got a gradient on any rank: those that did on none keep ``.grad`` None.

A rank knows which of them it has used itself, and has to ask about the others only: zeros in place
of no gradient would let momentum and weight decay move them. So at the end of each backward that
synchronizes the ranks tell each other, in one byte a parameter, beside the last reductions. A rank
that has used all of its parameters does not look at what arrives (on an accelerator: its host does
not wait). What else was weighed: docs/design/engine.md.
"""

from __future__ import annotations

import torch

from vescale_fsdp import devices
from vescale_fsdp.dbuffer import Comm, Flags
from vescale_fsdp.engine.group import Group


class Usage:
    """The flags of the groups that one backward reduces, over the ranks of one mesh.

    Args:
        groups: those that are reduced, in an order that all ranks have.
        comm: of the ranks that reduce.
        asks: whether parameters that no rank used stay without a gradient. If not, every trainable
            parameter gets one, and nothing is communicated.

    Cost: `Flags`, of one byte a parameter, in the order of the communicator: to be made when all
    reductions of the backward have been issued.
    """

    def __init__(self, groups: list[Group], comm: Comm, *, asks: bool) -> None:
        self._groups, self._asks = groups, asks
        self._used = [[slot.used for slot in group.slots] for group in groups]
        self._flags: Flags | None = None
        if asks and comm.size * comm.num_replicas > 1:
            flat = [flag for flags in self._used for flag in flags]
            device = groups[0].pool.device
            self._flags = Flags(devices.from_host(flat, torch.uint8, device), comm)

    def finish(self) -> list[list[bool]]:
        """One flag a slot of each group: whether its gradient is to be published."""
        if not self._asks:
            return [[True] * len(flags) for flags in self._used]
        if self._flags is None:
            return self._used
        anywhere = self._flags.finish()
        if self._knows:
            return self._used
        flags = iter(anywhere.tolist())
        return [[bool(next(flags)) for _ in group] for group in self._used]

    @property
    def _knows(self) -> bool:
        """Whether this rank has used all that may get a gradient."""
        return all(
            was_used or not is_wanted
            for group, flags in zip(self._groups, self._used, strict=True)
            for is_wanted, was_used in zip(group.gradients.wanted, flags, strict=True)
        )

"""ZeRO's stages as data: what is sharded over which axis of the mesh, and when.

========== ============================ ============================ ============================
sharding   parameters, from forward     gradients, between micro-    optimizer states, and the
           to backward                  batches                      parameters between steps
========== ============================ ============================ ============================
ddp        replicated                   local sums                   replicated
zero1      replicated                   local sums                   sharded
zero2      replicated                   sharded                      sharded
zero3      sharded                      local sums *                 sharded
hsdp       sharded over the inner axis  local sums *                 sharded over the inner axis
hsdp_zero1 sharded over the inner axis  local sums *                 sharded over both axes
========== ============================ ============================ ============================

With ddp in one dtype the shard is the unsharded parameters: there is one copy, and nothing to
gather. With ddp, zero1 and zero2 on the CPU unsharded parameters and reduced gradients keep their
memory from step to step, as the buckets of ``DistributedDataParallel``: the kernel would have to
clear it again in each step. An accelerator's allocator keeps it anyway.

Of two axes the first (outer) one replicates, for example between machines, and the second (inner)
one shards. Micro-batches are those before the last of a step: backwards for which the user has
switched synchronization off. After the last one gradients are sharded as the optimizer states are.

(*) With ``accumulate="sharded"`` gradients between micro-batches are sharded over the axis that
shards, and local sums over the other.

Source: ZeRO, arXiv 1910.02054, section 5; hsdp_zero1 is what Megatron calls a distributed optimizer
over the outer axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum, auto
from types import MappingProxyType


class Kept(Enum):
    """What a rank holds of something, along one axis of the mesh."""

    CUT = auto()  # each rank holds its part
    COPIED = auto()  # each rank holds the same
    OWN_SUM = auto()  # each rank holds a term of the sum


_CUT, _COPIED, _OWN_SUM = Kept.CUT, Kept.COPIED, Kept.OWN_SUM


@dataclass(frozen=True)
class Row:
    """A row of the table. A column has one entry per axis, the outer one first."""

    parameters: tuple[Kept, ...]
    gradients: tuple[Kept, ...]
    optimizer: tuple[Kept, ...]

    @property
    def num_axes(self) -> int:
        return len(self.parameters)

    @property
    def cuts_parameters(self) -> bool:
        """Whether parameters are resharded between forward and backward."""
        return self.parameters[-1] is _CUT

    @property
    def cuts_gradients(self) -> bool:
        """Whether each backward reduces gradients, also those of micro-batches."""
        return self.gradients[-1] is _CUT

    @property
    def cuts_states(self) -> bool:
        """Whether optimizer states are sharded."""
        return self.optimizer[-1] is _CUT

    @property
    def cuts_states_outside(self) -> bool:
        """Whether optimizer states are sharded over the outer axis too."""
        return self.num_axes == 2 and self.optimizer[0] is _CUT


ZERO_TABLE: Mapping[str, Row] = MappingProxyType(
    {
        "ddp": Row((_COPIED,), (_OWN_SUM,), (_COPIED,)),
        "zero1": Row((_COPIED,), (_OWN_SUM,), (_CUT,)),
        "zero2": Row((_COPIED,), (_CUT,), (_CUT,)),
        "zero3": Row((_CUT,), (_OWN_SUM,), (_CUT,)),
        "hsdp": Row((_COPIED, _CUT), (_OWN_SUM, _OWN_SUM), (_COPIED, _CUT)),
        "hsdp_zero1": Row((_COPIED, _CUT), (_OWN_SUM, _OWN_SUM), (_CUT, _CUT)),
    }
)

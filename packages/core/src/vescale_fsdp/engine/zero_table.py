"""ZeRO's stages as placements: what is sharded over which axis of the mesh, and when.

========== ============================ ============================ ============================
sharding   parameters, from forward     gradients, between micro-    optimizer states, and the
           to backward                  batches                      parameters at rest
========== ============================ ============================ ============================
ddp        on every rank                each rank's own sum          on every rank
zero1      on every rank                each rank's own sum          cut
zero2      on every rank                cut                          cut
zero3      cut                          each rank's own sum *        cut
hsdp       copies; cut inside           each rank's own sum *        copies; cut inside
hsdp_zero1 copies; cut inside           each rank's own sum *        cut over both axes
========== ============================ ============================ ============================

Of two axes the first (outer) one replicates, for example between machines, and the second (inner)
one shards. Micro-batches are those before the last of a step: backwards that the user has switched
synchronization off for. After the last one gradients are sharded as the optimizer states are.

Without ``sharding`` it is zero3 on one axis, and hsdp on two: FSDP2's.

(*) With ``accumulate="sharded"`` they are sharded over the axis that shards, and own sums over the
other.

Source: ZeRO, arXiv 1910.02054, section 5; hsdp_zero1 is what Megatron calls a distributed optimizer
over the outer axis.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import Enum, auto
from types import MappingProxyType


class _Kept(Enum):
    CUT = auto()  # each rank holds its part
    COPIED = auto()  # each rank holds the same
    OWN_SUM = auto()  # each rank holds a term of the sum


_CUT, _COPIED, _OWN_SUM = _Kept.CUT, _Kept.COPIED, _Kept.OWN_SUM


@dataclass(frozen=True)
class Row:
    """One way to shard; a column has one entry per axis, outer first."""

    parameters: tuple[_Kept, ...]
    gradients: tuple[_Kept, ...]
    optimizer: tuple[_Kept, ...]

    @property
    def num_axes(self) -> int:
        return len(self.parameters)

    @property
    def cuts_parameters(self) -> bool:
        """Whether parameters are released between forward and backward."""
        return self.parameters[-1] is _CUT

    @property
    def cuts_gradients(self) -> bool:
        """Whether each backward reduces, also one that is not synchronized."""
        return self.gradients[-1] is _CUT

    @property
    def cuts_states(self) -> bool:
        """Whether the optimizer's states are cut at all."""
        return self.optimizer[-1] is _CUT

    @property
    def cuts_states_outside(self) -> bool:
        """Whether the optimizer's states are cut over the outer axis too."""
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

_DEFAULTS = {1: "zero3", 2: "hsdp"}  # by the number of axes: FSDP2's


def row_of(
    sharding: str | None,
    num_axes: int,
    accumulate: str | None,
    reshard_after_forward: bool | int | None,
) -> Row:
    """The row that arguments of ``fully_shard`` name.

    Raises:
        ValueError: there is no such row, it is for another number of axes, or the other two
            arguments contradict it.
    """
    if sharding is None:
        sharding = _DEFAULTS[num_axes]
    if sharding not in ZERO_TABLE:
        raise ValueError(
            f"fully_shard: sharding must be one of {', '.join(ZERO_TABLE)}, got {sharding!r}"
        )
    row = ZERO_TABLE[sharding]
    if row.num_axes != num_axes:
        names = " and ".join(n for n, r in ZERO_TABLE.items() if r.num_axes == num_axes)
        raise ValueError(
            f"fully_shard: sharding={sharding!r} is for a mesh of {row.num_axes} axes, got "
            f"{num_axes}; for that there are {names}"
        )
    if reshard_after_forward and not row.cuts_parameters:
        raise ValueError(
            f"fully_shard: sharding={sharding!r} keeps parameters after forward; leave out "
            f"reshard_after_forward={reshard_after_forward}, or use 'zero3'"
        )
    if accumulate is None:
        return row
    if accumulate not in ("unsharded", "sharded"):
        raise ValueError(
            f"fully_shard: accumulate must be 'unsharded' or 'sharded', got {accumulate!r}"
        )
    if (accumulate == "sharded") == row.cuts_gradients:
        return row
    if not row.cuts_parameters:  # another row has what is asked for
        other = {"zero1": "use sharding='zero2'", "zero2": "use sharding='zero1'"}
        raise ValueError(
            f"fully_shard: sharding={sharding!r} does not accumulate {accumulate} gradients; "
            + other.get(sharding, "nothing is sharded there")
        )
    return replace(row, gradients=(*row.gradients[:-1], _CUT))

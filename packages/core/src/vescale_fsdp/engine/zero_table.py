"""ZeRO's stages as placements: which state is sharded over which axis of the mesh, and when.

========== ============================ ============================ ============================
sharding   parameters, from forward     gradients, between micro-    optimizer states, and
           to backward                  batches                      parameters between steps
========== ============================ ============================ ============================
ddp        replicated                   unreduced                    replicated
zero1      replicated                   unreduced                    sharded
zero2      replicated                   sharded                      sharded
zero3      sharded                      unreduced *                  sharded
hsdp       replicated; sharded inside   unreduced *                  replicated; sharded inside
hsdp_zero1 replicated; sharded inside   unreduced *                  sharded over both axes
========== ============================ ============================ ============================

With two axes, the first (outer) one replicates, for example between machines, and the second
(inner) one shards. Unreduced: each rank has the sum of its own gradients, as full tensors.
Micro-batches are those for which the user has disabled gradient synchronization: all but the last
of a step. After the last one, gradients are sharded as the optimizer states.

The defaults are FSDP2's: zero3 with one axis, hsdp with two.

(*) With ``accumulate="sharded"`` they are reduced and sharded over the axis that shards, and
unreduced over the other.

Source: ZeRO, arXiv 1910.02054, section 5. hsdp_zero1 is Megatron's distributed optimizer over the
outer axis.
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
    """A row of the table. A column has one entry per axis, the outer one first."""

    parameters: tuple[_Kept, ...]
    gradients: tuple[_Kept, ...]
    optimizer: tuple[_Kept, ...]

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

_DEFAULTS = {1: "zero3", 2: "hsdp"}  # by the number of axes: FSDP2's


def row_of(
    sharding: str | None,
    num_axes: int,
    accumulate: str | None,
    reshard_after_forward: bool | int | None,
) -> Row:
    """Return the row for the arguments of ``fully_shard``.

    Raises:
        ValueError: there is no such row, it needs another number of axes, or the other two
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

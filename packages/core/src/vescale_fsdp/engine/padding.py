"""The warning about padding that a user of ``fully_shard`` did not expect."""

from __future__ import annotations

import warnings

from vescale_fsdp.planner import PaddingWarning, ShardLayout, advise

_LEAST_BYTES = 1 << 20  # of padding in the whole buffer: toy models pad a lot, and nobody minds


def warn_of_padding(layout: ShardLayout, itemsize: int, rank: int, stacklevel: int) -> None:
    """Warn, on the first rank, if blocks force more than 5% padding and that is over 1 MiB."""
    if rank == 0 and layout.padding * itemsize >= _LEAST_BYTES:
        advice = advise(layout)
        if advice is not None:
            warnings.warn(
                f"fully_shard: {advice} `vescale-fsdp plan` shows it",
                PaddingWarning,
                stacklevel=stacklevel + 1,
            )

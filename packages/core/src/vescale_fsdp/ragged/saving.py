"""What ``torch.load(weights_only=True)`` may call to rebuild ragged tensors.

It calls nothing that is not on torch's list, and torch puts its own placements and specs there.
Ours are functions and classes that only build what they are given. Loading needs the same mesh,
and gives each rank its part; for another number of ranks use a distributed checkpoint.
"""

from __future__ import annotations

import torch

from vescale_fsdp.compat import NormPartial
from vescale_fsdp.ragged.placement import RaggedShard, _rebuild_placement
from vescale_fsdp.ragged.tensor import RaggedTensor, _rebuild


def allow_loading() -> None:
    """Put on torch's list what rebuilds ragged tensors and the norms of tensors."""
    torch.serialization.add_safe_globals(
        [NormPartial, RaggedShard, RaggedTensor, _rebuild, _rebuild_placement]
    )

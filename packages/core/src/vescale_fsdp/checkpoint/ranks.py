"""For `elastic`, until it uses `vescale_fsdp.ranks`."""

from __future__ import annotations

import math
from typing import Any

import torch.distributed as dist

from vescale_fsdp import ranks
from vescale_fsdp.ranks import everyone as all_ranks

__all__ = ["Ranks", "all_ranks"]


class Ranks(ranks.Ranks):
    """The ranks of a group."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        numbers = [] if group is None else dist.get_process_group_ranks(group)
        super().__init__(numbers, dist.get_rank() if numbers else 0, link=group)

    def exchange(self, what: str, work: Any, combine: Any) -> Any:  # type: ignore[override]
        return self.together(what, work, combine, timeout_s=math.inf)

    def agree(self, what: str, work: Any) -> None:  # type: ignore[override]
        self.together(what, work, timeout_s=math.inf)

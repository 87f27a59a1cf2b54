"""A planner of ``torch.distributed.checkpoint`` for files that hold one box of each tensor.

DCP's default planners save and load a RaggedTensor: a flat range is a few boxes, and its own files
hold any number. Torch's safetensors files do not::

    dcp.save(state, storage_writer=HuggingFaceStorageWriter(...), planner=SavePlanner())
"""

from __future__ import annotations

import math
from typing import Any, cast

from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.tensor import Shard

from vescale_fsdp.ragged import RaggedTensor, redistribute


class SavePlanner(DefaultSavePlanner):
    """Each rank saves one box of each tensor, as ``HuggingFaceStorageWriter`` needs it.

    Not for ``async_save``: planning communicates, and would do so beside the training.

    Cost: where a part of a tensor is several boxes, one all-to-all that moves it to ``Shard(0)``,
    and the memory of the part.
    """

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: Any = None, is_coordinator: bool = False
    ) -> None:
        """As torch's. Collective."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        self.state_dict = {name: _as_one_box(value) for name, value in self.state_dict.items()}


def _as_one_box(value: Any) -> Any:
    if not isinstance(value, RaggedTensor) or value.dim() < 2 or _is_cut_in_rows(value):
        return value
    placements = list(value.placements)
    placements[value.ragged_axis] = Shard(0)
    return redistribute(cast(RaggedTensor, value.detach()), placements=placements)


def _is_cut_in_rows(tensor: RaggedTensor) -> bool:
    """Whether each rank has whole rows. The same on every rank."""
    if any(type(each) is Shard for each in tensor.placements):
        return False
    row = math.prod(tensor.shape[1:])
    return all(not row or n % row == 0 for _, n in tensor.ragged_placement.runs_in(tensor.shape))

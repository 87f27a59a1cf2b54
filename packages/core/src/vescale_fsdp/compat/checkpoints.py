"""What ``torch.distributed.checkpoint`` makes of a tensor that speaks `CheckpointableTensor`.

That protocol is in torch since 2.14. For 2.13 the two functions are here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.checkpoint import planner_helpers
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType


def chunks_by_hand(tensor: Any) -> list[ChunkStorageMetadata]:
    """The boxes that this rank holds."""
    boxes = zip(tensor.global_offsets, tensor.local_sizes, strict=True)
    return [ChunkStorageMetadata(torch.Size(at), torch.Size(sizes)) for at, sizes in boxes]


def write_items_by_hand(fqn: str, tensor: Any) -> list[WriteItem]:
    """What the plan of a save has of them."""
    properties = TensorProperties.create_from_tensor(tensor)
    size = torch.Size(tensor.global_shape)
    return [
        WriteItem(
            MetadataIndex(fqn, chunk.offsets, number),
            WriteItemType.SHARD,
            tensor_data=TensorWriteData(chunk, properties, size),
        )
        for number, chunk in enumerate(chunks_by_hand(tensor))
    ]


chunk_list: Callable[[Any], list[ChunkStorageMetadata]] = getattr(
    planner_helpers, "_get_checkpointable_tensor_chunks", chunks_by_hand
)
write_items: Callable[[str, Any], list[WriteItem]] = getattr(
    planner_helpers, "_get_checkpointable_tensor_write_items", write_items_by_hand
)

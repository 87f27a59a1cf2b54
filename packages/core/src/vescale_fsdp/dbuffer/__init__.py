"""DBuffer: one flat buffer per communication group, gathered and reduced in place.

`memory` is allocated only while it is needed. `buffer` has the parameters of a group as views of a
flat tensor, and `gradients` has their gradients, at the offsets of a `packing`. `collectives`
gathers and reduces both, over a `transport`. A `message` holds several small buffers. A `codec`
encodes what is sent: `block_codec` sends the codes of `eight_bits`. On CUDA the kernels of
`codec_kernels` write and read many messages in one launch (`codec_launches`), from
`codec_tables`. What is for 8 bits is loaded when it is asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vescale_fsdp.dbuffer.buffer import DBuffer, ParameterBuffer, plain_tensors, shard_view
from vescale_fsdp.dbuffer.codec import Codec, EncodedShard
from vescale_fsdp.dbuffer.collectives import Comm, choose_reduction
from vescale_fsdp.dbuffer.gradients import GradientBuffer, Residuals
from vescale_fsdp.dbuffer.memory import (
    SMALLEST_LASTING,
    Lasting,
    Region,
    SlabPool,
    hand_back,
    is_checked,
    make_region,
    mapped_empty,
    on_lane,
    pool_for,
)
from vescale_fsdp.dbuffer.message import Flags, GatherMessage, SharedReduce, start_reduce_together
from vescale_fsdp.dbuffer.packing import Packing
from vescale_fsdp.dbuffer.transport import (
    SHORTEST_BYTES,
    Exchange,
    PendingReduce,
    ThenCopy,
    let_ranks_go_first,
)

if TYPE_CHECKING:
    from vescale_fsdp.dbuffer.block_codec import BlockCodec, KeptCodes
    from vescale_fsdp.dbuffer.eight_bits import (
        CodeDtype,
        Coding,
        checked_block,
        decode_blocks,
        encode,
        is_offered,
    )

__all__ = [
    "SHORTEST_BYTES",
    "SMALLEST_LASTING",
    "BlockCodec",
    "CodeDtype",
    "Codec",
    "Coding",
    "Comm",
    "DBuffer",
    "EncodedShard",
    "Exchange",
    "Flags",
    "GatherMessage",
    "GradientBuffer",
    "KeptCodes",
    "Lasting",
    "Packing",
    "ParameterBuffer",
    "PendingReduce",
    "Region",
    "Residuals",
    "SharedReduce",
    "SlabPool",
    "ThenCopy",
    "checked_block",
    "choose_reduction",
    "decode_blocks",
    "encode",
    "hand_back",
    "is_checked",
    "is_offered",
    "let_ranks_go_first",
    "make_region",
    "mapped_empty",
    "on_lane",
    "plain_tensors",
    "pool_for",
    "shard_view",
    "start_reduce_together",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = "block_codec" if name in ("BlockCodec", "KeptCodes") else "eight_bits"
    return getattr(import_module(f"{__name__}.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

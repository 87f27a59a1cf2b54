"""DBuffer: one flat buffer per communication group, gathered and reduced in place.

`memory` comes and goes (`mapped` on CPUs), `flat` is a tensor with fixed views on it, `buffer` the
parameters of a group, `gradients` their gradients, where a `packing` says, `collectives` moves both
between ranks (`exchange` on CPUs, and a `message` of several that are small, where `threads` keeps
gloo's out of the way), `flags` tells what any rank has used. A `codec` writes what travels:
`block_codec` has codes of `eight_bits`, which `kept_codes` hands on as they are. On CUDA
(`codec_choice`) the kernels of `codec_kernels` write and read many messages in one launch
(`codec_launches`), from `codec_tables`.
"""

from vescale_fsdp.dbuffer.block_codec import BlockCodec, Coding, decode_blocks, encode_blocks
from vescale_fsdp.dbuffer.buffer import DBuffer, shard_view
from vescale_fsdp.dbuffer.codec import Cast, Codec, Outbox
from vescale_fsdp.dbuffer.collectives import Comm, choose_reduction
from vescale_fsdp.dbuffer.custom import ThenCopy
from vescale_fsdp.dbuffer.eight_bits import CodeDtype, is_offered
from vescale_fsdp.dbuffer.exchange import SHORTEST_BYTES, Exchange
from vescale_fsdp.dbuffer.flags import Flags
from vescale_fsdp.dbuffer.flat import FlatBuffer, plain_tensors
from vescale_fsdp.dbuffer.gradients import GradientBuffer
from vescale_fsdp.dbuffer.kept_codes import KeptCodes
from vescale_fsdp.dbuffer.mapped import hand_back
from vescale_fsdp.dbuffer.memory import SlabPool, mapped_empty, pool_for
from vescale_fsdp.dbuffer.message import GatherMessage, SharedReduce, start_reduce_together
from vescale_fsdp.dbuffer.packing import Packing
from vescale_fsdp.dbuffer.pending import PendingReduce
from vescale_fsdp.dbuffer.threads import let_ranks_go_first

__all__ = [
    "SHORTEST_BYTES",
    "BlockCodec",
    "Cast",
    "CodeDtype",
    "Codec",
    "Coding",
    "Comm",
    "DBuffer",
    "Exchange",
    "Flags",
    "FlatBuffer",
    "GatherMessage",
    "GradientBuffer",
    "KeptCodes",
    "Outbox",
    "Packing",
    "PendingReduce",
    "SharedReduce",
    "SlabPool",
    "ThenCopy",
    "choose_reduction",
    "decode_blocks",
    "encode_blocks",
    "hand_back",
    "is_offered",
    "let_ranks_go_first",
    "mapped_empty",
    "plain_tensors",
    "pool_for",
    "shard_view",
    "start_reduce_together",
]

"""The planner: places the tensors of a communication group in one flat, evenly sharded buffer.

For tensors with blocks that must not be split, it finds the least shard size and a start
for every tensor, so that all ranks have shards of the same size, every tensor is contiguous, and
shard boundaries fall between blocks. Tensors keep the given order, or get
another one if that reduces padding. It computes with integers and imports no torch.

Example: three tensors over 4 ranks.

>>> from vescale_fsdp.planner import TensorSpec, plan
>>> layout = plan(
...     [
...         TensorSpec("a", (2, 4), block=4),  # rows stay whole
...         TensorSpec("b", (3,), block=1),  # may be split anywhere
...         TensorSpec("c", (5, 2), block=2),
...     ],
...     num_shards=4,
... )
>>> layout.shard_size, layout.offsets, layout.padding
(6, (2, 10, 14), 3)
>>> layout.order_name, layout.optimal
('definition', True)

::

    rank 0  | . . a a a a |   a starts at 2, so that the boundary at 6 is one row from its start
    rank 1  | a a a a b b |   the boundary at 12 goes through b, which has no blocks
    rank 2  | b . c c c c |   c starts at 14: the boundary at 18 is two rows from its start
    rank 3  | c c c c c c |

21 elements need S >= 6, so S = 6 is the least, and 3 of 24 elements (``.``) are padding.

Files: ``layout`` (input and output), ``solve`` (branch and bound: the least shard size for an
order, and a bound for all orders), ``orders`` (the orders that are tried), ``api``
(``plan``, and advice on what to change where padding is large).
"""

from __future__ import annotations

from vescale_fsdp.planner.api import PADDING_LIMIT as PADDING_LIMIT  # of other floors, not public
from vescale_fsdp.planner.api import Advice, PaddingWarning, advise, lay_out, plan
from vescale_fsdp.planner.api import is_forced as is_forced
from vescale_fsdp.planner.layout import ShardLayout, TensorSpec

__all__ = [
    "Advice",
    "PaddingWarning",
    "ShardLayout",
    "TensorSpec",
    "advise",
    "lay_out",
    "plan",
]

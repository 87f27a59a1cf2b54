"""The planner: where the tensors of a communication group lie in one flat, evenly cut buffer.

Given tensors in order, each with a block that must not be cut, it finds the least shard size
and a start for every tensor, so that all ranks have shards of the same size, every tensor is
contiguous, and shard boundaries fall between blocks. Pure integers: it imports no torch.

Example: three tensors over 4 ranks.

>>> from vescale_fsdp.planner import TensorSpec, plan
>>> layout = plan(
...     [
...         TensorSpec("a", (2, 4), block=4),  # rows stay whole
...         TensorSpec("b", (3,), block=1),  # may be cut anywhere
...         TensorSpec("c", (5, 2), block=2),
...     ],
...     num_shards=4,
... )
>>> layout.shard_size, layout.offsets, layout.padding
(6, (2, 10, 14), 3)

::

    rank 0  | . . a a a a |   a starts at 2, so that the cut at 6 is one row from its start
    rank 1  | a a a a b b |   the cut at 12 goes through b, which does not mind
    rank 2  | b . c c c c |   c starts at 14: the cut at 18 is two rows from its start
    rank 3  | c c c c c c |

21 elements need S >= 6, so S = 6 is the least, and 3 of 24 elements (``.``) are padding.

Files: ``spec`` (what goes in), ``solve`` (the search), ``layout`` (what comes out), ``api``
(``plan``), ``naive`` (the same by brute force, for tests).
"""

from __future__ import annotations

from vescale_fsdp.planner.api import plan
from vescale_fsdp.planner.layout import ShardLayout
from vescale_fsdp.planner.spec import TensorSpec

__all__ = ["ShardLayout", "TensorSpec", "plan"]

"""One floor where ranks talk to each other: text and JSON only, every wait has a limit.

Read in this order; each file is one concept.

- `limits`: how long a rank waits (``VESCALE_FSDP_TIMEOUT_S``).
- `waits`: the bounded wait of a collective, and what ends all waits (`abort`). `notes`: what each
  rank does, for the errors of the others. `threads`: waits that another thread can end.
- `alarm`: by which ranks hear that another one has given up, where NCCL keeps their devices.
- `attempt`: a store whose keys are new in each attempt of a job.
- `ranks`: `Ranks`, with which ranks compare, exchange and do things together, or all raise.
- `collectives`: process groups, and collectives on tensors with bounded waits.

docs/design/ranks.md says who uses what, and why.
"""

from vescale_fsdp.ranks.attempt import AbsentError, init_process_group
from vescale_fsdp.ranks.limits import limit_s
from vescale_fsdp.ranks.ranks import Ranks, everyone, merge_pairs, over

__all__ = [
    "AbsentError",
    "Ranks",
    "everyone",
    "init_process_group",
    "limit_s",
    "merge_pairs",
    "over",
]

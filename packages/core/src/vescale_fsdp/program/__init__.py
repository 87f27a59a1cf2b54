"""A step as data: what all ranks issue, decided in integers, with neither torch nor processes.

`order` is the sequence of a pass and a rank's way along it, `predict` says it before anybody has
run, `record` is what ranks tell each other to correct it, `names` fills in what nobody ran,
`policy` how much may be under way, `residency` why a unit is unsharded, `window` what is unsharded
ahead, `bundles` what is sent together, `reductions` when gradients are reduced. `walking` is what a
rank does to follow a program, `since` what it has done since the last backward, and `passes` the
events that begin and end both (docs/design/engine.md).
"""

from vescale_fsdp.program.executor import Executor
from vescale_fsdp.program.names import Names
from vescale_fsdp.program.passes import Passes
from vescale_fsdp.program.policy import policy_of
from vescale_fsdp.program.record import Record
from vescale_fsdp.program.reductions import Reduction
from vescale_fsdp.program.residency import Residency

__all__ = [
    "Executor",
    "Names",
    "Passes",
    "Record",
    "Reduction",
    "Residency",
    "policy_of",
]

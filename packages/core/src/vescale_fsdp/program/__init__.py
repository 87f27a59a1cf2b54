"""A step as data: what all ranks issue, decided in integers, with neither torch nor processes.

`order` is the sequence of a pass, a rank's way along it, and which neighbours are sent together.
`predict` says it before anybody has run, also for units that nobody ran. `record` is what ranks
tell each other to correct it. `residency` is why a unit is unsharded, `window` how much is
unsharded ahead, `reductions` when gradients are reduced. `walking` is what a rank does to follow a
program, `passes` the events that begin and end one, and an `executor` carries out what they decide
(docs/design/engine.md).
"""

from vescale_fsdp.program.executor import Executor
from vescale_fsdp.program.passes import Passes
from vescale_fsdp.program.predict import Names
from vescale_fsdp.program.record import Record
from vescale_fsdp.program.reductions import Reduction
from vescale_fsdp.program.residency import Residency
from vescale_fsdp.program.window import policy_of

__all__ = [
    "Executor",
    "Names",
    "Passes",
    "Record",
    "Reduction",
    "Residency",
    "policy_of",
]

"""A step as data: the collectives that all ranks issue, computed in integers, without torch.

`order` has the sequence of a pass, the position of a rank in it, and which neighbours share a
message. `predict` makes the sequence before a first run. `record` holds what ranks exchange to
correct it. `residency` tracks why a unit is unsharded, `window` limits prefetch, `reductions`
orders the reductions. `passes` makes a rank follow a program, event by event, and an `executor`
carries out the decisions (docs/design/engine.md); a `rehearsal` gives them as data. `zero_table`
has what is sharded when.
"""

from vescale_fsdp.program.executor import Executor
from vescale_fsdp.program.order import Bundles, Program, Sendable, sendable_if_small
from vescale_fsdp.program.passes import Passes
from vescale_fsdp.program.predict import Names
from vescale_fsdp.program.record import Record, merge
from vescale_fsdp.program.reductions import Reduction
from vescale_fsdp.program.residency import Lease, Residency, State
from vescale_fsdp.program.window import Policy, policy_of
from vescale_fsdp.program.zero_table import ZERO_TABLE, Kept, Row

__all__ = [
    "ZERO_TABLE",
    "Bundles",
    "Executor",
    "Kept",
    "Lease",
    "Names",
    "Passes",
    "Policy",
    "Program",
    "Record",
    "Reduction",
    "Residency",
    "Row",
    "Sendable",
    "State",
    "merge",
    "policy_of",
    "sendable_if_small",
]

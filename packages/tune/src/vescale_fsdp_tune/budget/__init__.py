"""``vescale_fsdp_tune.fully_shard``: the fastest settings that fit the memory.

* `request` is what the user asks for.
* `twins` copies modules. `describe` describes them for `vescale_fsdp_tune.costs`. `trace` runs a
  step of a copy with a `recorder` of its activations; on meta with `attention`, and what is
  `offloaded`.
* `units` are the modules that may be units. `blocks` times them, and `trials` does all of it.
* `rates` and `overhead` measure the `machine`.
* `merging` takes the figures of all ranks, and `choose` searches with them. `apply` shards with a
  candidate. `tuned` is all of this.
"""

from vescale_fsdp_tune.budget.describe import describe
from vescale_fsdp_tune.budget.request import Budget, arguments_of
from vescale_fsdp_tune.budget.trace import Job as TrialJob
from vescale_fsdp_tune.budget.trace import trace_of as trace_of_trial
from vescale_fsdp_tune.budget.trials import Subject, divide
from vescale_fsdp_tune.budget.tuned import fully_shard, tuning_of
from vescale_fsdp_tune.budget.twins import cast_parameters
from vescale_fsdp_tune.budget.units import divisions_to_try

__all__ = [
    "Budget",
    "Subject",
    "TrialJob",
    "arguments_of",
    "cast_parameters",
    "describe",
    "divide",
    "divisions_to_try",
    "fully_shard",
    "trace_of_trial",
    "tuning_of",
]

"""Costs of a step, computed before training: memory, bytes sent, and seconds. Loads no torch.

* `model` describes a model by its shapes, its units and a trace of its activations. `layouts` calls
  the planner for its groups. `settings` and `machine` are those of the job.
* `timeline` simulates the memory and the time of a step of `units`, by what the engine's own
  scheduler does (`vescale_fsdp.program.rehearsal`).
* `estimate` has the figures of one layout, and `predicting` those of one candidate.
* `problem` has what the tuner is asked and answers, `search` finds it among `divisions` and other
  settings. `choice_file` keeps it.

Formulas and their errors: docs/design/costs.md.
"""

from vescale_fsdp_tune.costs.amount import is_budget
from vescale_fsdp_tune.costs.machine import Link, Machine
from vescale_fsdp_tune.costs.problem import Candidate, Prediction, Tuning

__all__ = ["Candidate", "Link", "Machine", "Prediction", "Tuning", "is_budget"]

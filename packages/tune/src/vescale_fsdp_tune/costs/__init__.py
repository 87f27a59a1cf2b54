"""Costs of a step, computed before training: memory, bytes sent, and seconds. Loads no torch.

* `model` describes a model by its shapes, its units and a trace of its activations. `layouts` calls
  the planner for its groups. `settings` and `machine` are those of the job.
* `timeline` simulates the memory and the time of a step with the engine's own scheduler
  (`vescale_fsdp.program`), on `units` that are `simulated`.
* `estimate` has the figures of one layout, and `predicting` those of one candidate.
* `problem` has what the tuner is asked and answers, `search` finds it among `divisions` and other
  settings. `choice_file` keeps it.

Formulas and their errors: docs/design/costs.md.
"""

from vescale_fsdp_tune.costs.account import KINDS
from vescale_fsdp_tune.costs.amount import Amount, is_budget, is_path
from vescale_fsdp_tune.costs.choice_file import Choice, choice_text, read_choice, write_choice
from vescale_fsdp_tune.costs.estimate import Figures, figures_of, figures_of_others
from vescale_fsdp_tune.costs.hardware import HARDWARE, published
from vescale_fsdp_tune.costs.layouts import (
    ALIGNMENT_BYTES,
    BlockOf,
    PlannedGroup,
    Track,
    lay_out_model,
)
from vescale_fsdp_tune.costs.machine import Link, Machine
from vescale_fsdp_tune.costs.model import (
    DTYPES,
    Dtype,
    Event,
    Group,
    Model,
    Moment,
    Tensor,
    Trace,
    Unit,
    kinds,
    make_model,
)
from vescale_fsdp_tune.costs.problem import (
    BlockTimes,
    Candidate,
    Division,
    Extra,
    Prediction,
    Problem,
    Tuning,
    split_anywhere,
)
from vescale_fsdp_tune.costs.report import report_of, shown_of
from vescale_fsdp_tune.costs.search import tune
from vescale_fsdp_tune.costs.settings import (
    NUM_STATES,
    Activations,
    Code,
    Codes,
    OptimizerName,
    Settings,
)
from vescale_fsdp_tune.costs.words import described

__all__ = [
    "ALIGNMENT_BYTES",
    "DTYPES",
    "HARDWARE",
    "KINDS",
    "NUM_STATES",
    "Activations",
    "Amount",
    "BlockOf",
    "BlockTimes",
    "Candidate",
    "Choice",
    "Code",
    "Codes",
    "Division",
    "Dtype",
    "Event",
    "Extra",
    "Figures",
    "Group",
    "Link",
    "Machine",
    "Model",
    "Moment",
    "OptimizerName",
    "PlannedGroup",
    "Prediction",
    "Problem",
    "Settings",
    "Tensor",
    "Trace",
    "Track",
    "Tuning",
    "Unit",
    "choice_text",
    "described",
    "figures_of",
    "figures_of_others",
    "is_budget",
    "is_path",
    "kinds",
    "lay_out_model",
    "make_model",
    "published",
    "read_choice",
    "report_of",
    "shown_of",
    "split_anywhere",
    "tune",
    "write_choice",
]

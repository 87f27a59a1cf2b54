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

from vescale_fsdp.costs.account import KINDS, Peak
from vescale_fsdp.costs.amount import Amount, is_path
from vescale_fsdp.costs.choice_file import Choice, choice_of, choice_text, read_choice, write_choice
from vescale_fsdp.costs.divisions import grouped
from vescale_fsdp.costs.estimate import Figures, Traffic, figures_of, figures_of_others
from vescale_fsdp.costs.hardware import HARDWARE, published
from vescale_fsdp.costs.layouts import (
    ALIGNMENT_BYTES,
    BlockOf,
    PlannedGroup,
    Track,
    fsdp2_shard_size,
    lay_out_model,
    megatron_shard_size,
)
from vescale_fsdp.costs.machine import Backend, Link, Machine
from vescale_fsdp.costs.model import (
    BF16,
    DTYPES,
    FP32,
    Dtype,
    Event,
    Group,
    Model,
    Moment,
    Tensor,
    Trace,
    Unit,
    joined,
    kinds,
    make_model,
)
from vescale_fsdp.costs.predicting import Predictor, predict
from vescale_fsdp.costs.problem import (
    BlockTimes,
    Candidate,
    Division,
    Extra,
    Prediction,
    Problem,
    Sharding,
    Tuning,
    split_anywhere,
)
from vescale_fsdp.costs.report import report_of, shown_of
from vescale_fsdp.costs.search import candidates, tune
from vescale_fsdp.costs.settings import (
    NUM_STATES,
    Activations,
    Code,
    Codes,
    OptimizerName,
    Settings,
)
from vescale_fsdp.costs.words import described

__all__ = [
    "ALIGNMENT_BYTES",
    "BF16",
    "DTYPES",
    "FP32",
    "HARDWARE",
    "KINDS",
    "NUM_STATES",
    "Activations",
    "Amount",
    "Backend",
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
    "Peak",
    "PlannedGroup",
    "Prediction",
    "Predictor",
    "Problem",
    "Settings",
    "Sharding",
    "Tensor",
    "Trace",
    "Track",
    "Traffic",
    "Tuning",
    "Unit",
    "candidates",
    "choice_of",
    "choice_text",
    "described",
    "figures_of",
    "figures_of_others",
    "fsdp2_shard_size",
    "grouped",
    "is_path",
    "joined",
    "kinds",
    "lay_out_model",
    "make_model",
    "megatron_shard_size",
    "predict",
    "published",
    "read_choice",
    "report_of",
    "shown_of",
    "split_anywhere",
    "tune",
    "write_choice",
]

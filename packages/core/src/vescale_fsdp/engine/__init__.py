"""The engine: ``fully_shard`` and what happens around each forward and backward.

Read in this order; each file is one concept.

- What is made: `api` (``fully_shard``), `arguments` (what it refuses), `ownership` (which
  parameters it takes, tied ones too), `placement` and `granularity` (how they are sharded),
  `axes` (over which axes of the mesh, and their communicators), `quantized` (what is sent in 8
  bits).
- What lives: `unit` (around each forward), `group` (one buffer: its shards, and what comes and
  goes) of `fsdp_param` (one parameter); `guard` watches their memory. Other kinds of groups:
  `quantized_weight` (codes in forward too), `extension` (parameters that gather themselves).
- What modules and autograd see: `shadows` (whole weights in the place of shards), `gather` (the
  nodes of autograd that take gradients), `substitutes` (tensors of `functional_call`), `loading`
  (whole tensors in ``load_state_dict``).
- How modules and autograd call: `hooks` and `boundary`; `unfilled` (tensors without values,
  and buffers to broadcast); `generation` (loops of forwards).
- What is sent, and when: `vescale_fsdp.program` decides (a floor of its own), `engine` carries it
  out and owns what changes; `reducing` (what a model sends together) and `reduce` (a group's
  gradients).
- What keeps ranks together: `agreement` (what they compare before collectives) and `settling` (of
  a step), through `vescale_fsdp.ranks` (a floor of its own).
- `remeshing` moves all of it to another number of ranks; `late` takes in modules that were added,
  and finds parameters in no unit; `first_backward` finds what a first backward did not train.
- What users call: `methods`, `tuning`, `clip`, `finite`, `streaming` (whole parameters, in
  `buckets`), `profiling`.

What a plain training does not use is loaded when it is asked for: by its name below, or by an
argument of ``fully_shard``.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    DataParallelMeshDims,
    MixedPrecisionPolicy,
    OffloadPolicy,
)

from vescale_fsdp.dbuffer import Residuals
from vescale_fsdp.engine.api import fully_shard, refuse_other_engines
from vescale_fsdp.engine.containers import map_tensors
from vescale_fsdp.engine.hooks import register_fsdp_forward_method
from vescale_fsdp.engine.late import check_reduced, late_modules
from vescale_fsdp.engine.methods import (
    FSDPModule,
    GradientReductionHandle,
    UnshardHandle,
    share_comm_ctx,
    unsharded,
)
from vescale_fsdp.engine.ownership import replaced_parameters
from vescale_fsdp.engine.unfilled import blank_tensors, mark_blank, materialize
from vescale_fsdp.engine.unit import unreduced_parameters

if TYPE_CHECKING:
    from vescale_fsdp.engine.clip import clip_grad_norm_
    from vescale_fsdp.engine.finite import check_gradients
    from vescale_fsdp.engine.generation import generating
    from vescale_fsdp.engine.granularity import (
        HEADS,
        Granularity,
        GranularityPolicy,
        callable_units,
        combine,
        may_be_hidden,
        repeated_blocks,
    )
    from vescale_fsdp.engine.profiling import profile
    from vescale_fsdp.engine.quantized import ErrorFeedback, QuantizedGather, QuantizedReduce
    from vescale_fsdp.engine.quantized_weight import QuantizedWeight
    from vescale_fsdp.engine.remeshing import check_remesh, remesh
    from vescale_fsdp.engine.streaming import stream_parameters

_HOMES = {  # the files of what is loaded at first use; of all else: granularity
    "ErrorFeedback": "quantized", "QuantizedGather": "quantized",
    "QuantizedReduce": "quantized", "QuantizedWeight": "quantized_weight",
    "check_gradients": "finite", "check_remesh": "remeshing", "clip_grad_norm_": "clip",
    "generating": "generation", "profile": "profiling", "remesh": "remeshing",
    "stream_parameters": "streaming",
}  # fmt: skip

__all__ = [
    "HEADS",
    "CPUOffloadPolicy",
    "DataParallelMeshDims",
    "ErrorFeedback",
    "FSDPModule",
    "GradientReductionHandle",
    "Granularity",
    "GranularityPolicy",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "QuantizedGather",
    "QuantizedReduce",
    "QuantizedWeight",
    "Residuals",
    "UnshardHandle",
    "blank_tensors",
    "callable_units",
    "check_gradients",
    "check_reduced",
    "check_remesh",
    "clip_grad_norm_",
    "combine",
    "fully_shard",
    "generating",
    "late_modules",
    "map_tensors",
    "mark_blank",
    "materialize",
    "may_be_hidden",
    "profile",
    "refuse_other_engines",
    "register_fsdp_forward_method",
    "remesh",
    "repeated_blocks",
    "replaced_parameters",
    "share_comm_ctx",
    "stream_parameters",
    "unreduced_parameters",
    "unsharded",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'granularity')}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

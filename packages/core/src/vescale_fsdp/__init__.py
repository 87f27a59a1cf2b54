"""veScale-FSDP: fully-sharded data parallelism that respects the structure of the model.

The names below load what they need at first use, so that ``vescale_fsdp.planner`` (integers
only) can be imported without torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from vescale_fsdp.errors import (
    CheckpointCorruptError,
    CheckpointExistsError,
    CheckpointIncompleteError,
    CheckpointMismatchError,
    CheckpointValueError,
    CheckpointWriteError,
    NonFiniteError,
    PlanError,
    RankMismatchError,
    VeScaleError,
)

if TYPE_CHECKING:
    from vescale_fsdp.engine import (
        CPUOffloadPolicy,
        DataParallelMeshDims,
        FSDPModule,
        GradientReductionHandle,
        Granularity,
        MixedPrecisionPolicy,
        OffloadPolicy,
        QuantizedGather,
        QuantizedReduce,
        QuantizedWeight,
        UnshardHandle,
        callable_units,
        check_gradients,
        clip_grad_norm_,
        combine,
        fully_shard,
        generating,
        late_modules,
        materialize,
        profile,
        refuse_other_engines,
        register_fsdp_forward_method,
        repeated_blocks,
        replaced_parameters,
        share_comm_ctx,
        stream_parameters,
        unsharded,
    )
    from vescale_fsdp.ragged import RaggedShard, RaggedTensor

__version__ = "0.1.0.dev0"
_COMPANIONS = {"elastic": "elastic", "Budget": "tune", "costs": "tune", "tuning_of": "tune"}


def has_moved(name: str) -> str:
    """The error for a name that is in a companion now."""
    extra = _COMPANIONS[name]
    return (
        f"vescale_fsdp.{name} is in a distribution of its own: pip install "
        f"'vescale-fsdp[{extra}]', and import vescale_fsdp_{extra}"
    )


__all__ = [
    "CPUOffloadPolicy",
    "CheckpointCorruptError",
    "CheckpointExistsError",
    "CheckpointIncompleteError",
    "CheckpointMismatchError",
    "CheckpointValueError",
    "CheckpointWriteError",
    "DataParallelMeshDims",
    "FSDPModule",
    "GradientReductionHandle",
    "Granularity",
    "MixedPrecisionPolicy",
    "NonFiniteError",
    "OffloadPolicy",
    "PlanError",
    "QuantizedGather",
    "QuantizedReduce",
    "QuantizedWeight",
    "RaggedShard",
    "RaggedTensor",
    "RankMismatchError",
    "UnshardHandle",
    "VeScaleError",
    "callable_units",
    "check_gradients",
    "clip_grad_norm_",
    "combine",
    "fully_shard",
    "generating",
    "late_modules",
    "materialize",
    "profile",
    "refuse_other_engines",
    "register_fsdp_forward_method",
    "repeated_blocks",
    "replaced_parameters",
    "share_comm_ctx",
    "stream_parameters",
    "unsharded",
]


def __getattr__(name: str) -> Any:
    if name in ("checkpoint", "optim", "planner"):
        return import_module(f"vescale_fsdp.{name}")
    if name in _COMPANIONS:  # ``from vescale_fsdp import`` has other words for an AttributeError
        raise (AttributeError if name in ("costs", "elastic") else ImportError)(has_moved(name))
    if name not in __all__:
        raise AttributeError(f"module 'vescale_fsdp' has no attribute {name!r}")
    home = "ragged" if name in ("RaggedShard", "RaggedTensor") else "engine"
    return getattr(import_module(f"vescale_fsdp.{home}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

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
        Budget,
        CPUOffloadPolicy,
        DataParallelMeshDims,
        FSDPModule,
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
        tuning_of,
        unsharded,
    )
    from vescale_fsdp.ragged import RaggedShard, RaggedTensor

__version__ = "0.1.0.dev0"
ELASTIC_HAS_MOVED = (
    "vescale_fsdp.elastic is a distribution of its own: pip install 'vescale-fsdp[elastic]', and "
    "import vescale_fsdp_elastic"
)

_HOME = {
    "Budget": "engine",
    "CPUOffloadPolicy": "engine",
    "DataParallelMeshDims": "engine",
    "FSDPModule": "engine",
    "Granularity": "engine",
    "MixedPrecisionPolicy": "engine",
    "OffloadPolicy": "engine",
    "QuantizedGather": "engine",
    "QuantizedReduce": "engine",
    "QuantizedWeight": "engine",
    "UnshardHandle": "engine",
    "callable_units": "engine",
    "check_gradients": "engine",
    "clip_grad_norm_": "engine",
    "combine": "engine",
    "fully_shard": "engine",
    "generating": "engine",
    "late_modules": "engine",
    "materialize": "engine",
    "profile": "engine",
    "refuse_other_engines": "engine",
    "register_fsdp_forward_method": "engine",
    "repeated_blocks": "engine",
    "replaced_parameters": "engine",
    "share_comm_ctx": "engine",
    "stream_parameters": "engine",
    "tuning_of": "engine",
    "unsharded": "engine",
    "RaggedShard": "ragged",
    "RaggedTensor": "ragged",
}

__all__ = [
    "Budget",
    "CPUOffloadPolicy",
    "CheckpointCorruptError",
    "CheckpointExistsError",
    "CheckpointIncompleteError",
    "CheckpointMismatchError",
    "CheckpointValueError",
    "CheckpointWriteError",
    "DataParallelMeshDims",
    "FSDPModule",
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
    "tuning_of",
    "unsharded",
]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"vescale_fsdp.{_HOME[name]}"), name)
    if name in ("checkpoint", "optim", "planner"):
        return import_module(f"vescale_fsdp.{name}")
    if name == "elastic":
        raise AttributeError(ELASTIC_HAS_MOVED)
    raise AttributeError(f"module 'vescale_fsdp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
